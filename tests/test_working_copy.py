"""The bf16 copy of the weights: its gradients, how it follows the weights, and an update with all that CUDA has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, gradients_of, watch_gradients
from torch import Tensor, nn
from update_pieces import (
    DEVICE,
    device_learner,
    flat,
    grouped_examples,
    on_cuda,
    ragged_switch,
    through_kernels,
    with_working_copy,
)

from reasonlab.model import fused
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example
from reasonlab.train.learner import working_copy

kernels = pytest.fixture(through_kernels)
with_ragged = pytest.fixture(ragged_switch)


def test_gradients_of_the_working_copy_are_those_of_autocast() -> None:
    """Both differ from fp32 by the rounding of bf16, and the copy by no more than autocast."""
    exact = flat(gradients_of(EXAMPLES, LOSSES["grpo"])[1])
    learner = with_working_copy()
    seen = watch_gradients(learner)
    learner.step(EXAMPLES, LOSSES["grpo"])
    assert all(g.dtype == torch.float32 for g in seen[0])
    with torch.autocast("cpu", torch.bfloat16):
        automatic = flat(gradients_of(EXAMPLES, LOSSES["grpo"])[1])

    def away(g: Tensor) -> float:
        return float((g - exact).norm() / exact.norm())

    assert F.cosine_similarity(flat(seen[0]), automatic, dim=0) > 0.999
    assert away(flat(seen[0])) < 0.04
    assert away(automatic) < 0.04


@pytest.mark.parametrize("fills", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as it is", "filled up"])
@pytest.mark.skipif(DEVICE == "cuda", reason="the tests on a device do it in earnest")
def test_all_of_it_together(
    kernels: Any, with_ragged: Callable[[bool], None], fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update as it is on CUDA in bf16: the working copy, the kernels, ragged attention, and a shared prompt."""
    examples = [Example(EXAMPLES[0].prompt, e.response[:7], e.logprobs[:7], e.mask[:7], e.advantage) for e in EXAMPLES]
    with monkeypatch.context() as plain:
        for module in (fused, learner_module):
            plain.setattr(module, "uses_kernels", lambda x: False)
        expected, exact = gradients_of(examples, LOSSES["grpo"])
    with_ragged(True)
    learner = with_working_copy(token_budget=60)
    learner.graphs = learner.new_graphs() if fills else None
    seen = watch_gradients(learner)
    result = learner.step(examples, LOSSES["grpo"])
    away = flat(seen[0]) - flat(exact)
    assert float(away.norm() / flat(exact).norm()) < 0.05  # the interpreter cuts off where a device rounds
    assert result.loss == pytest.approx(expected.loss, abs=0.02)
    assert result.entropy == pytest.approx(expected.entropy, rel=0.02)


def test_the_working_copy_follows_the_weights() -> None:
    learner = with_working_copy(token_budget=40)
    where = [p.data_ptr() for p in learner.working_parameters]
    before = [p.clone() for p in learner.working_parameters]
    learner.step(EXAMPLES, LOSSES["sft"])
    for weight, copied in zip(learner.parameters, learner.working_parameters, strict=True):
        assert torch.equal(weight.to(torch.bfloat16), copied)
    assert any((a != b).any() for a, b in zip(before, learner.working_parameters, strict=True))
    assert [p.data_ptr() for p in learner.working_parameters] == where, (
        "captured graphs read the weights where they lie"
    )


def test_many_micro_batches_of_bf16_add_up_in_fp32() -> None:
    """As many parts of equal size: their sum in bf16 would stand still."""
    parts = [[torch.full((3,), 1.0 + i % 2 / 128, dtype=torch.bfloat16)] for i in range(1000)]
    total = None
    for part in parts:
        total = learner_module.add_in_fp32(total, part)
    assert total is not None
    assert total[0].tolist() == pytest.approx([sum(float(p[0][0]) for p in parts)] * 3)


def test_what_stands_around_a_transformer_stays_fp32() -> None:
    around = nn.ModuleDict({"backbone": small_model(), "head": nn.Linear(24, 1)})
    twin = working_copy(around)  # type: ignore[arg-type]
    dtypes = {name: p.dtype for name, p in twin.named_parameters()}
    assert {t for name, t in dtypes.items() if name.startswith("backbone")} == {torch.bfloat16}
    assert {t for name, t in dtypes.items() if name.startswith("head")} == {torch.float32}
    assert {p.dtype for p in around.parameters()} == {torch.float32}


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_cuda
def test_bf16_gradients_on_a_device_are_those_of_fp32() -> None:
    results = []
    for bfloat16 in (True, False):
        learner = device_learner(bfloat16=bfloat16, token_budget=200)
        seen = watch_gradients(learner)
        result = learner.step(grouped_examples(), LOSSES["grpo"])
        results.append((result, flat(seen[0])))
    (low, got), (high, expected) = results
    assert low.loss == pytest.approx(high.loss, abs=2e-2)
    assert float((got - expected).norm() / expected.norm()) < 0.1  # 0.06 on an H200, and 0.012 on real shapes
