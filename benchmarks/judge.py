"""How fast a pool is scored: `reasonlab.judges.scoring` beside a plain loop over transformers, on the same weights.

    python benchmarks/judge.py                       # CPU, 2 threads, about two minutes
    python benchmarks/judge.py --threads 1 --cases bench --repetitions 5
    python benchmarks/judge.py --model tiny-0.3m --json judge.json

The judge is an outcome judge, saved by us and loaded by both sides from the same directory. Its weights are those of
the bundled model with a fresh head: how well it judges does not matter here. The other side is the usage on the model
cards of published judges: `AutoModelForSequenceClassification` and its tokenizer, batches of 8 in the order of the
file, padded to the longest of the batch, `torch.inference_mode`, with as many torch threads as we have workers. Both
sides start from the texts and end with a list of numbers; times include tokenising.

Responses are sampled at temperature 1 by two policies (tiny-0.3m and tiny-1m) in two styles each (free: mostly short;
worked style forced: long), so lengths are mixed. Files are ordered by problem.

bench     64 responses to each problem, 16 from each policy and style: the shape of a reward benchmark (rm@8 draws 8
          of 64). Much is common to them: the question, beginnings, whole responses
group     8 responses to each problem, two from each policy and style
single    one response to each problem: nothing in common, what remains is padding and overhead

One run of each side is warm-up; then they take turns. A ratio is the median of those of neighbouring runs (in brackets:
lowest and highest). "CPU" is the ratio of CPU seconds, which a busy machine disturbs less.

padded    tokens in the batches of the plain loop, over the tokens of the responses
computed  tokens that we compute, over the tokens of the responses
difference  largest |score − score|
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

from reasonlab.hardware import prepare
from reasonlab.judges.formats import own_format
from reasonlab.judges.network import fresh_judge, save_judge
from reasonlab.judges.scoring import ModelJudge
from reasonlab.judges.types import Candidate
from reasonlab.keys import key
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tiny_tokenizer import TinyTokenizer
from reasonlab.problems.corpus import prompt_text
from reasonlab.problems.tiny_world import problem_set
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

POLICIES, STYLES = ("tiny-0.3m", "tiny-1m"), ("", "<think>")
CASES = {"bench": 64, "group": 8, "single": 1}
BATCH = 8
WANTED, TOLERANCE = 5.0, 1e-5
BUSY = 0.2  # cores used by others that disturb a measurement


@dataclass
class Side:
    """One run of one side."""

    seconds: float
    cpu_s: float
    scores: list[float]
    busy_elsewhere: float


def make_pool(problems: int, each: int) -> list[Candidate]:
    """`each` responses to every problem, as even over policies and styles as possible."""
    tokenizer = TinyTokenizer.load()
    chosen = problem_set("test", problems, levels=(1, 2, 3, 4, 5))
    found: list[list[Candidate]] = [[] for _ in chosen]
    sources = [(policy, style) for policy in POLICIES for style in STYLES]
    for number, (policy, style) in enumerate(sources):
        engine = Engine(load_model(resolve_model(policy)), 256, 1, tokenizer.decode)
        opening = tokenizer.encode(style) if style else []
        # With one response to a problem the sources take turns; else each gives its share.
        mine = [i for i in range(len(chosen)) if each >= len(sources) or i % len(sources) == number]
        share = max(1, each // len(sources))
        requests = [
            Request(
                [*tokenizer.encode(prompt_text(chosen[i].question)), *opening],
                [key("judge-bench", policy, style, chosen[i].id, n) for n in range(share)],
            )
            for i in mine
        ]
        sampling = Sampling(1.0, max_tokens=320, stop_ids=(tokenizer.eos_id,), repetition_window=64)
        for i, rollouts in zip(mine, engine.generate(requests, sampling), strict=True):
            for rollout in rollouts:
                text = style + tokenizer.decode(rollout.ids).removesuffix("<eos>")
                found[i].append(Candidate(chosen[i].id, chosen[i].question, text, source=policy))
    return [candidate for group in found for candidate in group]


class PlainLoop:
    """What a model card tells one to do, in batches."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.padded = 0

    def score(self, pool: list[Candidate]) -> list[float]:
        scores: list[float] = []
        self.padded = 0
        with torch.inference_mode():
            for start in range(0, len(pool), BATCH):
                turns = [
                    [{"role": "user", "content": c.question}, {"role": "assistant", "content": c.response}]
                    for c in pool[start : start + BATCH]
                ]
                texts = self.tokenizer.apply_chat_template(turns, tokenize=False)
                batch = self.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
                ids, mask = batch["input_ids"], batch["attention_mask"]
                self.padded += ids.numel()
                scores += self.model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()
        return scores


