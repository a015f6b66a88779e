"""Claims of a source, judged on our own data: holds, fails or undecided, with the estimate and its interval."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from reasonlab.evaluate.statistics import Interval
from reasonlab.runs.record import git_state

Verdict = Literal["holds", "fails", "undecided"]


@dataclass(frozen=True, slots=True)
class Claim:
    """`estimate` and `interval` are in the unit that `text` names; `published` is what the source reports."""

    id: str
    text: str
    verdict: Verdict
    estimate: float | None
    interval: tuple[float, float] | None
    published: str = ""


@dataclass(frozen=True, slots=True)
class ArmCost:
    """What an arm reached and what it took, summed over its seeds (tokens sampled for training, not for evaluation)."""

    arm: str
    accuracy: float
    tokens: float
    generated_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a study found: the claims, what each arm cost, how it was measured."""

    claims: list[Claim]
    arms: list[ArmCost]
    protocol: dict[str, Any]
    gain_split: dict[str, Any] | None = None


def judge(id: str, text: str, value: Interval, published: str, threshold: float = 0.0) -> Claim:
    """Holds if the whole interval lies above the threshold, fails if it lies below, undecided if it contains it."""
    verdict: Verdict = "holds" if value.low > threshold else "fails" if value.high < threshold else "undecided"
    return Claim(id, text, verdict, value.estimate, (value.low, value.high), published)


def record(study: str, scale: str, seeds: Sequence[int], command: str, device: str, found: Outcome) -> dict[str, Any]:
    """The content of verdicts.json."""
    content: dict[str, Any] = {
        "study": study,
        "scale": scale,
        "seeds": list(seeds),
        "command": command,
        "commit": commit(),
        "hardware": hardware(device),
        "protocol": found.protocol,
        "claims": [_claim(claim) for claim in found.claims],
        "arms": [asdict(arm) for arm in found.arms],
    }
    if found.gain_split is not None:
        content["gain_split"] = found.gain_split
    return content


def _claim(claim: Claim) -> dict[str, Any]:
    """JSON has neither nan nor infinity: what is not known is null."""
    content = asdict(claim)
    if claim.estimate is None or not math.isfinite(claim.estimate):
        content["estimate"] = None
    if claim.interval is None or not all(map(math.isfinite, claim.interval)):
        content["interval"] = None
    return content


def hardware(device: str) -> str:
    import torch

    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), torch {torch.__version__}"


def commit() -> str:
    """The commit the code was run from; "+" says that the tree had changes."""
    state = git_state()
    return "unknown" if state is None else f"{state['commit']}{'+' if state['dirty'] else ''}"


def table(content: Mapping[str, Any]) -> str:
    """The verdicts and the cost of each arm as plain text."""
    lines = ["", "claims"]
    for claim in content["claims"]:
        estimate = "" if claim["estimate"] is None else f"{claim['estimate']:+.3g}"
        bounds = "" if claim["interval"] is None else "[{:+.3g}, {:+.3g}]".format(*claim["interval"])
        lines.append(f"  {claim['verdict']:<9}  {claim['id']:<28} {estimate:>8} {bounds:<18} {claim['text']}")
        if claim["published"]:
            lines.append(f"  {'':<9}  {'':<28} published: {claim['published']}")
    lines += ["", f"  {'arm':<24} {'accuracy':>8} {'tokens':>7} {'generated':>12} {'seconds':>8}"]
    for arm in content["arms"]:
        lines.append(
            f"  {arm['arm']:<24} {100 * arm['accuracy']:>7.1f}% {arm['tokens']:>7.1f} {arm['generated_tokens']:>12,} "
            f"{arm['seconds']:>8.0f}"
        )
    return "\n".join(lines)
