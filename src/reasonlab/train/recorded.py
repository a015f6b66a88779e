"""Responses kept in a file to learn from: demonstrations for SFT, preference pairs for DPO.

JSON lines, one example each: the problem (`id`, `question`, `answer`, `family`, `level`), token ids of `prompt` and
`response`, and in a pair those of `rejected` with `rejected_correct`. Token ids, not text: what a model sampled must
come back as the same tokens.
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
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.runs.files import write_aside

_PROBLEM = ("id", "question", "answer", "family", "level")


def write_demonstrations(path: Path, demonstrations: Iterable[tuple[Problem, Rollout]]) -> int:
    """Write the responses to imitate; returns how many there are."""
    return _write(path, ({**asdict(p), "prompt": r.prompt, "response": r.ids} for p, r in demonstrations))


def write_pairs(path: Path, groups: Iterable[Group]) -> int:
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
    return _write(path, rows)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    lines = [orjson.dumps(row) + b"\n" for row in rows]
    write_aside(path, b"".join(lines))
    return len(lines)


class RecordedResponses:
    """The rows of a file in whole passes, each in a keyed order, so that every row is seen equally often. No state."""

    def __init__(self, config: Config, path: Path, pairs: bool) -> None:
        self.seed, self.size = config.seed, config.rollout.prompts
        self.rows = read_responses(path, pairs)
        self._order: tuple[int, list[int]] = (-1, [])

    def groups(self, number: int) -> list[Group]:
        return [self._at(place) for place in range((number - 1) * self.size, number * self.size)]

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _at(self, place: int) -> Group:
        epoch, index = divmod(place, len(self.rows))
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            Random(key(self.seed, "recorded", epoch)).shuffle(order)
            self._order = epoch, order
        return self.rows[self._order[1][index]]


def read_responses(path: Path, pairs: bool) -> list[Group]:
    """One group for each row: the response, and in a pair the rejected one behind it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        remedy = "Make it with `reasonlab data sample`"
        raise UserError(f"the examples in {path} cannot be read ({error.strerror})", remedy) from None
    groups, vocabulary = [], TinyTokenizer.load().vocab_size
    for number, line in enumerate(lines, 1):
        try:
            groups.append(_group(orjson.loads(line), pairs, vocabulary))
        except (ValueError, KeyError, TypeError) as error:
            what = "a preference pair" if pairs else "a demonstration"
            remedy = f"Make the file with `reasonlab data sample --keep {'pairs' if pairs else 'shortest'}`"
            raise UserError(f"{path}, line {number} is not {what} ({error!r})", remedy) from None
    if not groups:
        raise UserError(f"{path} holds no examples", "Sample more problems, or more answers to each")
    return groups


def _group(row: dict[str, Any], pair: bool, vocabulary: int) -> Group:
    problem = Problem(**{name: row[name] for name in _PROBLEM})
    responses = [row["response"], row["rejected"]] if pair else [row["response"]]
    if not all(responses):
        raise ValueError("an empty response")
    for ids in (row["prompt"], *responses):
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
            raise ValueError(f"token ids are whole numbers below {vocabulary}")
    grades = [Grade("correct", problem.answer, "recorded")]
    if pair:
        grades.append(Grade("correct" if row["rejected_correct"] else "wrong", None, "recorded"))
    rollouts = [given(row["prompt"], response) for response in responses]
    return Group(problem, rollouts, grades, np.array([1.0, 0.0][: len(rollouts)]))


def given(prompt: Sequence[int], ids: Sequence[int]) -> Rollout:
    """A response that no policy of this run sampled."""
    count = len(ids)
    return Rollout(list(prompt), list(ids), np.zeros(count, np.float32), "stop", np.full(count, -1, np.int32))
