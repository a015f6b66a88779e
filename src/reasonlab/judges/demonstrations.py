"""Chosen candidates of the tiny world as demonstrations for SFT: token ids in the tiny models' own format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.grading.grade import extract_answer
from reasonlab.judges.types import Candidate
from reasonlab.model.tiny_tokenizer import EOS, TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.problem import Problem
from reasonlab.train.recorded import given, write_demonstrations


def write_as_demonstrations(path: Path, candidates: Sequence[Candidate]) -> int:
    """Every response ends with the end token: one that was cut off would teach never to stop, and is refused."""
    tokenizer = TinyTokenizer.load()
    rows = []
    for c in candidates:
        if extract_answer(c.response) is None:
            raise UserError(
                f"a chosen response to {c.problem} has no answer, and should not be imitated",
                "Choose fewer, or take the unfinished responses out of the pool",
            )
        ids = tokenizer.encode(c.response.removesuffix(EOS) + EOS)
        prompt = tokenizer.encode(prompt_text(c.question))
        if tokenizer.unknown_id in (*prompt, *ids):
            raise UserError(
                f"{c.problem} is not in the tiny models' language", "Leave out --demonstrations to write a pool"
            )
        rows.append((Problem(c.problem, c.question, c.answer, c.family, c.level), given(prompt, ids)))
    return write_demonstrations(path, rows)
