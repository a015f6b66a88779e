"""The terminal views: plain lines without control codes, a live view at any width, and no harm to training."""

from __future__ import annotations

import io
import math
import threading
from typing import Any

import pytest
from rich.console import Console

from reasonlab.evaluate.evaluator import Summary
from reasonlab.evaluate.statistics import Interval
from reasonlab.grading.grade import Grade, Verdict
from reasonlab.problems.problem import Problem
from reasonlab.terminal import LiveConsole, LiveObserver, PlainObserver, evaluation_sentence, make_observer, sparkline
from reasonlab.train.loop import Observer

SUMMARY = Summary(Interval(0.521, 0.476, 0.565), Interval(31.2, 28.0, 34.4), 480, 1, 0.01, 0)
PROBLEM = Problem("gcd/2/train/7", "What is gcd(12, 18)?", "6", "gcd", 2)


def metrics(accuracy: float = 0.5) -> dict[str, Any]:
    return {
        "train/accuracy": accuracy,
        "train/length/mean": 40 * accuracy,
        "train/entropy": 0.25,
        "train/reward/mean": accuracy,
        "perf/step_s": 2.0,
        "perf/tokens_per_s": 8123.0,
    }


def sample(text: str = "Answer:6<eos>", verdict: Verdict = "correct") -> tuple[Problem, str, Grade]:
    return PROBLEM, text, Grade(verdict, "6", "exact gcd")


def watch_a_run(observer: Observer, text: str = "Answer:6<eos>", verdict: Verdict = "correct") -> None:
    observer.evaluation(0, "tiny", SUMMARY)
    observer.evaluation(0, "tiny-forced", SUMMARY)
    for number in (1, 2, 3):
        observer.progress(f"iteration {number}: rollouts", 16, 16)
        observer.iteration(number, metrics(0.2 * number), sample(text, verdict))
    observer.alarm(3, "a loss was not finite; lower learner.lr")


