"""Scoring many candidates fast: no padding, no token twice, threads around single-threaded arithmetic.

Equal candidates are read once. The others are sorted so that those which begin alike are neighbours, the longest
questions' first, and cut into packs of about `token_budget` tokens; a pack computes common beginnings once. What a
candidate is packed with changes its scores by rounding only.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from reasonlab.hardware import prepare, worker_pool
from reasonlab.judges.formats import NOWHERE, Encoded, Format, windows
from reasonlab.judges.network import JudgeModel, Pack, load_judge
from reasonlab.judges.types import Candidate, Progress, Scored

CPU_BUDGET, CUDA_BUDGET = 2048, 65536  # tokens in a pack
AT_ONCE = 1 << 14  # candidates that are tokenised before the first of them is scored
NOTHING = Scored((), None)


class ModelJudge:
    """A model that scores candidates in its format."""

    def __init__(self, model: JudgeModel, form: Format, workers: int = 1, token_budget: int | None = None) -> None:
        self.model, self.format = model, form
        self.workers, self.token_budget = workers, token_budget

    @classmethod
    def open(cls, directory: Path, device: str = "cpu", workers: int = 1, bfloat16: bool = False) -> ModelJudge:
        """The judge in a directory; `bfloat16` halves the memory of large ones on a GPU, at the cost of exactness."""
        model, form = load_judge(directory)
        model.to(prepare(device))
        if bfloat16:
            model.backbone.to(torch.bfloat16)
        return cls(model, form, workers)

    def score(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[Scored]:
        return score(self.model, self.format, candidates, self.workers, self.token_budget, progress)


def score(
    model: JudgeModel,
    form: Format,
    candidates: Sequence[Candidate],
    workers: int = 1,
    token_budget: int | None = None,
    progress: Progress | None = None,
) -> list[Scored]:
    """The scores of all candidates, in their order. `progress` is called with the number that was just finished."""
    found: list[Scored] = []
    for start in range(0, len(candidates), AT_ONCE):
        part = candidates[start : start + AT_ONCE]
        pieces = [
            windows(encoded, model.positions, candidate.problem)
            for candidate, encoded in zip(part, form.encode_all(part), strict=True)
        ]
        # A candidate in several windows is finished with its last one.
        finishes = [number == len(piece) - 1 for piece in pieces for number in range(len(piece))]
        reads = iter(read(model, [w for piece in pieces for w in piece], workers, token_budget, progress, finishes))
        for piece in pieces:
            parts = [next(reads) for _ in piece]
            found.append(Scored(tuple(s for scored in parts for s in scored.steps), parts[-1].final))
    return found


def read(
    model: JudgeModel,
    encoded: Sequence[Encoded],
    workers: int = 1,
    token_budget: int | None = None,
    progress: Progress | None = None,
    counts: Sequence[int] | None = None,
) -> list[Scored]:
    """The scores read from token sequences, in their order. `counts` says what each is worth to `progress` (else 1)."""
    device = model.embedding.weight.device
    budget = token_budget or (CPU_BUDGET if device.type == "cpu" else CUDA_BUDGET)
    jobs: dict[tuple[bytes, bytes, int], _Job] = {}
    mine: list[_Job] = []
    for number, one in enumerate(encoded):
        name = one.ids.tobytes(), one.steps.tobytes(), one.final
        mine.append(jobs.setdefault(name, _Job(one, name[0][: one.prompt * one.ids.itemsize], name[0])))
        mine[-1].count += 1 if counts is None else counts[number]
    lock = threading.Lock()

    def work(pack: list[_Job]) -> None:
        with torch.inference_mode():
            steps, finals = model(Pack.of([job.encoded for job in pack]))
            of_steps, of_finals = iter(model.head.squash(steps).tolist()), iter(model.head.squash(finals).tolist())
        for job in pack:
            final = next(of_finals) if job.encoded.final != NOWHERE else None
            job.scored = Scored(tuple(next(of_steps) for _ in job.encoded.steps), final)
        if progress and (finished := sum(job.count for job in pack)):
            with lock:
                progress(finished)

    packs = _packs(list(jobs.values()), budget)
    if workers == 1 or len(packs) == 1 or device.type != "cpu":
        for pack in packs:
            work(pack)
    else:
        with worker_pool(workers) as pool:
            list(pool.map(work, packs))
    return [job.scored for job in mine]


@dataclass(slots=True)
class _Job:
    """A distinct sequence to read."""

    encoded: Encoded
    question: bytes
    name: bytes  # its tokens: sorted by them, sequences that begin alike are neighbours
    count: int = 0
    scored: Scored = NOTHING


def _packs(jobs: list[_Job], token_budget: int) -> list[list[_Job]]:
    """Runs of neighbours with at most `token_budget` tokens, common beginnings counted each time."""
    longest: dict[bytes, int] = {}
    for job in jobs:
        longest[job.question] = max(len(job.encoded.ids), longest.get(job.question, 0))
    packs: list[list[_Job]] = []
    used = 0
    for job in sorted(jobs, key=lambda job: (-longest[job.question], job.question, job.name)):
        if not packs or used + len(job.encoded.ids) > token_budget:
            packs.append([])
            used = 0
        packs[-1].append(job)
        used += len(job.encoded.ids)
    return packs
