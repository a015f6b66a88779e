"""How a candidate becomes the tokens a judge reads, and at which of them its scores are read.

A process judge tokenises the question and each step by itself: the tokens up to the end of a step do not depend on
anything after it, so with causal attention its score cannot either. An outcome judge tokenises the whole text at
once, as anybody who loads it with transformers will. Both end with the model's end token, where the score of the
whole is read.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from reasonlab.errors import UserError
from reasonlab.judges.steps import Rule, ended, spans_of
from reasonlab.judges.types import Candidate
from reasonlab.model.tiny_tokenizer import EOS, TinyTokenizer, vocabulary
from reasonlab.model.tokenizer import ChatTokenizer
from reasonlab.problems.corpus import prompt_text

Kind = Literal["outcome", "process"]
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a candidate, and the places among them where scores are read."""

    ids: NDArray[np.int64]
    steps: NDArray[np.int64]  # one rising place for each step; empty for an outcome judge
    final: int = NOWHERE  # where the score of the whole is read
    prompt: int = 0  # so many tokens at the beginning are the question's


class Format(ABC):
    """What a judge wants its candidates to look like."""

    @abstractmethod
    def encode(self, candidate: Candidate) -> Encoded: ...

    def encode_all(self, candidates: Sequence[Candidate]) -> list[Encoded]:
        return [self.encode(candidate) for candidate in candidates]

    def describe(self) -> dict[str, Any]:
        """What `judge.json` says of the format, enough for `open_format` to make it again."""
        raise UserError(f"a judge that reads {type(self).__name__} cannot be saved", "Keep its published files")


