"""What a run looks like in a terminal: a live view for people, plain lines for logs and pipes.

Both are `Observer`s of the training loop and must never harm it: what goes wrong here is dropped, and the calls that
come from worker threads cost next to nothing. Model output is data: it is shown letter by letter, without markup.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reasonlab.evaluate.control import FORCED_SUITE, SUITE
from reasonlab.evaluate.evaluator import Summary
from reasonlab.evaluate.statistics import length_brackets, length_text
from reasonlab.grading.grade import Grade
from reasonlab.problems.problem import Problem
from reasonlab.train.loop import Observer
from reasonlab.wording import counted

REFRESHES_PER_SECOND = 4
PROGRESS_INTERVAL = 0.1  # seconds between two progress reports that are taken in
PROGRESS_LINE_INTERVAL = 30.0  # seconds between two lines of progress in a log
SAMPLE_CHARACTERS = 320

_SUITE_NAMES = {SUITE: "held-out", FORCED_SUITE: "held-out, thinking forced"}
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One row of the view: where its value comes from and how it is written."""

    name: str
    metric: str = ""
    digits: int = 1
    percent: bool = False

    def show(self, value: float) -> str:
        return f"{100 * value:.1f} %" if self.percent else f"{value:.{self.digits}f}"

    def change(self, value: float) -> str:
        return f"{100 * value:+.1f}" if self.percent else f"{value:+.{self.digits}f}"


HELD_OUT_ACCURACY = Quantity("held-out accuracy", percent=True)
HELD_OUT_TOKENS = Quantity("held-out tokens")
TRAINING = (
    Quantity("training accuracy", "train/accuracy", percent=True),
    Quantity("training tokens", "train/length/mean"),
    Quantity("entropy", "train/entropy", digits=3),
    Quantity("reward", "train/reward/mean", digits=3),
)

P = ParamSpec("P")
Anyone = TypeVar("Anyone")


def make_observer(total: int, name: str, quiet: bool = False) -> AbstractContextManager[Observer]:
    """The live view where a person watches, plain lines everywhere else; `quiet` leaves only the alarms.

    `total` counts iterations; it is 0 for work that has none, such as an evaluation. The output of such work is its
    result alone, so lines about its progress go to the standard error.
    """
    if _interactive() and not quiet:
        return LiveObserver(total, name)
    return PlainObserver(total, name, quiet, None if total else sys.stderr)


def _interactive() -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return sys.stdout.isatty() and unicode and not plain


