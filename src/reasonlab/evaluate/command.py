"""`reasonlab eval`: score a model with the same evaluator that training uses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reasonlab import __version__
from reasonlab.errors import UserError
from reasonlab.evaluate.best_of import Choices, Chooser, open_chooser
from reasonlab.evaluate.evaluator import Answer, Task, answers_to, graded_answer
from reasonlab.evaluate.graders import grader_for, grader_version, policy_named
from reasonlab.evaluate.opened_model import OpenedModel, open_model
from reasonlab.evaluate.panels import (
    TINY_SPLIT,
    TINY_SUITE,
    Panel,
    check_tiny_options,
    chosen_panels,
    chosen_suite,
    overlap_with,
)
from reasonlab.evaluate.record import (
    ABOUT,
    EvaluationRecord,
    Place,
    answer_lines,
    place_of,
    read_answers,
    read_settings,
)
from reasonlab.evaluate.responder import FAILED, Response
from reasonlab.evaluate.scores import BESIDE, Scores, score
from reasonlab.problems.problem import Problem
from reasonlab.problems.registry import OWN_FILE_SUFFIXES
from reasonlab.runs.files import write_aside
from reasonlab.terminal import make_observer
from reasonlab.wording import counted

RESCORE_OPTIONS = ("--rescore", "--extraction", "--out", "--json", "--judge")
RESCORE_JUDGE_OPTIONS = ("--best-of", "--judge-kind", "--steps", "--alpha", "--threads", "--device")


def evaluate_model(arguments: argparse.Namespace) -> int:
    if _is_file(arguments.out) and arguments.out.name.endswith(".gz"):
        raise UserError("a plain file of answers is not compressed", "Give --out FILE.jsonl, or a directory")
    if arguments.rescore is not None:
        return rescore(arguments)
    if arguments.model is None:
        raise UserError("eval needs a model", "For instance: reasonlab eval tiny-1m")
    if arguments.k < 1:
        raise UserError(f"--k {arguments.k} asks for no answers", "Give a positive number")
    check_tiny_options(arguments)
    chooser = open_chooser(arguments, arguments.k)
    model = open_model(arguments)
    if model.sampling.temperature == 0 and arguments.k > 1:
        print(
            f"note: temperature 0 draws nothing: --k {arguments.k} asks the same {arguments.k} times", file=sys.stderr
        )
    panels = chosen_panels(arguments, model.tiny, _warn)
    settings = _settings(arguments, model, panels)
    if arguments.out is None or _is_file(arguments.out):
        answers = _ask(arguments, model, panels, {}, None)
        if arguments.out:
            write_aside(arguments.out, answer_lines(answers))
        chosen = _choices(chooser, answers, settings, None, arguments)
        _print(score(answers, settings), settings, chosen, arguments)
        return _exit_code(answers, chooser)
    with EvaluationRecord.start(arguments.out, settings) as record:
        known = _same_grader(record, settings)
        try:
            answers = _ask(arguments, model, panels, known, record.append)
        except KeyboardInterrupt:
            kept = counted(len(record.answers()), "answer")
            print(f"\ninterrupted. {kept} saved; the same command goes on from here.", file=sys.stderr)
            return 130
        record.replace({place_of(answer): answer for answer in answers}, settings)
        scores = score(answers, settings)
        chosen = _choices(chooser, answers, settings, arguments.out, arguments)
        record.write_scores({"grader": grader_version(), **_data(scores, settings, chosen)})
    _print(scores, settings, chosen, arguments)
    return _exit_code(answers, chooser)


def rescore(arguments: argparse.Namespace) -> int:
    """Grade the answers of a directory again, by the present grader and perhaps another extraction.

    With --out the outcome is written there and the directory is only read; without, it takes the directory's place.
    """
    _check_rescore_options(arguments)
    source, out = arguments.rescore, arguments.out
    with ExitStack() as held:
        if out is None or out.resolve() == source.resolve():
            out, record = source, held.enter_context(EvaluationRecord.existing(source))
        else:
            record = None
        settings, answers = read_settings(source), read_answers(source)
        if not answers:
            raise UserError(f"{source} holds no answers yet", "Run the evaluation first")
        chooser = open_chooser(arguments, settings["k"])
        if arguments.extraction:
            for entry in settings["benchmarks"].values():
                entry["extraction"] = policy_named(arguments.extraction)
        settings[ABOUT]["grader"] = grader_version()
        again = regraded(answers, settings)
        if _is_file(out):
            write_aside(out, answer_lines(again.values()))
        else:
            record = record or held.enter_context(EvaluationRecord.start(out, settings))
            _check_same_answers(record, again)
            record.replace(again, settings)
        changed = sum(again[place].verdict != answers[place].verdict for place in answers)
        scores = score(list(again.values()), settings)
        chosen = _choices(chooser, list(again.values()), settings, None if record is None else out, arguments)
        if record is not None:
            record.write_scores({"grader": grader_version(), **_data(scores, settings, chosen)})
    place = f"{source} was rewritten" if out == source else f"written to {out}, {source} is as it was"
    print(f"{changed} of {len(answers)} verdicts changed; {place}", file=sys.stderr)
    _print(scores, settings, chosen, arguments)
    return _exit_code(list(again.values()), chooser)


def _check_rescore_options(arguments: argparse.Namespace) -> None:
    """What rescoring does not use would silently change nothing."""
    if arguments.model is not None:
        raise UserError("--rescore needs no model", "It grades the stored answers: reasonlab eval --rescore DIR")
    used = RESCORE_OPTIONS + (RESCORE_JUDGE_OPTIONS if arguments.judge is not None else ())
    if unused := [option for option in arguments.given if option not in used]:
        raise UserError(
            f"--rescore asks nothing and does not use {', '.join(unused)}",
            "It takes --extraction, --out, --json, and --judge with its options",
        )


def _check_same_answers(record: EvaluationRecord, again: Mapping[Place, Answer]) -> None:
    """An earlier rescoring may be there, but no evaluation that would be lost."""
    there = record.answers()
    if any(place not in again or again[place].text != answer.text for place, answer in there.items()):
        raise UserError(f"{record.directory} holds other answers", "Choose another --out")


def regraded(answers: Mapping[Place, Answer], settings: Mapping[str, Any]) -> dict[Place, Answer]:
    """The same answers with fresh verdicts; those that never came stay what they are."""
    graders = {
        family: grader_for(entry["extraction"], entry["verifier"])
        for entry in settings["benchmarks"].values()
        for family in entry["families"]
    }
    again = {}
    for place, old in answers.items():
        problem = Problem(old.problem, old.question, old.gold, old.family, old.level)
        response = Response(old.text, old.tokens, old.finish)
        kept = old.finish == FAILED
        again[place] = old if kept else graded_answer(problem, old.sample, response, graders[old.family])
    return again


def _ask(
    arguments: argparse.Namespace,
    model: OpenedModel,
    panels: Sequence[Panel],
    known: Mapping[Place, Answer],
    keep: Callable[[Answer], None] | None,
) -> list[Answer]:
    """All answers in the order of problems and samples: those that are known, and the others asked for now."""
    responder = model.respond_with(model.sampling, keep is not None)
    wanted = [(p.family, p.id, sample) for panel in panels for p in panel.problems for sample in range(arguments.k)]
    found = {place: known[place] for place in wanted if place in known and known[place].finish != FAILED}
    done = len(found)
    with make_observer(0, f"eval {arguments.model}", quiet=arguments.json) as observer:
        if model.device:
            observer.note(f"{arguments.model} runs on {model.device} in {model.identity['dtype']}")
        if found:
            observer.note(f"{len(found):,} of {len(wanted):,} answers were there already")

        def progress(more: int) -> None:
            nonlocal done
            done += more
            observer.progress("answers", done, len(wanted))

        for panel in panels:
            grader = grader_for(panel.extraction, panel.verifier)
            for answer in answers_to(
                _open_tasks(panel, arguments.k, found), responder, model.sampling, grader, arguments.seed, progress
            ):
                if keep:
                    keep(answer)
                found[place_of(answer)] = answer
    return [found[place] for place in wanted]


def _open_tasks(panel: Panel, k: int, found: Mapping[Place, Answer]) -> list[Task]:
    tasks = []
    for problem in panel.problems:
        samples = [sample for sample in range(k) if (problem.family, problem.id, sample) not in found]
        if samples:
            tasks.append(Task(problem, panel.asked(problem), samples))
    return tasks


def _same_grader(record: EvaluationRecord, settings: dict[str, Any]) -> Mapping[Place, Answer]:
    """The answers of earlier attempts. If the grader has changed since, they are graded again: no mixture."""
    answers = record.answers()
    if record.settings[ABOUT]["grader"] != settings[ABOUT]["grader"]:
        answers = regraded(answers, settings)
        record.replace(answers, settings)
    return answers


def _settings(arguments: argparse.Namespace, model: OpenedModel, panels: Sequence[Panel]) -> dict[str, Any]:
    """The whole protocol. Nothing here is a secret: an endpoint's key is known only to the request."""
    about: dict[str, Any] = {"model": model.place, "reasonlab": __version__, "grader": grader_version()}
    if model.device:
        about["device"] = model.device
    suite = chosen_suite(arguments)
    beside = [panel.name for panel in panels[len(panels) - len(arguments.benchmark or ()) :]]
    if suite == TINY_SUITE:
        about["split"] = arguments.split or TINY_SPLIT
    if arguments.trained_on is not None:
        about["overlap"] = overlap_with(arguments.trained_on, panels)
    return {
        "version": 1,
        "model": model.identity,
        "suite": BESIDE.join([suite, *beside]) if suite else "",
        "benchmarks": {panel.name: panel.described() for panel in panels},
        "k": arguments.k,
        "sampling": {**asdict(model.sampling), "stop_ids": list(model.sampling.stop_ids), "stop_strings": []},
        "force": arguments.force,
        "template_arguments": sorted(arguments.template_arg or []),
        "seed": arguments.seed,
        ABOUT: about,
    }


