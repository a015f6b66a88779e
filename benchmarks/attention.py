"""Attention of an update by itself: our kernels beside what torch has, forward and backward, microseconds for a layer.

    python benchmarks/attention.py                                    # needs CUDA; Qwen2.5-0.5B's heads
    python benchmarks/attention.py --shape 135m --layouts 64x320 groups --json attention.json
    python benchmarks/attention.py --tune                             # our kernels with other settings

A layout is `SEQUENCESxLENGTH`, or `groups`: eight prompts of 110 tokens, each with eight answers of 120 to 400.

ours      kernels that read sequences as they lie, the prompt of a group once
flash     torch's flash kernels on ragged sequences; they know no shared prompts, so each answer brings its own
padded    `scaled_dot_product_attention` on padded blocks of similar length: what runs where there is no Triton

All sides compute the same: outputs and gradients are compared with those of padded attention in fp32, as the norm of
the difference over the norm (`away`). Times are those of a CUDA graph, so nothing of them is Python's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from random_models import SHAPES
from torch import Tensor

from reasonlab.hardware import prepare
from reasonlab.model import attention
from reasonlab.model.attention import PackedCausal
from reasonlab.train.batch import Example, Layout

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
REPETITIONS = 20
SETTINGS = [(block, warps, stages) for block in (64, 128) for warps, stages in ((4, 2), (4, 3), (8, 2), (8, 3))]


@dataclass(frozen=True)
class Sequences:
    name: str
    lengths: list[int]
    tokens: NDArray[np.int64] | None = None  # which flat token stands at each place, where sequences share some

    @classmethod
    def of(cls, name: str) -> Sequences:
        if name != "groups":
            count, _, length = name.partition("x")
            return cls(name, [int(length)] * int(count))
        drawn = np.random.default_rng(0).integers(120, 400, 8)
        examples = [
            Example(np.full(110, group), np.zeros(n, np.int64), np.zeros(n, np.float32), np.ones(n, bool))
            for group in range(8)
            for n in drawn
        ]
        layout = Layout.of(examples)
        return cls(name, layout.lengths, layout.sequences)

    def packed(self, device: torch.device) -> PackedCausal:
        return PackedCausal(self.lengths, device, self.tokens)


@dataclass(frozen=True)
class Result:
    layout: str
    side: str
    forward_us: float
    backward_us: float
    away: float  # of the output and the gradients, the worst


# --- sides -----------------------------------------------------------------------------------------------------------


def ours(sequences: Sequences, device: torch.device) -> Run:
    ragged = sequences.packed(device).ragged
    assert ragged is not None
    return ragged


def padded(sequences: Sequences, device: torch.device) -> Run:
    return sequences.packed(device).padded


def flash(sequences: Sequences, device: torch.device) -> Run:
    bounds = torch.tensor([0, *np.cumsum(sequences.lengths)], dtype=torch.int32, device=device)
    longest = max(sequences.lengths)
    tokens = sequences.tokens
    at = None if tokens is None else torch.from_numpy(tokens).to(device)
    # Of the copies of a shared token one gives the output, and gets the slope.
    first = None if tokens is None else torch.from_numpy(np.unique(tokens, return_index=True)[1]).to(device)

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, total, *_ = torch.ops.aten._flash_attention_forward(
                q, k, v, bounds, bounds, longest, longest, 0.0, True, False
            )
            ctx.save_for_backward(q, k, v, out, total)
            return out  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, total = ctx.saved_tensors
            no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
            return tuple(
                torch.ops.aten._flash_attention_backward(
                    gradient, q, k, v, out, total, bounds, bounds, longest, longest, 0.0, True, *no_dropout
                )
            )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if at is None or first is None:
            return Flash.apply(q, k, v)  # type: ignore[no-any-return, no-untyped-call]
        written_out = Flash.apply(*(x.index_select(0, at) for x in (q, k, v)))  # type: ignore[no-untyped-call]
        return written_out.index_select(0, first)  # type: ignore[no-any-return]

    return run


SIDES: dict[str, Callable[[Sequences, torch.device], Run]] = {"ours": ours, "flash": flash, "padded": padded}


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Heads:
    """Random projections as a layer has them, and a slope at the output."""

    whole: Tensor  # [tokens, heads + 2 kv_heads, d]
    slope: Tensor
    sizes: tuple[int, int, int]

    @classmethod
    def of(cls, shape: str, tokens: int, device: torch.device) -> Heads:
        config = SHAPES[shape]
        sizes = (config.heads, config.kv_heads, config.kv_heads)
        generator = torch.Generator().manual_seed(0)
        whole, slope = (
            torch.randn(tokens, n, config.head_dim, generator=generator).to(device) for n in (sum(sizes), config.heads)
        )
        return cls(whole, slope, sizes)

    def to(self, dtype: torch.dtype) -> Heads:
        return Heads(self.whole.to(dtype), self.slope.to(dtype), self.sizes)

    def run(self, attend: Run) -> tuple[Tensor, Callable[[], Tensor]]:
        """The output, and what computes the gradient of the projection."""
        whole = self.whole.detach().requires_grad_()
        out = attend(*whole.split(self.sizes, dim=1))
        return out, lambda: torch.autograd.grad(out, whole, self.slope, retain_graph=True)[0]


def away(got: Tensor, right: Tensor) -> float:
    return float((got.float() - right).norm() / right.norm())


def microseconds(prepared: Callable[[], Callable[[], object]], device: torch.device, before: float = 0.0) -> float:
    """Of one call in a graph of many. What prepares them is in the graph too, and takes `before`: autograd goes back on
    the stream on which it came."""
    if device.type == "cpu":
        return float("nan")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            prepared()()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call = prepared()
        for _ in range(REPETITIONS):
            call()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return (1e3 * begin.elapsed_time(end) - before) / REPETITIONS


def measure(
    sequences: Sequences, side: str, heads: Heads, exact: tuple[Tensor, Tensor], device: torch.device
) -> Result:
    attend = SIDES[side](sequences, device)
    heads = heads.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    out, gradient = heads.run(attend)
    worst = max(away(out.detach(), exact[0]), away(gradient(), exact[1]))
    with torch.no_grad():
        forward = microseconds(lambda: lambda: attend(*heads.whole.split(heads.sizes, dim=1)), device)
    backward = microseconds(lambda: heads.run(attend)[1], device, forward)
    return Result(sequences.name, side, forward, backward, worst)


@contextmanager
def setting(block: int, warps: int, stages: int) -> Iterator[None]:
    from reasonlab.model import attention_kernels as kernels

    with (
        patch.object(attention, "BLOCK", block),
        patch.object(kernels, "BLOCK", block),
        patch.object(kernels, "STAGES", stages),
        patch.object(kernels, "_warps", lambda d: warps),
    ):
        yield


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="whose heads")
    parser.add_argument("--layouts", nargs="+", default=["64x320", "6x320", "1x2048", "16x2048", "groups"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--tune", action="store_true", help="only ours, with blocks, warps and stages of all kinds")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was measured")
    options = parser.parse_args(arguments)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if options.device == "cpu" and (
        options.tune or set(options.sides) - {"padded", *(["ours"] if interpreted else [])}
    ):
        parser.error("needs CUDA; on the CPU there is --sides padded, and ours with TRITON_INTERPRET=1, without times")

    device = prepare(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, heads of {options.shape}\n")
    print(f"{'layout':10} {'side':22} {'forward':>10} {'backward':>10} {'away':>9}")
    results: list[Result] = []
    for layout in options.layouts:
        sequences = Sequences.of(layout)
        heads = Heads.of(options.shape, sequences.packed(device).count, device)
        out, gradient = heads.run(padded(sequences, device))
        exact = out.detach(), gradient()
        sides = [("ours", one) for one in SETTINGS] if options.tune else [(side, None) for side in options.sides]
        for side, chosen in sides:
            if chosen is None:
                one, label = measure(sequences, side, heads, exact, device), side
            else:
                with setting(*chosen):
                    one = measure(sequences, side, heads, exact, device)
                label = "block {} warps {} stages {}".format(*chosen)
            results.append(one)
            print(
                f"{layout:10} {label:22} {one.forward_us:7.0f} us {one.backward_us:7.0f} us {one.away:9.2e}", flush=True
            )
    if options.json is not None:
        settings = {k: str(v) for k, v in vars(options).items()}
        document = {"device": name, "settings": settings, "results": [asdict(one) for one in results]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
