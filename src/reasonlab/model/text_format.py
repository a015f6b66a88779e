"""How a question becomes a model's tokens, and how its tokens become text: one notion for training and evaluation.

The tiny models have a text of their own; every other checkpoint brings a tokenizer and, mostly, a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from reasonlab.errors import UserError
from reasonlab.model.tiny_tokenizer import EOS, TinyTokenizer
from reasonlab.model.tokenizer import ChatTokenizer
from reasonlab.problems.corpus import prompt_text

_THINK = "<think>"
_A_RESPONSE = "RESPONSE"  # stands for one where only what the template writes after it is looked at


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and what of the response they already hold (a forced style, a template that opens the thinking)."""

    ids: list[int]
    opening: str = ""
    opening_tokens: int = 0  # those of the opening that count as the response's


class TextFormat(Protocol):
    """What it takes to ask a model and to read its answer."""

    def prompt(self, question: str) -> Prompt: ...
    def prompts(self, questions: Sequence[str]) -> list[Prompt]: ...
    def response(self, ids: Sequence[int]) -> str: ...
    def responses(self, many: Sequence[Sequence[int]]) -> list[str]: ...


class TextTokenizer(Protocol):
    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class TinyFormat:
    """The tiny models' own text: `<bos>question` and a line break, special tokens written out."""

    def __init__(self, tokenizer: TextTokenizer, force: str = "") -> None:
        self.tokenizer, self.opening = tokenizer, force
        self._forced = tokenizer.encode(force) if force else []

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (self.tokenizer.eos_id,)

    def prompt(self, question: str) -> Prompt:
        return Prompt(self.tokenizer.encode(prompt_text(question)) + self._forced, self.opening, len(self._forced))

    def prompts(self, questions: Sequence[str]) -> list[Prompt]:
        return [self.prompt(question) for question in questions]

    def response(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def responses(self, many: Sequence[Sequence[int]]) -> list[str]:
        return [self.tokenizer.decode(ids) for ids in many]

    def response_ids(self, text: str) -> list[int]:
        """The tokens of a given response, its end token included."""
        return self.tokenizer.encode(text.removesuffix(EOS) + EOS)

    def shown(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


class ChatFormat:
    """A checkpoint's own tokenizer and chat template."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.tokenizer.stop_ids

    @cached_property
    def opening(self) -> str:
        """What every prompt holds of the response already."""
        return self.prompt("?").opening

    def prompt(self, question: str) -> Prompt:
        return self.prompts([question])[0]

    def prompts(self, questions: Sequence[str]) -> list[Prompt]:
        """Of many questions at once, on all cores."""
        if self.tokenizer.template is None:
            return [Prompt(self.tokenizer.prompt_ids(question)) for question in questions]
        # A template that opens the thinking itself leaves responses that seem to have none; a truncated one would then
        # be read as an answer. So the response gets its beginning back.
        texts = [self.tokenizer.chat_text(question) for question in questions]
        starts = [text.rfind(_THINK) if text.rstrip().endswith(_THINK) else len(text) for text in texts]
        many = zip(self.tokenizer.encode_batch(texts), texts, starts, strict=True)
        return [Prompt(ids, text[start:]) for ids, text, start in many]

    def response(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def responses(self, many: Sequence[Sequence[int]]) -> list[str]:
        return self.tokenizer.decode_batch(many)

    def response_ids(self, text: str) -> list[int]:
        """The tokens of a given response and the token that ends it.

        They are tokenised by themselves, as sampled ones follow a prompt. What the template has opened already is left
        out; without a template a line break parts the response from the question.
        """
        if self.tokenizer.template is None:
            return [*self.tokenizer.encode("\n" + text), self.end_id]
        return [*self.tokenizer.encode(text.removeprefix(self.opening)), self.end_id]

    def shown(self, ids: Sequence[int]) -> str:
        """Exactly these tokens as text, special ones written out."""
        return self.tokenizer.decode_all(ids)

    @cached_property
    def end_id(self) -> int:
        """The stop token that the template writes behind a response; else the tokenizer's own end token."""
        if self.tokenizer.template is not None:
            turns = [("user", "?"), ("assistant", _A_RESPONSE)]
            written = self.tokenizer.render(turns).rpartition(_A_RESPONSE)[2]
            for token in self.tokenizer.encode(written):
                if token in self.stop_ids:
                    return token
        own = self.tokenizer.id_of(self.tokenizer.specials.get("eos_token", ""))
        ends = [*([] if own is None else [own]), *self.stop_ids]
        if not ends:
            raise UserError("the tokenizer names no end token", "Set eos_token in tokenizer_config.json")
        return ends[0]


ModelFormat = TinyFormat | ChatFormat


def open_format(
    directory: Path, vocab_size: int, template_arguments: Mapping[str, Any] | None = None, force: str = ""
) -> ModelFormat:
    """The format of the checkpoint in `directory`, whose model has so many tokens. `force` is for the tiny models."""
    tiny = TinyTokenizer.load()
    if vocab_size == tiny.vocab_size and has_tiny_tokenizer(directory):
        return TinyFormat(tiny, force)
    return ChatFormat(ChatTokenizer.load(directory, template_arguments))


def has_tiny_tokenizer(directory: Path) -> bool:
    """Whether the tokenizer beside the weights, if there is one, is the tiny world's."""
    file = directory / "tokenizer.json"
    try:
        vocabulary = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"] if file.is_file() else None
    except (KeyError, TypeError, ValueError):
        return False
    own = Path(__file__).resolve().parent / "assets" / "tiny_tokenizer" / "tokenizer.json"
    return vocabulary is None or vocabulary == json.loads(own.read_text(encoding="utf-8"))["model"]["vocab"]
