"""What the backward pass adds to the sums of a step are the gradients of autograd: each part once, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import small_model
from test_learner import LOSSES, make_examples, settings, watch_gradients
from torch import Tensor
from update_pieces import (
    DEVICE,
    ROUNDING,
    apart,
    assert_close,
    captured_shapes,
    device_gradients,
    grouped_examples,
    half_shared,
    on_cuda,
    plain_ragged,
    plain_ragged_backward,
)

from reasonlab.model import accumulate, attention, fused
from reasonlab.model.accumulate import Embedding, Linear, add_product, addmm_takes, into, sum_of
from reasonlab.model.lora import add_lora
from reasonlab.model.transformer import Transformer
from reasonlab.train import graphs
from reasonlab.train import learner as learner_module
from reasonlab.train.learner import Learner, working_copy


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    """What is found out about a patched torch is forgotten again."""
    addmm_takes.cache_clear()
    yield
    addmm_takes.cache_clear()


# --- one operation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_a_product_is_added_to_the_sum(bias: bool, dtype: torch.dtype, bound: float) -> None:
    layer = Linear(5, 3, bias=bias).to(dtype)
    total, before = normal(3, 5), normal(3, 5)
    expected = before.clone()
    for seed in (1, 2):  # two micro-batches
        x, g = normal(7, 5, seed=seed, dtype=dtype).requires_grad_(), normal(7, 3, seed=seed + 9, dtype=dtype)
        inputs = [x, *layer.parameters()]
        of_x, of_weight, *of_bias = torch.autograd.grad(layer(x), inputs, g)
        expected += of_weight
        with into({layer.weight: total}):
            y = layer(x)
        got = torch.autograd.grad(y, inputs, g, allow_unused=True)
        assert got[1] is None
        assert_close([y, got[0], *got[2:]], [F.linear(x, layer.weight, layer.bias), of_x, *of_bias], bound)
    assert_close([total], [expected], bound)
    assert not torch.equal(total, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_the_sum(dtype: torch.dtype) -> None:
    table = Embedding(9, 4).to(dtype)
    ids, g = torch.tensor([5, 3, 0, 3, 8, 3, 0]), normal(7, 4, dtype=dtype)
    total = normal(9, 4)
    expected = total.clone()
    for i, row in zip(ids.tolist(), g, strict=True):
        expected[i] += row
    untouched = total[[1, 2, 4, 6, 7]]
    with into({table.weight: total}):
        y = table(ids)
    assert torch.equal(y, table.weight[ids])
    assert torch.autograd.grad(y, [table.weight], g, allow_unused=True) == (None,)
    assert_close([total], [expected], 1e-6)
    assert torch.equal(total[[1, 2, 4, 6, 7]], untouched)


@pytest.mark.parametrize(("rows", "keep"), [(50, True), (50, False), (7, False)])
def test_the_head_adds_its_chunks_to_the_sum(rows: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "logit_rows", lambda *_: (rows, keep))
    hidden, head = normal(20, 16).requires_grad_(), normal(37, 16, seed=1).requires_grad_()
    targets, slopes = torch.arange(20) * 7 % 37, normal(20, seed=2)

    def differentiate() -> tuple[Tensor | None, ...]:
        logprobs, _ = fused.head_logprobs(hidden, head, targets, 0.8)
        return torch.autograd.grad(logprobs, [hidden, head], slopes, allow_unused=True)

    of_hidden, of_head = differentiate()
    assert of_hidden is not None
    assert of_head is not None
    total = torch.ones_like(head)
    with into({head: total}):
        got = differentiate()
    assert got[0] is not None
    assert got[1] is None
    assert_close([got[0], total], [of_hidden, of_head + 1], 1e-6)


def test_without_sums_nothing_changes() -> None:
    layer, other, x = Linear(5, 3), Linear(5, 3), normal(7, 5)
    plain = torch.nn.Linear(5, 3)
    plain.load_state_dict(layer.state_dict())
    expected = torch.autograd.grad(plain(x).cos().sum(), list(plain.parameters()))
    total = torch.zeros(3, 5)

    def assert_plain() -> None:
        y = layer(x)
        assert torch.equal(y, plain(x))
        got = torch.autograd.grad(y.cos().sum(), list(layer.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    assert_plain()
    with into({other.weight: total}):
        assert_plain()
    with into({layer.weight: total}), ThreadPoolExecutor(1) as pool:
        assert sum_of(layer.weight) is total
        pool.submit(assert_plain).result()  # what others compute meanwhile is not a part of the step
        with torch.no_grad():
            assert torch.equal(layer(x), plain(x))
    with pytest.raises(ZeroDivisionError), into({layer.weight: total}):
        raise ZeroDivisionError
    assert_plain()
    assert not total.any()


def test_a_weight_that_is_also_used_otherwise() -> None:
    """What does not go to the sum comes from autograd, so that together they are the gradient."""
    layer, x, total = Linear(5, 5, bias=False), normal(7, 5), torch.zeros(5, 5)

    def value() -> Tensor:
        return (layer(layer(x)).cos() * F.linear(x, layer.weight)).sum() + layer.weight.square().sum()

    expected = torch.autograd.grad(value(), [layer.weight])
    with into({layer.weight: total}):
        summed = value()
    rest = torch.autograd.grad(summed, [layer.weight], allow_unused=True)[0]
    assert rest is not None
    assert total.any()
    assert_close([total + rest], expected)


# --- one call for product and sum ------------------------------------------------------------------------------------


def addmm_as_on_cuda(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    assert out_dtype == torch.float32
    assert a.dtype == b.dtype
    return out.copy_(total + a.float() @ b.float())


def addmm_that_rounds(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    return out.copy_(total + a @ b)


def addmm_that_forgets(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    return out.copy_(a.float() @ b.float())


def addmm_that_refuses(*_: Tensor, **__: Any) -> Tensor:
    raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


def addmm_of_old(total: Tensor, a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    raise AssertionError("is not called: it knows no out_dtype")


@pytest.mark.parametrize("by", [addmm_that_refuses, addmm_of_old, addmm_that_rounds, addmm_that_forgets])
def test_a_torch_that_cannot_do_it_is_found_out(by: Any, fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "addmm", by)
    g, x, total = normal(7, 3, dtype=torch.bfloat16), normal(7, 5, seed=1, dtype=torch.bfloat16), normal(3, 5, seed=2)
    expected = total + (g.T @ x).float()
    assert not addmm_takes(x.device, x.dtype)
    add_product(total, g, x)
    assert torch.equal(total, expected)


def test_a_torch_that_can_do_it_is_asked_once(fresh_probe: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(total: Tensor, a: Tensor, b: Tensor, **how: Any) -> Tensor:
        calls.append(a.shape)
        return addmm_as_on_cuda(total, a, b, **how)

    monkeypatch.setattr(torch, "addmm", counted)
    g, x, total = normal(7, 3, dtype=torch.bfloat16), normal(7, 5, seed=1, dtype=torch.bfloat16), normal(3, 5, seed=2)
    expected = total + 2 * g.float().T @ x.float()
    assert addmm_takes(x.device, x.dtype)
    for _ in range(2):
        add_product(total, g, x)
    assert_close([total], [expected], 1e-6)
    assert calls[1:] == [(3, 7), (3, 7)]


def test_torch_refuses_it_on_the_cpu(fresh_probe: None) -> None:
    assert not addmm_takes(torch.device("cpu"), torch.bfloat16)


# --- a step ----------------------------------------------------------------------------------------------------------


SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen2 untied": {"architecture": "qwen2", "qkv_bias": True, "tied": False},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
    "output bias": {"qkv_bias": True, "output_bias": True},
}
BUDGET = 100


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that adds to sums on CUDA does so here: the head as well, and attention by plain torch."""
    monkeypatch.setattr(attention, "takes_ragged", lambda q: True)
    monkeypatch.setattr(attention, "ragged_forward", plain_ragged)
    monkeypatch.setattr(attention, "ragged_backward", plain_ragged_backward)
    monkeypatch.setattr(learner_module, "uses_kernels", lambda x: True)


