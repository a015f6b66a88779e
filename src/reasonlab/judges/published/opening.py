"""From a directory to a judge that scores: our own judges and published ones, by one function."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from reasonlab.errors import UserError
from reasonlab.hardware import prepare
from reasonlab.judges.formats import Encoded, Format
from reasonlab.judges.network import DESCRIPTION, JudgeModel, load_judge
from reasonlab.judges.published.kinds import KINDS, OWN, known, recognise
from reasonlab.judges.published.text import JudgeTokenizer
from reasonlab.judges.published.weights import Checkpoint, PublishedHead
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.types import Candidate, Progress, Scored

Long = Literal["chunk", "refuse"]


class LongInputWarning(UserWarning):
    """Some responses were longer than the judge's positions and were read in windows."""


class OpenedJudge(ModelJudge):
    """A judge from a directory, and what was made of it: `kind`, and how it treats responses that are too long."""

    def __init__(self, kind: str, model: JudgeModel, form: Format, long: Long, workers: int) -> None:
        self.kind, self._watched = kind, _Watched(form, model.positions, long)
        super().__init__(model, self._watched, workers)

    @property
    def long_ones(self) -> int:
        """How many responses of the latest call of `score` exceed the judge's positions."""
        return self._watched.long_ones

    def score(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Scored]:
        self._watched.long_ones = 0
        found = super().score(candidates, progress)
        if self._watched.long_ones:
            warnings.warn(
                f"{self._watched.long_ones} of {len(candidates)} responses exceed the {self.model.positions} positions "
                "of the judge; their steps were scored in windows, each with the question and the latest steps before",
                LongInputWarning,
                stacklevel=2,
            )
        return found


def open_judge(
    path: str | Path,
    kind: str | None = None,
    *,
    long: Long = "chunk",
    system: str | None = None,
    device: str | None = "cpu",
    workers: int = 1,
    bfloat16: bool = False,
) -> OpenedJudge:
    """Open a directory as a judge, recognising the layout where `kind` does not name it.

    `long` says what happens to a response that exceeds the judge's positions: "chunk" lets a process judge read it in
    windows (`judges/formats.py` says how) with a LongInputWarning, "refuse" raises a UserError. An outcome judge always
    refuses; nothing is ever cut off. `system` replaces the system turn that the judge was published with ("" leaves it
    out). `bfloat16` holds and computes the backbone in 16 bits, for large judges on a GPU; heads stay in fp32.
    Without a `device` (None) it is CUDA where there is one.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}", "Give the directory of a judge's checkpoint")
    if long not in get_args(Long):
        raise UserError(f"long={long!r} is not known", 'Use "chunk" or "refuse"')
    if kind is not None and kind not in (OWN, *KINDS):
        raise UserError(f"there is no kind of judge {kind!r}", known())
    place, dtype = prepare(device), torch.bfloat16 if bfloat16 else torch.float32
    if kind == OWN or (kind is None and (directory / DESCRIPTION).is_file()):
        if system is not None:
            raise UserError("a judge of ours has no system turn to replace", "Leave system away")
        model, own_form = load_judge(directory)
        model.backbone.to(place, dtype)
        return OpenedJudge(OWN, model.to(place), own_form, long, workers)
    checkpoint = Checkpoint(directory)
    kind = kind or recognise(checkpoint)
    layout = KINDS[kind]
    layers, form = layout.read(checkpoint, JudgeTokenizer(directory), layout.system if system is None else system)
    head = PublishedHead(layers, layout.part, layout.probability).to(place)
    return OpenedJudge(kind, JudgeModel(checkpoint.backbone(place, dtype), head), form, long, workers)


class _Watched(Format):
    """A format that counts, or refuses, what exceeds the judge's positions."""

    def __init__(self, form: Format, limit: int, long: Long) -> None:
        self.form, self.limit, self.long = form, limit, long
        self.long_ones = 0

    def encode(self, candidate: Candidate) -> Encoded:
        return self.encode_all([candidate])[0]

    def encode_all(self, candidates: Sequence[Candidate]) -> list[Encoded]:
        found = self.form.encode_all(candidates)
        for candidate, encoded in zip(candidates, found, strict=True):
            if len(encoded.ids) <= self.limit:
                continue
            if self.long == "refuse":
                raise UserError(
                    f"a response to problem {candidate.problem!r} has {len(encoded.ids):,} tokens, the judge reads "
                    f"{self.limit:,} at most",
                    'Leave it out of the pool; a process judge opened with long="chunk" reads it in windows',
                )
            self.long_ones += 1
        return found

    def describe(self) -> dict[str, Any]:
        return self.form.describe()
