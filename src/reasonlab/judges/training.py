"""One training loop for all judges: epochs over lists (outcome) or over step-labelled responses (process).

A step is a function of (weights, optimizer, step number) alone, because the order of an epoch and the drawn pairs are
keyed. So a killed training continues from its newest checkpoint and arrives at the same bits (on CUDA up to the order
of atomic additions). The run directory is that of every run (`docs/architecture.md`). Checkpoints at equal fractions of
the training all keep their weights, for curves over progress; only the newest has an optimizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from reasonlab.config import LearnerConfig
from reasonlab.errors import UserError
from reasonlab.hardware import prepare
from reasonlab.interruption import asks_to_stop
from reasonlab.judges.formats import Encoded, StepsOnly, own_format
from reasonlab.judges.inputs import read_candidates
from reasonlab.judges.learner import JudgedExample, JudgeLearner, judged, judged_list
from reasonlab.judges.lists import CandidateList, make_lists
from reasonlab.judges.losses import (
    JudgeLoss,
    bradley_terry,
    outcome_cross_entropy,
    outcome_squared_error,
    process_cross_entropy,
    process_squared_error,
    until_first_wrong,
)
from reasonlab.judges.network import DESCRIPTION, fresh_judge, load_judge, save_judge
from reasonlab.judges.settings import JudgeConfig, judge_toml, load_judge_recipe
from reasonlab.judges.types import Candidate, Labelled, read_labels, read_scores
from reasonlab.keys import key
from reasonlab.model.ladder import resolve_model
from reasonlab.runs import RunRecord
from reasonlab.runs.files import explained, replace_directory, write_aside
from reasonlab.runs.record import read_run
from reasonlab.train.checkpoint import (
    OPTIMIZER,
    SOURCE,
    STATE,
    TrainState,
    checkpoint_name,
    load_checkpoint,
    newest_checkpoint,
    optimizer_tensors,
)
from reasonlab.train.learner import StepResult

__all__ = ["JudgeConfig", "JudgeTrainer", "checkpoints_of", "resume", "start"]

Report = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
Unit = CandidateList | Labelled  # what an epoch goes through
TRAINER = "trainer"


def losses(config: JudgeConfig) -> JudgeLoss:
    """The loss that the settings name."""
    if config.kind == "process":
        make = process_cross_entropy if config.loss == "ce" else process_squared_error
        return make(config.step_weight, config.final_weight)
    return {"ce": outcome_cross_entropy, "mse": outcome_squared_error}.get(config.loss, bradley_terry)


@dataclass(frozen=True, slots=True)
class Data:
    """What a judge learns from, tokenised: units, the tokens of their responses, and what was left out.

    `counted` says of each labelled response which steps may enter the loss; None: all of them.
    """

    units: list[Unit]
    tokens: list[list[Encoded]]
    report: dict[str, Any]
    counted: list[NDArray[np.bool_]] | None = None

    def digest(self) -> str:
        """Tells two sets apart, so that a training is never resumed on another one."""
        hasher = hashlib.blake2b(digest_size=16)
        for unit, encoded in zip(self.units, self.tokens, strict=True):
            labels = (len(unit.right),) if isinstance(unit, CandidateList) else (unit.steps, unit.final)
            hasher.update(repr(labels).encode())
            for one in encoded:
                hasher.update(one.ids.tobytes())
        return hasher.hexdigest()


class JudgeTrainer:
    """Everything one training needs. Made by `start` or `resume`, which give it its record."""

    record: RunRecord

    def __init__(
        self, config: JudgeConfig, units: Sequence[Unit] | None, report: Report, checkpoint: Path | None = None
    ) -> None:
        self.config, self.report = config, report
        device = prepare(config.device)
        self.base = resolve_model(config.model)
        judge = load_judge(checkpoint)[0] if checkpoint else fresh_judge(self.base, config.kind, config.seed)
        self.format = own_format(self.base, config.kind, None if config.steps == "auto" else config.steps)
        self.data = self._tokenised(*(_read(config) if units is None else (units, {})), judge.positions)
        self.about = {"data": self.data.digest()}  # kept in checkpoints
        self.steps_per_epoch = -(-len(self.data.units) // config.batch)
        self.total = config.epochs * self.steps_per_epoch
        self.marks = sorted(
            {max(1, round(self.total * i / config.checkpoints)) for i in range(1, config.checkpoints + 1)}
        )
        self.judge = judge.to(device)
        self.learner = JudgeLearner(self.judge, self._learner_config(), config.threads)
        self.loss = losses(config)
        self.state = TrainState()
        if checkpoint:
            self.state, about = load_checkpoint(checkpoint, self.learner)
            if about != self.about:
                raise UserError(
                    f"{checkpoint} was trained on other data than there are now", "Restore the pool, or start anew"
                )
        self.latest: dict[str, Any] = {}  # metrics of the step that was just made
        self.stop_requested = False
        self._order: tuple[int, list[int]] = (-1, [])

    def _learner_config(self) -> LearnerConfig:
        config = self.config
        return LearnerConfig(
            lr=config.lr,
            token_budget=config.token_budget,
            clip_grad_norm=config.clip_grad_norm,
            weight_decay=config.weight_decay,
            schedule="cosine",
            warmup_steps=round(config.warmup * self.total),
            decay_steps=self.total,
            final_lr_ratio=config.final_lr_ratio,
            bfloat16=config.bfloat16,
        )

    # --- data --------------------------------------------------------------------------------------------------

    def _tokenised(self, units: Sequence[Unit], report: dict[str, Any], positions: int) -> Data:
        """Every response as tokens; one that the model cannot read whole is refused, or dropped with its unit."""
        responses = [candidate for unit in units for candidate in _candidates(unit)]
        tokens: list[Encoded] = []
        for start in range(0, len(responses), 4096):
            tokens += self.format.encode_all(responses[start : start + 4096])
            self.report("tokenising", len(tokens), len(responses))
        kept: list[tuple[Unit, list[Encoded]]] = []
        rest, dropped = iter(tokens), 0
        for unit in units:
            mine = [next(rest) for _ in _candidates(unit)]
            longest = max(len(one.ids) for one in mine)
            if longest > positions and self.config.too_long == "refuse":
                raise UserError(
                    f"a response to problem {_candidates(unit)[0].problem!r} has {longest:,} tokens, "
                    f"{self.config.model} reads {positions:,} at most",
                    'Leave it out of the data, or set too_long = "drop"',
                )
            if longest > positions:
                dropped += 1
                continue
            if isinstance(unit, Labelled) and len(unit.steps) != len(mine[0].steps):
                raise UserError(
                    f"a response to problem {unit.candidate.problem!r} has {len(mine[0].steps)} steps by the rule "
                    f"of this judge, but {len(unit.steps)} labels",
                    "Label it by the same rule (`steps`), or give step_ends",
                )
            if isinstance(unit, Labelled) and self.config.loss == "ce" and any(s not in (0, 1) for s in unit.steps):
                raise UserError(
                    f"a response to problem {unit.candidate.problem!r} has soft labels, cross-entropy wants 0 and 1",
                    'Set loss = "mse"',
                )
            kept.append((unit, mine))
        if not kept:
            raise UserError("there is nothing to learn from", "Give problems with right and wrong responses, or labels")
        report |= {"too_long": dropped}
        counted = None
        if self.config.kind == "process" and self.config.shared_steps == "once":
            counted = first_times(mine[0] for _, mine in kept)
            report |= {"shared_steps": int(sum((~mask).sum() for mask in counted))}
        return Data([unit for unit, _ in kept], [mine for _, mine in kept], report, counted)

    def _examples(self, step: int) -> list[JudgedExample]:
        """The examples of the step with this number, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(len(self.data.units)))
            Random(key(self.config.seed, "judge-epoch", epoch)).shuffle(order)
            self._order = epoch, order
        chosen = self._order[1][place * self.config.batch : (place + 1) * self.config.batch]
        return [example for number in chosen for example in self._unit(number, epoch)]

    def _unit(self, number: int, epoch: int) -> list[JudgedExample]:
        unit, tokens = self.data.units[number], self.data.tokens[number]
        if isinstance(unit, Labelled):
            counted = np.ones(len(unit.steps), bool) if self.data.counted is None else self.data.counted[number]
            if self.config.loss == "ce":
                counted = counted & until_first_wrong(np.array(unit.steps, np.float32))
            return [judged(tokens[0], unit.final, unit.steps, counted)]
        right = len(unit.right)
        chosen = list(range(len(tokens)))
        if self.config.loss == "pair_bt":
            rng = Random(key(self.config.seed, "judge-pair", epoch, unit.problem))
            chosen = [rng.randrange(right), rng.randrange(right, len(tokens))]
        return judged_list([tokens[i] for i in chosen], [i < right for i in chosen], number)

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Train to the end or until interrupted; returns the status that the record ends with."""
        started = time.monotonic() - self.state.seconds
        status = "finished"
        with asks_to_stop(self._ask_to_stop):
            while self.state.iteration < self.total:
                if self.stop_requested:
                    status = "interrupted"
                    break
                self._step(self.state.iteration)
                self.state.seconds = time.monotonic() - started
                if self.state.iteration in self.marks:
                    self._save()
            if status == "interrupted" and self.state.iteration:
                self._save()
        self.record.finish(status)
        return status

    def _step(self, number: int) -> None:
        began, examples = time.perf_counter(), self._examples(number)
        result = self.learner.learn(examples, self.loss)
        self.state.iteration, self.state.learner_steps = number + 1, self.learner.steps
        self.latest = _metrics(result, examples, (number + 1) / self.total, began)
        self.record.metrics(number + 1, self.latest)
        if result.nonfinite:
            text = "a loss or gradient was not finite and was dropped; lower lr"
            self.record.event("alarm", number + 1, alarm="nonfinite", text=text)
        self.report("training the judge", number + 1, self.total)

    def _save(self) -> None:
        """Write the checkpoint; then older ones lose their optimizer, and those between the fractions go."""
        folder, name = self.record.directory / "checkpoints", checkpoint_name(self.state.iteration)
        temporary, final = folder / f".{name}.{os.getpid()}.tmp", folder / name
        notes = {"step": self.state.iteration, "steps_in_all": self.total, "base": self.config.model}
        with explained(final):
            try:
                (temporary / TRAINER).mkdir(parents=True)
                form = self.format if self._learns_whole() else StepsOnly(self.format)
                save_judge(self.judge, form, temporary, self.base, notes)
                save_file(optimizer_tensors(self.learner), temporary / TRAINER / OPTIMIZER)
                (temporary / TRAINER / STATE).write_text(json.dumps(asdict(self.state), indent=2) + "\n")
                (temporary / TRAINER / SOURCE).write_text(json.dumps(self.about) + "\n")
            except Exception as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, SafetensorError):  # which hides a full disk in its text
                    raise UserError(f"cannot write {final} ({error})", "Free some space there") from error
                raise
        replace_directory(temporary, final)
        write_aside(folder / "latest", f"{name}\n".encode())
        kept = {checkpoint_name(mark) for mark in self.marks} | {name}
        for old in folder.glob("step-*"):
            if old.name != name:
                shutil.rmtree(old / TRAINER if old.name in kept else old, ignore_errors=True)
        for left_over in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:  # by processes that were killed
            left_over.unlink() if left_over.is_file() else shutil.rmtree(left_over, ignore_errors=True)
        self.record.event("checkpoint", self.state.iteration, name=name)
        self.record.sync()

    def _learns_whole(self) -> bool:
        """Whether anything says what whole responses are worth; without, that row of the head stays as it was drawn."""
        units = self.data.units
        judged_whole = any(not isinstance(unit, Labelled) or unit.final is not None for unit in units)
        return judged_whole and (self.config.kind == "outcome" or self.config.final_weight > 0)

    def _ask_to_stop(self) -> None:
        self.stop_requested = True


def start(
    config: JudgeConfig, out: Path, argv: Sequence[str], report: Report, units: Sequence[Unit] | None = None
) -> JudgeTrainer:
    """A new training in `out`, on the data of the settings or on `units`. Mistakes show before the run exists."""
    trainer = JudgeTrainer(config, units, report)
    trainer.record = RunRecord.create(out, judge_toml(config), list(argv))
    trainer.record.event("data", 0, units=len(trainer.data.units), **trainer.data.report)
    return trainer


def resume(run: Path, report: Report, units: Sequence[Unit] | None = None) -> JudgeTrainer:
    """The training in `run`, continued from its newest checkpoint (or from the base model if it has none yet)."""
    status = read_run(run)["status"]
    if status not in ("running", "interrupted", "failed"):
        raise UserError(f"the training in {run} has already ended ({status})", "Start another with --out")
    trainer = JudgeTrainer(load_judge_recipe(run / "config.toml"), units, report, newest_checkpoint(run))
    trainer.record = RunRecord.resume(run)
    trainer.record.event("resume", trainer.state.iteration)
    return trainer


def checkpoints_of(run: Path) -> list[tuple[float, Path]]:
    """The kept checkpoints of a training with their progress from 0 to 1, in order."""
    found = []
    for directory in sorted((run / "checkpoints").glob("step-*")):
        notes = json.loads((directory / DESCRIPTION).read_text())
        found.append((notes["step"] / notes["steps_in_all"], directory))
    return found


def first_times(responses: Iterable[Encoded]) -> list[NDArray[np.bool_]]:
    """Which steps of each response no response before it has, by all tokens up to the step's end."""
    seen: set[bytes] = set()
    found = []
    for one in responses:
        hasher, start = hashlib.blake2b(digest_size=16), 0
        mask = np.zeros(len(one.steps), bool)
        for i, place in enumerate(one.steps):
            hasher.update(one.ids[start : place + 1].tobytes())
            start, name = int(place) + 1, hasher.digest()
            mask[i] = name not in seen
            seen.add(name)
        found.append(mask)
    return found


def _read(config: JudgeConfig) -> tuple[Sequence[Unit], dict[str, Any]]:
    """The units in the file that the settings name, and what was left out of it."""
    if not config.data:
        raise UserError("no data to learn from are named", "Set data to a file of JSON lines")
    path = Path(config.data).expanduser()
    if config.kind == "process":
        return read_labels(path), {}
    pool = read_candidates(path)
    scores = None
    if config.scores:
        scores = [scored.overall() for scored in read_scores(Path(config.scores).expanduser(), pool)]
    lists, report = make_lists(pool, config.list_size, scores, config.top, config.seed)
    return lists, asdict(report)


def _candidates(unit: Unit) -> tuple[Candidate, ...]:
    return unit.candidates if isinstance(unit, CandidateList) else (unit.candidate,)


def _metrics(result: StepResult, examples: Sequence[JudgedExample], progress: float, began: float) -> dict[str, Any]:
    seconds, tokens = time.perf_counter() - began, sum(e.length for e in examples)
    return {
        "train/progress": progress,
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "train/nonfinite": result.nonfinite,
        **{f"train/{name}": value for name, value in result.metrics.items()},
        "train/responses": len(examples),
        "train/tokens": tokens,
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
    }
