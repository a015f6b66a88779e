"""benchmarks/scaling.py: the fitted growth, and a table on the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest
from benchmark_scripts import load_script


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return load_script("scaling")


def test_growth_is_the_power(scaling: ModuleType) -> None:
    assert scaling.growth([1, 10, 100], [2.0, 2.0 * 10**1.5, 2.0 * 100**1.5]) == pytest.approx(1.5)


def test_every_axis_is_measured_once(scaling: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rollouts", "8", "16", "--lengths", "8", "16", "--sizes", "mini", "--centre", "mini", "8", "8"]
    words = ["--device", "cpu", "--seconds", "0", *sizes]
    axes = scaling.main(words)["axes"]
    assert [row["rollouts"] for row in axes["rollouts"]["points"]] == [8, 16]
    assert [row["new"] for row in axes["length"]["points"]] == [8, 16]
    assert axes["rollouts"]["points"][0] == axes["length"]["points"][0], "the same point is not measured twice"
    assert all(row["whole"] == row["rollout"] + row["update"] > 0 for row in axes["size"]["points"])
    assert axes["size"]["growth"] == {}
    assert "growth, whole range" in capsys.readouterr().out
