"""A step of the learner: it waits for the device only at its end, moves what may move, and can keep less."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, new_learner, settings, watch_gradients
from torch import Tensor
from update_pieces import DEVICE, device_learner, grouped_examples, on_cuda, packs_of

from reasonlab.train import graphs
from reasonlab.train.learner import Learner


def test_nothing_is_read_from_the_device_between_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `float(tensor)` waits for the device, however many micro-batches there are, only at the end of a step.

    On the CPU, where waiting costs nothing, it is asked twice whether to move, and then for the norm."""
    reads = 0
    original = Tensor.item

    def count(self: Tensor) -> Any:
        nonlocal reads
        reads += 1
        return original(self)

    def count_float(self: Tensor) -> float:
        return float(count(self))

    monkeypatch.setattr(Tensor, "item", count)
    monkeypatch.setattr(Tensor, "__float__", count_float)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: bool(count(self)))
    for budget in (1, 1000):
        reads = 0
        new_learner(token_budget=budget).step(EXAMPLES, LOSSES["grpo"])
        assert reads == 3, "the numbers come through tolist"


def test_the_mean_mismatch() -> None:
    learner = new_learner(token_budget=40)
    now = learner.logprobs(EXAMPLES)
    distances = np.concatenate([np.abs(a - e.logprobs)[e.mask] for a, e in zip(now, EXAMPLES, strict=True)])
    result = learner.step(EXAMPLES, LOSSES["sft"])
    assert result.mean_mismatch == pytest.approx(distances.mean(), rel=1e-5)
    assert result.mismatch == pytest.approx(distances.max(), rel=1e-5)


def test_frozen_weights_are_not_learned() -> None:
    model = small_model(seed=2)
    model.embedding.weight.requires_grad_(False)
    learner = Learner(model, settings())
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner.step(EXAMPLES, LOSSES["sft"])
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(before) - {"embedding.weight"}


def test_recomputed_layers_give_the_same_gradients_and_keep_less() -> None:
    kept: dict[bool, int] = {}
    results = {}
    for recompute in (False, True):
        learner = new_learner(recompute=recompute)
        assert learner.model.recompute is recompute
        seen = watch_gradients(learner)
        sizes: list[int] = []

        def keep(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            learner._forward(EXAMPLES, with_entropy=True)
        kept[recompute] = sum(sizes)
        results[recompute] = (learner.step(EXAMPLES, LOSSES["grpo"]), seen[0])
    assert results[True][0] == results[False][0]
    assert all(torch.equal(a, b) for a, b in zip(results[True][1], results[False][1], strict=True))
    assert kept[True] < kept[False] / 3


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [False, True], ids=["launched", "captured"])
@pytest.mark.gpu
@on_cuda
def test_micro_batches_do_not_wait_for_the_device(capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CAPTURE", capture)
    learner, examples = device_learner(token_budget=100), grouped_examples()
    assert (learner.graphs is not None) is capture
    packs = packs_of(learner, examples)
    assert len(packs) > 2
    for _ in range(4):  # compiles the kernels, and captures
        list(learner.gradients(packs))
    if learner.graphs is not None:
        assert all(slot.captured for slot in learner.graphs.slots.values())
    learner.step(examples, LOSSES["grpo"])  # the optimizer makes its moments
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = list(learner.gradients(packs))
        gradients = learner.graphs.sums if learner.graphs else [g.float() for g in parts[0].gradients]
        learner._move(gradients, [part.loss for part in parts], lr=1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(parts) == len(packs)


@pytest.mark.gpu
@on_cuda
def test_clipping_inside_the_optimizer_is_that_outside() -> None:
    """Three clipped steps from the same gradients, one of them not finite, on both devices."""
    change = settings(clip_grad_norm=0.1, bfloat16=False)
    learners = [Learner(small_model(seed=2).to(device), change) for device in ("cpu", DEVICE)]
    generator = torch.Generator().manual_seed(0)
    steps = [[torch.randn(p.shape, generator=generator) for p in learners[0].parameters] for _ in range(3)]
    steps[1][0].view(-1)[0] = float("nan")
    for learner in learners:
        for gradients in steps:
            mine = [gradient.to(learner.device, copy=True) for gradient in gradients]
            norm = learner._move(mine, [torch.zeros((), device=learner.device)], lr=1e-3)
            assert bool(norm.isfinite()) is not any(bool(g.isnan().any()) for g in gradients)
        before = [p.detach().clone() for p in learner.parameters]
        learner._move(
            [g.to(learner.device) for g in steps[0]], [torch.tensor(math.nan, device=learner.device)], lr=1e-3
        )
        assert all(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True)), "no loss is finite"
    for ours, theirs in zip(learners[1].parameters, learners[0].parameters, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-6, rtol=1e-5)