def _harmless(method: Callable[Concatenate[Anyone, P], None]) -> Callable[Concatenate[Anyone, P], None]:
    """A closed pipe or a strange terminal must not end a run of hours: whatever fails in here is dropped."""

    @wraps(method)
    def call(self: Anyone, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            return

    return call


class PlainObserver:
    """One line for each iteration, evaluation and alarm, without control codes."""

    def __init__(self, total: int, name: str, quiet: bool = False, file: TextIO | None = None) -> None:
        self.total, self.name, self.quiet, self.file = total, _printable(name), quiet, file
        self.pace = _Pace(total)
        self._next_progress = time.monotonic() + PROGRESS_LINE_INTERVAL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    @_harmless
    def progress(self, what: str, done: int, total: int) -> None:
        """A log wants results, not motion; but where no iterations tell of life, a line now and then does."""
        now = time.monotonic()
        if self.total or now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_LINE_INTERVAL
        self._line(f"{_printable(what)} {done:,}/{total:,}; {self.pace.text()}")

    @_harmless
    def iteration(self, number: int, metrics: dict[str, Any], sample: tuple[Problem, str, Grade]) -> None:
        self.pace.take(number, metrics)
        parts = [f"{q.name} {q.show(metrics[q.metric])}" for q in TRAINING if q.metric in metrics]
        if idle := _no_update(metrics):
            parts.append(idle)
        self._line(f"iteration {number}/{self.total}: {', '.join(parts)}; {self.pace.text()}")

    @_harmless
    def evaluation(self, number: int, suite: str, summary: Summary) -> None:
        self._line(evaluation_sentence(number, suite, summary))

    @_harmless
    def alarm(self, number: int, text: str) -> None:
        self._line(f"alarm at iteration {number}: {_printable(text)}", always=True)

    @_harmless
    def note(self, text: str) -> None:
        for line in text.splitlines():
            self._line(_printable(line))

    @_harmless
    def stopping(self, text: str) -> None:
        self._line(_printable(text), always=True)

    def _line(self, text: str, always: bool = False) -> None:
        if always or not self.quiet:
            print(f"[{self.name}] {text}", file=self.file or sys.stdout, flush=True)


class LiveConsole(Console):
    """A console that falls silent when its reader is gone; rich's own would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveObserver:
    """A view that redraws itself a few times a second: header, metrics with sparklines, phase, alarm, a sample.

    Observer calls only note what happened; drawing is done by rich's own thread.
    """

    def __init__(self, total: int, name: str, console: Console | None = None) -> None:
        self.total, self.name = total, _printable(name)
        self.console = console or LiveConsole()
        self.pace = _Pace(total)
        self.series: dict[Quantity, list[float]] = {}
        self.held_out: Summary | None = None
        self.phase: tuple[str, int, int] | None = None
        self.last_alarm: tuple[int, str] | None = None
        self.last_word = ""
        self.idle = ""  # why the last iteration changed nothing, if it did not
        self.sample: tuple[Problem, str, Grade] | None = None
        self._next_progress = 0.0
        # Reentrant: the word of Ctrl-C comes from a signal handler, which may interrupt another of our calls.
        self._lock = threading.RLock()
        self._live = Live(
            console=self.console, get_renderable=self._view, refresh_per_second=REFRESHES_PER_SECOND, transient=False
        )

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self.phase = None  # the frame that stays on the screen shows results, not a halted bar
        self._stop()

    @_harmless
    def _start(self) -> None:
        self._live.start(refresh=True)

    @_harmless
    def _stop(self) -> None:
        self._live.stop()

    def progress(self, what: str, done: int, total: int) -> None:
        """Called by worker threads for every finished rollout: most calls return at once."""
        now, phase = time.monotonic(), self.phase
        same = phase is not None and phase[0] == what
        if same and done < total and now < self._next_progress:
            return
        with self._lock:
            self._next_progress = now + PROGRESS_INTERVAL
            # Threads report out of order, but a bar only grows.
            if self.phase is None or self.phase[0] != what or done > self.phase[1]:
                self.phase = (what, done, total)

    @_harmless
    def iteration(self, number: int, metrics: dict[str, Any], sample: tuple[Problem, str, Grade]) -> None:
        with self._lock:
            self.pace.take(number, metrics)
            self.sample, self.idle = sample, _no_update(metrics)
            for quantity in TRAINING:
                if quantity.metric in metrics:
                    self._note(quantity, float(metrics[quantity.metric]))

    @_harmless
    def evaluation(self, number: int, suite: str, summary: Summary) -> None:
        if suite != FORCED_SUITE:
            with self._lock:
                self.held_out = summary
                self._note(HELD_OUT_ACCURACY, summary.accuracy.estimate)
                self._note(HELD_OUT_TOKENS, summary.tokens.estimate)
        # Above the view, where it scrolls away and stays in the terminal's history.
        self.console.print(Text(evaluation_sentence(number, suite, summary)), soft_wrap=True)

    @_harmless
    def alarm(self, number: int, text: str) -> None:
        with self._lock:
            self.last_alarm = (number, _printable(text))

    @_harmless
    def note(self, text: str) -> None:
        # Above the view, like an evaluation.
        self.console.print(Text("\n".join(map(_printable, text.splitlines()))), soft_wrap=True)

    @_harmless
    def stopping(self, text: str) -> None:
        # In the view, not above it: printing waits for rich's thread, which may wait for the call that was interrupted.
        with self._lock:
            self.last_word = _printable(text)

    def _view(self) -> RenderableType:
        return _View(self)

    def render(self, width: int) -> RenderableType:
        """The present frame, for a terminal so many characters wide."""
        with self._lock:
            parts: list[RenderableType] = [self._header()]
            if self.series:
                parts.append(self._table(width))
            if self.idle:
                parts.append(Text(f"iteration {self.pace.iteration}: {self.idle}", style="yellow"))
            if self.phase:
                parts.append(_bar(*self.phase, width))
            if self.last_alarm:
                number, text = self.last_alarm
                parts.append(Text(f"! alarm at iteration {number}: {text}", style="bold yellow"))
            if self.last_word:
                parts.append(Text(self.last_word, style="bold"))
            if self.sample:
                parts.append(_shown_sample(*self.sample, min(SAMPLE_CHARACTERS, 4 * width)))
            return Group(*parts)

    def _header(self) -> Text:
        header = Text(self.name, style="bold")
        iteration = f"iteration {self.pace.iteration}/{self.total}  " if self.total else ""
        header.append(f"  {iteration}{self.pace.text()}", style="not bold")
        return header

    def _table(self, width: int) -> Table:
        """Name, last value, change since the start, and the way there where there is room for it."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", expand=False)
        spark = min(48, width - 58)
        table.add_column("", no_wrap=True, overflow="ellipsis")
        table.add_column("last", no_wrap=True, justify="right")
        table.add_column("change", no_wrap=True, justify="right")
        if spark >= 8:
            table.add_column("since the start", no_wrap=True, style="cyan")
        for quantity in (*TRAINING, HELD_OUT_ACCURACY, HELD_OUT_TOKENS):
            if values := self.series.get(quantity):
                last = quantity.show(values[-1]) + (self._interval(quantity) if width >= 58 else "")
                cells = [quantity.name, last, quantity.change(values[-1] - values[0]) if len(values) > 1 else ""]
                table.add_row(*map(Text, [*cells, sparkline(values, spark)] if spark >= 8 else cells))
        return table

    def _interval(self, quantity: Quantity) -> str:
        if self.held_out and quantity is HELD_OUT_ACCURACY:
            return f" [{100 * self.held_out.accuracy.low:.1f}, {100 * self.held_out.accuracy.high:.1f}]"
        if self.held_out and quantity is HELD_OUT_TOKENS:
            return length_brackets(self.held_out.tokens)
        return ""

    def _note(self, quantity: Quantity, value: float) -> None:
        self.series.setdefault(quantity, []).append(value)


