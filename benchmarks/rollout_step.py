"""One step of decoding in `rollout.py`: its time, and where that goes by kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median

import torch
from rollout_work import Work

from reasonlab.model.transformer import Transformer
from reasonlab.rollout.decoder import Decoder
from reasonlab.rollout.operations import RUNNING

KINDS = {  # of kernels, by a part of their names
    "attention": ("_attend", "_join"),
    "norms": ("norm",),
    "gate": ("swiglu",),
    "drawing": ("_masses", "_draw"),
    "matrix products": ("gemm", "gemv", "nvjet", "cutlass", "sm90", "splitK", "mm"),
}


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
    rows = torch.arange(work.rows, device=decoder.device)
    state.leaders.copy_(rows - rows % work.group)
    state.shared.fill_(work.prompt - 1)


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
