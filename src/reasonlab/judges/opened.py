"""From `--judge J` to something that scores, whoever asks: `judge score`, `judge bench`, `select`, `eval`."""

from __future__ import annotations

import argparse
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from reasonlab.errors import UserError
from reasonlab.judges.types import Aggregate, Candidate, Judge, Progress, Scored
from reasonlab.options import add_device_argument

if TYPE_CHECKING:  # which imports torch
    from reasonlab.judges.published import OpenedJudge

EXACT = "exact"
JUDGE_HELP = (
    "directory of a judge (ours or a published one), a training of `judge train` (its newest checkpoint), "
    "or `exact`: the tiny world's true steps"
)
POOL_HELP = "candidates as JSON lines (docs/judges.md), or the directory or answers.jsonl of `reasonlab eval --out`"
_DECISIVE = ("*.safetensors", "*.json", "*.jinja", "reward_head.pt")  # files that decide what a judge says


@dataclass(slots=True)
class JudgeAtWork:
    """A judge, what tells it apart from others (`identity`), and whether its scores are probabilities."""

    judge: Judge
    identity: dict[str, Any]
    place: str
    probability: bool
    scores_steps: bool = True
    in_windows: int = 0  # responses so far that were longer than the judge's positions

    def score(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Scored]:
        """Scores in the order of the candidates. Responses read in windows are counted, not warned of one by one."""
        from reasonlab.judges.published import LongInputWarning, OpenedJudge

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LongInputWarning)
            found = self.judge.score(candidates, progress)
        if isinstance(self.judge, OpenedJudge):
            self.in_windows += self.judge.long_ones
        return found

    def notice(self) -> str:
        """What a person should know about the scores; empty if there is nothing."""
        if not self.in_windows:
            return ""
        return (
            f"{self.in_windows:,} responses exceed the judge's positions; their steps were scored in windows, each "
            "with the question and the latest steps before (docs/judges.md)"
        )


def add_judge_arguments(parser: argparse._ActionsContainer) -> None:
    """How a judge is opened, for commands that open one."""
    parser.add_argument("--kind", help="the judge's kind where its files do not say (docs/judges.md lists them)")
    parser.add_argument(
        "--long",
        choices=["chunk", "refuse"],
        default="chunk",
        help="responses beyond the judge's positions: chunk reads their steps in windows, refuse stops",
    )
    add_device_argument(parser)
    parser.add_argument("--bfloat16", action="store_true", help="hold the judge in 16 bits (large ones on a GPU)")
    parser.add_argument("--threads", type=int, default=2, help="CPU worker threads")


def add_ranking_arguments(parser: argparse._ActionsContainer) -> None:
    """How the scores of a response become one number."""
    parser.add_argument(
        "--steps",
        choices=get_args(Aggregate),
        default="mean",
        help="how the scores of steps become one number (default: mean)",
    )
    parser.add_argument(
        "--alpha", type=float, default=1.0, metavar="A", help="steps + A * final, where there are both (default: 1)"
    )


def open_at_work(
    name: str,
    kind: str | None = None,
    long: str = "chunk",
    device: str | None = "cpu",
    threads: int = 1,
    bfloat16: bool = False,
) -> JudgeAtWork:
    if threads < 1:
        raise UserError("--threads is at least 1", "For instance --threads 2")
    if name == EXACT:
        from reasonlab.judges.exact_labels import ExactJudge

        return JudgeAtWork(ExactJudge(), {"kind": EXACT}, EXACT, True)
    from reasonlab.judges.published import open_judge

    directory = judge_directory(name)
    opened = open_judge(
        directory,
        kind,
        long="refuse" if long == "refuse" else "chunk",
        device=device,
        workers=threads,
        bfloat16=bfloat16,
    )
    identity = {
        "kind": opened.kind,
        "sha256": _sha256(directory),
        "long": long,
        "dtype": "bfloat16" if bfloat16 else "float32",
    }
    return JudgeAtWork(opened, identity, str(directory), _says_probabilities(opened), "step" in opened.model.head.parts)


def judge_directory(name: str) -> Path:
    """The checkpoint itself, or the newest one of a training."""
    path = Path(name).expanduser()
    if not (path / "run.json").is_file():
        return path
    from reasonlab.train.checkpoint import newest_checkpoint

    newest = newest_checkpoint(path)
    if newest is None:
        raise UserError(
            f"the training in {path} has no checkpoint yet", f"Continue it: reasonlab judge train --resume {path}"
        )
    return newest


def _says_probabilities(opened: OpenedJudge) -> bool:
    from reasonlab.judges.network import OutcomeHead
    from reasonlab.judges.published.weights import PublishedHead

    head = opened.model.head
    return head.probability if isinstance(head, PublishedHead) else not isinstance(head, OutcomeHead)


def _sha256(directory: Path) -> str:
    from reasonlab.model.gguf import file_sha256

    files = {file for pattern in _DECISIVE for file in directory.glob(pattern) if file.is_file()}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()
