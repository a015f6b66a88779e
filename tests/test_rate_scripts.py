"""The scripts that try settings: what they count and what they keep."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from judge_rates import keep, on_device
from length_and_spread import main as length_and_spread
from selection_rates import auc

from reasonlab.studies.recipe import study_recipe


def test_auc_is_the_share_of_pairs_in_order() -> None:
    scores, right = np.array([3.0, 1.0, 2.0, 1.0]), np.array([True, True, False, False])
    assert auc(scores, right) == (1 + 1 + 0 + 0.5) / 4


@pytest.mark.parametrize("sign", [1, -1])
def test_auc_of_a_perfect_and_of_a_perverse_judge(sign: int) -> None:
    right = np.arange(20) % 3 == 0
    assert auc(sign * right.astype(float), right) == (sign + 1) / 2


def test_a_line_is_kept_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rates.jsonl"
    for rate in (1e-3, 1e-4, 1e-3):
        keep(file, {"arm": "a", "rate": rate})
    assert file.read_text().splitlines() == ['{"arm": "a", "rate": 0.001}', '{"arm": "a", "rate": 0.0001}']
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_recipe_of_one_machine_can_be_tried_on_another() -> None:
    arms = study_recipe("rm-scaling", "cpu").arms
    assert {config.device for config in on_device(arms, "cuda").values()} == {"cuda"}
    assert on_device(arms, None) is arms


@pytest.mark.slow
def test_length_and_spread_in_miniature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", str(tmp_path), "--seeds", "1", "--iterations", "1", "--problems", "8"]
    length_and_spread(words)
    first = [line for line in capsys.readouterr().out.splitlines() if line.startswith("group_")]
    assert [line.split()[0] for line in first] == ["group_std-0"] * 2 + ["group_mean-0"] * 2, "at both ends"
    length_and_spread(words)
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("group_")] == first
