"""How fast an update is: our learner beside an eager training step of transformers, on the same weights and work.

    python benchmarks/update.py                                    # CUDA if there is one: 10m, 135m and 0.5b, 64 x 320
    python benchmarks/update.py --shapes 0.5b --sequences 16 --length 2048
    python benchmarks/update.py --shapes 135m --sides ours eager no-kernels padded recomputed-logits
    python benchmarks/update.py --shapes 135m --profile --json update.json
    python benchmarks/update.py --prompt 64 --group 8              # what sharing the prompt of a group saves

One step is a forward pass, the loss −Σ A log π / tokens, the backward pass, clipping and AdamW on fp32 weights, with a
random advantage for each sequence. Every token but the first `--prompt` of a sequence is predicted. Weights are random
in the shapes of SmolLM2-135M, Qwen2.5-0.5B and a Llama of 10 million.

ours                the learner as it trains; on CUDA its passes are captured as graphs
eager               the same without graphs: every operation is launched from Python
no-kernels          the same without our Triton kernels: torch operations, autograd, the head in chunks
compiled            the same without our kernels, each layer through torch.compile
padded              the same with padded attention in place of kernels that read ragged sequences
recomputed-logits   the same with the logits computed again in the backward pass, as for packs too large to keep them
recomputed-layers   the same with `learner.recompute`
transformers        eager, SDPA, fp32 weights under bf16 autocast: what its Trainer does with bf16=True
transformers-bf16   the same with weights, gradients and moments in bf16: less memory, and another optimizer step

tokens/s   tokens of all sequences, prompts included, over the median time of a step
of peak    3 · forward FLOP (2·W per token and causal attention) over time, of the bf16 peak (--peak, in TFLOP/s)
memory     the largest that torch had allocated, weights and optimizer included, since before the first step
held       what torch holds of the device's memory in the end: with graphs, all that lies inside them too
away       |g − g₃₂| / |g₃₂| for the gradient g of the first step, before clipping, and that of transformers in fp32
cosine     of the angle between the two
worst      the largest |g − g₃₂| of a parameter over the largest |g₃₂| of it, for the worst parameter
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from reasonlab.config import LearnerConfig
from reasonlab.hardware import prepare
from reasonlab.model import attention, fused
from reasonlab.model.checkpoint import tensor_layout
from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import Block, Transformer
from reasonlab.studies.footprint import forward_flops
from reasonlab.train import graphs
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, TokenBatch
from reasonlab.train.learner import Learner

SHAPES = {
    "tiny": ModelConfig("llama", 320, 64, 160, 2, 4, 2, 16),
    "10m": ModelConfig("llama", 4096, 320, 864, 6, 10, 5, 32),
    "135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, rope={"rope_theta": 100000.0}, max_positions=8192),
    "0.5b": ModelConfig(
        "qwen2", 151936, 896, 4864, 24, 14, 2, 64, rope={"rope_theta": 1e6}, max_positions=8192, qkv_bias=True
    ),
}
LEARNING_RATE, BETAS, CLIP_NORM = 1e-6, (0.9, 0.95), 1.0
WARMUP = 3  # after the first step: sizes settle, every shape is seen, the second time captured
TOP_KERNELS = 40
Step = Callable[[], None]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Work:
    shape: str
    sequences: int
    length: int
    prompt: int
    group: int  # so many sequences in a row have the same prompt
    budget: int
    device: str

    @property
    def model(self) -> ModelConfig:
        return SHAPES[self.shape]

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> float:
        """Of the work as transformers does it: every sequence with its own prompt, logits of all tokens."""
        return 3 * forward_flops(self.model, self.tokens, self.sequences * self.length**2)

    def transformer(self) -> Transformer:
        with torch.device(self.device):
            model = Transformer(self.model)
        generator = torch.Generator(self.device).manual_seed(0)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.02, generator)
        return model

    def examples(self) -> list[Example]:
        rng = np.random.default_rng(0)
        response = self.length - self.prompt
        result: list[Example] = []
        for i in range(self.sequences):
            prompt = result[-1].prompt if i % self.group else rng.integers(1, self.model.vocab_size, self.prompt)
            ids = rng.integers(1, self.model.vocab_size, response)
            old, mask = np.zeros(response, np.float32), np.ones(response, bool)
            result.append(Example(prompt, ids, old, mask, advantage=float(rng.normal())))
        return result


def policy_gradient(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -(batch.per_token(batch.advantage) * logprobs * batch.mask).sum() / batch.totals.tokens, {}


# --- the sides -------------------------------------------------------------------------------------------------------


def ours(work: Work, recompute: bool = False) -> tuple[Step, Gradients]:
    config = LearnerConfig(
        lr=LEARNING_RATE,
        betas=BETAS,
        clip_grad_norm=CLIP_NORM,
        token_budget=work.budget,
        bfloat16=work.device == "cuda",
        recompute=recompute,
    )
    learner, examples = Learner(work.transformer(), config), work.examples()
    seen: Gradients = {}
    names = [name for name, _ in learner.model.named_parameters()]
    move = learner._move

    def note(gradients: Sequence[Tensor], losses: Sequence[Tensor], lr: float) -> Tensor:
        seen.update({name: gradient.cpu().clone() for name, gradient in zip(names, gradients, strict=True)})
        return move(gradients, losses, lr)

    with patch.object(learner, "_move", note):
        learner.step(examples, policy_gradient)
    return lambda: _ignore(learner.step(examples, policy_gradient)), seen


def _ignore(_: object) -> None: ...


def in_transformers(work: Work, dtype: torch.dtype) -> Any:
    """The same weights."""
    import transformers

    theirs = transformers.AutoConfig.for_model(**work.model.to_hf())
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa", dtype=torch.float32)
    mine = dict(work.transformer().cpu().named_parameters())
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, targets in tensor_layout(work.model):
            parts = mine[name].split([len(weights[target]) for target in targets])
            for target, part in zip(targets, parts, strict=True):
                weights[target].copy_(part)
    return model.to(work.device, dtype).train()


def transformers_side(work: Work, dtype: torch.dtype, autocast: bool) -> tuple[Step, Gradients]:
    model, examples = in_transformers(work, dtype), work.examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    ids = torch.from_numpy(np.stack([np.concatenate((e.prompt, e.response)) for e in examples]))
    advantage = torch.tensor([e.advantage for e in examples])
    seen: Gradients = {}
    predicted = work.length - work.prompt
    rows = max(1, work.budget // work.length)  # the same micro-batches

    def differentiate() -> None:
        for start in range(0, work.sequences, rows):
            some = ids[start : start + rows].to(work.device)
            low = torch.autocast(work.device, torch.bfloat16) if autocast else nullcontext()
            with low:
                logits = model(some, use_cache=False).logits[:, work.prompt - 1 : -1]
            logprobs = logits.float().log_softmax(-1).gather(2, some[:, work.prompt :, None]).squeeze(2)
            weight = advantage[start : start + rows].to(work.device)[:, None]
            (-(weight * logprobs).sum() / (work.sequences * predicted)).backward()

    def step() -> None:
        differentiate()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    differentiate()
    theirs = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    for name, targets in tensor_layout(work.model):
        seen[name] = torch.cat([theirs[target] for target in targets])
    model.zero_grad(set_to_none=True)
    return step, seen


@contextmanager
def without_kernels() -> Iterator[None]:
    def never(_: Tensor) -> bool:
        return False

    places = [(fused, "uses_kernels"), (learner_module, "uses_kernels"), (attention, "takes_ragged")]
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(patch.object(module, name, never))
        yield


@contextmanager
def compiled() -> Iterator[None]:
    with without_kernels(), patch.object(Block, "forward", torch.compile(Block.forward, dynamic=True)):
        yield


SIDES: dict[str, tuple[Callable[[Work], tuple[Step, Gradients]], Callable[[], Any]]] = {
    "ours": (ours, nullcontext),
    "eager": (ours, lambda: patch.object(graphs, "CAPTURE", False)),
    "no-kernels": (ours, without_kernels),
    "compiled": (ours, compiled),
    "padded": (ours, lambda: patch.object(attention, "takes_ragged", lambda q: False)),
    "recomputed-logits": (ours, lambda: patch.object(fused, "KEPT_SHARE", 1 << 40)),
    "recomputed-layers": (lambda work: ours(work, recompute=True), nullcontext),
    "transformers": (lambda work: transformers_side(work, torch.float32, work.device == "cuda"), nullcontext),
    "transformers-bf16": (lambda work: transformers_side(work, torch.bfloat16, False), nullcontext),
}


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    side: str
    seconds: float
    tokens_per_s: float
    of_peak: float
    memory_gib: float
    held_gib: float
    away: float
    cosine: float
    worst: float


def exact_gradients(work: Work) -> Gradients:
    """Those of transformers in fp32, a few sequences at a time."""
    few = Work(**{**asdict(work), "budget": 4 * work.length})
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    _, gradients = transformers_side(few, torch.float32, False)
    torch.set_float32_matmul_precision(precision)
    free(work.device)
    return gradients


def measure(side: str, work: Work, exact: Gradients, repetitions: int, peak: float, profile: bool) -> Result:
    free(work.device)
    make, switch = SIDES[side]
    cuda = work.device == "cuda"
    with switch():
        if cuda:  # here, because torch does not count as allocated what a graph uses when it is replayed
            torch.cuda.reset_peak_memory_stats()
        step, gradients = make(work)
        for _ in range(WARMUP):
            step()
        times = []
        for _ in range(repetitions):
            wait(work.device)
            start = time.perf_counter()
            step()
            wait(work.device)
            times.append(time.perf_counter() - start)
        memory, held = (torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) if cuda else (0, 0)
        seconds = median(times)
        if profile:
            show_profile(step, side, cuda, seconds)
    del step
    away, cosine, worst = distance(gradients, exact) if exact else (math.nan, math.nan, math.nan)
    rate = work.flops / seconds / (peak * 1e12)
    return Result(side, seconds, work.tokens / seconds, rate, memory / 2**30, held / 2**30, away, cosine, worst)


def distance(gradients: Gradients, exact: Gradients) -> tuple[float, float, float]:
    assert gradients.keys() == exact.keys()
    of, along, mine, squared, worst = 0.0, 0.0, 0.0, 0.0, 0.0
    for name, right in exact.items():
        got = gradients[name].double()
        right = right.double()
        of += float((got - right).square().sum())
        along += float((got * right).sum())
        mine += float(got.square().sum())
        squared += float(right.square().sum())
        worst = max(worst, float((got - right).abs().max() / right.abs().max().clamp(min=1e-30)))
    return (of / squared) ** 0.5, along / (mine * squared) ** 0.5, worst


def show_profile(step: Step, side: str, cuda: bool, seconds: float) -> None:
    """The kernels that take most of a step, and how much of its time the device works (on the CPU: operations)."""
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait("cuda" if cuda else "cpu")
    place = "CUDA" if cuda else "CPU"
    rows = [row for row in profile.key_averages() if row.device_type.name == place and not row.is_user_annotation]
    times = {row: (row.self_device_time_total if cuda else row.self_cpu_time_total) / 1e3 for row in rows}
    total = sum(times.values())
    print(f"\n{side}: {total:.1f} ms of work in a step of {1e3 * seconds:.1f} ms ({total / (1e3 * seconds):.0%})")
    for row in sorted(rows, key=lambda row: -times[row])[:TOP_KERNELS]:
        print(f"{times[row]:9.2f} ms {times[row] / total:6.1%} {row.count:6} x  {row.key[:80]}")
    print()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Result]]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=found)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["10m", "135m", "0.5b"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "transformers", "transformers-bf16"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=1, help="of them that are not predicted")
    parser.add_argument("--group", type=int, default=1, help="sequences with the same prompt")
    parser.add_argument("--budget", type=int, help="tokens of a micro-batch, for both (default: all)")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--peak", type=float, default=989.0, help="bf16 TFLOP/s of the device (default: H100, H200)")
    parser.add_argument("--profile", action="store_true", help="also print where the time of one step goes")
    parser.add_argument("--unchecked", action="store_true", help="without the gradients in fp32, which take their time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    options = parser.parse_args(arguments)

    device = prepare(options.device).type
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {options.sequences} x {options.length} tokens, {options.prompt} of prompt"
    )
    results: dict[str, list[Result]] = {}
    for shape in options.shapes:
        budget = options.budget or options.sequences * options.length
        work = Work(shape, options.sequences, options.length, options.prompt, options.group, budget, device)
        exact = {} if options.unchecked else exact_gradients(work)
        print(f"\n{shape}, {work.model.parameter_count() / 1e6:.0f} M parameters, micro-batches of {budget} tokens")
        print("side                   step   tokens/s  of peak     memory       held      away    cosine     worst")
        results[shape] = []
        for side in options.sides:
            try:
                one = measure(side, work, exact, options.repetitions, options.peak, options.profile)
            except torch.cuda.OutOfMemoryError:
                print(f"{side:<18} out of memory")
                continue
            results[shape].append(one)
            print(
                f"{side:<18} {1e3 * one.seconds:5.0f} ms {one.tokens_per_s:10,.0f} {one.of_peak:8.1%} "
                f"{one.memory_gib:6.2f} GiB {one.held_gib:6.2f} GiB {one.away:9.2e} {one.cosine:9.6f} {one.worst:9.2e}",
                flush=True,
            )
    if options.json is not None:
        document = {shape: [asdict(one) for one in rows] for shape, rows in results.items()}
        settings = {k: str(v) for k, v in vars(options).items()}
        options.json.write_text(
            json.dumps({"device": name, "settings": settings, "results": document}, indent=1) + "\n"
        )
    return results


if __name__ == "__main__":
    main()
