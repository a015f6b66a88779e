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
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from reasonlab.hardware import prepare
from reasonlab.keys import key
from reasonlab.model.attention import PackedCausal
from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import FusedAttention, Transformer
from reasonlab.rollout import decoder as decoder_module
from reasonlab.rollout import engine as engine_module
from reasonlab.rollout.decoder import Decoder
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.operations import RUNNING, TorchOperations
from reasonlab.rollout.types import Request, Sampling

SHAPES = {
    "10m": ModelConfig("llama", 4096, 320, 864, 6, 10, 5, 32),
    "135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, rope={"rope_theta": 1e5}),
    "0.5b": ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, rope={"rope_theta": 1e6}, qkv_bias=True),
    "mini": ModelConfig("llama", 512, 32, 64, 2, 4, 2, 8),
}
MEAN_RAGGED = 150
KNOBS: dict[str, dict[str, tuple[int, ...]]] = {  # of each part of a step, the fields of `Tuning`
    "attention": {
        "attention_keys": (32, 64, 128),
        "attention_warps": (1, 2, 4, 8),
        "attention_stages": (2, 3, 4, 5),
        "attention_programs": (132, 264, 528, 1056),
    },
    "drawing": {"vocabulary_block": (1024, 2048, 4096, 8192), "vocabulary_warps": (2, 4, 8)},
}
DRAWS = 10  # measured at a time: one alone is too short
MOST_COMPILERS = 16
COMPILED_ROWS = 16
Setting = dict[str, int]
KINDS = {  # of kernels, by a part of their names
    "attention": ("_attend", "_join"),
    "norms": ("norm",),
    "gate": ("swiglu",),
    "drawing": ("_masses", "_draw"),
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "sm90", "splitK", "mm"),
}


@dataclass(frozen=True)
class Work:
    rows: int
    prompt: int
    new: int
    group: int
    ragged: bool

    def requests(self, vocabulary: int) -> list[Request]:
        rollouts = self.rows * (4 if self.ragged else 1)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, vocabulary, (-(-rollouts // self.group), self.prompt), generator=generator).tolist()
        return [
            Request(prompt, [key("speed", i, j) for j in range(min(self.group, rollouts - i * self.group))])
            for i, prompt in enumerate(prompts)
        ]

    def sampling(self, vocabulary: int) -> Sampling:
        stops = tuple(range(0, vocabulary, MEAN_RAGGED)) if self.ragged else ()
        return Sampling(max_tokens=self.new, stop_ids=stops)


def random_model(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    with torch.device(device):
        model = Transformer(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.02)
    return model.to(device, dtype)


def limit(model: Transformer, work: Work, bandwidth: float) -> float:
    """Tokens/s at which memory alone is the bound, for rows of the mean length."""
    c = model.config
    size = model.embedding.weight.element_size()
    weights = sum(p.numel() for p in model.parameters()) * size
    cached = 2 * c.layers * c.kv_heads * c.head_dim * size * (work.prompt + work.new / 2)
    return work.rows / ((weights + work.rows * cached) / (bandwidth * 1e12))


# --- sides ----------------------------------------------------------------------------------------------------------


def engine_side(model: Transformer, work: Work) -> Callable[[], int]:
    engine = Engine(model, work.rows)
    requests, sampling = work.requests(model.config.vocab_size), work.sampling(model.config.vocab_size)
    return lambda: sum(len(rollout.ids) for group in engine.generate(requests, sampling) for rollout in group)


def transformers_side(model: Transformer, work: Work) -> Callable[[], int]:
    """`generate` on all prompts at once, without logprobs, which would only slow it down."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[model.config.architecture]
    weight = model.embedding.weight
    theirs = AutoModelForCausalLM.from_config(kind(**model.config.to_hf()), dtype=weight.dtype).to(weight.device).eval()
    prompts = [r.prompt for r in replace(work, group=1).requests(model.config.vocab_size)]
    tokens = torch.tensor(prompts, device=weight.device)

    @torch.inference_mode()
    def run() -> int:
        out = theirs.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None,
            min_new_tokens=work.new, max_new_tokens=work.new,
        )  # fmt: skip
        return int(out.shape[0] * (out.shape[1] - work.prompt))

    return run


def vllm_side(model: Transformer, work: Work) -> Callable[[], int]:
    """vLLM's offline engine with random weights of the same shape, returning the logprob of each sampled token."""
    from vllm import LLM, SamplingParams

    directory = TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(model.config.to_hf("bfloat16")))
    llm = LLM(
        directory.name, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=work.rows,
        max_model_len=work.prompt + work.new, enable_prefix_caching=False, gpu_memory_utilization=0.5,
    )  # fmt: skip
    parameters = SamplingParams(temperature=1.0, max_tokens=work.new, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(r.prompt)} for r in replace(work, group=1).requests(model.config.vocab_size)]

    def run(keep: object = directory) -> int:
        return sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, parameters, use_tqdm=False))

    return run


