"""Readers of published judges: `open_judge(directory)` opens any of them, and our own."""

from reasonlab.judges.published.kinds import KINDS
from reasonlab.judges.published.opening import LongInputWarning, OpenedJudge, open_judge

__all__ = ["KINDS", "LongInputWarning", "OpenedJudge", "open_judge"]
