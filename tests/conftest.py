"""Settings for all tests: one torch thread, and property tests that draw the same examples every time."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

# One thread keeps sums in one order, and tiny models are fastest that way.
if find_spec("torch"):
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported first, by whomever

# Hypothesis' own "ci" profile: no deadline per example (a busy machine is not a bug), fixed examples.
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _commands_run_on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests promise to the last bit they promise for the CPU; those for CUDA say so."""
    if find_spec("torch") and request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("reasonlab.hardware.default_device", lambda: "cpu")
