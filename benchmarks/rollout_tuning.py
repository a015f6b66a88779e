"""The kernels of decoding with all their settings: `rollout.py --tune`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
from random_models import random_model
from rollout_step import ready_columns, ready_decoder, rewind
from rollout_work import Work

from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import FusedAttention, Transformer
from reasonlab.rollout.decoder import Decoder

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


def compile_all(script: str, arguments: list[str]) -> None:
    """Fill Triton's cache with all settings, in several processes: to compile takes far longer than to measure.

    Each is the script with these arguments and its share, which it gives to `compile_share`.
    """
    count = min(MOST_COMPILERS, os.cpu_count() or 1)
    start = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, script, *arguments, "--share", str(number), str(count)])
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
