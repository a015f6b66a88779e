"""The tokenizer and chat template of any Hugging Face checkpoint, without importing transformers.

`tokenizer.json` is read by the `tokenizers` package; the chat template is rendered in jinja2's sandbox with the same
helpers that transformers gives it. The template writes the special tokens itself, so nothing is added to what it writes
and a beginning-of-sequence token can never be doubled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from reasonlab.errors import UserError

# Some templates print the date. It must not depend on the day: an evaluation continued tomorrow asks the same.
TEMPLATE_DATE = datetime(2024, 7, 26)
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer:
    """Text to ids and back, for one checkpoint."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None = None,
        specials: Mapping[str, str] | None = None,
        stop_ids: Sequence[int] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.template, self.specials, self.stop_ids = template, dict(specials or {}), tuple(stop_ids)
        self.template_arguments = dict(template_arguments or {})
        self._compiled: Template | None = None

    @classmethod
    def load(cls, directory: Path, template_arguments: Mapping[str, Any] | None = None) -> ChatTokenizer:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{directory} has no tokenizer.json", "Save the checkpoint's fast tokenizer beside it")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exceptions
            raise UserError(f"{file} cannot be read ({error})", "Fetch it again") from None
        # Left in the file by its last use in training. Nobody who asks for the tokens of a text wants fewer, or more.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _json(directory / "tokenizer_config.json")
        specials = {name: _token_text(settings[name]) for name in _SPECIAL if settings.get(name) is not None}
        return cls(
            tokenizer,
            _template(directory, settings),
            specials,
            _stop_ids(directory, tokenizer, specials),
            template_arguments,
        )

    @property
    def vocab_size(self) -> int:
        size: int = self._tokenizer.get_vocab_size()
        return size

    @cached_property
    def fingerprint(self) -> str:
        """Tells the token ids of two tokenizers apart."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for many texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_ends(self, text: str, add_special_tokens: bool = False) -> tuple[list[int], list[int]]:
        """Token ids, and for each the character of the text where it ends."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, [end for _, end in encoding.offsets]

    def id_of(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_of(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response without its end token; special tokens inside it stay visible."""
        return self.decode_all(self._without_end(ids))

    def decode_batch(self, many: Sequence[Sequence[int]]) -> list[str]:
        """Like `decode` for many responses, on all cores."""
        kept = [self._without_end(ids) for ids in many]
        texts: list[str] = self._tokenizer.decode_batch(kept, skip_special_tokens=False)
        return texts

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        kept = list(ids)
        while kept and kept[-1] in self.stop_ids:
            kept.pop()
        return kept

    def decode_all(self, ids: Sequence[int]) -> str:
        """The text of exactly these tokens, special ones and the end token written out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def chat_text(self, question: str) -> str:
        """The question as a user's turn, up to where the answer begins; the bare question without a template."""
        return question if self.template is None else self.render([("user", question)], to_be_answered=True)

    def render(self, turns: Sequence[tuple[str, str]], to_be_answered: bool = False) -> str:
        """The template's text of a conversation of (role, text); up to where an answer begins if it is to be answered.

        Only for checkpoints that have a template.
        """
        try:
            self._compiled = self._compiled or _environment().from_string(self.template or "")
            return self._compiled.render(
                messages=[{"role": role, "content": text} for role, text in turns],
                add_generation_prompt=to_be_answered,
                **self.specials,
                **self.template_arguments,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise UserError(f"the chat template fails ({error})", "Check chat_template.jinja of the model") from None

    def prompt_ids(self, question: str) -> list[int]:
        if self.template is not None:
            return self.encode(self.chat_text(question))
        ids = self.encode(question, add_special_tokens=True)
        # The tokenizer may end its sequences too; an answer must begin before the end.
        while len(ids) > 1 and ids[-1] in self.stop_ids:
            ids.pop()
        return ids


class _GenerationBlock(Extension):
    """`{% generation %}` marks what training learns from; for a prompt it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    return environment


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file, or the entry of tokenizer_config.json, which may hold several by name."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _stop_ids(directory: Path, tokenizer: Tokenizer, specials: Mapping[str, str]) -> tuple[int, ...]:
    """Every token that ends an answer: by generation_config.json, config.json, and the tokenizer itself."""
    found: dict[int, None] = {}
    for file in ("generation_config.json", "config.json"):
        ends = _json(directory / file).get("eos_token_id")
        found |= dict.fromkeys(ends if isinstance(ends, list) else [] if ends is None else [int(ends)])
    own = tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return tuple(found | ({own: None} if own is not None else {}))


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})", "Fetch it again") from None
    return value if isinstance(value, dict) else {}
