"""Ctrl-C while answers are sampled: the workers end at once, and what is said to be saved is saved."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_models import random_sequences, small_model

from reasonlab.cli import main
from reasonlab.rollout.decoder import Decoder
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

# Shells let the commands that they start in the background ignore Ctrl-C; this one hears it in any case.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from reasonlab.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_error_of_one_worker_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[int, int] = {}

    def step(self: Decoder, *arguments: int) -> None:
        me = threading.get_ident()
        steps[me] = steps.get(me, 0) + 1
        if len(steps) == 2 and me == list(steps)[1]:
            raise KeyboardInterrupt
        time.sleep(0.001)

    monkeypatch.setattr(Decoder, "step", step)
    requests = [Request(prompt.tolist(), [1, 2]) for prompt in random_sequences([5, 9])]
    with pytest.raises(KeyboardInterrupt):
        Engine(small_model(), workers=2).generate(requests, Sampling(max_tokens=400))
    assert max(steps.values()) < 200


def test_an_interrupted_evaluation_counts_what_it_has_saved(tmp_path: Path) -> None:
    words = [
        "eval",
        "tiny-0.3m",
        "--problems",
        "24",
        "--k",
        "96",
        "--max-tokens",
        "24",
        "--threads",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    command = [sys.executable, "-c", COMMAND, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    answers = tmp_path / "out" / "answers.jsonl"
    while process.poll() is None and not (answers.exists() and answers.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    saved = answers.read_bytes().count(b"\n")
    assert process.returncode == 130
    assert 0 < saved < 24 * 96
    found = re.search(r"interrupted\. ([\d,]+) answers? saved", told)
    assert found, told
    assert int(found[1].replace(",", "")) == saved
    assert main(words) == 0
    assert answers.read_bytes().count(b"\n") == 24 * 96