def step_gradients(model: Transformer, sums: bool, low: bool = False) -> list[Tensor]:
    """What reaches the optimizer in a step of several micro-batches."""
    learner = Learner(model, settings(token_budget=BUDGET))
    if low:
        learner.working = working_copy(model)
        learner.working_parameters = [p for p in learner.working.parameters() if p.requires_grad]
    learner.graphs = learner.new_graphs() if sums else None
    seen = watch_gradients(learner)
    learner.step(half_shared(), LOSSES["grpo"])
    return seen[0]


def watch_rest(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The dimensions of the gradients that autograd returns, one list for each micro-batch."""
    seen: list[list[int]] = []
    original = graphs.add_mixed

    def note(sums: list[Tensor], gradients: list[Tensor]) -> None:
        seen.append([g.dim() for g in gradients])
        original(sums, gradients)

    monkeypatch.setattr(graphs, "add_mixed", note)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sums_of_a_step_are_its_gradients(shape: str, summing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step_gradients(small_model(seed=2, **SHAPES[shape]), sums=False)
    rest = watch_rest(monkeypatch)
    model = small_model(seed=2, **SHAPES[shape])
    assert_close(step_gradients(model, sums=True), expected)
    assert len(rest) > 2
    small = sum(p.dim() == 1 for p in model.parameters())
    assert all(dimensions == [1] * small for dimensions in rest), "no matrix comes from autograd"


@pytest.mark.parametrize("one_call", [False, True], ids=["two calls", "one call"])
@pytest.mark.parametrize("shape", ["tied", "qwen2 untied"])
def test_the_sums_of_a_bf16_copy(
    shape: str, one_call: bool, summing: None, fresh_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step_gradients(small_model(seed=2, **SHAPES[shape]), sums=False, low=True)
    if one_call:
        monkeypatch.setattr(torch, "addmm", addmm_as_on_cuda)
    got = step_gradients(small_model(seed=2, **SHAPES[shape]), sums=True, low=True)
    assert all(g.dtype == torch.float32 for g in got)
    assert addmm_takes(torch.device("cpu"), torch.bfloat16) is one_call
    for mine, theirs in zip(got, expected, strict=True):
        assert apart([mine], [theirs]) < ROUNDING


def test_a_head_without_a_sum_of_its_own(summing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where plain torch computes the logits, the head's part comes from autograd and the embedding's does not."""
    monkeypatch.setattr(learner_module, "uses_kernels", lambda x: False)
    rest = watch_rest(monkeypatch)
    expected = step_gradients(small_model(seed=2), sums=False)
    assert_close(step_gradients(small_model(seed=2), sums=True), expected)
    assert all(dimensions.count(2) == 1 for dimensions in rest)


TRAINED = {
    "first matrix": ["blocks.0.attention.qkv.weight"],
    "embedding": ["embedding.weight"],
    "matrices": ["qkv.weight", "output.weight", "gate_up.weight", "down.weight", "embedding.weight"],
    "norms": ["norm.weight"],
    "last layer": ["blocks.1.", "head."],
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("trained", TRAINED)
def test_frozen_parts_do_not_hide_the_others(trained: str, tied: bool, summing: None) -> None:
    results = []
    for sums in (False, True):
        model = small_model(seed=2, tied=tied)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in TRAINED[trained]))
        results.append(step_gradients(model, sums))
    assert all(g.any() for g in results[0])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("thawed", [False, True], ids=["adapters", "and a base weight"])