class TinyFormat(Format):
    """Candidates of the tiny world: `<bos>question`, a line end, the response, `<eos>`."""

    def __init__(self, kind: Kind, rule: Rule = "tiny", tokenizer: TinyTokenizer | None = None) -> None:
        self.kind, self.rule, self.tokenizer = kind, rule, tokenizer or TinyTokenizer.load()

    def encode(self, candidate: Candidate) -> Encoded:
        return self.encode_all([candidate])[0]

    def encode_all(self, candidates: Sequence[Candidate]) -> list[Encoded]:
        questions = list(dict.fromkeys(candidate.question for candidate in candidates))
        prompts = dict(zip(questions, self.tokenizer.encode_batch([prompt_text(q) for q in questions]), strict=True))
        cuts = [pieces(candidate, self.kind, self.rule, EOS) for candidate in candidates]
        tokens = iter(self.tokenizer.encode_batch([piece for cut in cuts for piece in cut]))
        return [
            assemble(prompts[candidate.question], [next(tokens) for _ in cut], [self.tokenizer.eos_id], self.kind)
            for candidate, cut in zip(candidates, cuts, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return {"text": "tiny", "kind": self.kind, "steps": self.rule}


class ChatFormat(Format):
    """The question as a user's turn of the model's own chat template, the response, the end token.

    A model without a template reads the question, a line end and the response. A template that opens the thinking
    itself leaves the opening to a response that has its own.
    """

    def __init__(self, kind: Kind, rule: Rule, tokenizer: ChatTokenizer) -> None:
        self.kind, self.rule, self.tokenizer = kind, rule, tokenizer
        self.end = tokenizer.specials.get("eos_token", "")
        self.end_ids = tokenizer.encode(self.end)
        if len(self.end_ids) != 1:
            raise UserError("the judge's tokenizer names no end token", "Set eos_token in tokenizer_config.json")

    def encode(self, candidate: Candidate) -> Encoded:
        return self._encode(candidate, self.tokenizer.encode)

    def encode_all(self, candidates: Sequence[Candidate]) -> list[Encoded]:
        """Each text is tokenised once: responses repeat their question, and branching ones their common steps."""
        encode = cache(self.tokenizer.encode)
        return [self._encode(candidate, encode) for candidate in candidates]

    def _encode(self, candidate: Candidate, encode: Callable[..., list[int]]) -> Encoded:
        prompt, parts = self._prompt(candidate), pieces(candidate, self.kind, self.rule, self.end)
        bare = self.tokenizer.template is None  # then the tokenizer adds its own special tokens to the beginning
        start = [*encode(prompt, add_special_tokens=bare)]
        while bare and len(start) > 1 and start[-1] in self.tokenizer.stop_ids:
            start.pop()
        if self.kind == "process":
            if parts:  # the last step too is read behind its separator, or its end would tell it from the others
                parts[-1] = ended(parts[-1], self.rule)
            return assemble(start, [encode(piece) for piece in parts], self.end_ids, self.kind)
        whole = encode(prompt + "".join(parts) + self.end, add_special_tokens=bare)
        last = len(whole) - 1 - whole[::-1].index(self.end_ids[0])  # a tokenizer may end its sequences once more
        common = len(start) if whole[: len(start)] == start else 0  # a token may straddle question and response
        return Encoded(np.array(whole[: last + 1], np.int64), np.zeros(0, np.int64), last, common)

    def _prompt(self, candidate: Candidate) -> str:
        text = self.tokenizer.chat_text(candidate.question)
        if self.tokenizer.template is None:
            return text + "\n"
        opened = text.rstrip()
        if opened.endswith("<think>") and candidate.response.lstrip().startswith("<think>"):
            return opened.removesuffix("<think>")
        return text

    def describe(self) -> dict[str, Any]:
        return {"text": "chat", "kind": self.kind, "steps": self.rule}


class StepsOnly(Format):
    """For a process judge that never learned what a whole response is worth: no score of the whole is read."""

    def __init__(self, form: Format) -> None:
        self.form = form

    def encode(self, candidate: Candidate) -> Encoded:
        return replace(self.form.encode(candidate), final=NOWHERE)

    def encode_all(self, candidates: Sequence[Candidate]) -> list[Encoded]:
        return [replace(encoded, final=NOWHERE) for encoded in self.form.encode_all(candidates)]

    def describe(self) -> dict[str, Any]:
        return {**self.form.describe(), "final": False}


def pieces(candidate: Candidate, kind: Kind, rule: Rule, end: str) -> list[str]:
    """What is tokenised by itself: the steps, or the whole response; without an end token of the text's own."""
    response = candidate.response
    stop = len(response) - len(end) * response.endswith(end)
    if kind == "outcome":
        return [response[:stop]]
    return [response[a : min(b, stop)] for a, b in spans_of(candidate, rule) if a < stop]


def assemble(prompt: Sequence[int], parts: Sequence[Sequence[int]], end: Sequence[int], kind: Kind) -> Encoded:
    """Question, pieces and end token one behind the other; a step is read at its last token."""
    ids = np.array([*prompt, *(token for part in parts for token in part), *end], np.int64)
    places = len(prompt) - 1 + np.cumsum([len(part) for part in parts], dtype=np.int64)
    return Encoded(ids, places if kind == "process" else np.zeros(0, np.int64), len(ids) - 1, len(prompt))


def own_format(directory: Path, kind: Kind, rule: Rule | None = None) -> Format:
    """The format of a judge trained from a checkpoint: the tiny world's, or the checkpoint's chat template."""
    if is_tiny(directory):
        return TinyFormat(kind, rule or "tiny")
    return ChatFormat(kind, rule or "blank_line", ChatTokenizer.load(directory))


def open_format(description: dict[str, Any], directory: Path) -> Format:
    """The format that `describe` described, with the tokenizer in `directory`."""
    if description.get("final") is False:
        return StepsOnly(open_format({**description, "final": True}, directory))
    try:
        text, kind, rule = description["text"], description["kind"], description["steps"]
        if text == "tiny":
            return TinyFormat(kind, rule)
        if text == "chat":
            return ChatFormat(kind, rule, ChatTokenizer.load(directory))
    except KeyError as missing:
        raise UserError(f"judge.json in {directory} lacks the key {missing}", "Train the judge again") from None
    raise UserError(f"judge.json in {directory} names an unknown text format {text!r}", "It is tiny or chat")


def is_tiny(directory: Path) -> bool:
    """Whether the tokenizer of a checkpoint is the tiny world's."""
    try:
        stored = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, KeyError, TypeError, ValueError):
        return False
    return bool(stored == {token: i for i, token in enumerate(vocabulary())})


def windows(encoded: Encoded, room: int, name: str) -> list[Encoded]:
    """The pieces in which a judge with `room` positions reads a candidate: one, if it fits.

    A longer one is read by a process judge in windows that each begin with the question. A window ends before the
    first step that no longer fits; the next begins with the latest steps that fill at most half of what the question
    leaves, as context that is not scored again, and goes on from there. So a step is scored with everything before
    it as long as that fits, and else with at least its latest predecessors (fewer if the step itself needs the room).
    The score of the whole is read in the last window. Nothing is ever dropped: an outcome judge, which needs all of
    the text at once, and a step that does not fit beside the question are refused.
    """
    if len(encoded.ids) <= room:
        return [encoded]
    if not len(encoded.steps):
        raise UserError(
            f"a response to problem {name!r} has {len(encoded.ids):,} tokens, the judge reads {room:,} at most",
            "Leave it out of the pool, or use a judge with more positions",
        )
    question, body = encoded.ids[: encoded.prompt], room - encoded.prompt
    # Step t is the tokens from starts[t] to starts[t + 1]; what follows the last step stays with it.
    starts = np.array([encoded.prompt, *(encoded.steps[:-1] + 1), len(encoded.ids)])
    found: list[Encoded] = []
    first, scored, count = 0, 0, len(encoded.steps)
    while scored < count:
        end = int(np.searchsorted(starts, starts[first] + body, side="right")) - 1  # steps first … end − 1 fit
        while end <= scored and first < scored:  # the next step is long: give up context for it
            first += 1
            end = int(np.searchsorted(starts, starts[first] + body, side="right")) - 1
        if end <= scored:
            raise UserError(
                f"step {scored + 1} of a response to problem {name!r} has {starts[scored + 1] - starts[scored]:,} "
                f"tokens; beside its question the judge has room for {max(0, body):,}",
                "Leave it out of the pool, cut steps by a finer rule, or use a judge with more positions",
            )
        end = min(end, count)
        shift = int(starts[first]) - encoded.prompt
        found.append(
            Encoded(
                np.concatenate((question, encoded.ids[starts[first] : starts[end]])),
                encoded.steps[scored:end] - shift,
                encoded.final - shift if end == count and encoded.final != NOWHERE else NOWHERE,
                encoded.prompt,
            )
        )
        scored = end
        first = int(np.searchsorted(starts, starts[scored] - body // 2, side="left"))
    return found
