"""The loop: problems → rollouts → grades → method → update → evaluation, everything into the run record.

One iteration is a function of (weights, optimizer, iteration number) alone, because every draw is keyed. So a killed
run continues from its newest checkpoint and arrives at the same bits (on CUDA up to the order of atomic additions); the
work in flight is simply made again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reasonlab.config import Config, GrpoConfig, load_recipe, to_toml
from reasonlab.errors import UserError
from reasonlab.evaluate.control import FORCED_SUITE, SUITE
from reasonlab.evaluate.evaluator import FORCED_STYLE, Summary, summarise
from reasonlab.grading.grade import Grade
from reasonlab.hardware import prepare
from reasonlab.interruption import asks_to_stop
from reasonlab.keys import key
from reasonlab.methods import build_method, mel
from reasonlab.methods.group import Group, Method, example
from reasonlab.methods.mel import Experience
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.lora import add_lora, check_rank, has_lora, load_adapter, merged, refresh_merged
from reasonlab.model.text_format import ModelFormat, TinyFormat, open_format
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.model.transformer import Transformer
from reasonlab.problems.problem import Problem
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Sampling
from reasonlab.runs import RunRecord
from reasonlab.runs.files import write_aside
from reasonlab.runs.record import read_run
from reasonlab.train.batch import Example, TokenBatch, Totals
from reasonlab.train.checkpoint import (
    ADAPTER,
    FINAL,
    TrainState,
    checkpoint_name,
    iterations_done,
    load_checkpoint,
    newest_checkpoint,
    prune,
    save_checkpoint,
)
from reasonlab.train.exchange import Exchange
from reasonlab.train.experience import Reflections, experience_rows
from reasonlab.train.held_out import known_overlap, open_held_out
from reasonlab.train.learner import Learner, Loss, Objective, StepResult
from reasonlab.train.measures import Clock, Counter, evaluation_metrics, iteration_metrics, one_sample, rollout_rows
from reasonlab.train.memory import (
    Workload,
    check_room,
    described,
    free_memory,
    out_of_memory,
    planned_memory,
    warned_of_room,
)
from reasonlab.train.plan import planned_work
from reasonlab.train.sources import Source, build_source

TIME_LIMIT = "stopped at the time limit"


class Observer(Protocol):
    """Somebody who watches a run: the terminal view. Nothing in training depends on it."""

    def progress(self, what: str, done: int, total: int) -> None: ...
    def iteration(self, number: int, metrics: dict[str, Any], sample: tuple[Problem, str, Grade]) -> None: ...
    def evaluation(self, number: int, suite: str, summary: Summary) -> None: ...
    def alarm(self, number: int, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def stopping(self, text: str) -> None: ...  # called by a signal handler, perhaps in the midst of another call


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    status: str  # "finished", "interrupted" or TIME_LIMIT
    iteration: int
    seconds: float


class Trainer:
    """Everything one run needs, on one device. Made by `start` or `resume`, which give it its record."""

    record: RunRecord
    written: Future[None] | None = None  # rollouts on their way to the disk

    def __init__(self, config: Config, observer: Observer, checkpoint: Path | None = None) -> None:
        self.config, self.observer = config, observer
        device = prepare(config.device)
        self.base = resolve_model(config.model.path)
        # With adapters the weights of a checkpoint are merged ones: go on from the base, and put its adapters on.
        model = load_model(self.base if checkpoint is None or config.model.lora_rank else checkpoint)
        if checkpoint is None:
            check_rank(model.config, config.model.lora_rank)
        self.work = Workload(model.config, prompt=0)
        with self._explaining_memory():
            self._open(model.to(device), device, checkpoint)
            self._plan()

    def _open(self, model: Transformer, device: torch.device, checkpoint: Path | None) -> None:
        config, observer = self.config, self.observer
        # Said, and kept as events, when the run begins: what is good to know, and what needs attention.
        self.notices: list[str] = []
        self.warnings: list[str] = []
        text_format = open_format(self.base, model.config.vocab_size, config.model.template_arguments)
        self.exchange = Exchange(text_format, config.reward.extraction)
        self.held_out = open_held_out(config, self.exchange.tiny, self.warnings.append)
        if config.model.lora_rank:
            add_lora(model, config.model.lora_rank, config.model.lora_alpha, seed=config.seed)
            if checkpoint:
                load_adapter(model, checkpoint / ADAPTER)
        steps = {"decay_steps": config.learner.decay_steps or config.updates}
        learning = config.learner.model_copy(update=steps)
        self.learner = Learner(model, learning, config.threads, config.rollout.temperature or 1.0)
        self.engine = Engine(self._engine_model(), config.rollout.rows, config.threads, text_format.response)
        self.method: Method = build_method(config)
        self.reference = self._reference(device) if self.method.needs_reference else None
        self.sampling = Sampling(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            max_tokens=config.rollout.max_tokens,
            stop_ids=self.exchange.stop_ids,
            repetition_window=config.rollout.repetition_window,
            segment_tokens=config.rollout.segment_tokens,
        )
        self.source: Source = build_source(
            config,
            self.engine,
            self.exchange,
            self.sampling,
            observer.progress,
            self.held_out,
            self.notices.append,
        )
        self.writer = ThreadPoolExecutor(1, "rollouts")
        self.state = TrainState()
        if checkpoint:
            self.state, of_source = load_checkpoint(checkpoint, self.learner)
            self.source.restore(of_source)
        self.reflections = Reflections(config, self.engine, self.exchange, self.sampling, observer.progress)
        self.stop_requested = False
        self.evaluated: set[tuple[str, int]] = set()  # suites and iterations

    def _engine_model(self) -> Transformer:
        """What the learner computes with: its own weights, on CUDA their bf16 copy; with adapters merged into them."""
        working = self.learner.working
        return merged(self.learner.model, working.embedding.weight.dtype) if has_lora(working) else working

    def _reference(self, device: torch.device) -> Learner:
        return Learner(load_model(self.base).to(device), self.config.learner, 1, self.config.rollout.temperature or 1.0)

    # --- what is said before the first step ----------------------------------------------------------------------

    def _plan(self) -> None:
        """What the run will need, and what it shares with benchmarks. A refusal comes before there is a record."""
        longest = self.source.longest()
        self.work = planned_work(self.config, self.work.shape, self.exchange, self.held_out, longest)
        free = free_memory(self.config)
        self.plan = described(self.config, self.work, free)
        if not self.exchange.tiny or free is not None:
            self.observer.note(self.plan)
        check_room(self.config, self.work, free)
        self.shared = known_overlap(self.config) if self.state.iteration == 0 else {}

    def _announce(self) -> None:
        """The memory plan, what was left out of the training problems, and what they share with benchmarks."""
        number = self.state.iteration
        self.record.event("memory", number, text=self.plan, **asdict(planned_memory(self.config, self.work)))
        if self.shared:
            self.record.event("overlap", number, pool=self.config.problems.path, problems=self.shared)
            names = ", ".join(f"{name} ({count})" for name, count in self.shared.items())
            self.warnings.append(
                f"the training pool holds problems of {names}: scores on them say little. "
                f"`reasonlab data check {self.config.problems.path} --clean FILE` makes a pool without them"
            )
        if number == 0 and (notice := spread_notice(self.config)):
            self.notices.append(notice)
        if notice := warned_of_room(self.config, self.work):
            self.notices.append(notice)
        for text in self.notices:
            self.record.event("note", number, text=text)
            self.observer.note(text)
        for text in self.warnings:
            self._alarm(number, "data", text)

    def _show_example(self, group: Group) -> None:
        """The first prompt and response exactly as the model sees them, before anything is learned from them."""
        rollout, grade = group.rollouts[0], group.grades[0]
        prompt, response = self.exchange.format.shown(rollout.prompt), self.exchange.format.shown(rollout.ids)
        about = {"problem": group.problem.id, "finish": rollout.finish, **asdict(grade)}
        about |= {"gold": group.problem.answer, "stop_ids": list(self.exchange.stop_ids)}
        self.record.event("example", 1, prompt=prompt, response=response, **about)
        if not self.exchange.tiny:
            found = f"{grade.verdict}: read {grade.extracted!r}, gold {group.problem.answer!r}"
            if not group.gradable[0]:
                found = f"not graded: {grade.rule}"
            self.observer.note(
                f"one example, special tokens written out ({found}):\n{prompt}\n--- response:\n{response}"
            )

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise out_of_memory(self.config, self.work) from error

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self, deadline: float | None = None) -> Outcome:
        """Train to the last iteration, or until interrupted or past the deadline (in `time.monotonic` seconds)."""
        total, status = self.config.iterations, "finished"
        started = time.monotonic() - self.state.seconds
        with asks_to_stop(self._ask_to_stop), self._explaining_memory():
            self._announce()
            if self.state.iteration == 0 and self.config.evaluate.every:
                self._evaluate(0, both_ends=True)
            while self.state.iteration < total:
                late = deadline is not None and time.monotonic() > deadline
                if self.stop_requested or late:
                    status = "interrupted" if self.stop_requested else TIME_LIMIT
                    break
                self._iteration(self.state.iteration + 1)
                self.state.seconds = time.monotonic() - started
                done = self.state.iteration
                every = self.config.evaluate.every
                if every and done % every == 0 and done < total:
                    self._evaluate(done)
                if done % self.config.checkpoint.every == 0 and done < total:
                    self._checkpoint()
            if status == "interrupted":
                self._checkpoint()
            else:
                if self.config.evaluate.every:
                    self._evaluate(self.state.iteration, both_ends=True)
                self._save(FINAL)
        self._finish_writing()
        self.record.finish(status)
        return Outcome(status, self.state.iteration, time.monotonic() - started)

    def _iteration(self, number: int) -> None:
        clock, generated = Clock(), self.engine.generated
        self.engine.version = number - 1
        groups = self.source.groups(number)
        clock.lap("rollout")
        if number == 1:
            self._show_example(groups[0])
        experiences = self._reflect(number, groups)
        if experiences:
            clock.lap("reflect")
        results = self._update(number, groups, experiences)
        refresh_merged(self.engine.model, self.learner.model)
        clock.lap("update")
        self.state.iteration = number
        self.state.learner_steps = self.learner.steps
        self.state.generated_tokens += self.engine.generated - generated
        metrics = {**iteration_metrics(groups, results)}
        reflecting = mel.metrics(groups, experiences) if self.config.mel.weight > 0 else {}
        metrics |= clock.metrics(self.engine.generated - generated or sum(int(group.lengths.sum()) for group in groups))
        if self.config.mel.weight > 0:
            metrics |= {f"train/{name}": value for name, value in reflecting.items()}
            self.record.experiences(number, experience_rows(experiences, self.exchange))
        self._write_rollouts(number, groups)
        self.record.metrics(number, metrics)
        if sum(result.nonfinite for result in results):
            self._alarm(number, "nonfinite", "a loss or gradient was not finite and was dropped; lower learner.lr")
        self.observer.iteration(number, metrics, one_sample(groups, self.exchange, number))

    def _write_rollouts(self, number: int, groups: Sequence[Group]) -> None:
        """Begin to write them: decoding and compressing go on while the next ones are sampled."""
        self._finish_writing()
        self.written = self.writer.submit(lambda: self.record.rollouts(number, rollout_rows(groups, self.exchange)))

    def _finish_writing(self) -> None:
        """Before anything is called saved: wait for the rollouts, and raise what went wrong with them."""
        written, self.written = self.written, None
        if written is not None:
            written.result()

    def _reflect(self, number: int, groups: list[Group]) -> list[Experience]:
        return self.reflections.on(number, groups) if self.config.mel.weight > 0 else []

    # --- the update --------------------------------------------------------------------------------------------

    def _update(self, number: int, groups: list[Group], experiences: Sequence[Experience]) -> list[StepResult]:
        """`inner_steps` optimizer steps in each epoch, each on its own share of the examples.

        Kept reflections of MEL are a second objective of every step.
        """
        config = self.config.learner
        if self.method.resets_optimizer:
            self.learner.reset_optimizer()
        if self.reference is not None:
            self._refer(self.reference, groups)
        examples = self.method.examples(groups)
        fresh = [e.sampled_by(number - 1) for e in examples]
        partial, anchored = self.config.rollout.segment_tokens > 0, self.config.rollout.stale == "anchor"
        if partial and not anchored:
            for e, tokens in zip(examples, fresh, strict=True):
                e.mask &= tokens
        shares = [share for epoch in range(config.epochs) for share in self._shares(number, epoch, examples)]
        # The first update on fresh tokens needs no stored logprobs: the sampling policy is the present one.
        fresh_only = not (partial and anchored)
        single = config.inner_steps * config.epochs == 1 and fresh_only
        # In a single step without a KL term an example without advantage has no gradient, whatever the method.
        only_counted = self.reference is None and (single or self.method.needs_advantage)

        def teaches(e: Example) -> bool:
            return (e.advantage != 0 or not only_counted) and (bool(e.mask.any()) or e.pair >= 0)

        on_cuda = self.config.device == "cuda"
        losses: list[Loss] = [self.method.loss] * len(shares)
        if losses and (single or (on_cuda and fresh_only)):
            losses[0] = on_policy(self.method.loss)
        apart: list[NDArray[np.float32]] = []  # engine and learner, where the learner's logprobs take their place
        if on_cuda and not single:
            # bf16 sampling and bf16 training differ a little: measure the policy before the update with the learner.
            # In a single epoch nobody asks for those of the first update.
            unasked = {id(e) for e in shares[0]} if shares and fresh_only and config.epochs == 1 else set()
            measured = [i for i, e in enumerate(examples) if id(e) not in unasked and teaches(e) and fresh[i].any()]
            for i, logprobs in zip(measured, self.learner.logprobs([examples[i] for i in measured]), strict=True):
                now = np.where(fresh[i], logprobs, examples[i].logprobs)
                if not unasked:
                    apart.append(np.abs(now - examples[i].logprobs)[examples[i].mask & fresh[i]])
                examples[i].logprobs = now
        learned = mel.internalised(self.config.mel, experiences, len(groups))
        results = []
        for share, loss in zip(shares, losses, strict=True):
            useful = [e for e in share if teaches(e)]
            objectives = [Objective(useful, loss, Totals.of(share))] if useful else []
            if learned:
                objectives.append(Objective(learned[0], mel.nll, learned[1]))
            if objectives:
                results.append(self.learner.step_on(objectives))
        if results and sum(map(len, apart)):
            distances = np.concatenate(apart)
            mean, most = float(distances.mean()), float(distances.max())
            results[0] = replace(results[0], mismatch=most, mean_mismatch=mean)
        elif results and not all(tokens[e.mask].all() for e, tokens in zip(examples, fresh, strict=True)):
            results[0] = replace(results[0], mismatch=None, mean_mismatch=None)  # of tokens that others have written
        return results

    def _refer(self, reference: Learner, groups: list[Group]) -> None:
        """Give every rollout its logprobs under the frozen initial model."""
        rollouts = [example(rollout, 0.0) for group in groups for rollout in group.rollouts]
        logprobs = iter(reference.logprobs(rollouts))
        for group in groups:
            group.reference = [next(logprobs) for _ in group.rollouts]

    def _shares(self, number: int, epoch: int, examples: list[Example]) -> Iterator[list[Example]]:
        """The examples of each inner step: all of them, or a keyed shuffle of the groups dealt out evenly."""
        parts = self.config.learner.inner_steps
        if parts == 1:
            yield examples
            return
        units: dict[int | bytes, list[Example]] = {}  # a pair stays together, and a group: its prompt is computed once
        for e in examples:
            units.setdefault(e.pair if e.pair >= 0 else e.prompt.tobytes(), []).append(e)
        order = list(units.values())
        Random(key(self.config.seed, "shares", number, epoch)).shuffle(order)
        order.sort(key=lambda unit: all(e.advantage == 0 for e in unit))  # no step should be left with these alone
        for part in range(parts):
            if order[part::parts]:
                yield [e for unit in order[part::parts] for e in unit]

    # --- evaluation, checkpoints, interruption -----------------------------------------------------------------

    def _evaluate(self, number: int, both_ends: bool = False) -> None:
        """Score the present weights; at both ends of a run also with the worked style forced, the control."""
        config, clock = self.config.evaluate, Clock()
        sampling = Sampling(
            temperature=config.temperature,
            max_tokens=self.sampling.max_tokens,
            stop_ids=self.sampling.stop_ids,
            # As `reasonlab eval` does: only tiny models are cut when they repeat themselves.
            repetition_window=self.sampling.repetition_window if self.exchange.tiny else 0,
        )
        values: dict[str, Any] = {}
        formats: dict[str, ModelFormat] = {self.held_out.suite: self.exchange.format}
        if both_ends and config.forced_style and self.held_out.suite == SUITE and self.exchange.tiny:
            formats[FORCED_SUITE] = TinyFormat(TinyTokenizer.load(), FORCED_STYLE)
        for suite, text_format in formats.items():
            if (suite, number) in self.evaluated:  # a time limit may end the run right after an evaluation
                continue
            total = self.held_out.questions * config.samples
            count = Counter(self.observer.progress, f"evaluating {suite} at {number}", total)
            answers = self.held_out.evaluate(self.engine, text_format, sampling, config.samples, count)
            self.record.evaluation(suite, number, [answer.row() for answer in answers])
            values |= evaluation_metrics(suite, answers)
            self.observer.evaluation(number, suite, summarise(answers))
            self.evaluated.add((suite, number))
        if values:
            clock.lap("evaluate")
            self.record.metrics(number, {**values, **clock.seconds_by_phase})

    def _checkpoint(self) -> None:
        if self.state.iteration > 0:
            self._save(checkpoint_name(self.state.iteration))
            prune(self.record.directory, self.config.checkpoint.keep)

    def _save(self, name: str) -> None:
        self._finish_writing()
        if self.method.resets_optimizer:
            self.learner.reset_optimizer()  # the next iteration would anyway: do not write moments nobody reads
        source, named = self.source.state(), self.config.model.path
        save_checkpoint(self.record.directory, name, self.learner, self.state, source, self.base, named)
        self.record.event("checkpoint", self.state.iteration, name=name)
        self.record.sync()

    def _alarm(self, number: int, kind: str, text: str) -> None:
        self.record.event("alarm", number, alarm=kind, text=text)
        self.observer.alarm(number, text)

    def _ask_to_stop(self) -> None:
        self.stop_requested = True
        self.observer.stopping("interrupted: finishing this iteration, then saving")


def start(config: Config, out: Path, argv: Sequence[str], observer: Observer) -> Trainer:
    """A new run in `out`. What can be wrong with the recipe is found before the run exists."""
    trainer = Trainer(config, observer)
    trainer.record = RunRecord.create(out, to_toml(config), list(argv))
    return trainer


def resume(run: Path, observer: Observer, iterations: int | None = None) -> Trainer:
    """The run in `run`, continued from its newest checkpoint (or from the base model if it has none yet).

    `iterations` takes the place of those it was started with, so that one that has ended can go on.
    """
    status, config, checkpoint = read_run(run)["status"], load_recipe(run / "config.toml"), newest_checkpoint(run)
    done = 0 if checkpoint is None else iterations_done(checkpoint)
    if iterations is not None:
        if iterations < done:
            raise UserError(
                f"the run in {run} has {done} iterations already", f"Give --iterations and more than {done}"
            )
        config = config.model_copy(update={"iterations": iterations})
    if status not in ("running", "interrupted", "failed", TIME_LIMIT) and done >= config.iterations:
        raise UserError(
            f"the run in {run} has already ended ({status})",
            f"Start another with --out, or let it go on with --iterations and more than {done}",
        )
    trainer = Trainer(config, observer, checkpoint)
    if iterations is not None:
        write_aside(run / "config.toml", to_toml(config).encode())
    trainer.record = RunRecord.resume(run)
    trainer.record.event("resume", trainer.state.iteration)
    observer.note(
        "no checkpoint was written yet: starting again from iteration 0"
        if checkpoint is None
        else f"continuing after iteration {trainer.state.iteration} of {trainer.config.iterations} "
        f"({checkpoint.relative_to(run)})"
    )
    return trainer


def spread_notice(config: Config) -> str | None:
    """What whoever asks for short answers should know of advantages that are divided by the spread of their group."""
    divided = isinstance(config.method, GrpoConfig) and config.method.advantage == "group_std"
    if not divided or config.reward.length_weight == 0:
        return None
    return (
        "advantages are divided by their group's spread: where all answers are right, length weighs as much as being "
        "right does elsewhere, and answers went on shrinking at the cost of accuracy. --method.advantage group_mean "
        "keeps the proportion"
    )


def on_policy(loss: Loss) -> Loss:
    """One update on fresh rollouts: the sampling policy is the present one, so the ratio is exactly one."""

    def wrapped(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(logprobs, replace(batch, old=logprobs.detach()))

    return wrapped