def frame(observer: LiveObserver, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(observer.render(width))
    return console.export_text()


def live(width: int = 80) -> LiveObserver:
    return LiveObserver(10, "demo", Console(file=io.StringIO(), force_terminal=True, width=width))


def test_plain_view_is_one_line_per_event_without_control_codes() -> None:
    file = io.StringIO()
    with PlainObserver(10, "demo\x1b[31m", file=file) as observer:
        watch_a_run(observer)
    lines = file.getvalue().splitlines()
    assert len(lines) == 6
    assert all(line.isprintable() for line in lines)
    assert "iteration 2/10: training accuracy 40.0 %, training tokens 16.0" in lines[3]
    assert lines[5].endswith("alarm at iteration 3: a loss was not finite; lower learner.lr")


def test_an_iteration_without_an_update_says_so_in_both_views() -> None:
    file, view = io.StringIO(), live()
    for observer in (PlainObserver(10, "demo", file=file), view):
        observer.iteration(1, metrics() | {"train/updates": 0, "train/groups/zero_std_frac": 1.0}, sample())
    assert "no update: all answers to a problem earned the same" in file.getvalue()
    assert "iteration 1: no update" in frame(view, 80)
    for observer in (PlainObserver(10, "demo", file=file), view):
        observer.iteration(2, metrics() | {"train/updates": 1, "train/groups/zero_std_frac": 1.0}, sample())
    assert file.getvalue().count("no update") == 1
    assert "no update" not in frame(view, 80)


def test_stopping_is_said_in_both_views_and_is_no_alarm() -> None:
    file, view = io.StringIO(), live()
    for observer in (PlainObserver(10, "demo", file=file), view):
        observer.stopping("interrupted: saving")
    assert file.getvalue() == "[demo] interrupted: saving\n"
    assert "interrupted: saving" in frame(view, 80)
    assert "alarm" not in frame(view, 80)


def test_quiet_leaves_only_alarms() -> None:
    file = io.StringIO()
    with PlainObserver(10, "demo", quiet=True, file=file) as observer:
        watch_a_run(observer)
    assert file.getvalue().count("\n") == 1
    assert "alarm" in file.getvalue()


def test_work_without_iterations_tells_its_progress_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("reasonlab.terminal.time.monotonic", lambda: clock)
    texts = {}
    for total in (0, 10):
        file, clock = io.StringIO(), 0.0
        observer = PlainObserver(total, "eval", file=file)
        for second in range(100):
            clock = float(second)
            observer.progress("answers", 10 * second, 1200)
        texts[total] = file.getvalue().splitlines()
    assert texts[0] == [f"[eval] answers {10 * s}/1,200; elapsed {s // 60}:{s % 60:02d}" for s in (30, 60, 90)]
    assert texts[10] == [], "iterations are lines of their own"


def test_work_without_iterations_has_none_in_its_header() -> None:
    observer = LiveObserver(0, "eval", Console(file=io.StringIO(), force_terminal=True, width=80))
    assert "eval  elapsed 0:00" in frame(observer, 80)


def test_lengths_of_few_questions_have_no_impossible_intervals() -> None:
    one = Summary(Interval(1.0, 0.2, 1.0), Interval(75.0, -math.inf, math.inf), 1, 1, 0.0, 0)
    two = Summary(Interval(1.0, 0.3, 1.0), Interval(47.0, -127.3, 221.3), 2, 1, 0.0, 0)
    assert evaluation_sentence(0, "tiny", one).endswith("75.0 tokens/answer (1 question, 0.0 % truncated)")
    assert evaluation_sentence(0, "tiny", two).endswith(
        "47.0 [0.0, 221.3] tokens/answer (2 questions, 0.0 % truncated)"
    )
    assert "75.0 tokens/answer" in one.sentence("tiny", 1.0, 160)


def test_evaluation_sentence_gives_accuracy_and_length_with_intervals() -> None:
    sentence = evaluation_sentence(5, "tiny-forced", SUMMARY)
    assert sentence == (
        "evaluation at iteration 5, held-out, thinking forced: avg@1 = 52.1 % [47.6, 56.5], "
        "31.2 [28.0, 34.4] tokens/answer (480 questions, 1.0 % truncated)"
    )


def test_eta_is_the_time_of_the_iterations_to_come() -> None:
    observer = live()
    watch_a_run(observer)  # three of ten iterations, two seconds each
    assert "iteration 3/10" in frame(observer, 80)
    assert "ETA 0:14, 8,123 tokens/s" in frame(observer, 80)


@pytest.mark.parametrize("width", [120, 80, 40])
def test_live_view_fits_its_width(width: int) -> None:
    observer = live(width)
    with observer:
        watch_a_run(observer, "<think>" + "18-12=6;" * 200 + "</think>Answer:6<eos>")
        observer.progress("iteration 4: rollouts", 5, 16)
        text = frame(observer, width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("training accuracy", "60.0 %", "+40.0", "held-out tokens", "5/16", "✓ correct", "Answer:6<eos>"):
        assert part in text
    assert ("since the start" in text) == (width >= 80)
    assert ("[47.6, 56.5]" in text) == (width >= 80)


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [("correct", "✓ correct"), ("wrong", "✗ wrong"), ("timeout", "? timeout"), ("error", "? not graded")],
)
def test_verdict_has_a_glyph_and_a_word(verdict: Verdict, shown: str) -> None:
    observer = live()
    watch_a_run(observer, verdict=verdict)
    assert shown in frame(observer, 80)


def test_model_text_is_shown_literally_and_cannot_steer_the_terminal() -> None:
    observer = live()
    with observer:
        watch_a_run(observer, "[bold]x[/] [/] [link=http://a]b :smile: \x1b[2J\x07\nend")
    written = observer.console.file
    assert isinstance(written, io.StringIO)
    assert "[bold]x[/] [/] [link=http://a]b :smile: ·[2J··end" in frame(observer, 80)
    assert "\x1b[2J" not in written.getvalue()
    assert "\x07" not in written.getvalue()


def test_live_screen_keeps_evaluations_above_and_results_below() -> None:
    observer = live()
    with observer:
        watch_a_run(observer)
    written = observer.console.file
    assert isinstance(written, io.StringIO)
    assert "avg@1 = 52.1 % [47.6, 56.5]" in written.getvalue()
    assert "held-out accuracy" in written.getvalue()
    assert "rollouts" not in frame(observer, 80)


def test_progress_from_many_threads_ends_full_and_never_shrinks() -> None:
    observer = live()
    workers, each = 8, 500
    total = workers * each
    seen: list[list[int]] = [[] for _ in range(workers)]

    def work(worker: int) -> None:
        for step in range(each):
            observer.progress("rollouts", worker * each + step + 1, total)
            seen[worker].append(observer.phase[1] if observer.phase else -1)

    with observer:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert observer.phase == ("rollouts", total, total)
    assert all(len(counts) == each and counts == sorted(counts) for counts in seen)


def test_progress_skips_most_calls_but_not_a_new_phase_or_the_last() -> None:
    observer = live()
    for done in range(1, 1000):
        observer.progress("rollouts", done, 100_000)
    assert observer.phase is not None
    assert observer.phase[1] < 999
    observer.progress("evaluating", 3, 10)
    assert observer.phase == ("evaluating", 3, 10)
    observer.progress("evaluating", 10, 10)
    assert observer.phase == ("evaluating", 10, 10)


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_a_broken_terminal_does_not_reach_training(kind: str) -> None:
    file = ClosedPipe()
    observer: PlainObserver | LiveObserver = PlainObserver(10, "demo", file=file)
    if kind == "live":
        observer = LiveObserver(10, "demo", LiveConsole(file=file, force_terminal=True, width=80))
    with observer:
        watch_a_run(observer)
        observer.iteration(4, {}, sample())


def test_pipes_get_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with make_observer(10, "demo") as observer:
        watch_a_run(observer)
    assert capsys.readouterr().out.count("[demo] ") == 6


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminals_get_the_live_view_unless_asked_not_to(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    class Screen(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdout", Screen(io.BytesIO(), encoding="utf-8"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_observer(10, "demo"), LiveObserver)
    assert isinstance(make_observer(10, "demo", quiet=True), PlainObserver)
    monkeypatch.setenv(variable, value)
    assert isinstance(make_observer(10, "demo"), PlainObserver)


def test_sparkline_scales_averages_and_survives_nan() -> None:
    assert sparkline([0, 7], 8) == "▁█"
    assert sparkline([1, 1, 1], 8) == "▁▁▁"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([0, float("nan"), 7], 8) == "▁ █"
    assert sparkline([float("nan")], 8) == " "
