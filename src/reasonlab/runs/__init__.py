"""The run record: a directory is the only account of what happened; one side writes, one reads."""

from reasonlab.runs.reader import RunReader
from reasonlab.runs.record import RunRecord

__all__ = ["RunReader", "RunRecord"]
