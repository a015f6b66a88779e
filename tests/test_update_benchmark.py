"""The benchmark of an update, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

from benchmark_scripts import load_script


def test_the_benchmark_in_miniature(tmp_path: Path) -> None:
    benchmark = load_script("update")
    sides = ["ours", "eager", "recomputed-layers", "transformers"]
    arguments = "--device cpu --shapes tiny --sequences 6 --length 24 --prompt 4 --group 3 --budget 60 --repetitions 1"
    out = tmp_path / "update.json"
    results = benchmark.main([*arguments.split(), "--json", str(out), "--sides", *sides])["tiny"]
    assert [one.side for one in results] == sides
    for one in results:
        assert one.tokens_per_s > 0
        assert one.away < 1e-5
        assert one.cosine > 0.999999
        assert one.worst < 1e-4
    assert json.loads(out.read_text())["results"]["tiny"][0]["side"] == "ours"


def test_every_side_switches_what_is_there() -> None:
    """A name that was changed elsewhere is an error here, not on a device only."""
    for switch in (switch for _, switch in load_script("update").SIDES.values()):
        with switch():
            pass
