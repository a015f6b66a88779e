"""Responses kept in a file to learn from: demonstrations for SFT, preference pairs for DPO.

JSON lines, one example each. What a model sampled must come back as the same tokens, so `reasonlab data sample` writes
token ids: the problem (`id`, `question`, `answer`, `family`, `level`), the ids of `prompt` and `response`, in a pair
those of `rejected` with `rejected_correct`, and for language models which `tokenizer` they belong to.

What a user writes is text: `question` and `response`, in a pair `rejected`; `id`, `answer`, `family` and `level` if
there are any. The question is put as training and evaluation put it, and the response gets its end token. The columns
of other trainers are understood too: `messages`, `prompt` with `completion`, and `prompt`, `chosen`, `rejected`.

Responses are graded as rollouts are, if only to say what is being learnt: SFT and DPO learn from every example,
whatever its grade. Where there is no answer to compare with, the grade says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson

from reasonlab.config import Config
from reasonlab.errors import UserError
from reasonlab.grading.grade import Grade
from reasonlab.keys import key
from reasonlab.methods.group import Group
from reasonlab.problems.problem import Problem
from reasonlab.problems.sources import question_column
from reasonlab.rollout.types import Rollout
from reasonlab.runs.files import write_aside
from reasonlab.train.exchange import Exchange, tiny_exchange

_PROBLEM = ("id", "question", "answer", "family", "level")
_UNGRADED = Grade("error", None, "the row has no answer to compare with")


def write_demonstrations(path: Path, demonstrations: Iterable[tuple[Problem, Rollout]], tokenizer: str = "") -> int:
    """Write the responses to imitate; returns how many there are. `tokenizer` is the fingerprint of one not tiny."""
    rows = ({**asdict(p), "prompt": r.prompt, "response": r.ids} for p, r in demonstrations)
    return _write(path, rows, tokenizer)


def write_pairs(path: Path, groups: Iterable[Group], tokenizer: str = "") -> int:
    """Write preference pairs, groups of a chosen and a rejected rollout; returns how many there are."""
    rows = (
        {
            **asdict(group.problem),
            "prompt": group.rollouts[0].prompt,
            "response": group.rollouts[0].ids,
            "rejected": group.rollouts[1].ids,
            "rejected_correct": bool(group.correct[1]),
        }
        for group in groups
    )
    return _write(path, rows, tokenizer)


def _write(path: Path, rows: Iterable[dict[str, Any]], tokenizer: str) -> int:
    mark = {"tokenizer": tokenizer} if tokenizer else {}
    lines = [orjson.dumps(row | mark) + b"\n" for row in rows]
    write_aside(path, b"".join(lines))
    return len(lines)


class RecordedResponses:
    """Fixed examples in whole passes, each in a keyed order, so that every one is seen equally often. No state."""

    def __init__(self, config: Config, rows: list[Group], exchange: Exchange) -> None:
        self.seed, self.size = config.seed, config.rollout.prompts
        self.rows, self.exchange = rows, exchange
        self._order: tuple[int, list[int]] = (-1, [])

    def groups(self, number: int) -> list[Group]:
        groups = [self._at(place) for place in range((number - 1) * self.size, number * self.size)]
        self._grade([group for group in groups if not group.grades])
        return groups

    def longest(self) -> tuple[int, int]:
        rollouts = [rollout for group in self.rows for rollout in group.rollouts]
        return max(len(r.prompt) for r in rollouts), max(len(r.prompt) + len(r.ids) for r in rollouts)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _grade(self, groups: Sequence[Group]) -> None:
        """When their turn comes, not when the file is opened: it may be long, and math-verify takes its time."""
        for group in groups:
            group.grades = [_UNGRADED] * len(group.rollouts)
        gradable = [group for group in groups if group.problem.answer]
        found = self.exchange.grades([(group.problem, group.rollouts) for group in gradable])
        for group, grades in zip(gradable, found, strict=True):
            group.grades = grades

    def _at(self, place: int) -> Group:
        epoch, index = divmod(place, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            Random(key(self.seed, "recorded", epoch)).shuffle(order)
            self._order = epoch, order
        return self.rows[self._order[1][index]]


def read_responses(path: Path, pairs: bool, exchange: Exchange | None = None) -> list[Group]:
    """One group for each row, not yet graded: the response, and in a pair the rejected one behind it.

    For tiny models by default.
    """
    exchange = exchange or tiny_exchange()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        remedy = "Make it with `reasonlab data sample`"
        raise UserError(f"the examples in {path} cannot be read ({error.strerror})", remedy) from None
    groups = []
    for number, line in enumerate(lines, 1):
        try:
            row = orjson.loads(line)
            groups.append(_group(row, pairs, exchange, f"{path.name.split('.')[0]}-{number}"))
        except (ValueError, KeyError, TypeError) as error:
            what = "a preference pair" if pairs else "a demonstration"
            kind = "pairs" if pairs else "shortest"
            remedy = (
                f"It needs question and {'response and rejected' if pairs else 'response'}, or make the file with "
                f"`reasonlab data sample --keep {kind}`"
            )
            raise UserError(f"{path}, line {number} is not {what} ({error!r})", remedy) from None
    if not groups:
        raise UserError(f"{path} holds no examples", "Sample more problems, or more answers to each")
    return groups


def _group(row: dict[str, Any], pair: bool, exchange: Exchange, name: str) -> Group:
    row = _renamed(row)
    written = isinstance(row["response"], str)
    problem = _problem(row, name) if written else Problem(**{key: row[key] for key in _PROBLEM})
    responses = [row["response"], row["rejected"]] if pair else [row["response"]]
    if not all(responses):
        raise ValueError("an empty response")
    rollouts = [demonstration(problem, one, exchange) if written else _sampled(row, one, exchange) for one in responses]
    return Group(problem, rollouts, [], np.array([1.0, 0.0][: len(rollouts)]))


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with our names for what other trainers call differently."""
    if "response" in row:
        return row
    if "messages" in row:
        turns = row["messages"]
        if [turn["role"] for turn in turns] != ["user", "assistant"]:
            raise ValueError("messages that are not one of the user and one of the assistant")
        return {**row, "question": turns[0]["content"], "response": turns[1]["content"]}
    texts = {
        "question": "prompt",
        "response": "completion" if "completion" in row else "chosen",
        "rejected": "rejected",
    }
    return row | {ours: _text(row[theirs]) for ours, theirs in texts.items() if theirs in row}


