"""Settings for all tests: one torch thread, and property tests that draw the same examples every time."""

from __future__ import annotations

from importlib.util import find_spec

# One thread keeps sums in one order, and tiny models are fastest that way.
if find_spec("torch"):
    import torch

    torch.set_num_threads(1)

# Hypothesis' own "ci" profile: no deadline per example (a busy machine is not a bug), fixed examples.
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.load_profile("ci")
