"""Scoring a pool: the same scores whatever else is in it, in its order, with nothing cut off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from judge_pools import pool
from small_models import shake

from reasonlab.errors import UserError
from reasonlab.judges import scoring
from reasonlab.judges.formats import TinyFormat
from reasonlab.judges.network import JudgeModel, Pack, fresh_judge, save_judge
from reasonlab.judges.scoring import ModelJudge, score
from reasonlab.judges.steps import cut
from reasonlab.judges.types import Candidate, Scored
from reasonlab.model.ladder import resolve_model

TINY = resolve_model("tiny-0.3m")
# Mixed lengths, several responses to a question, some of them twice, an empty one and one with blanks alone.
POOL = [
    *pool(12, 6, styles=("answer", "worked", "checked"), families=("sum", "linear", "word"), level=3),
    Candidate("empty", "1+1=?", ""),
    Candidate("blank", "1+1=?", " \n"),
]


def tiny_judge(kind: Any, positions: int | None = None) -> JudgeModel:
    judge = fresh_judge(TINY, kind, 0)
    shake(judge.head, 1, scale=0.1)
    if positions:
        judge.backbone.config = replace(judge.backbone.config, max_positions=positions)
    return judge


def one_by_one(judge: JudgeModel, kind: Any) -> list[Scored]:
    form = TinyFormat(kind)
    found = []
    with torch.no_grad():
        for candidate in POOL:
            encoded = form.encode(candidate)
            steps, finals = (judge.head.squash(x) for x in judge(Pack.of([encoded])))
            found.append(Scored(tuple(steps.tolist()), finals.item()))
    return found


def assert_same(got: list[Scored], expected: list[Scored], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.steps == pytest.approx(b.steps, abs=tolerance)
        assert a.final == pytest.approx(b.final, abs=tolerance)


@pytest.mark.parametrize("kind", ["outcome", "process"])
@pytest.mark.parametrize(("budget", "workers"), [(1, 1), (150, 2), (100_000, 1)])
def test_scores_are_those_of_each_candidate_alone(kind: Any, budget: int, workers: int) -> None:
    judge = tiny_judge(kind)
    expected = one_by_one(judge, kind)
    assert_same(score(judge, TinyFormat(kind), POOL, workers, budget), expected)
    assert len({round(s.final or 0, 3) for s in expected}) > 20
    if kind == "process":
        assert [len(s.steps) for s in expected] == [len(cut(c.response, "tiny")) for c in POOL]


def test_order_and_company_do_not_matter() -> None:
    judge = tiny_judge("process")
    places = list(range(len(POOL)))
    Random(3).shuffle(places)
    shuffled = score(judge, TinyFormat("process"), [POOL[i] for i in places], 1, 300)
    straight = score(judge, TinyFormat("process"), POOL, 1, 300)
    assert_same(shuffled, [straight[i] for i in places])
    assert_same(score(judge, TinyFormat("process"), POOL[5:9]), straight[5:9])


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_equal_candidates_are_read_once_and_get_equal_scores(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = tiny_judge(kind)
    read: list[int] = []
    forward = judge.forward
    monkeypatch.setattr(judge, "forward", lambda pack: (read.append(len(pack.lengths)), forward(pack))[1])
    first, *rest = score(judge, TinyFormat(kind), [POOL[0]] * 5 + [POOL[1]])
    assert rest[:4] == [first] * 4
    assert rest[4] != first
    assert sum(read) == 2


def test_progress_counts_every_candidate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "AT_ONCE", 20)
    counts: list[int] = []
    score(tiny_judge("process", positions=70), TinyFormat("process"), POOL, 2, 200, counts.append)
    assert sum(counts) == len(POOL)
    assert len(counts) > 3


def test_a_long_response_is_read_in_windows_and_its_beginning_scores_the_same() -> None:
    form = TinyFormat("process")
    longest = max(POOL, key=lambda c: len(form.encode(c).ids))
    encoded = form.encode(longest)
    assert len(encoded.ids) > 100
    whole, windowed = tiny_judge("process"), tiny_judge("process", positions=80)
    (expected,), (got,) = (score(judge, form, [longest]) for judge in (whole, windowed))
    assert len(got.steps) == len(expected.steps)
    fit = int(np.searchsorted(encoded.steps, 80))  # what the first window holds sees all that came before it
    assert 0 < fit < len(got.steps)
    assert got.steps[:fit] == pytest.approx(expected.steps[:fit], abs=1e-5)
    assert got.steps[fit:] != pytest.approx(expected.steps[fit:], abs=1e-3)
    assert got.final is not None


def test_an_outcome_judge_refuses_what_it_cannot_read_whole() -> None:
    with pytest.raises(UserError, match="the judge reads 40 at most") as error:
        score(tiny_judge("outcome", positions=40), TinyFormat("outcome"), POOL)
    assert any(repr(c.problem) in str(error.value) for c in POOL)


def test_a_judge_opened_from_its_directory_scores_as_before(tmp_path: Path) -> None:
    judge = tiny_judge("process")
    save_judge(judge, TinyFormat("process"), tmp_path, TINY)
    assert ModelJudge.open(tmp_path).score(POOL) == ModelJudge(judge, TinyFormat("process")).score(POOL)
    assert ModelJudge.open(tmp_path).score([]) == []


def test_in_sixteen_bits_the_backbone_rounds_and_the_head_does_not(tmp_path: Path) -> None:
    judge = tiny_judge("outcome")
    save_judge(judge, TinyFormat("outcome"), tmp_path, TINY)
    rounded = ModelJudge.open(tmp_path, bfloat16=True)
    assert rounded.model.embedding.weight.dtype == torch.bfloat16
    expected, got = ([s.overall() for s in one.score(POOL)] for one in (ModelJudge.open(tmp_path), rounded))
    assert got == pytest.approx(expected, abs=0.3)
    assert torch.tensor(got).bfloat16().unique().numel() < len(set(got))  # finer than 16 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_scores_on_cuda_are_those_of_the_cpu(kind: Any, tmp_path: Path) -> None:
    save_judge(tiny_judge(kind), TinyFormat(kind), tmp_path, TINY)
    assert_same(ModelJudge.open(tmp_path, "cuda").score(POOL), ModelJudge.open(tmp_path).score(POOL), 1e-4)
