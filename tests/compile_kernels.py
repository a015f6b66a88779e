"""Compiles decoding's kernels for a Hopper GPU, which needs none: run by `test_kernels.py` in a process of its own.

Prints a line of JSON for each: its shared memory, and how many instructions multiply matrices, copy from memory in the
background, and read 16 bytes at once. Triton must not be in interpreter mode.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from reasonlab.rollout import kernels
from reasonlab.rollout.kernels import TUNING

HOPPER = GPUTarget("cuda", 90, 32)
ROW_NUMBERS = {"positions", "finish", "tokens", "seeds", "counts", "limits", "leaders", "shared"}
INTEGERS = ROW_NUMBERS | {"ids", "stop_ids", "rows", "begins", "lengths", "cuts", "ties"}
SINGLES = {"cos_table", "sin_table", "shares", "sums", "tops", "masses", "kept", "logprobs"}
SCALARS = {"eps": "fp32", "scale": "fp32", "temperature": "fp32", "top_p": "fp32"} | dict.fromkeys(
    ("wave_stride", "layer_stride", "row_stride", "head_stride", "ids_stride", "splits", "vocabulary", "blocks"), "i32"
)
# Multiples of 16, as they are for real models.
ALIGNED = {"wave_stride", "layer_stride", "row_stride", "head_stride", "vocabulary"}


def build(name: str, kernel: Any, dtype: str, constants: dict[str, Any], **options: int) -> None:
    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in SCALARS:
            return SCALARS[argument]
        return "*i64" if argument in INTEGERS else "*fp32" if argument in SINGLES else f"*{dtype}"

    kinds = {argument: kind(argument) for argument in kernel.arg_names}
    aligned = [i for i, (argument, of) in enumerate(kinds.items()) if of[0] == "*" or argument in ALIGNED]
    source = ASTSource(
        kernel,
        signature=kinds,
        constexprs={(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    built = triton.compile(source, target=HOPPER, options=options)
    ptx = built.asm["ptx"]
    result = {
        "kernel": f"{name} {dtype}",
        "shared": built.metadata.shared,
        "matrix": len(re.findall(r"mma\.sync|wgmma\.mma", ptx)),
        "asynchronous": ptx.count("cp.async.cg"),
        "wide": len(re.findall(r"ld\.global[.\w:]*\.v4", ptx)),
    }
    print(json.dumps(result))


def main() -> None:
    for dtype in ("bf16", "fp32"):
        vocabulary = {"BLOCK": TUNING.vocabulary_block}
        build("masses", kernels._masses, dtype, vocabulary, num_warps=TUNING.vocabulary_warps)
        bits = {"SHIFT": 16 if dtype == "bf16" else 0}
        for name, greedy, nucleus in (("all", False, False), ("nucleus", False, True), ("greedy", True, False)):
            more = {"GREEDY": greedy, "NUCLEUS": nucleus, "STOPS": 2, "BLOCK_S": 2, "BLOCKS": 16}
            build(f"draw {name}", kernels._draw, dtype, vocabulary | bits | more, num_warps=TUNING.vocabulary_warps)
        searched = vocabulary | bits | {"BLOCKS": 16}
        build("nucleus", kernels._nucleus, dtype, searched, num_warps=TUNING.vocabulary_warps)
        for heads, kv_heads, d, splits in ((9, 3, 64, 1), (14, 2, 64, 4), (16, 8, 128, 1)):
            constants = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": d, "NORM": d == 128, "SPLIT": splits > 1}
            constants |= {"BLOCK_G": 16, "BLOCK_D": d, "BLOCK_N": TUNING.attention_keys}
            options = {"num_warps": TUNING.attention_warps, "num_stages": TUNING.attention_stages}
            build(f"attend{heads}", kernels._attend, dtype, constants, **options)
        stored = {"KV_HEADS": 3, "HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK_N": kernels.STORED_TOKENS}
        build("store", kernels._store, dtype, stored, num_warps=4)
        build("join", kernels._join, dtype, {"HEAD_DIM": 64, "SPLITS": 4, "BLOCK_D": 64}, num_warps=1)


if __name__ == "__main__":
    main()
