"""The tokenizer that a GGUF file describes, as `tokenizer.json`, `tokenizer_config.json` and a chat template.

transformers reads vocabulary, merges and special tokens. How text is cut before the merges apply is only a name in the
file (`tokenizer.ggml.pre`). transformers knows some of them and cuts the others like GPT-2 without a word, so the
common ones are set here as the published tokenizers have them, and a name nobody knows is refused.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from reasonlab.errors import UserError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
_LIKE_GPT2 = ("default", "gpt-2")
_DIGITS_ALONE = ("smollm",)  # every digit by itself, then GPT-2's rule on what lies between
_WHOLE_WORDS_FIRST = ("llama3", "llama-v3", "llama-bpe", "tekken")  # a word in the vocabulary needs no merges
_CONTROL = 3
# Tokens that end an answer by their name, whatever else the file says; llama.cpp does the same.
_END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<|end|>")
_SPECIALS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: those the file names so, and control tokens that are one by their name."""
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    found = dict.fromkeys(int(number) for number in named if number is not None)
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    for number, (token, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind == _CONTROL and token in _END_NAMES:
            found[number] = None
    return tuple(found)


def save_tokenizer(path: Path, metadata: Mapping[str, Any], target: Path) -> None:
    """Write the tokenizer files of the GGUF file `path` into the directory `target`."""
    tokenizer = _tokenizer(path, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in _SPECIALS.items()}
    specials = {name: (str(tokens[number]), int(number)) for name, number in ids.items() if number is not None}
    tokenizer.post_processor = _ends(metadata, specials)
    tokenizer.save(str(target / "tokenizer.json"))
    settings: dict[str, Any] = {f"{name}_token": token for name, (token, _) in specials.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", "utf-8")
    template = metadata.get("tokenizer.chat_template")
    if template:
        (target / "chat_template.jinja").write_text(template, encoding="utf-8")


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    # Not AutoTokenizer: to choose a class it reads the header once more, slowly, and the backend is the same.
    from transformers import PreTrainedTokenizerFast

    try:
        with tempfile.TemporaryDirectory() as alone:  # a tokenizer.json beside the file would be taken instead
            (Path(alone) / path.name).symlink_to(path.resolve())
            # None, unless the file names them: otherwise <s> and </s> are made up.
            found = PreTrainedTokenizerFast.from_pretrained(alone, gguf_file=path.name, bos_token=None, eos_token=None)
        tokenizer: Tokenizer = found.backend_tokenizer
    except Exception as error:  # whatever transformers meets in a file it does not support
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"transformers cannot read the tokenizer of {path.name} ({first})",
            "Give the model as a Hugging Face directory",
        ) from error
    if metadata.get("tokenizer.ggml.model") != "gpt2":  # sentencepiece: there is one way to cut
        if not metadata.get("tokenizer.ggml.add_space_prefix", True):
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
            spaces = decoders.Replace("▁", " ")
            tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
        return tokenizer
    cut = metadata.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut not in _SPLITS)
    if cut in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[cut]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif cut in _DIGITS_ALONE:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif cut in _LIKE_GPT2:
        tokenizer.pre_tokenizer = byte_level
    else:
        known = ", ".join((*_LIKE_GPT2, *_DIGITS_ALONE, *_SPLITS))
        raise UserError(
            f"{path.name} cuts text by the rule {cut!r}, which is not known (known: {known})",
            "Give the model as a Hugging Face directory",
        )
    if cut in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.model.ignore_merges = cut in _WHOLE_WORDS_FIRST
    return tokenizer


def _ends(metadata: Mapping[str, Any], specials: Mapping[str, tuple[str, int]]) -> Any:
    """What is put before and after a text that asks for special tokens; chat templates write their own."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    begins = metadata.get("tokenizer.ggml.add_bos_token", sentencepiece) and "bos" in specials
    ends = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in specials
    before = [specials["bos"][0]] if begins else []
    after = [specials["eos"][0]] if ends else []
    used = [specials[name] for name, wanted in (("bos", begins), ("eos", ends)) if wanted]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)
