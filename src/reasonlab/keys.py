"""Keyed randomness: every random draw in the laboratory is a function of the names of what it is for.

There is no generator state to save: a draw is identified by its parts, for instance
``key(run_seed, "rollout", iteration, problem_id, sample)``, so any rollout can be made again alone.
"""

from __future__ import annotations

import hashlib


def key(*parts: int | str) -> int:
    """A 63-bit number that depends on every part and on their order (BLAKE2b of their representations)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
