"""The prompts of this room: files in `prompts/`, with names between braces that are filled in."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def _template(name: str) -> str:
    return (files("reasonlab.judges") / "prompts" / name).read_text(encoding="utf-8").rstrip("\n")


def filled(name: str, **values: str) -> str:
    """All names replaced in one pass, so that a name inside a value is left alone."""
    return re.sub(r"\{(" + "|".join(values) + r")\}", lambda match: values[match[1]], _template(name))
