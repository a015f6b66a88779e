"""The commands of judges for the tests: pools to give them, what they print, how they refuse, and a kill on the way."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from reasonlab.cli import main
from reasonlab.judges.types import Candidate
from reasonlab.problems.families.steps import render
from reasonlab.problems.reflections import spoiled
from reasonlab.problems.tiny_world import Split, draw

FAMILIES = ("sum", "gcd", "counting")
Output = pytest.CaptureFixture[str]


def pool(problems: int, each: int, split: Split = "train", seed: int = 0) -> list[Candidate]:
    """Right and spoiled responses by turns, to problems that can be drawn again from their ids."""
    rng, found = Random(seed), []
    for number in range(problems):
        drawn = draw(FAMILIES[number % 3], 2, split, number, seed)
        p = drawn.problem
        for place in range(each):
            right = place % 2 == 0
            text = render(drawn.solution, "worked", rng, 0.2) if right else spoiled(drawn, rng, "worked")
            found.append(Candidate(p.id, p.question, text, p.answer, right, p.family, p.level))
    return found


def run(capsys: Output, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def mistake(capsys: Output, *words: object) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    return error


def killed(words: list[str], smaller: str, log: Path, lines: int) -> None:
    """Start a command with smaller chunks in a process of its own, and kill it when its log has so many lines."""
    code = (
        f"import sys; from reasonlab.judges import score_log, label_command; {smaller}; "
        "from reasonlab.cli import main; main(sys.argv[1:])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *words])
    while not log.is_file() or log.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
