"""How each published judge wants to be asked: the tokens of a candidate, and at which of them the head reads.

The tokens of a process judge end with its last mark: what follows could not change a causal score. A response longer
than the judge's positions is read in windows of whole steps behind the question (`judges/formats.py`); the windows are
made of the tokens of the whole, so a step is tokenised alike wherever its window begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reasonlab.errors import UserError
from reasonlab.judges.formats import Encoded, Format
from reasonlab.judges.published.text import JudgeTokenizer
from reasonlab.judges.steps import Rule, steps_of
from reasonlab.judges.types import Candidate

SEPARATOR = "<extra_0>"
TAG = "ки"


class SeparatedChat(Format):
    """A conversation whose answer has a separator token behind every step (Qwen2.5-Math-PRM, ReasonFlux-PRM-7B).

    The separator is one special token, so each step is tokenised for itself. The system turn is left out where `system`
    is empty; many templates then write one of their own.
    """

    def __init__(self, tokenizer: JudgeTokenizer, system: str, rule: Rule = "blank_line") -> None:
        self.tokenizer, self.system, self.rule = tokenizer, system, rule
        found = tokenizer.id_of(SEPARATOR)
        if found is None or tokenizer.encode(SEPARATOR) != [found]:
            raise UserError(
                f"the tokenizer in {tokenizer.directory} has no token {SEPARATOR}, where this judge's scores stand",
                "Fetch the tokenizer files of the judge itself, not those of its base model",
            )
        self._separator = found

    def encode(self, candidate: Candidate) -> Encoded:
        for part, text in (("question", candidate.question), ("response", candidate.response)):
            if SEPARATOR in text:
                raise UserError(
                    f"the {part} of problem {candidate.problem!r} contains {SEPARATOR}, the judge's own separator",
                    "Take the separator out of the text and give the steps by step_ends",
                )
        steps = bare_steps(candidate, self.rule)
        answer = "".join(step + SEPARATOR for step in steps)
        text = self.tokenizer.conversation(self.system, candidate.question, answer)
        begin = text.rfind(answer)
        ids, ends = self.tokenizer.encode_with_ends(text)
        marks = [place for place, token in enumerate(ids) if token == self._separator]
        if begin < 0 or len(marks) != len(steps):
            raise UserError(
                f"the chat template of {self.tokenizer.directory} does not repeat the answer as it is",
                "Fetch the chat template of the judge itself",
            )
        return _encoded(ids, marks, sum(end <= begin for end in ends[: marks[0]]))


class TokenLines(Format):
    """Beginning token, question and a newline; then the lines of the response, each tokenised alone and followed by the
    newline token, where its score stands (Skywork-o1-Open-PRM). An empty line is a step too, as in the published code.
    """

    def __init__(self, tokenizer: JudgeTokenizer, begin_id: int | None) -> None:
        self.tokenizer = tokenizer
        named = tokenizer.specials.get("bos_token") or (None if begin_id is None else tokenizer.token_of(begin_id))
        if named is None:
            raise UserError(
                f"neither tokenizer_config.json nor config.json in {tokenizer.directory} names a beginning token",
                "Fetch the judge's own files; its input begins with that token",
            )
        self._begin = named
        self._newline = tokenizer.encode("\n")[-1]

    def encode(self, candidate: Candidate) -> Encoded:
        given = bool(candidate.step_ends)
        steps = bare_steps(candidate, "newline") if given else candidate.response.split("\n")
        ids, marks = self.tokenizer.encode(f"{self._begin}{candidate.question}\n"), []
        question = len(ids)
        for step in steps:
            ids += [*self.tokenizer.encode(step), self._newline]
            marks.append(len(ids) - 1)
        return _encoded(ids, marks, question)


class TaggedLines(Format):
    """Question, a space, and the steps as lines that end in a tag, where their scores stand (Math-Shepherd).

    The tag is found by its place in the text, not by its id: a question in Russian may hold the same token. What the
    tokenizer makes of tag and signs is checked when the judge is opened. The judge was trained on steps that begin with
    "Step 1: "; nothing is written into a response that lacks it. A later window has the line end of the step before
    it between the question and its first step, where the first window has a space.
    """

    def __init__(self, tokenizer: JudgeTokenizer, rule: Rule = "newline") -> None:
        self.tokenizer, self.rule = tokenizer, rule
        tag = tokenizer.encode(TAG)
        if len(tag) != 1:
            raise self._foreign(f"splits the step tag {TAG!r} into {len(tag)} tokens")
        self._tag = tag[0]
        self.plus, self.minus = self._signs()

    def _signs(self) -> tuple[int, int]:
        """The ids of "+" and "-" as the judge was taught them: `tokenizer.encode("+ -")` without special tokens.

        A tokenizer of SentencePiece's kind puts a space before the first word, so both signs come with a space. A
        byte-level tokenizer does not and would give "+" beside " -"; there the pair is that of " + -".
        """
        for text in ("+ -", " + -"):
            ids = self.tokenizer.encode(text)
            plain = [self.tokenizer.decode([token]).strip() for token in ids]
            spaced = {_begins_with_space(self.tokenizer.token_of(token)) for token in ids}
            if plain == ["+", "-"] and len(spaced) == 1:
                return ids[0], ids[1]
        raise self._foreign(f'makes {self.tokenizer.encode("+ -")} of "+ -", which is not one token for each sign')

    def _foreign(self, what: str) -> UserError:
        return UserError(
            f"the tokenizer in {self.tokenizer.directory} {what}", "Fetch the tokenizer files of the judge itself"
        )

    def encode(self, candidate: Candidate) -> Encoded:
        steps = bare_steps(candidate, self.rule)
        tagged = [f"{step} {TAG}" for step in steps]
        begin = len(candidate.question) + 1
        ids, ends = self.tokenizer.encode_with_ends(f"{candidate.question} " + "\n".join(tagged), True)
        last_token_at = {end: place for place, end in enumerate(ends)}
        stops = begin - 1 + np.cumsum([len(line) + 1 for line in tagged])  # the character behind each tag
        marks = [last_token_at.get(int(stop), -1) for stop in stops]
        for step, mark in zip(steps, marks, strict=True):
            if mark < 0 or ids[mark] != self._tag:
                raise self._foreign(f"does not keep the tag {TAG!r} apart behind {step[-20:]!r}")
        return _encoded(ids, marks, sum(end <= begin for end in ends[: marks[0]]))


class WholeChat(Format):
    """A conversation read at its end (AceMath-RM, sequence classifiers, Qwen2.5-Math-RM).

    The end is the last token that is not padding, as transformers finds it: where a template ends in the padding token
    (some models have no other end token), the token before it is read.
    """

    def __init__(self, tokenizer: JudgeTokenizer, system: str, pad_id: int | None) -> None:
        self.tokenizer, self.system, self._pad = tokenizer, system, pad_id

    def encode(self, candidate: Candidate) -> Encoded:
        text = self.tokenizer.conversation(self.system, candidate.question, candidate.response)
        ids = self.tokenizer.encode(text)
        end = max((place for place, token in enumerate(ids) if token != self._pad), default=len(ids) - 1)
        return _encoded(ids[: end + 1], [], 0, end)


class WholeText(Format):
    """Question and response with nothing between them, read at the last token (ReasonFlux-PRM-1.5B)."""

    def __init__(self, tokenizer: JudgeTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, candidate: Candidate) -> Encoded:
        ids = self.tokenizer.encode(candidate.question + candidate.response, add_special_tokens=True)
        if not ids:
            raise UserError(f"problem {candidate.problem!r} has no text at all", "Take it out of the pool")
        return _encoded(ids, [], 0, len(ids) - 1)


def bare_steps(candidate: Candidate, rule: Rule) -> list[str]:
    """The steps without the white space around them; an empty response is one empty step, so that it has a score."""
    return [step.strip() for step in steps_of(candidate, rule)] or [""]


def _encoded(ids: Sequence[int], marks: Sequence[int], question: int, end: int = -1) -> Encoded:
    kept = ids[: marks[-1] + 1] if marks else ids
    return Encoded(np.array(kept, np.int64), np.array(marks, np.int64), end, question)


def _begins_with_space(token: str | None) -> bool:
    """Whether a token of a vocabulary stands for text that begins with a space: ▁ in SentencePiece, Ġ in byte-level."""
    return token is not None and token[:1] in ("▁", "Ġ", " ")