def _choices(
    chooser: Chooser | None,
    answers: Sequence[Answer],
    settings: Mapping[str, Any],
    directory: Path | None,
    arguments: argparse.Namespace,
) -> Choices | None:
    """What the judge of --judge makes of the answers, unless none came: that is told elsewhere.

    If the judge cannot (an answer is too long for it), the scores still come, and its error at the end.
    """
    if chooser is None or all(answer.finish == FAILED for answer in answers):
        return None
    try:
        return chooser.choose(answers, settings, directory, arguments.json)
    except UserError as error:
        chooser.failure = error
        return None


def _data(scores: Scores, settings: Mapping[str, Any], chosen: Choices | None) -> dict[str, Any]:
    best_of = {} if chosen is None else {"best_of": chosen.data()}
    return {**scores.data(), **best_of, "sentences": _sentences(scores, settings, chosen)}


def _sentences(scores: Scores, settings: Mapping[str, Any], chosen: Choices | None) -> list[str]:
    return scores.sentences(settings["sampling"]) + ([] if chosen is None else chosen.sentences())


def _print(scores: Scores, settings: Mapping[str, Any], chosen: Choices | None, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"settings": settings, **_data(scores, settings, chosen)}, indent=1))
        return
    for sentence in _sentences(scores, settings, chosen):
        print(sentence)


def _exit_code(answers: Sequence[Answer], chooser: Chooser | None) -> int:
    """Failure where nothing at all came; some failures are part of the sentences, and of the directory."""
    if chooser is not None and chooser.failure is not None:
        raise chooser.failure
    failed = [answer for answer in answers if answer.finish == FAILED]
    if failed:
        print(f"warning: {len(failed)} of {len(answers)} answers never came ({failed[0].rule})", file=sys.stderr)
    return 1 if len(failed) == len(answers) else 0


def _is_file(out: Path | None) -> bool:
    return out is not None and out.name.endswith(OWN_FILE_SUFFIXES)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
