"""`reasonlab judge label`: what the steps of a pool are worth, as examples to train a process judge with."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reasonlab.errors import UserError
from reasonlab.judges.opened import POOL_HELP
from reasonlab.judges.types import Candidate, Labelled
from reasonlab.options import add_device_argument

if TYPE_CHECKING:
    from reasonlab.judges.labels import StepLabels
    from reasonlab.judges.monte_carlo import MonteCarlo
    from reasonlab.judges.steps import Rule
    from reasonlab.judges.templates import TemplateReward
    from reasonlab.rollout.types import Sampling

DESCRIPTION = """Label the steps of every candidate of a pool, or read labels that people gave:
  exact        the tiny world's true steps
  monte-carlo  a policy goes on from the end of each step; how often it arrives is counted
  trajectory   ReasonFlux's targets in the tiny world: alignment, quality and coherence of each step, and for the whole
               the share of answers that are right when a policy follows the response's strategy
  endpoint     a language model behind an OpenAI-compatible endpoint reads the steps
  prm800k      POOL is a file of PRM800K's rated steps. Each beginning of a solution that nobody went on from becomes
               a candidate. A rating of -1 is wrong, 1 and a step without a rating (people wrote it) are right; a
               neutral step (0) counts as right, as in the original work, or --neutral of it (0.5: for loss = "mse")
  processbench POOL is a file of ProcessBench: right before the first wrong step, wrong from there on
Steps of the last two are those of the data, joined by blank lines; where they end is kept in `step_ends`.
The same command goes on where a killed one stopped."""
EXAMPLES = """example: reasonlab judge label pool.jsonl --source exact --out labels.jsonl

