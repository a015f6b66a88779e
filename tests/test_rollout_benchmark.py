"""`benchmarks/rollout.py` in miniature: all its parts run on the CPU and say what they measured."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_scripts import load_script

from reasonlab.model.transformer import Transformer
from reasonlab.rollout import decoder


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    return load_script("rollout")


@pytest.fixture(scope="module")
def tuning() -> ModuleType:
    return load_script("rollout_tuning")


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return load_script("random_models")


def run(speed: ModuleType, *more: str) -> list[dict[str, object]]:
    options = ("--device", "cpu", "--shapes", "mini", "--rows", "4", "--prompt", "6", "--new", "10")
    results: list[dict[str, object]] = speed.main([*options, "--repetitions", "1", *more])
    return results


@pytest.mark.parity
def test_both_sides_are_measured(speed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(speed, "--sides", "engine", "transformers", "--profile", "--json", str(tmp_path / "speed.json"))
    assert [result["side"] for result in results] == ["engine", "transformers", "step"]
    assert json.loads((tmp_path / "speed.json").read_text())[0] == results[0]
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "matrix products" in printed


@pytest.mark.parametrize(("group", "more", "told"), [("1", [], "all of full length"), ("2", ["--ragged"], "ragged")])
def test_the_header_tells_groups_and_lengths(
    group: str, more: list[str], told: str, speed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run(speed, "--group", group, *more)
    assert f"6 + 10 tokens, group {group}, {told}" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        *(([f"--{name}", "0"], f"--{name}: 0 is not at least 1") for name in ("new", "group", "rows", "prompt")),
        (["--repetitions", "0"], "--repetitions: 0 is not at least 1"),
        (["--interval", "0"], "--interval: 0 is not at least 1"),
        (["--new", "many"], "--new: invalid positive value: 'many'"),
        (["--bandwidth", "0"], "--bandwidth is more than 0"),
        (["--tune"], "--tune measures the kernels: it needs CUDA"),
        (["--device", "cuda"], "--device cuda: no CUDA device is available"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    words: list[str],
    told: str,
    speed: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        run(speed, *words)
    assert exit_.value.code == 2
    assert told in capsys.readouterr().err


def test_the_check_compares_logprobs(speed: ModuleType) -> None:
    results = run(speed, "--check", "--group", "3")
    difference = results[-1]["logprob_difference"]
    assert isinstance(difference, dict)
    assert 0 < difference["mean"] <= difference["max"] < 1e-5


def test_settings_of_the_kernels_are_compared(
    speed: ModuleType,
    tuning: ModuleType,
    models: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In Triton's interpreter: what counts here is that each setting is run, and once."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off where there is a GPU")
    from test_kernels import kernels  # repairs the interpreter, and skips where there is no Triton

    few = {"attention_keys": (16, 64), "attention_warps": (1,), "attention_programs": (1, 2, 64)}
    monkeypatch.setattr(tuning, "KNOBS", {"attention": few, "drawing": {"vocabulary_block": (128, 4096)}})
    monkeypatch.setattr(tuning, "DRAWS", 2)
    monkeypatch.setattr(tuning, "COMPILED_ROWS", 2)
    monkeypatch.setattr(decoder, "operations_for", kernels.Kernels)
    work, shape = speed.Work(rows=1, prompt=6, new=10, group=1, ragged=False), models.SHAPES["mini"]
    apart = tuning.settings("attention", 2, tuning.ready_columns(work))
    assert len(apart) == 4  # 1 and 2 programs are reached without a split; 64 need parts, as many as there are keys for
    launched = [tuning.compile_share(shape, work, torch.device("cpu"), torch.float32, number, 3) for number in range(3)]
    assert sum(launched) == len(apart) + 2
    before = asdict(kernels.TUNING)
    measured = tuning.tune(models.random_model(shape, torch.device("cpu"), torch.float32), work)
    assert asdict(kernels.TUNING) == before
    for part, settings in (("attention", 5), ("drawing", 3)):  # with the one that is set
        seconds = [time for _, time in measured[part]]
        assert (len(seconds), seconds) == (settings, sorted(seconds))
    assert "attention_keys 16, attention_warps 1, attention_programs 64" in capsys.readouterr().out


def test_all_tokens_count(speed: ModuleType, models: ModuleType) -> None:
    model = models.random_model(models.SHAPES["mini"], torch.device("cpu"), torch.float32)
    work = speed.Work(rows=6, prompt=5, new=9, group=4, ragged=False)
    assert [len(request.keys) for request in work.requests(512)] == [4, 2]
    assert speed.SIDES["engine"](model, work)() == 6 * 9
    ragged = speed.Work(rows=6, prompt=5, new=400, group=4, ragged=True)
    assert 24 < speed.SIDES["engine"](model, ragged)() < 24 * 400


def test_the_limit_is_reading_weights_and_cache(speed: ModuleType, models: ModuleType) -> None:
    """The table of the H200 that the targets come from: 135M about 780,000 tokens/s at 256 rows, 920,000 at 1024."""
    with torch.device("meta"):
        model = Transformer(models.SHAPES["135m"]).to(torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    for rows, expected in ((256, 780_000), (1024, 920_000)):
        assert speed.limit(model, speed.Work(rows, 64, 256, 1, False), 4.3) == pytest.approx(expected, rel=0.02)