def timed(work: Callable[[list[Candidate]], list[float]], pool: list[Candidate], threads: int) -> Side:
    torch.set_num_threads(threads)
    process = psutil.Process()

    def used() -> tuple[float, float]:
        times, own = psutil.cpu_times(), process.cpu_times()
        return sum(times) - times.idle - times.iowait, own.user + own.system

    (all_before, own_before), start = used(), time.perf_counter()
    scores = work(pool)
    seconds, (all_after, own_after) = time.perf_counter() - start, used()
    cpu = own_after - own_before
    return Side(seconds, cpu, scores, max(0.0, (all_after - all_before - cpu) / seconds))


def computed_tokens(judge: ModelJudge, pool: list[Candidate]) -> int:
    """How many tokens go through the model."""
    seen: list[int] = []
    hook = judge.model.register_forward_pre_hook(lambda _, packs: seen.append(len(packs[0].ids)))
    judge.score(pool)
    hook.remove()
    return sum(seen)


def measure(name: str, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    each = CASES[name]
    pool = make_pool(max(1, options.responses // each), each)
    plain, judge = PlainLoop(directory), ModelJudge.open(directory, "cpu", options.threads)
    sizes = [len(e.ids) for e in judge.format.encode_all(pool)]

    def ours(candidates: list[Candidate]) -> list[float]:
        return [scored.overall() for scored in judge.score(candidates)]

    def pair() -> tuple[Side, Side]:
        # Our workers are threads that each compute single-threaded.
        return timed(plain.score, pool, options.threads), timed(ours, pool, 1)

    pair()
    runs = [pair() for _ in range(options.repetitions)]
    ratios = [a.seconds / b.seconds for a, b in runs]
    theirs, mine = runs[-1]
    return {
        "case": name,
        "responses": len(pool),
        "distinct": len({(c.question, c.response) for c in pool}),
        "tokens": sum(sizes),
        "lengths": [int(x) for x in np.quantile(sizes, (0, 0.5, 0.95, 1))],
        "padded": plain.padded / sum(sizes),
        "computed": computed_tokens(judge, pool) / sum(sizes),
        "plain_s": median(a.seconds for a, _ in runs),
        "ours_s": median(b.seconds for _, b in runs),
        "ratio": [median(ratios), min(ratios), max(ratios)],
        "cpu_ratio": median(a.cpu_s / b.cpu_s for a, b in runs),
        "difference": max(abs(a - b) for a, b in zip(theirs.scores, mine.scores, strict=True)),
        "spread": float(np.std(mine.scores)),
        "busy_elsewhere": max(side.busy_elsewhere for run in runs for side in run),
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    ratio, low, high = result["ratio"]
    yield (
        f"{result['case']}: {result['responses']:,} responses ({result['distinct']:,} distinct), "
        f"{result['tokens']:,} tokens; shortest, median, 95 %, longest: {result['lengths']}"
    )
    yield f"  padded {result['padded']:.2f}, computed {result['computed']:.2f} times the tokens of the responses"
    yield (
        f"  transformers {result['plain_s']:.2f} s, reasonlab {result['ours_s']:.2f} s "
        f"({result['tokens'] / result['ours_s']:,.0f} tokens/s)"
    )
    verdict = "reached" if ratio >= WANTED else "not reached"
    yield f"  ratio {ratio:.2f} ({low:.2f}–{high:.2f}), CPU {result['cpu_ratio']:.2f}; wanted {WANTED:g}: {verdict}"
    same = "identical" if result["difference"] <= TOLERANCE else "DIFFERENT"
    yield f"  largest difference {result['difference']:.1e} of scores that spread by {result['spread']:.2f}: {same}"
    if result["busy_elsewhere"] > BUSY:
        yield f"  other processes used up to {result['busy_elsewhere']:.1f} cores meanwhile: measure again"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-1m", help="backbone of the judge")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--responses", type=int, default=1536, help="in each case")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="write all numbers into this file")
    options = parser.parse_args()
    prepare("cpu")
    base = resolve_model(options.model)
    with tempfile.TemporaryDirectory() as folder:
        judge = fresh_judge(base, "outcome", 0)
        nn.init.normal_(judge.head.get_parameter("score.weight"), 0.0, 0.1, torch.Generator().manual_seed(0))
        save_judge(judge, own_format(base, "outcome"), Path(folder), base)
        print(f"{options.model}, {options.threads} threads, torch {torch.__version__}, batches of {BATCH}")
        results = []
        for name in options.cases:
            results.append(measure(name, Path(folder), options))
            print("\n".join(lines(results[-1])), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "cases": results}, indent=1))


if __name__ == "__main__":
    main()
