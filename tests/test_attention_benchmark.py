"""The benchmark of attention, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark_scripts import load_script
from update_pieces import DEVICE, through_kernels


def test_the_benchmark_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    through_kernels(monkeypatch)
    benchmark, out = load_script("attention"), tmp_path / "attention.json"
    arguments = ["--device", DEVICE, "--shape", "mini", "--layouts", "3x70", "--json", str(out)]
    results = benchmark.main([*arguments, "--sides", "ours", "padded"])
    assert [one.side for one in results] == ["ours", "padded"]
    assert all(one.away < (2e-2 if DEVICE == "cuda" else 1e-5) for one in results)
    assert json.loads(out.read_text())["results"][0]["layout"] == "3x70"


def test_groups_share_their_prompts() -> None:
    sequences = load_script("attention").Sequences.of("groups")
    assert len(sequences.lengths) == 64
    assert sequences.packed("cpu").count == sum(n - 110 for n in sequences.lengths) + 8 * 110