def test_adapters(thawed: bool, summing: None) -> None:
    results = []
    for sums in (False, True):
        model = small_model(seed=2, qkv_bias=True)
        add_lora(model, rank=2, alpha=4, targets=("q_proj", "v_proj", "down_proj"))
        if thawed:
            model.blocks[0].attention.qkv.weight.requires_grad_()
            model.blocks[0].feed_forward.gate_up.weight.requires_grad_()
        results.append(step_gradients(model, sums))
    assert_close(results[1], results[0])


def test_a_pack_that_the_graphs_do_not_take(summing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second micro-batch is differentiated by the learner itself, and added to the same sums."""
    expected = step_gradients(small_model(seed=2), sums=False)
    original, asked = graphs.UpdateGraphs.forward, []

    def every_second(self: graphs.UpdateGraphs, layout: Any) -> graphs.Pass | None:
        asked.append(layout)
        return original(self, layout) if len(asked) % 2 else None

    monkeypatch.setattr(graphs.UpdateGraphs, "forward", every_second)
    assert_close(step_gradients(small_model(seed=2), sums=True), expected)
    assert len(asked) > 2


def test_torch_is_tried_before_the_first_pass(summing: None, fresh_probe: None) -> None:
    """A captured pass could not wait for the answer."""
    learner = Learner(small_model(seed=2), settings())
    learner.graphs = learner.new_graphs()
    learner.graphs.begin()
    asked = addmm_takes.cache_info().misses
    assert asked == 1
    device_gradients(learner, make_examples())
    assert addmm_takes.cache_info().misses == asked


def test_gradients_of_two_dtypes_are_added() -> None:
    sums = [torch.ones(3), torch.zeros(2, 2)]
    parts = [torch.full((3,), 1 / 128, dtype=torch.bfloat16), torch.eye(2)]
    for _ in range(2):
        graphs.add_mixed(sums, parts)
    assert_close(sums, [torch.full((3,), 1 + 2 / 128), 2 * torch.eye(2)], 0)


# --- on a device -----------------------------------------------------------------------------------------------------


def device_model(**shape: Any) -> Transformer:
    sizes: dict[str, Any] = {"head_dim": 32, "heads": 4, "kv_heads": 2, "hidden_size": 128, "intermediate_size": 320}
    return small_model(seed=2, scale=0.1, **sizes | shape).to(DEVICE)


@pytest.mark.parametrize("one_call", [False, True], ids=["two calls", "as torch can"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.gpu
@on_cuda
def test_captured_sums_are_the_launched_ones_and_those_of_autograd(
    shape: str, one_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_call:
        monkeypatch.setattr(accumulate, "addmm_takes", lambda *_: False)
    examples = grouped_examples()
    learner = Learner(device_model(**SHAPES[shape]), settings(token_budget=BUDGET))
    assert learner.graphs is not None
    monkeypatch.setattr(graphs, "CAPTURE", False)
    plain = Learner(device_model(**SHAPES[shape]), settings(token_budget=BUDGET))
    assert plain.graphs is None
    expected = device_gradients(plain, examples)
    monkeypatch.setattr(learner.graphs, "room", False)  # nothing is captured
    launched = device_gradients(learner, examples)
    assert captured_shapes(learner) == 0
    learner.graphs.room = True
    for _ in range(3):
        captured = device_gradients(learner, examples)
    assert captured_shapes(learner) == len(learner.graphs.slots)
    for got in (captured, launched):
        assert apart(got, expected) < ROUNDING
        for mine, right in zip(got, expected, strict=True):
            assert apart([mine], [right]) < 5 * ROUNDING  # counted twice it would be 1


@pytest.mark.gpu
@on_cuda
def test_rows_are_added_with_the_same_bits() -> None:
    ids = torch.arange(5000, device=DEVICE) % 7
    g = normal(5000, 64, dtype=torch.bfloat16).to(DEVICE)
    sums = [torch.ones(100, 64, device=DEVICE) for _ in range(5)]
    for total in sums:
        accumulate.add_rows(total, ids, g)
    assert all(torch.equal(total, sums[0]) for total in sums)
    expected = torch.ones(100, 64, device=DEVICE).double().index_add_(0, ids, g.double())
    assert_close([sums[0]], [expected], 1e-6)