more:
  reasonlab judge label pool.jsonl --source monte-carlo --model tiny-1m --completions 8 --soft --out labels.jsonl
  reasonlab judge label pool.jsonl --source trajectory --model tiny-1m --completions 8 --out labels.jsonl
  reasonlab judge label pool.jsonl --source endpoint --url http://localhost:8000/v1 --out labels.jsonl
  reasonlab judge label prm800k_phase1_train_steps.jsonl.gz --source prm800k --out labels.jsonl"""
CHUNK = 1 << 13  # characters that are labelled together: each takes a policy far longer than a judge
LOG_SUFFIX = ".labelling"  # beside a file in the making: what is known so far
LOGGED = ("monte-carlo", "trajectory", "endpoint")  # sources that take long
STEP_TOKENS = 64  # the tiny world's steps are shorter
Found = list[tuple[Labelled | None, str]]  # labels, or why there are none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, metavar="POOL", help=POOL_HELP)
    parser.add_argument(
        "--source",
        choices=["exact", "monte-carlo", "trajectory", "endpoint", "prm800k", "processbench"],
        required=True,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the candidates with step_labels")
    parser.add_argument(
        "--rule",
        choices=["tiny", "blank_line", "newline"],
        help="where steps end (default: tiny; endpoint: blank_line)",
    )
    parser.add_argument("--seed", type=int, default=0)
    rollouts = parser.add_argument_group("monte-carlo and trajectory")
    rollouts.add_argument(
        "--model", default="tiny-1m", help="who goes on, or follows: a bundled name or a checkpoint directory"
    )
    rollouts.add_argument(
        "--completions", type=int, default=8, metavar="N", help="from the end of each step, or of each strategy"
    )
    rollouts.add_argument("--soft", action="store_true", help="the share that arrives, instead of whether any does")
    rollouts.add_argument("--temperature", type=float, default=1.0)
    rollouts.add_argument(
        "--max-tokens", type=int, help=f"of a completion (default: 160), or of a followed step (default: {STEP_TOKENS})"
    )
    add_device_argument(rollouts)
    rollouts.add_argument("--threads", type=int, default=2)
    reader = parser.add_argument_group("endpoint")
    reader.add_argument("--url", help="such as http://localhost:8000/v1")
    reader.add_argument("--endpoint-model", default="", metavar="NAME")
    reader.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE")
    reader.add_argument("--concurrency", type=int, default=16)
    reader.add_argument("--show-answer", action="store_true", help="the reader sees the right answer where it is known")
    ratings = parser.add_argument_group("prm800k")
    ratings.add_argument("--neutral", type=float, default=1.0, metavar="X", help="worth of a neutral step, 0.5 to 1")


def run(arguments: argparse.Namespace) -> int:
    from reasonlab.judges.inputs import read_candidates
    from reasonlab.judges.types import write_labels

    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists", "Choose another --out, or remove it")
    log = _log_path(arguments)
    if arguments.source not in LOGGED and log.exists():
        raise UserError(f"{log} holds labels of another source", "Remove it, or choose another --out")
    if arguments.source in ("prm800k", "processbench"):
        candidates, found = _from_data(arguments)
    else:
        candidates = read_candidates(arguments.pool)
        sources = {"exact": _exact, "monte-carlo": _monte_carlo, "trajectory": _trajectory, "endpoint": _endpoint}
        found = sources[arguments.source](candidates, arguments)
    labelled = [one for one, _ in found if one is not None]
    failures = Counter(why for one, why in found if one is None)
    told = "; left out: " + ", ".join(f"{count:,} ({why})" for why, count in failures.most_common()) if failures else ""
    if not labelled:
        raise UserError(f"no candidate could be labelled{told.replace('left out: ', '')}", "Check the pool and --rule")
    write_labels(arguments.out, labelled)
    log.unlink(missing_ok=True)
    steps = sum(len(one.steps) for one in labelled)
    wrong = sum(value < 0.5 for one in labelled for value in one.steps)
    print(
        f"wrote {arguments.out}: {len(labelled):,} of {len(candidates):,} candidates with {steps:,} steps, "
        f"{100 * wrong / steps:.1f} % wrong{told}"
    )
    return 0


def _from_data(arguments: argparse.Namespace) -> tuple[list[Candidate], Found]:
    """Candidates and labels both come from the file."""
    from reasonlab.judges.label_data import read_prm800k, read_processbench

    if not arguments.pool.is_file():
        raise UserError(f"there is no file {arguments.pool}", "Give the JSON lines of the data, plain or gzip")
    if arguments.rule is not None:
        raise UserError("the data say themselves where steps end", "Leave out --rule")
    if arguments.source == "prm800k":
        examples = read_prm800k(arguments.pool, arguments.neutral)
    else:
        examples = read_processbench(arguments.pool)
    found: Found = [(_graded(example.candidate, example.labels), "") for example in examples]
    return [example.candidate for example in examples], found


def _log_path(arguments: argparse.Namespace) -> Path:
    out: Path = arguments.out
    return out.with_name(out.name + LOG_SUFFIX)


def _graded(candidate: Candidate, labels: StepLabels) -> Labelled:
    """Labels of steps, and for the whole whether the response is right."""
    return labels.labelled(candidate, None if candidate.correct is None else float(candidate.correct))


def _exact(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.judges.exact_labels import exact_labels
    from reasonlab.judges.inputs import progress_bar

    if arguments.rule not in (None, "tiny"):
        raise UserError("exact labels are for the tiny world's steps", "Leave out --rule")
    found: Found = []
    with progress_bar("labelling", len(candidates)) as advance:
        for candidate in candidates:
            labels = exact_labels(candidate)
            found.append((_graded(candidate, labels), "") if labels.values else (None, "no steps"))
            advance(1)
    return found


def _monte_carlo(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.evaluate.graders import grade_response, grader_for
    from reasonlab.hardware import prepare
    from reasonlab.judges.formats import is_tiny
    from reasonlab.judges.inputs import progress_bar
    from reasonlab.judges.monte_carlo import MonteCarlo, monte_carlo
    from reasonlab.judges.score_log import in_chunks, open_log
    from reasonlab.model.checkpoint import load_model
    from reasonlab.model.ladder import resolve_model
    from reasonlab.model.text_format import ChatFormat, TinyFormat
    from reasonlab.model.tiny_tokenizer import TinyTokenizer
    from reasonlab.model.tokenizer import ChatTokenizer
    from reasonlab.rollout.engine import Engine
    from reasonlab.rollout.types import Sampling

    a = arguments
    _check_sampling(a)
    if unanswered := next((c for c in candidates if not c.answer), None):
        raise UserError(
            f"the right answer to {unanswered.problem} is not in the pool", "Monte-Carlo labels need `answer`"
        )
    rule: Rule = a.rule or "tiny"
    directory = resolve_model(a.model)
    tokenizer = TinyTokenizer.load() if is_tiny(directory) else ChatTokenizer.load(directory)
    tiny = isinstance(tokenizer, TinyTokenizer)
    text_format = TinyFormat(tokenizer) if isinstance(tokenizer, TinyTokenizer) else ChatFormat(tokenizer)
    stops = (tokenizer.eos_id,) if isinstance(tokenizer, TinyTokenizer) else tokenizer.stop_ids
    engine = Engine(load_model(directory).to(prepare(a.device)), 256 if tiny else 32, a.threads)
    sampling = Sampling(a.temperature, max_tokens=160 if a.max_tokens is None else a.max_tokens, stop_ids=stops)
    grader = grade_response if tiny else grader_for("explicit", "mathematics")

    def complete(part: Sequence[Candidate]) -> list[MonteCarlo]:
        counts = monte_carlo(part, engine, text_format, tokenizer, sampling, a.completions, rule, grader, a.seed)
        advance(len(part))
        return counts

    whose = _whose_rollouts(a, directory, rule, sampling)
    with (
        progress_bar("completing", len(candidates)) as advance,
        open_log(_log_path(a), whose, MonteCarlo) as log,
    ):
        results = in_chunks(candidates, complete, log, CHUNK, advance)
    found: Found = []
    for candidate, one in zip(candidates, results, strict=True):
        labels = one.labels("soft" if a.soft else "hard") if one.graded else None
        why = "a step without a graded completion" if one.graded else "no steps"
        found.append((None, why) if labels is None else (_graded(candidate, labels), ""))
    return found


def _trajectory(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.judges.formats import is_tiny
    from reasonlab.judges.inputs import progress_bar
    from reasonlab.judges.score_log import in_chunks, open_log
    from reasonlab.judges.targets import tiny_trajectories
    from reasonlab.judges.templates import TemplateReward, tiny_rewards
    from reasonlab.model.ladder import resolve_model
    from reasonlab.problems.curation import of_tiny_world
    from reasonlab.problems.problem import Problem
    from reasonlab.rollout.types import Sampling
    from reasonlab.train.sample import open_engine

    a = arguments
    _check_sampling(a)
    if a.rule not in (None, "tiny"):
        raise UserError("trajectory labels are for the tiny world's steps", "Leave out --rule")
    for c in candidates:
        if not of_tiny_world(Problem(c.problem, c.question, c.answer, c.family, c.level)):
            raise UserError(
                f"{c.problem} is no problem of the tiny world, which trajectory labels are for",
                "In Python, step_targets (judges/targets.py) and template_rewards (judges/templates.py) make them for "
                "language models",
            )
    directory = resolve_model(a.model)
    if not is_tiny(directory):
        raise UserError(f"{a.model} is no tiny model, and cannot be made to follow", "For instance --model tiny-1m")
    engine, tokenizer = open_engine(directory, a.device, a.threads, rows=256)
    most = STEP_TOKENS if a.max_tokens is None else a.max_tokens
    sampling = Sampling(a.temperature, max_tokens=most, stop_ids=(tokenizer.eos_id,))

    def follow(part: Sequence[Candidate]) -> list[TemplateReward]:
        rewards = tiny_rewards(part, engine, tokenizer, sampling, a.completions, a.seed)
        advance(len(part))
        return rewards

    whose = _whose_rollouts(a, directory, "tiny", sampling)
    with (
        progress_bar("following", len(candidates)) as advance,
        open_log(_log_path(a), whose, TemplateReward) as log,
    ):
        labelled = tiny_trajectories(candidates, lambda them: in_chunks(them, follow, log, CHUNK, advance), a.seed)
    return [(one, "") if one.steps else (None, "no steps") for one in labelled]


def _check_sampling(arguments: argparse.Namespace) -> None:
    a = arguments
    if min(a.completions, 1 if a.max_tokens is None else a.max_tokens, a.threads) < 1 or a.temperature < 0:
        raise UserError(
            "--completions, --max-tokens and --threads are at least 1, --temperature at least 0",
            "For instance --completions 8",
        )


def _whose_rollouts(arguments: argparse.Namespace, model: Path, rule: Rule, sampling: Sampling) -> dict[str, Any]:
    """What completions depend on."""
    from reasonlab.evaluate.opened_model import checkpoint_sha256

    return {
        "source": arguments.source,
        "model": checkpoint_sha256(model),
        "completions": arguments.completions,
        "rule": rule,
        "seed": arguments.seed,
        "sampling": asdict(sampling),
    }


def _endpoint(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.judges.inputs import progress_bar
    from reasonlab.judges.labels import StepLabels
    from reasonlab.judges.llm_labels import SAMPLING, llm_labels
    from reasonlab.judges.score_log import name_of, open_log
    from reasonlab.judges.types import Scored
    from reasonlab.rollout.endpoint import Endpoint

    if not arguments.url:
        raise UserError("--source endpoint needs --url", "For instance --url http://localhost:8000/v1")
    endpoint = Endpoint(
        arguments.url, arguments.endpoint_model, arguments.api_key_env, concurrency=arguments.concurrency
    )
    endpoint.connect()
    rule: Rule = arguments.rule or "blank_line"
    shows, seed = arguments.show_answer, arguments.seed
    whose = {
        "source": arguments.source,
        "model": endpoint.model,
        "rule": rule,
        "show_answer": shows,
        "seed": seed,
        "sampling": asdict(SAMPLING),
    }
    asked = {name_of(candidate): candidate for candidate in candidates}
    with (
        progress_bar("asking", len(asked)) as advance,
        open_log(_log_path(arguments), whose, Scored) as log,
    ):

        def keep(candidate: Candidate, labels: StepLabels) -> None:
            log.append([name_of(candidate)], [Scored(labels.values, None)])

        advance(len(log.known.keys() & asked.keys()))
        missing = {name: candidate for name, candidate in asked.items() if name not in log.known}
        judged = llm_labels(
            list(missing.values()), endpoint, rule, show_answer=shows, seed=seed, progress=advance, keep=keep
        )
        failures = {name: one.failure for name, one in zip(missing, judged, strict=True)}
    found: Found = []
    for candidate in candidates:
        name = name_of(candidate)
        said = log.known.get(name)
        labels = None if said is None else StepLabels.of(said.steps)
        found.append((None, failures[name]) if labels is None else (_graded(candidate, labels), ""))
    return found