SIDES = {"engine": engine_side, "transformers": transformers_side, "vllm": vllm_side}


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


# --- one step -------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def ready_decoder(model: Transformer, work: Work) -> Decoder:
    """All rows in the middle of their rollouts, with room for the steps of a measurement."""
    sampling = replace(work.sampling(model.config.vocab_size), max_tokens=max(work.new, 512), stop_ids=())
    decoder = Decoder(model, work.rows, ready_columns(work), sampling)
    rewind(decoder, work)
    return decoder


def ready_columns(work: Work) -> int:
    return work.prompt + max(work.new, 512)


def rewind(decoder: Decoder, work: Work) -> None:
    state = decoder.state
    state.positions.fill_(work.prompt + work.new // 2)
    state.counts.fill_(work.new // 2)
    state.limits.fill_(decoder.sampling.max_tokens)
    state.finish.fill_(RUNNING)


@torch.inference_mode()
def step_seconds(decoder: Decoder, work: Work, steps: int = 16, repetitions: int = 5) -> float:
    """Median time of a step, several launched in a row so that the host does not count."""
    columns = work.prompt + work.new // 2 + steps + 1
    decoder.step(work.rows, columns)  # capture
    times = []
    for _ in range(repetitions):
        rewind(decoder, work)
        _wait(decoder.device)
        start = time.perf_counter()
        for _ in range(steps):
            decoder.step(work.rows, columns)
        _wait(decoder.device)
        times.append((time.perf_counter() - start) / steps)
    return median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def profile(decoder: Decoder, work: Work, steps: int = 8) -> list[tuple[str, str, float, int]]:
    """Kind, kernel (on the CPU: operation), microseconds a step and launches a step; the longest first."""
    from torch.profiler import ProfilerActivity

    cuda = decoder.device.type == "cuda"
    columns = work.prompt + work.new // 2 + steps + 1
    decoder.step(work.rows, columns)
    rewind(decoder, work)
    _wait(decoder.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            decoder.step(work.rows, columns)
        _wait(decoder.device)
    rows = []
    for event in recorded.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        if micros > 0 and not (cuda and event.key.startswith(("cuda", "aten::"))):
            rows.append((kind_of(event.key), event.key, micros / steps, round(event.count / steps)))
    return sorted(rows, key=lambda row: -row[2])


def kind_of(kernel: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel for part in parts)), "other")


def print_profile(rows: list[tuple[str, str, float, int]], most: int = 16) -> None:
    total = sum(row[2] for row in rows)
    kinds: dict[str, float] = defaultdict(float)
    for kind, _, micros, _ in rows:
        kinds[kind] += micros
    print(f"    one step by kernels: {total:.0f} us;", end=" ")
    print(", ".join(f"{kind} {t:.0f} us ({t / total:.0%})" for kind, t in sorted(kinds.items(), key=lambda x: -x[1])))
    for kind, kernel, micros, count in rows[:most]:
        print(f"    {micros:9.1f} us {count:5d} x  {kind:16s} {kernel[:90]}")


# --- settings of the kernels ----------------------------------------------------------------------------------------


def settings(part: str, programs: int, columns: int) -> list[Setting]:
    """All that differ: the number of programs only says into how many parts long rows are split."""
    from reasonlab.rollout.kernels import attention_splits

    found: dict[tuple[int, ...], Setting] = {}
    for values in product(*KNOBS[part].values()):
        setting = dict(zip(KNOBS[part], values, strict=True))
        with tuned(setting):
            splits = attention_splits(programs, columns) if part == "attention" else 1
        same = tuple(value for knob, value in setting.items() if knob != "attention_programs")
        found.setdefault((*same, splits), setting)
    return list(found.values())


@contextmanager
def tuned(setting: Setting) -> Iterator[None]:
    from reasonlab.rollout.kernels import TUNING

    usual = {knob: getattr(TUNING, knob) for knob in setting}
    for knob, value in setting.items():
        setattr(TUNING, knob, value)
    try:
        yield
    finally:
        for knob, value in usual.items():
            setattr(TUNING, knob, value)


def part_of_step(part: str, decoder: Decoder) -> Callable[[], None]:
    """What launches the kernels of all layers' attention, or of some draws, on the state of a decoder."""
    model, state, like = decoder.model, decoder.state, decoder.cache.keys
    config = model.config
    if part == "drawing":
        logits = torch.randn(decoder.rows, config.vocab_size, dtype=like.dtype, device=like.device)

        def draw() -> None:
            for _ in range(DRAWS):
                decoder.operations.draw(logits, state, decoder.stop_ids, decoder.sampling)

        return draw
    attention = decoder.operations.attention(decoder.cache, state, decoder.columns)
    assert isinstance(attention, FusedAttention)
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    qkv = torch.randn(decoder.rows, width, dtype=like.dtype, device=like.device)

    def attend() -> None:
        for layer, block in enumerate(model.blocks):
            attention.attend(layer, qkv, block.attention)  # type: ignore[arg-type]

    return attend


def kernel_seconds(launch: Callable[[], None], device: torch.device, repetitions: int = 5) -> float:
    """Time of what is launched, on CUDA as a graph, so that the host does not count."""
    launch()  # compiles, or reads what was compiled
    if device.type == "cpu":
        start = time.perf_counter()
        launch()
        return time.perf_counter() - start
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repetitions):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repetitions


