"""`reasonlab data sample`: let a model answer training problems, and keep what is worth learning from."""

from __future__ import annotations

import argparse
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.options import add_device_argument

KEEP = {
    "shortest": "the shortest correct answer to each problem: SFT data of shortest rejection sampling",
    "pairs": "preference pairs for DPO: the shortest correct answer against longer wrong and much longer correct ones",
    "long": "correct answers that check and correct themselves: SFT data of the long-CoT warm-up (thinking is forced)",
}
DESCRIPTION = "Sample a model on training problems and keep verified answers for SFT or DPO:\n" + "\n".join(
    f"  {name:<9} {text}" for name, text in KEEP.items()
)
EXAMPLES = """example: reasonlab data sample runs/demo-1/checkpoints/final --keep shortest --out shortest.jsonl

then:    reasonlab train recipes/smoke.toml --method.type sft --method.data shortest.jsonl \\
             --model.path runs/demo-1/checkpoints/final"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a bundled name, a checkpoint directory or a GGUF file")
    parser.add_argument("--keep", choices=list(KEEP), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--problems", type=int, default=512, metavar="N", help="training problems to ask")
    parser.add_argument("--levels", default="2,3,4,5", help="of the tiny world, comma-separated")
    parser.add_argument("--path", default="", metavar="POOL", help="ask the problems of a file or training set instead")
    parser.add_argument("--data", default="", metavar="DIR", help="directory with the training sets, for their names")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="answers to each (the report has 8)")
    parser.add_argument("--most-pairs", type=int, default=4, metavar="N", help="of one problem, for --keep pairs")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, help="default: 160 for the tiny models, else 1024")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    add_device_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out.exists():
        raise UserError(f"{arguments.out} exists", "Choose another --out, or remove it")
    try:
        levels = tuple(int(level) for level in arguments.levels.split(","))
    except ValueError:
        raise UserError(f"--levels {arguments.levels} is no list of levels", "For instance --levels 3,4,5") from None
    longest = 1 if arguments.max_tokens is None else arguments.max_tokens
    numbers = arguments.samples, arguments.problems, longest, arguments.threads, arguments.most_pairs
    if min(numbers) < 1 or arguments.temperature < 0:
        raise UserError(
            "--samples, --problems, --max-tokens, --threads and --most-pairs are at least 1, --temperature at least 0",
            "For instance --samples 8 --temperature 1",
        )
    from reasonlab.config import Config, ProblemsConfig
    from reasonlab.evaluate.evaluator import FORCED_STYLE
    from reasonlab.methods.behaviours import warmup_demonstrations
    from reasonlab.methods.long2short import preference_pairs, shortest_correct
    from reasonlab.rollout.types import Sampling
    from reasonlab.terminal import make_observer
    from reasonlab.train.prompts import training_pool
    from reasonlab.train.recorded import write_demonstrations, write_pairs
    from reasonlab.train.sample import open_sampler, sample_groups

    problems = ProblemsConfig(levels=levels, pool=arguments.problems, path=arguments.path)
    config = Config(problems=problems, data=arguments.data)
    pool = [problem for problem, _ in training_pool(config)][: arguments.problems]
    engine, exchange = open_sampler(arguments.model, arguments.device, arguments.threads, rows=256)
    max_tokens = arguments.max_tokens or (160 if exchange.tiny else 1024)
    sampling = Sampling(arguments.temperature, max_tokens=max_tokens, stop_ids=exchange.stop_ids)
    force = FORCED_STYLE if arguments.keep == "long" and exchange.tiny else ""
    with make_observer(0, arguments.out.name) as observer:
        groups = sample_groups(
            engine, exchange, pool, arguments.samples, sampling, arguments.seed, observer.progress, force
        )
    right = sum(int(group.correct.sum()) for group in groups)
    total = len(groups) * arguments.samples
    pairs = preference_pairs(groups, arguments.most_pairs) if arguments.keep == "pairs" else []
    chosen = shortest_correct(groups) if arguments.keep == "shortest" else warmup_demonstrations(groups, exchange.text)
    if not (pairs if arguments.keep == "pairs" else chosen):
        raise UserError(
            f"nothing to keep: {right:,} of {total:,} answers are correct",
            "Ask more problems or easier levels, or take more samples of each",
        )
    if arguments.keep == "pairs":
        kept = write_pairs(arguments.out, pairs, exchange.fingerprint)
    else:
        kept = write_demonstrations(arguments.out, chosen, exchange.fingerprint)
    print(f"{total:,} answers to {len(groups):,} problems, {100 * right / total:.1f} % correct; {kept:,} kept:")
    print(
        f"  {arguments.out}   (learn from it: --method.type {'dpo' if arguments.keep == 'pairs' else 'sft'} "
        f"--method.data {arguments.out})"
    )
    return 0
