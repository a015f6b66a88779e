"""What the figures of a study need of its verdicts.json: which study it is, and how it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reasonlab.errors import UserError
from reasonlab.evaluate.control import Split
from reasonlab.evaluate.statistics import Interval
from reasonlab.figures.tables import REMEDY

BEGUN, VERDICTS = "study.json", "verdicts.json"  # what a study writes when it begins, and when it has finished


@dataclass(frozen=True, slots=True)
class Record:
    """What the figures need of verdicts.json.

    `protocol` holds words and numbers for the captions, any of which may be absent: model, other_model, iterations,
    temperature, max_tokens, split, curriculum_switch; for MEL also prompts, rollouts_per_prompt, lr, mel_weight, pairs,
    token_ratio. `gain` is absent where the control was not measured.
    """

    study: str
    protocol: Mapping[str, Any] = field(default_factory=dict)
    gain: Split | None = None


_NUMBERS = (
    *("temperature", "max_tokens", "curriculum_switch"),
    *("prompts", "rollouts_per_prompt", "lr", "mel_weight", "pairs", "token_ratio"),
)


def read_record(path: Path) -> Record:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})", "Run the study that writes it") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", REMEDY) from error
    try:
        protocol = {name: value for name, value in (content.get("protocol") or {}).items() if value is not None}
        for name in _NUMBERS:
            if not isinstance(protocol.get(name, 0), int | float):
                raise TypeError(f"{name} is {protocol[name]!r}, not a number")
        split = content.get("gain_split")
        return Record(str(content["study"]), protocol, split and _gain_split(split))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(f"{path} is not the record of a study: {what}", REMEDY) from error


def _gain_split(split: Mapping[str, Any]) -> Split:
    """{"before": 0, "after": 40, "gain": [estimate, low, high], "style": […], "skill": […]}"""
    gain, style, skill = (Interval(*map(float, split[name])) for name in ("gain", "style", "skill"))
    return Split(int(split["before"]), int(split["after"]), gain, style, skill)


def unfinished(directory: Path) -> UserError | None:
    """What to say of a study that has begun and not finished; None where none has begun."""
    if not (directory / BEGUN).exists():
        return None
    content = json.loads((directory / BEGUN).read_bytes())
    how = f"with: {content['command']}" if "command" in content else "with the command that began it"
    return UserError(
        f"the study {content['name']} in {directory} is unfinished: there is nothing to draw yet", f"Continue it {how}"
    )
