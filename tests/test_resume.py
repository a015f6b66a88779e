"""kill -9 at random moments, full and unwritable disks: real processes through the command line."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reasonlab.runs import RunReader

ROOT = Path(__file__).parent.parent
SMOKE = ROOT / "recipes" / "smoke.toml"
FINAL = "checkpoints/final/model.safetensors"


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "reasonlab.cli", *words]


def launch(*words: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)  # type: ignore[call-overload, no-any-return]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = tmp_path_factory.mktemp("whole") / "run"
    process = launch("train", str(SMOKE), "--out", str(run))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return (run / FINAL).read_bytes()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_killed_again_and_again_it_ends_with_the_same_bytes(tmp_path: Path, uninterrupted: bytes, seed: int) -> None:
    """Kills fall on moments the run does not choose: sampling, updating, evaluating, writing a checkpoint."""
    rng = random.Random(seed)
    run = tmp_path / "run"
    words = ["train", str(SMOKE), "--out", str(run)]
    for kill_after in sorted(rng.sample(range(1, 8), 2)):
        process = launch(*words)
        while process.poll() is None and not (run / "rollouts" / f"{kill_after:06d}.jsonl.gz").exists():
            time.sleep(0.01)
        time.sleep(rng.random() * 0.6)
        process.kill()
        process.wait()
        reader = RunReader(run)
        steps = [line["step"] for line in reader.metrics() if "train/loss" in line]
        assert reader.bad_lines == 0
        assert steps == list(range(1, len(steps) + 1)), "an acknowledged iteration is missing"
        words = ["train", "--resume", str(run)]
    process = launch(*words)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert (run / FINAL).read_bytes() == uninterrupted
    assert not list((run / "checkpoints").glob(".*")), "a killed process left something behind"
    assert [line["step"] for line in RunReader(run).metrics()] == list(range(9))


def test_a_disk_that_fills_up_is_explained_and_nothing_is_half_written(tmp_path: Path, uninterrupted: bytes) -> None:
    """No file may grow beyond 300 kB: the first checkpoint cannot be written."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    run = tmp_path / "run"
    process = launch("train", str(SMOKE), "--out", str(run), preexec_fn=limit)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "error: no space left" in output
    assert "Traceback" not in output
    assert not list((run / "checkpoints").glob("*")), "a checkpoint that could not be written must not exist"
    process = launch("train", "--resume", str(run))  # with room again it goes on, from the start
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert (run / FINAL).read_bytes() == uninterrupted


def test_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    process = launch("train", str(SMOKE), "--out", str(blocked / "run"))
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert output.startswith("error: cannot write")
    assert len(output.strip().splitlines()) == 1


def test_ctrl_c_prints_the_command_that_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch("train", str(SMOKE), "--out", str(run))
    while not (run / "rollouts" / "000001.jsonl.gz").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(2)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"reasonlab train --resume {run}" in output
    assert os.path.exists(run / "checkpoints" / "latest")
