"""`benchmarks/rollout.py` in miniature: all its parts run on the CPU and say what they measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks/rollout.py"
    spec = importlib.util.spec_from_file_location("rollout_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, *more: str) -> list[dict[str, object]]:
    options = ("--device", "cpu", "--shapes", "mini", "--rows", "4", "--prompt", "6", "--new", "10")
    results: list[dict[str, object]] = benchmark.main([*options, "--repetitions", "1", *more])
    return results


@pytest.mark.parity
def test_both_sides_are_measured(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(benchmark, "--sides", "engine", "transformers", "--profile", "--json", str(tmp_path / "speed.json"))
    assert [result["side"] for result in results] == ["engine", "transformers", "step"]
    assert json.loads((tmp_path / "speed.json").read_text())[0] == results[0]
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "matrix products" in printed


def test_the_check_compares_logprobs(benchmark: ModuleType) -> None:
    results = run(benchmark, "--check", "--group", "3")
    difference = results[-1]["logprob_difference"]
    assert isinstance(difference, dict)
    assert 0 < difference["mean"] <= difference["max"] < 1e-5


def test_all_tokens_count(benchmark: ModuleType) -> None:
    model = benchmark.random_model(benchmark.SHAPES["mini"], torch.device("cpu"), torch.float32)
    work = benchmark.Work(rows=6, prompt=5, new=9, group=4, ragged=False)
    assert [len(request.keys) for request in work.requests(512)] == [4, 2]
    assert benchmark.engine_side(model, work)() == 6 * 9
    ragged = benchmark.Work(rows=6, prompt=5, new=400, group=4, ragged=True)
    assert 24 < benchmark.engine_side(model, ragged)() < 24 * 400


def test_the_limit_is_reading_weights_and_cache(benchmark: ModuleType) -> None:
    """The table of the H200 that the targets come from: 135M about 780,000 tokens/s at 256 rows, 920,000 at 1024."""
    with torch.device("meta"):
        model = benchmark.Transformer(benchmark.SHAPES["135m"]).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    for rows, expected in ((256, 780_000), (1024, 920_000)):
        assert benchmark.limit(model, benchmark.Work(rows, 64, 256, 1, False), 4.3) == pytest.approx(expected, rel=0.02)
