"""`reasonlab judge label`: what the steps of a pool are worth, as examples to train a process judge with."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reasonlab.errors import UserError
from reasonlab.judges.opened import POOL_HELP
from reasonlab.judges.types import Candidate

if TYPE_CHECKING:
    from reasonlab.judges.labels import StepLabels
    from reasonlab.judges.steps import Rule

DESCRIPTION = """Label the steps of every candidate of a pool:
  exact        the tiny world's true steps
  monte-carlo  a policy goes on from the end of each step; how often it arrives is counted
  endpoint     a language model behind an OpenAI-compatible endpoint reads the steps"""
EXAMPLES = """example: reasonlab judge label pool.jsonl --source exact --out labels.jsonl

more:
  reasonlab judge label pool.jsonl --source monte-carlo --model tiny-1m --completions 8 --soft --out labels.jsonl
  reasonlab judge label pool.jsonl --source endpoint --url http://localhost:8000/v1 --out labels.jsonl"""
Found = list[tuple["StepLabels | None", str]]  # labels, or why there are none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pool", type=Path, metavar="POOL", help=POOL_HELP)
    parser.add_argument("--source", choices=["exact", "monte-carlo", "endpoint"], required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the candidates with step_labels")
    parser.add_argument(
        "--rule",
        choices=["tiny", "blank_line", "newline"],
        help="where steps end (default: tiny; endpoint: blank_line)",
    )
    parser.add_argument("--seed", type=int, default=0)
    rollouts = parser.add_argument_group("monte-carlo")
    rollouts.add_argument("--model", default="tiny-1m", help="who goes on: a bundled name or a checkpoint directory")
    rollouts.add_argument("--completions", type=int, default=8, metavar="N", help="from the end of each step")
    rollouts.add_argument("--soft", action="store_true", help="the share that arrives, instead of whether any does")
    rollouts.add_argument("--temperature", type=float, default=1.0)
    rollouts.add_argument("--max-tokens", type=int, default=160)
    rollouts.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    rollouts.add_argument("--threads", type=int, default=2)
    reader = parser.add_argument_group("endpoint")
    reader.add_argument("--url", help="such as http://localhost:8000/v1")
    reader.add_argument("--endpoint-model", default="", metavar="NAME")
    reader.add_argument("--api-key-env", default="OPENAI_API_KEY", metavar="VARIABLE")
    reader.add_argument("--concurrency", type=int, default=16)
    reader.add_argument("--show-answer", action="store_true", help="the reader sees the right answer where it is known")


def run(arguments: argparse.Namespace) -> int:
    from reasonlab.judges.inputs import read_candidates
    from reasonlab.judges.types import write_labels

    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists", "Choose another --out, or remove it")
    candidates = read_candidates(arguments.pool)
    sources = {"exact": _exact, "monte-carlo": _monte_carlo, "endpoint": _endpoint}
    found = sources[arguments.source](candidates, arguments)
    labelled = [
        labels.labelled(candidate, None if candidate.correct is None else float(candidate.correct))
        for candidate, (labels, _) in zip(candidates, found, strict=True)
        if labels is not None
    ]
    failures = Counter(why for labels, why in found if labels is None)
    told = "; left out: " + ", ".join(f"{count:,} ({why})" for why, count in failures.most_common()) if failures else ""
    if not labelled:
        raise UserError(f"no candidate could be labelled{told.replace('left out: ', '')}", "Check the pool and --rule")
    write_labels(arguments.out, labelled)
    steps = sum(len(one.steps) for one in labelled)
    wrong = sum(value < 0.5 for one in labelled for value in one.steps)
    print(
        f"wrote {arguments.out}: {len(labelled):,} of {len(candidates):,} candidates with {steps:,} steps, "
        f"{100 * wrong / steps:.1f} % wrong{told}"
    )
    return 0


def _exact(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.judges.exact_labels import exact_labels
    from reasonlab.judges.inputs import progress_bar

    if arguments.rule not in (None, "tiny"):
        raise UserError("exact labels are for the tiny world's steps", "Leave out --rule")
    found: Found = []
    with progress_bar("labelling", len(candidates)) as advance:
        for candidate in candidates:
            labels = exact_labels(candidate)
            found.append((labels, "") if labels.values else (None, "no steps"))
            advance(1)
    return found


def _monte_carlo(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.evaluate.evaluator import TinyFormat
    from reasonlab.evaluate.graders import grade_response, grader_for
    from reasonlab.evaluate.opened_model import ChatFormat
    from reasonlab.hardware import prepare
    from reasonlab.judges.formats import is_tiny
    from reasonlab.judges.inputs import progress_bar
    from reasonlab.judges.monte_carlo import monte_carlo
    from reasonlab.judges.steps import spans_of
    from reasonlab.model.checkpoint import load_model
    from reasonlab.model.ladder import resolve_model
    from reasonlab.model.tiny_tokenizer import TinyTokenizer
    from reasonlab.model.tokenizer import ChatTokenizer
    from reasonlab.rollout.engine import Engine
    from reasonlab.rollout.types import Sampling

    a = arguments
    if min(a.completions, a.max_tokens, a.threads) < 1 or a.temperature < 0:
        raise UserError(
            "--completions, --max-tokens and --threads are at least 1, --temperature at least 0",
            "For instance --completions 8",
        )
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
    beginnings = {(c.problem, c.response[: span.end]) for c in candidates for span in spans_of(c, rule)[:-1]}
    with progress_bar("completing", len(beginnings) * a.completions) as advance:
        results = monte_carlo(
            candidates,
            engine,
            text_format,
            tokenizer,
            Sampling(a.temperature, max_tokens=a.max_tokens, stop_ids=stops),
            a.completions,
            rule,
            grade_response if tiny else grader_for("explicit", "mathematics"),
            a.seed,
            advance,
        )
    found: Found = []
    for one in results:
        labels = one.labels("soft" if a.soft else "hard") if one.graded else None
        found.append((labels, "" if labels else "a step without a graded completion" if one.graded else "no steps"))
    return found


def _endpoint(candidates: Sequence[Candidate], arguments: argparse.Namespace) -> Found:
    from reasonlab.judges.inputs import progress_bar
    from reasonlab.judges.llm_labels import llm_labels
    from reasonlab.rollout.endpoint import Endpoint

    if not arguments.url:
        raise UserError("--source endpoint needs --url", "For instance --url http://localhost:8000/v1")
    endpoint = Endpoint(
        arguments.url, arguments.endpoint_model, arguments.api_key_env, concurrency=arguments.concurrency
    )
    endpoint.connect()
    with progress_bar("asking", len(candidates)) as advance:
        judged = llm_labels(
            candidates,
            endpoint,
            arguments.rule or "blank_line",
            show_answer=arguments.show_answer,
            seed=arguments.seed,
            progress=advance,
        )
    return [(one.labels, one.failure) for one in judged]
