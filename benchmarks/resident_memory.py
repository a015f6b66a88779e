"""The memory of this process, in MiB."""

from __future__ import annotations

import resource
import sys

import psutil


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


def peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
