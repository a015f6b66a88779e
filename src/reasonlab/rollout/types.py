"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "repetition", "unfinished"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Logprobs are always those of the full distribution at this temperature.

    For training keep `top_p = 1` and `top_k = 0`: a truncated sampler is not the policy that the loss describes.
    Temperature 0 takes the most likely token; its logprobs are those at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    repetition_window: int = 0
    """Cut a rollout whose last so many tokens repeat one block at least four times (0: never)."""
    segment_tokens: int = 0
    """New tokens of a rollout in one call; what is not done by then comes back unfinished (0: no limit)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the keys of its samples: a sample depends on the weights, the prompt and its key alone.

    `started` holds what an earlier call returned for each key, or None for a sample that begins. An unfinished rollout
    is continued where it ended, with the draws it would have got anyway; a finished one comes back as it is.
    """

    prompt: Sequence[int]
    keys: Sequence[int]
    started: Sequence[Rollout | None] = ()


@dataclass(slots=True)
class Rollout:
    """One sampled response. `versions[t]` is the policy version that sampled token t."""

    prompt: list[int]
    ids: list[int]
    logprobs: NDArray[np.float32]
    finish: Finish
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
