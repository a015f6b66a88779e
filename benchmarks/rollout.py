"""How fast rollouts are sampled: our engine beside transformers (and vLLM where it is installed), on random weights.

    python benchmarks/rollout.py                                   # CUDA if there is one: 135m, 64, 256 and 1024 rows
    python benchmarks/rollout.py --shapes 135m 0.5b 10m --rows 256 1024 --sides engine transformers
    python benchmarks/rollout.py --shapes 135m --rows 1024 --profile # where the time of a step goes, by kernel
    python benchmarks/rollout.py --shapes 135m --rows 256 1024 --tune # decoding's kernels with all their settings
    python benchmarks/rollout.py --ragged --json rollout.json      # lengths as they come, four times as many as rows

Every rollout has its own prompt of `--prompt` random tokens (or shares it with `--group` − 1 others) and `--new` new
tokens at temperature 1, with logprobs and keyed seeds. Nothing stops early, except with `--ragged`: there every token
ends its rollout with probability 1 / 150, and rows are given on. Weights are random in the shapes of SmolLM2-135M,
Qwen2.5-0.5B and a Llama of 10 million. A first run of each side is warm-up (it captures graphs); the best of the
others counts.

tokens/s   new tokens over the time of the whole call, prompts and the way to the host included
step       device time of one decoding step at the mean length, and what tokens/s it would give alone
of limit   the share of the tokens/s there would be if a step took only the time to read the weights and the keys and
           values of every row, at `--bandwidth` TB/s
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPES, random_model
from rollout_sides import SIDES
from rollout_step import print_profile, profile, ready_decoder, step_seconds
from rollout_tuning import compile_all, compile_share, tune
from rollout_work import Work

from reasonlab.hardware import prepare
from reasonlab.model.attention import PackedCausal
from reasonlab.model.transformer import Transformer
from reasonlab.rollout import decoder as decoder_module
from reasonlab.rollout import engine as engine_module
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.operations import TorchOperations


def limit(model: Transformer, work: Work, bandwidth: float) -> float:
    """Tokens/s at which memory alone is the bound, for rows of the mean length."""
    c = model.config
    size = model.embedding.weight.element_size()
    weights = sum(p.numel() for p in model.parameters()) * size
    cached = 2 * c.layers * c.kv_heads * c.head_dim * size * (work.prompt + work.new / 2)
    return work.rows / ((weights + work.rows * cached) / (bandwidth * 1e12))


def best_rate(run: Callable[[], int], repetitions: int) -> tuple[float, float]:
    """Tokens/s of the best of some runs, and seconds of the first, which warms up."""
    start = time.perf_counter()
    run()
    first, rates = time.perf_counter() - start, []
    for _ in range(repetitions):
        start = time.perf_counter()
        tokens = run()
        rates.append(tokens / (time.perf_counter() - start))
    return max(rates), first


@torch.inference_mode()
def check(model: Transformer, work: Work, most: int = 64) -> tuple[float, float]:
    """Mean and largest |engine logprob − that of a forward pass in fp32 with the same weights|, over some rollouts."""
    vocabulary = model.config.vocab_size
    rollouts = [r for group in Engine(model, work.rows).generate(work.requests(vocabulary), work.sampling(vocabulary))
                for r in group][:: max(1, work.rows // most)]  # fmt: skip
    exact = copy.deepcopy(model).float()
    differences = []
    for rollout in rollouts:
        tokens = torch.tensor(rollout.prompt + rollout.ids, device=model.embedding.weight.device)
        attend = PackedCausal([len(tokens) - 1], tokens.device)
        hidden = exact(tokens[:-1], attend.positions, attend)[len(rollout.prompt) - 1 :]
        logprobs = (hidden @ exact.head_weight.T).log_softmax(-1).gather(1, tokens[len(rollout.prompt) :, None])
        differences.append((logprobs.squeeze(1).cpu() - torch.from_numpy(rollout.logprobs)).abs())
    together = torch.cat(differences)
    return float(together.mean()), float(together.max())


def positive(word: str) -> int:
    """A number of the command line that nothing can be measured with if it is 0."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m"])
    parser.add_argument("--rows", nargs="+", type=positive, default=[64, 256, 1024], help="rollouts at once")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["engine"])
    parser.add_argument("--prompt", type=positive, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=positive, default=256, help="new tokens of a rollout, at most")
    parser.add_argument("--group", type=positive, default=1, help="rollouts that share a prompt")
    parser.add_argument("--ragged", action="store_true", help="rollouts end at random, and there are 4 for each row")
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--profile", action="store_true", help="time of a step by kernel")
    parser.add_argument("--check", action="store_true", help="compare logprobs with those of a forward pass in fp32")
    parser.add_argument("--tune", action="store_true", help="only time the kernels of decoding with all their settings")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)  # of a compiling process
    parser.add_argument("--interval", type=positive, help="steps between two looks at which rows are done")
    parser.add_argument("--ahead", type=int, help="steps that are launched before such a look is waited for")
    parser.add_argument("--wave", type=positive, help="tokens that are prefilled at once")
    parser.add_argument("--plain", action="store_true", help="the torch operations in place of the kernels")
    parser.add_argument("--float32", action="store_true", help="weights in fp32 (always so on the CPU)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="of the memory, in TB/s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write all numbers there")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is available")
    if options.tune and (options.device == "cpu" or options.plain):
        parser.error("--tune measures the kernels: it needs CUDA, and no --plain")
    if not options.bandwidth > 0:
        parser.error("--bandwidth is more than 0")
    device = prepare(options.device)
    dtype = torch.float32 if options.float32 or device.type == "cpu" else torch.bfloat16
    if options.plain:
        decoder_module.operations_for = lambda model, columns: TorchOperations()
    if options.interval is not None:
        engine_module.CHECK_INTERVAL[device.type] = options.interval
    if options.ahead is not None:
        engine_module.STEPS_AHEAD[device.type] = options.ahead
    if options.wave is not None:
        decoder_module.WAVE_TOKENS[device.type] = options.wave
    if options.share:
        for shape, rows in product(options.shapes, options.rows):
            work = Work(rows, options.prompt, options.new, options.group, options.ragged)
            compile_share(SHAPES[shape], work, device, dtype, *options.share)
        return []
    results: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    lengths = "ragged" if options.ragged else "all of full length"
    print(
        f"{name}, torch {torch.__version__}, {dtype}; {options.prompt} + {options.new} tokens, group {options.group}, "
        f"{lengths}"
    )
    if options.tune:
        compile_all(__file__, sys.argv[1:] if arguments is None else arguments)
    for shape in options.shapes:
        model = random_model(SHAPES[shape], device, dtype)
        for rows in options.rows:
            work = Work(rows, options.prompt, options.new, options.group, options.ragged)
            bound = limit(model, work, options.bandwidth)
            if options.tune:
                print(f"{shape:>5} {rows:5d} rows", flush=True)
                results.append({"shape": shape, **asdict(work), "side": "tuning", "tuning": tune(model, work)})
                continue
            for side in options.sides:
                if side == "vllm" and find_spec("vllm") is None:
                    print("  vLLM is not installed")
                    continue
                rate, first = best_rate(SIDES[side](model, work), options.repetitions)
                print(
                    f"{shape:>5} {rows:5d} rows  {side:12s} {rate:10,.0f} tokens/s  {rate / bound:6.1%} of the limit "
                    f"{bound:,.0f}  (first call {first:.1f} s)",
                    flush=True,
                )
                results.append({"shape": shape, **asdict(work), "side": side, "rate": rate, "of_limit": rate / bound})
            decoder = ready_decoder(model, work)
            step = step_seconds(decoder, work)
            print(
                f"      step {1e6 * step:.0f} us: {rows / step:,.0f} tokens/s, {rows / step / bound:.1%} of the limit"
            )
            results.append({"shape": shape, **asdict(work), "side": "step", "seconds": step})
            if options.check:
                mean, largest = check(model, work)
                print(
                    f"      logprobs: {mean:.2e} from those of a forward pass in fp32 on average, {largest:.2e} at most"
                )
                results[-1]["logprob_difference"] = {"mean": mean, "max": largest}
            if options.profile:
                kernels = profile(decoder, work)
                print_profile(kernels)
                results[-1]["kernels"] = kernels
            del decoder
        del model
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return results


if __name__ == "__main__":
    main()
