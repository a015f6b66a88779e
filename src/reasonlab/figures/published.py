"""The published numbers that stand beside ours; `source` in their file says where they are from."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

KIMI = "Kimi k1.5 report, arXiv 2501.12599"
KIMI_NOTE = f"{KIMI}; read off its figures, one run each, no intervals given"
MEL_PAPER = "MEL paper, arXiv 2602.10224"
ACEMATH = "AceMath paper, arXiv 2412.15084"

REASONFLUX = "ReasonFlux-PRM paper, arXiv 2506.18896"


@cache
def kimi_k15() -> dict[str, Any]:
    """Figures 5 to 10 of the Kimi k1.5 report."""
    return _content("kimi_k15.json")


@cache
def mel() -> dict[str, Any]:
    """Table 1 of the MEL paper, as printed, and its curves, read by eye."""
    return _content("mel.json")


@cache
def acemath() -> dict[str, Any]:
    """Table 6 of the AceMath paper, as printed, and the ends of the curves of its Figure 5, read by eye."""
    return _content("acemath.json")


@cache
def reasonflux() -> dict[str, Any]:
    """Tables 1 to 3 of the ReasonFlux-PRM paper, as printed, and its Figures 5 and 6, read off their pixels."""
    return _content("reasonflux.json")


def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(files("reasonlab.studies").joinpath("published", name).read_bytes())
    return content
