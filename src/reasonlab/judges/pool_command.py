"""`reasonlab judge pool`: let tiny models answer problems of the tiny world, and keep every graded answer."""

from __future__ import annotations

import argparse
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.options import add_device_argument

DESCRIPTION = """Sample tiny models on problems of the tiny world into one pool of graded candidates. For other models
and benchmarks, the directory of `reasonlab eval MODEL --k N --out DIR` is a pool already."""
EXAMPLES = """example: reasonlab judge pool tiny-1m tiny-0.3m --problems 2000 --samples 8 --out pool.jsonl

more:
  reasonlab judge pool tiny-1m --split test --problems 480 --samples 64 --out bench.jsonl.gz"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="bundled names or checkpoint directories")
    parser.add_argument("--out", type=Path, required=True, metavar="POOL.jsonl")
    parser.add_argument("--split", choices=["train", "validation", "test", "harder"], default="train")
    parser.add_argument("--problems", type=int, default=512, metavar="N")
    parser.add_argument("--levels", default="", help="comma-separated (default: 2,3,4,5; harder: 6,7)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="answers of each model to each problem")
    parser.add_argument("--think", action="store_true", help="force the worked style, which makes more responses long")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0, help="of problems and samples")
    parser.add_argument("--threads", type=int, default=2)
    add_device_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    if a.out.exists():
        raise UserError(f"{a.out} exists", "Choose another --out, or remove it")
    if min(a.problems, a.samples, a.max_tokens, a.threads) < 1 or a.temperature < 0:
        raise UserError(
            "--problems, --samples, --max-tokens and --threads are at least 1, --temperature at least 0",
            "For instance --problems 512 --samples 8",
        )
    try:
        levels = [int(level) for level in (a.levels or ("6,7" if a.split == "harder" else "2,3,4,5")).split(",")]
    except ValueError:
        raise UserError(f"--levels {a.levels} is no list of levels", "For instance --levels 3,4,5") from None
    from reasonlab.evaluate.evaluator import FORCED_STYLE
    from reasonlab.judges.inputs import as_report, progress_bar
    from reasonlab.judges.types import Candidate, write_pool
    from reasonlab.model.ladder import resolve_model
    from reasonlab.problems.tiny_world import problem_set
    from reasonlab.rollout.types import Sampling
    from reasonlab.train.exchange import tiny_exchange
    from reasonlab.train.sample import open_engine, sample_groups

    problems = problem_set(a.split, a.problems, a.seed, levels=levels)
    directories = {name: resolve_model(name) for name in a.models}
    found: list[list[Candidate]] = [[] for _ in problems]
    for name, directory in directories.items():
        engine, tokenizer = open_engine(directory, a.device, a.threads, rows=256)
        sampling = Sampling(a.temperature, max_tokens=a.max_tokens, stop_ids=(tokenizer.eos_id,))
        with progress_bar(f"sampling {name}", len(problems) * a.samples) as advance:
            groups = sample_groups(
                engine,
                tiny_exchange(tokenizer),
                problems,
                a.samples,
                sampling,
                a.seed,
                as_report(advance),
                FORCED_STYLE if a.think else "",
            )
        for mine, group in zip(found, groups, strict=True):
            for rollout, grade in zip(group.rollouts, group.grades, strict=True):
                p, verdict = group.problem, {"correct": True, "wrong": False}.get(grade.verdict)
                text = tokenizer.decode(rollout.ids)
                mine.append(Candidate(p.id, p.question, text, p.answer, verdict, p.family, p.level, name))
    pool = [candidate for mine in found for candidate in mine]
    right = sum(candidate.correct is True for candidate in pool)
    write_pool(a.out, pool)
    print(
        f"wrote {a.out}: {len(pool):,} candidates for {len(problems):,} problems, {100 * right / len(pool):.1f} % right"
    )
    return 0
