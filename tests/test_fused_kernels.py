"""The kernels between the matrix products of an update compute what torch computes, and their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, settings, watch_gradients
from torch import Tensor
from update_pieces import DEVICE, assert_close, compiled_elsewhere, gradients, normal, through_kernels

from reasonlab.model import fused
from reasonlab.model.rope import rotate
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example
from reasonlab.train.learner import Learner

kernels = pytest.fixture(through_kernels)


@pytest.mark.parametrize("width", [8, 24, 577])
@pytest.mark.parametrize("with_branch", [True, False], ids=["branch", "alone"])
@pytest.mark.parametrize("uses", ["both", "normed", "total"])
def test_add_norm(kernels: Any, width: int, with_branch: bool, uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NORM_PROGRAMS", 3)  # each goes over several rows, and not all over as many
    x, weight = normal(7, width), normal(width, seed=1)
    branch = normal(7, width, seed=2) if with_branch else None
    inputs = [t for t in (x, branch, weight) if t is not None and (uses != "total" or t is not weight)]

    def chosen(total: Tensor, normed: Tensor) -> list[Tensor]:
        return {"both": [total, normed], "normed": [normed], "total": [total]}[uses]

    summed = x if branch is None else x + branch
    expected = chosen(summed, F.rms_norm(summed, (width,), weight, 1e-5))
    got = chosen(*kernels.add_norm(x, branch, weight, 1e-5))
    assert_close(got, expected)
    if not (uses == "total" and branch is None):
        assert_close(gradients(got, inputs), gradients(expected, inputs))


def test_add_norm_keeps_the_sum_in_fp32(kernels: Any) -> None:
    x, branch, weight = normal(5, 24), normal(5, 24, seed=1, dtype=torch.bfloat16), normal(24, dtype=torch.bfloat16)
    total, normed = kernels.add_norm(x, branch, weight, 1e-5)
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert_close([total], [x + branch.float()])
    of_x, of_branch, of_weight = gradients([total, normed], [x, branch, weight])
    assert (of_x.dtype, of_branch.dtype, of_weight.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert_close([of_branch], [of_x], 1e-2)  # the interpreter cuts off where a device rounds


def test_split_heads_and_their_gradients() -> None:
    x = normal(5, 6, 4)
    for got, expected in zip(fused.split_heads(x, [3, 2, 1]), x.split((3, 2, 1), 1), strict=True):
        assert got.data_ptr() == expected.data_ptr()
    weights = [normal(5, heads, 4, seed=heads) for heads in (3, 2, 1)]
    split = (fused.split_heads(x, [3, 2, 1]), x.split((3, 2, 1), 1))
    sums = [sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True)) for parts in split]
    assert torch.equal(*(torch.autograd.grad(total, x)[0] for total in sums))
    whole = torch.arange(120.0).view(5, 6, 4)
    layouts = {
        "side by side": (whole.split((3, 2, 1), 1), True),
        "inside something larger": (whole[:, 1:5].split((3, 1), 1), True),
        "another tensor": ((whole[:, :3], whole.clone()[:, 3:]), False),
        "another order": ((whole[:, 3:], whole[:, :3]), False),
        "a gap": ((whole[:, :2], whole[:, 3:]), False),
        "one number everywhere": ((torch.ones(()).expand(5, 3, 4), torch.ones(()).expand(5, 1, 4)), False),
    }
    for name, (parts, together) in layouts.items():
        found = fused.side_by_side(parts)
        assert torch.equal(found, torch.cat(parts, 1)), name
        assert (found.data_ptr() == parts[0].data_ptr()) == together, name


@pytest.mark.parametrize("rows", [0, 1, 5, 130, 300])
@pytest.mark.parametrize("width", [3, 64, 100])
def test_column_sum(kernels: Any, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SUMMED_ROWS", 140)
    monkeypatch.setattr(kernels, "PART_ROWS", 64)  # five parts, the last of which is short
    x = normal(rows, width).detach()
    assert_close([kernels.column_sum(x), fused.column_sum(x)], [x.sum(0)] * 2, 1e-5)
    low = kernels.column_sum(x.to(torch.bfloat16), torch.float32)
    assert_close([low], [x.to(torch.bfloat16).float().sum(0)], 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (9, 3, 64), (7, 1, 24), (3, 3, 2)])
def test_rotation(kernels: Any, heads: int, kv_heads: int, head_dim: int) -> None:
    count = heads + 2 * kv_heads
    x = normal(6, count * head_dim)
    angles = normal(6, 1, head_dim // 2, seed=1).detach() * 5
    cos, sin = angles.cos(), angles.sin()
    qk, v = x.view(6, count, head_dim).split((heads + kv_heads, kv_heads), dim=1)
    expected = [*rotate(qk, cos, sin).split((heads, kv_heads), dim=1), v]
    got = list(fused.rotate_heads(x * 1, cos, sin, heads, kv_heads))
    assert_close(got, expected)
    assert_close(gradients(got, [x]), gradients(expected, [x]))


@pytest.mark.parametrize("width", [8, 40, 1025])
def test_swiglu(kernels: Any, width: int) -> None:
    x = normal(5, 2 * width)
    gate, up = x.chunk(2, dim=-1)
    expected, got = F.silu(gate) * up, kernels.swiglu(x)
    assert_close([got], [expected])
    assert_close(gradients([got], [x]), gradients([expected], [x]))


@pytest.mark.parametrize("shape", [{}, {"architecture": "qwen3", "qk_norm": True}, {"qkv_bias": True}])
def test_a_model_of_kernels_is_the_model(kernels: Any, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "VOCABULARY", 8)  # several blocks of it
    results = []
    for on in (True, False):
        for module in (fused, learner_module):
            monkeypatch.setattr(module, "uses_kernels", lambda x, on=on: on)
        model = small_model(seed=3, **shape).to(DEVICE)
        learner = Learner(model, settings(token_budget=12, bfloat16=False))
        seen = watch_gradients(learner)
        short = [Example(e.prompt[:3], e.response[:6], e.logprobs[:6], e.mask[:6], e.advantage) for e in EXAMPLES[:3]]
        results.append((learner.step(short, LOSSES["grpo"]), seen[0]))
    (got_result, got), (expected_result, expected) = results
    assert_close(got, expected, 5e-6)
    assert got_result.loss == pytest.approx(expected_result.loss, abs=1e-6)
    assert got_result.entropy == pytest.approx(expected_result.entropy, abs=1e-5)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from reasonlab.model import attention_kernels, kernels

low, high, number, ids = "*bf16", "*fp32", "i32", "*i64"
types = {
    **dict.fromkeys(("branch", "weight", "normed", "of_normed", "of_branch", "gate_up", "of_out", "gradient"), low),
    **dict.fromkeys(("out", "x", "logits"), low),
    **dict.fromkeys(("total", "inverse", "of_total", "of_x", "parts", "cos", "sin"), high),
    **dict.fromkeys(("logprobs", "entropies", "totals", "slopes"), high),
    **dict.fromkeys(("width", "tokens", "programs", "turned", "heads", "half", "vocabulary", "count", "rows"), number),
    **dict.fromkeys(("eps", "sign", "factor"), "fp32"),
    "targets": ids,
}
constants = {"WITH_BRANCH": True, "WITH_TOTAL": True, "BLOCK": 1024, "HEADS": 16, "HALF": 32}
constants |= {"COLUMNS": 32, "ROWS": 128}
jobs = [(f, types, constants) for f in vars(kernels).values() if isinstance(f, triton.JITFunction)]
types = {
    **dict.fromkeys(("q", "k", "v", "out", "gradient", "of_q", "of_k", "of_v"), low),
    **dict.fromkeys(("total", "along"), high),
    **dict.fromkeys(("tokens", "size", "q_stride", "k_stride", "v_stride", "gradient_stride", "result_stride"), number),
    **{"blocks": "*i32", "table": "*i32", "at": ids, "scale": "fp32"},
    **{"parts": low, "part_stride": number, "out_stride": number},
}
for shared in (False, True):
    constants = {"HEADS": 14, "KV_HEADS": 2, "HEAD_DIM": 64, "BLOCK_D": 64, "BLOCK": 64}
    constants |= {"SHARED": shared, "BEGINNING": shared, "PER": 1 if shared else 7}
    constants |= {"GROUP": 7, "BLOCK_G": 8}
    names = ("_packed_forward", "_packed_of_queries", "_packed_of_keys", "_add_groups")
    named = [getattr(attention_kernels, name) for name in names]
    jobs += [(f, types, constants) for f in named]
def built(function, types, constants, generation, **options):
    own = {(i,): constants[name] for i, name in enumerate(function.arg_names) if name in constants}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=own)
    return triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
for job in jobs:
    assert built(*job, 90).asm["cubin"]
# Large heads on a small device: a program may have 99 KiB there.
large = {**constants, "HEADS": 16, "HEAD_DIM": 128, "BLOCK_D": 128}
for function in named:
    one = built(function, types, large, 89, num_warps=8, num_stages=attention_kernels.STAGES)
    assert one.metadata.shared <= 99 << 10
print(len(jobs))
"""


def test_the_kernels_compile_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    """The interpreter knows no types: a variable that changes its own in a loop is an error to the compiler alone."""
    assert int(compiled_elsewhere(COMPILE, tmp_path)) == 16