def impossible() -> tuple[type[Exception], ...]:
    """What Triton raises where a setting needs more shared memory or registers than there are."""
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, PTXASError


def compile_all(arguments: list[str]) -> None:
    """Fill Triton's cache with all settings, in several processes: to compile takes far longer than to measure."""
    count = min(MOST_COMPILERS, os.cpu_count() or 1)
    start = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, __file__, *arguments, "--share", str(number), str(count)])
        for number in range(count)
    ]
    failed = sum(process.wait() != 0 for process in processes)
    print(
        f"  compiled by {count} processes in {time.perf_counter() - start:.0f} s"
        + (f", {failed} failed" * bool(failed))
    )


@torch.inference_mode()
def compile_share(
    shape: ModelConfig, work: Work, device: torch.device, dtype: torch.dtype, number: int, count: int
) -> int:
    """Launch every `count`-th setting once, beginning with `number`; returns how many those are.

    A layer and a few rows are enough: compiled code depends on the columns and the number of parts, not on them.
    """
    from reasonlab.rollout import kernels

    columns = ready_columns(work)
    decoder = ready_decoder(random_model(replace(shape, layers=1), device, dtype), replace(work, rows=COMPILED_ROWS))
    launched, usual = 0, kernels.attention_splits
    for part in KNOBS:
        launch, programs = part_of_step(part, decoder), work.rows * shape.kv_heads
        for setting in settings(part, programs, columns)[number::count]:
            with tuned(setting):
                splits = usual(programs, columns)
                kernels.attention_splits = lambda *_, splits=splits: splits
                try:
                    launch()
                except impossible():
                    pass
                finally:
                    kernels.attention_splits = usual
            launched += 1
    return launched


@torch.inference_mode()
def tune(model: Transformer, work: Work, most: int = 5) -> dict[str, list[tuple[Setting, float]]]:
    """For each part of a step the settings and what they take in a step, the fastest first."""
    from reasonlab.rollout.kernels import TUNING

    decoder, table = ready_decoder(model, work), {}
    for part, knobs in KNOBS.items():
        launch, a_step = part_of_step(part, decoder), DRAWS if part == "drawing" else 1
        now = {knob: getattr(TUNING, knob) for knob in knobs}
        measured = []
        candidates = settings(part, work.rows * model.config.kv_heads, decoder.columns)
        for setting in [now, *(candidate for candidate in candidates if candidate != now)]:
            rewind(decoder, work)
            with tuned(setting):
                try:
                    measured.append((setting, kernel_seconds(launch, decoder.device) / a_step))
                except impossible():
                    continue
        usual = next((seconds for setting, seconds in measured if setting == now), math.nan)
        table[part] = sorted(measured, key=lambda one: one[1])
        print(f"    {part}: {1e6 * usual:.0f} us a step as it is ({_described(now)}); of {len(measured)} the best are")
        for setting, seconds in table[part][:most]:
            print(f"    {1e6 * seconds:9.1f} us  {_described(setting)}", flush=True)
    return table


def _described(setting: Setting) -> str:
    return ", ".join(f"{knob} {value}" for knob, value in setting.items())


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 256, 1024], help="rollouts at once")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["engine"])
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=256, help="new tokens of a rollout, at most")
    parser.add_argument("--group", type=int, default=1, help="rollouts that share a prompt")
    parser.add_argument("--ragged", action="store_true", help="rollouts end at random, and there are 4 for each row")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="time of a step by kernel")
    parser.add_argument("--check", action="store_true", help="compare logprobs with those of a forward pass in fp32")
    parser.add_argument("--tune", action="store_true", help="only time the kernels of decoding with all their settings")
    parser.add_argument("--share", nargs=2, type=int, help=argparse.SUPPRESS)  # of a compiling process
    parser.add_argument("--interval", type=int, help="steps between two looks at which rows are done")
    parser.add_argument("--ahead", type=int, help="steps that are launched before such a look is waited for")
    parser.add_argument("--wave", type=int, help="tokens that are prefilled at once")
    parser.add_argument("--plain", action="store_true", help="the torch operations in place of the kernels")
    parser.add_argument("--float32", action="store_true", help="weights in fp32 (always so on the CPU)")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="of the memory, in TB/s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write all numbers there")
    options = parser.parse_args(arguments)
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
    print(f"{name}, torch {torch.__version__}, {dtype}; {options.prompt} + {options.new} tokens")
    if options.tune and device.type == "cuda":
        compile_all(sys.argv[1:] if arguments is None else arguments)
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
