"""The tokenizer of the tiny models: one token per character, and one per word of the tiny world.

It is an ordinary Hugging Face tokenizer (a BPE without merges), so that the stored files load with
``AutoTokenizer``; here it is used through the ``tokenizers`` package alone, which imports fast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from reasonlab.problems.families import WORDS

PAD, BOS, EOS, THINK, END_THINK, UNKNOWN = "<pad>", "<bos>", "<eos>", "<think>", "</think>", "<unk>"
SPECIALS = (PAD, BOS, EOS, THINK, END_THINK, UNKNOWN)
REFLECTION_WORDS = ("wrong", "right", "first", "rule", "because", "hint")
_SPARE_TOKENS = 4
_ROUND_TO = 8  # matrix shapes like it

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{ bos_token + message['content'] + '\\n' }}"
    "{%- elif message['role'] == 'assistant' -%}{{ message['content'] + eos_token }}"
    "{%- else -%}{{ raise_exception('the tiny models know only user and assistant messages') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
)


def vocabulary() -> list[str]:
    """Every token in the order of its id."""
    characters = ["\n", *map(chr, range(32, 127))]
    words = [word for word in (*WORDS, *REFLECTION_WORDS) if len(word) > 1]
    tokens = [*SPECIALS, *characters, *words, *(f" {word}" for word in words)]
    spare = _SPARE_TOKENS + -(len(tokens) + _SPARE_TOKENS) % _ROUND_TO
    return tokens + [f"<reserved_{i}>" for i in range(spare)]


def build() -> Tokenizer:
    """The tokenizer, made from the words of the families."""
    ids = {token: i for i, token in enumerate(vocabulary())}
    # With `ignore_merges`, a piece that is in the vocabulary is one token and any other falls to characters.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save(directory: Path) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    build().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


class TinyTokenizer:
    """Text to ids and back; special tokens are written out in the text, as in ``<think>``."""

    pad_id, bos_id, eos_id, think_id, end_think_id, unknown_id = range(len(SPECIALS))

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size()

    @classmethod
    def load(cls) -> TinyTokenizer:
        """The tokenizer stored in the package."""
        stored = files("reasonlab.model") / "assets" / "tiny_tokenizer" / "tokenizer.json"
        return cls(Tokenizer.from_str(stored.read_text(encoding="utf-8")))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts, several times faster."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text
