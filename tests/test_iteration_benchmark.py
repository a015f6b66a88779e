"""`benchmarks/iteration.py` in miniature: its sides run on the CPU, do the same work, and differences are found."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load_script

SMALL = ("--device", "cpu", "--shape", "mini", "--prompts", "2", "--samples", "4", "--prompt", "24", "--new", "6")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("iteration")


@pytest.fixture(scope="module")
def work(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("mini")
    benchmark.write_checkpoint("mini", 24, 16, directory)
    return benchmark.Work(
        model=str(directory), data="", prompts=2, samples=4, new=6, ragged=False, warmup=0, timed=1, micro=4,
        budget=4096, vllm_memory=0.4, device="cpu", threads=1,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parity
def test_our_loop_and_trl_do_the_same_work(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: make install-dev")
    file = tmp_path / "iteration.json"
    document = benchmark.main([*SMALL, "--timed", "1", "--sides", "ours", "trl", "--json", str(file)])
    assert json.loads(file.read_text()) == document
    assert document["differences"] == []
    assert document["ratios"]["trl"] > 0
    theirs, own = (document["sides"][side]["iterations"] for side in ("trl", "ours"))
    assert [one["prompts"] for one in theirs] == [one["prompts"] for one in own]
    for one in (*theirs, *own):
        assert one["tokens"] == 2 * 4 * 6
        assert one["in_loss"] == 2 * 4
        assert 0 < one["rollout_s"] + one["update_s"] <= one["seconds"]
    assert "the same work on all sides" in capsys.readouterr().out


def test_prompts_have_the_tokens_they_are_asked_to_have(benchmark: ModuleType, work: Any) -> None:
    prompts = replace(work, timed=2).prompt_ids
    assert [[len(ids) for ids in iteration] for iteration in prompts] == [[24, 24], [24, 24]]
    assert len({tuple(ids) for iteration in prompts for ids in iteration}) == 4
    assert min(min(ids) for iteration in prompts for ids in iteration) > 2  # no special token


def test_sampling_alone(benchmark: ModuleType, work: Any) -> None:
    measured = benchmark.measure("ours", replace(work, rollouts_only=True))
    assert [one.tokens for one in measured.iterations] == [2 * 4 * 6]
    assert benchmark.differences(replace(work, rollouts_only=True), [measured]) == []


def test_other_work_is_noticed(benchmark: ModuleType, work: Any) -> None:
    told = benchmark.digest(benchmark.repeated(work.prompt_ids[0], 4))
    right = benchmark.Iteration(1.0, 0.5, 0.1, 0.4, tokens=48, in_loss=8, prompts=told)

    def found(**changes: object) -> list[str]:
        side = benchmark.Measured("trl", [replace(right, **changes)], 1.0, 0.0)
        differences: list[str] = benchmark.differences(work, [side])
        return differences

    assert found() == []
    assert found(prompts="others") == ["trl had other prompts"]
    assert found(tokens=47) == ["trl generated [47] tokens, not 48"]
    assert found(in_loss=5) == ["trl had [5] sequences in the loss, not 8"]


def test_rewards_differ_inside_a_group() -> None:
    reward_of = load_script("iteration_work").reward_of
    rewards = {reward_of(ids) for ids in ([5, 6, 7], [7, 6, 5], [5, 6], [5, 7, 6])}
    assert len(rewards) == 4
    assert all(0 <= reward < 1 for reward in rewards)


def test_a_side_that_fails_leaves_the_others(benchmark: ModuleType, work: Any) -> None:
    broken = replace(work, model="/nowhere")
    assert "ended early" in benchmark.measure_apart("ours", broken, start_timeout=60, timeout=60)
    assert benchmark.measure_apart("ours", work, start_timeout=0.01, timeout=60) == "no iteration begun after 0 s"


@pytest.mark.parametrize(
    ("before", "after", "start_timeout", "late"),
    [
        (1.5, 0, 60, ""),  # a start longer than the timeout is no fault
        (0, 60, 60, "not done after 1 s"),
        (60, 0, 1, "no iteration begun after 1 s"),
    ],
)
def test_the_start_has_a_limit_of_its_own(
    benchmark: ModuleType, tmp_path: Path, before: float, after: float, start_timeout: float, late: str
) -> None:
    begun = tmp_path / "begun"
    program = f"import pathlib, time; time.sleep({before}); pathlib.Path({str(begun)!r}).touch(); time.sleep({after})"
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert benchmark.lateness(process, begun, start_timeout, timeout=1) == late
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("rollouts_only", [False, True])
def test_an_answer_grows_with_every_iteration(
    benchmark: ModuleType, work: Any, tmp_path: Path, rollouts_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, answer = tmp_path / "work.json", tmp_path / "measured.json"
    told.write_text(json.dumps(asdict(replace(work, rollouts_only=rollouts_only, warmup=1, timed=2))))
    lengths, replaced = [], Path.replace

    def watched(path: Path, target: Path) -> Path:
        lengths.append(len(json.loads(path.read_text())["iterations"]))
        return replaced(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    benchmark.answer_apart(str(told), "ours", str(answer))
    assert lengths[-4:] == [0, 0, 1, 2]  # at the beginning, after the warm-up, and then
    assert len(json.loads(answer.read_text())["iterations"]) == 2


def test_of_a_late_side_counts_what_it_has_done(
    benchmark: ModuleType, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(process: object, answer: Path, *_: float) -> str:
        while not (answer.is_file() and json.loads(answer.read_text())["iterations"]):
            time.sleep(0.01)
        return "not done after 1 s"

    monkeypatch.setattr(benchmark, "lateness", impatient)
    sampling = replace(work, rollouts_only=True, timed=500)
    late = benchmark.measure_apart("ours", sampling, 60, 60)
    assert 1 <= len(late.iterations) < 500
    assert benchmark.row("ours", late).endswith(f"({len(late.iterations)} timed, not done after 1 s)")
    assert benchmark.differences(sampling, [late]) == []


def test_sides_that_do_not_fit_are_refused(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([*SMALL, "--sides", "vllm"])
    assert "vllm is for --rollouts-only" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main([*SMALL, "--sides", "ours", "--model", "tiny-1m"])
    assert "--model and --data belong together" in capsys.readouterr().err