class _View:
    """Asks the observer for a frame when rich draws, with the width it has then."""

    def __init__(self, observer: LiveObserver) -> None:
        self.observer = observer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.observer.render(options.max_width)


class _Pace:
    """How far a run is and how long the rest takes, judged by the iterations seen and by nothing else."""

    def __init__(self, total: int) -> None:
        self.total, self.iteration, self.seen = total, 0, 0
        self.seconds, self.tokens_per_s = 0.0, math.nan
        self.started = time.monotonic()

    def take(self, number: int, metrics: dict[str, Any]) -> None:
        self.iteration, self.seen = number, self.seen + 1
        self.seconds += float(metrics["perf/step_s"])
        self.tokens_per_s = float(metrics["perf/tokens_per_s"])

    @property
    def remaining(self) -> float:
        return self.seconds / self.seen * max(0, self.total - self.iteration) if self.seen else math.nan

    def text(self) -> str:
        elapsed = f"elapsed {_clock(time.monotonic() - self.started)}"
        if not self.seen:
            return elapsed
        return f"{elapsed}, ETA {_clock(self.remaining)}, {self.tokens_per_s:,.0f} tokens/s"


def _no_update(metrics: dict[str, Any]) -> str:
    """Why an iteration left the weights as they were; empty where it did not."""
    if metrics.get("train/updates") != 0:
        return ""
    equal = metrics.get("train/groups/zero_std_frac") == 1
    return f"no update: {'all answers to a problem earned the same' if equal else 'there was nothing to learn from'}"


def evaluation_sentence(number: int, suite: str, summary: Summary) -> str:
    """An evaluation in one line: accuracy and length, always together, always with intervals."""
    a = summary.accuracy
    sentence = (
        f"evaluation at iteration {number}, {_SUITE_NAMES.get(suite, suite)}: "
        f"avg@{summary.samples} = {100 * a.estimate:.1f} % [{100 * a.low:.1f}, {100 * a.high:.1f}], "
        f"{length_text(summary.tokens)} tokens/answer "
        f"({counted(summary.questions, 'question')}, {100 * summary.truncated:.1f} % truncated)"
    )
    return sentence + (f", {summary.ungraded} answers could not be graded" if summary.ungraded else "")


def sparkline(values: Sequence[float], width: int) -> str:
    """All values in at most `width` bars; where there are more values, each bar is the mean of its share."""
    count = min(width, len(values))
    shares = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return " " * count
    low, reach = min(finite), max(finite) - min(finite)
    top = len(_BARS) - 1
    return "".join(
        " " if not math.isfinite(mean) else _BARS[round(top * (mean - low) / reach) if reach else 0] for mean in means
    )


def _bar(what: str, done: int, total: int, width: int) -> Table:
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_column(no_wrap=True, overflow="ellipsis", max_width=max(8, width - 34))
    count = f"{done}/{total}"
    bar.add_row(Text(_printable(what)), ProgressBar(total=total, completed=done, width=16), Text(count, style="dim"))
    return bar


def _shown_sample(problem: Problem, text: str, grade: Grade, limit: int) -> Text:
    """One solution as the model wrote it, with its verdict in a glyph, a word and a colour."""
    glyph, style = {"correct": ("✓", "green"), "wrong": ("✗", "red")}.get(grade.verdict, ("?", "yellow"))
    shown = Text("\n")
    shown.append(f"{glyph} {'not graded' if grade.verdict == 'error' else grade.verdict}", style=f"bold {style}")
    shown.append(f"  {problem.family}  ", style="dim")
    shown.append(_printable(problem.question), style="bold")
    shown.append("\n" + _shortened(_printable(text), limit))
    return shown


def _printable(text: str) -> str:
    """No escape sequences, no line breaks: a model or a file name must not steer the terminal."""
    return "".join(character if character.isprintable() else "·" for character in text)


def _shortened(text: str, limit: int) -> str:
    """Beginning and end; the answer stands at the end."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]}…{text[head + 1 - limit :]}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