def _text(value: Any) -> Any:
    """A text, or the only message of a list."""
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        raise ValueError("several messages where one is learned from")
    return value[0]["content"]


def _problem(row: dict[str, Any], name: str) -> Problem:
    question = question_column(row)
    if not question:
        raise KeyError("question")
    family, level = str(row.get("family") or name.rpartition("-")[0]), row.get("level")
    identity, answer = str(row.get("id", name)), row.get("answer")
    return Problem(
        identity, question, "" if answer is None else str(answer), family, level if isinstance(level, int) else 0
    )


def _sampled(row: dict[str, Any], ids: Any, exchange: Exchange) -> Rollout:
    if row.get("tokenizer", "") != exchange.fingerprint:
        raise ValueError("its tokens are those of another tokenizer")
    vocabulary = exchange.format.tokenizer.vocab_size
    for tokens in (row["prompt"], ids):
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
            raise ValueError(f"token ids are whole numbers below {vocabulary}")
    return given(row["prompt"], ids)


def demonstration(problem: Problem, text: str, exchange: Exchange) -> Rollout:
    """A written response to a problem, as the model would be asked and would answer."""
    return given(exchange.prompt(problem).ids, exchange.response_ids(text))


def given(prompt: Sequence[int], ids: Sequence[int]) -> Rollout:
    """A response that no policy of this run sampled."""
    count = len(ids)
    return Rollout(list(prompt), list(ids), np.zeros(count, np.float32), "stop", np.full(count, -1, np.int32))
