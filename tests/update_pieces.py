"""What the tests of a fast update share: numbers to compare, the parts that only CUDA has, examples and learners.

Without CUDA the Triton kernels run in Triton's interpreter. Those of attention are replaced, where they are not the
matter, by what they compute; what is built around them is the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_model
from test_learner import make_examples, new_learner, settings
from torch import Tensor

from reasonlab.methods.sft import sft_loss
from reasonlab.model import attention, fused
from reasonlab.model.attention import Ragged
from reasonlab.model.lora import add_lora
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, Totals, micro_batches
from reasonlab.train.learner import Learner, Loss, Objective, add_in_fp32, working_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
ROUNDING = 0.02  # of bf16, where matrices of other sizes are multiplied in another order


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seed: int = 9) -> list[Tensor]:
    """Of a random combination of the outputs."""
    weights = [normal(*out.shape, seed=seed + i).detach().to(out.dtype) for i, out in enumerate(outputs)]
    return list(torch.autograd.grad(outputs, inputs, weights))


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 2e-6) -> None:
    """Differences are measured against the largest number of a tensor."""
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape
        size = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.float(), b.float(), atol=bound * size, rtol=0)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def apart(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return float((flat(got) - flat(expected)).norm() / flat(expected).norm())


# --- what CUDA has, without CUDA -------------------------------------------------------------------------------------


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, and everything in `fused` going through them."""
    pytest.importorskip("triton", reason="needs Triton")
    from reasonlab.model import kernels

    if DEVICE == "cpu":
        from triton.runtime import interpreter

        patch = interpreter._patch_lang_tensor

        def patch_with_index(tensor: Any, scope: Any) -> None:
            """Triton 3.6 makes an index of an array of one element, which NumPy 2.4 refuses."""
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
    monkeypatch.setattr(fused, "uses_kernels", lambda x: True)
    monkeypatch.setattr(learner_module, "uses_kernels", lambda x: True)
    return kernels


def compiled_elsewhere(script: str, cache: Path) -> str:
    """What a script prints that compiles kernels, in a process in which Triton does not interpret them."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def plain_ragged(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """What the kernels compute, block by block of their table."""
    out, total = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan, device=q.device)
    for scores, here, there in ragged_scores(q, k, ragged):
        value = v[there].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(q.dtype)
        total[:, here] = scores.logsumexp(-1)
    return out, total


def plain_ragged_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    gradient, out = gradient.float(), out.float()
    for scores, here, there in ragged_scores(q, k, ragged):
        weights = (scores - total[:, here, None]).exp()
        key, value = (x[there].float().repeat_interleave(group, 1) for x in (k, v))
        along = torch.einsum("qhd,khd->hqk", gradient[here], value)
        slope = weights * (along - (gradient[here] * out[here]).sum(-1).T[:, :, None]) * q.shape[-1] ** -0.5
        of_q[here] += torch.einsum("hqk,khd->qhd", slope, key)
        of_k.index_add_(0, there, torch.einsum("hqk,qhd->khd", slope, q[here].float()).unflatten(1, (-1, group)).sum(2))
        of_v.index_add_(
            0, there, torch.einsum("hqk,qhd->khd", weights, gradient[here]).unflatten(1, (-1, group)).sum(2)
        )
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def ragged_scores(q: Tensor, k: Tensor, ragged: Ragged) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The scores of the queries of each block, with the tokens they come from and the keys they see."""
    assert ragged.blocks.dtype == torch.int32
    result = []
    for first, start, end, asked, asked_end in ragged.blocks.T.tolist():
        if first >= end:
            continue
        here = torch.arange(first, min(first + attention.BLOCK, end), device=q.device)
        own = torch.arange(start, int(here[-1]) + 1, device=q.device)
        before = own[:0] if ragged.at is None else ragged.at[asked:asked_end]
        there = torch.cat((before, own))
        key = k[there].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q[here].float(), key) * q.shape[-1] ** -0.5
        later = torch.cat((torch.zeros_like(before), own))[None, :] > here[:, None]
        result.append((scores.masked_fill(later, -torch.inf), here, there))
    return result


def ragged_switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Attention to sequences as they lie, whose kernels are replaced by what they compute."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(attention, "takes_ragged", lambda q: on)
        monkeypatch.setattr(attention, "ragged_forward", plain_ragged)
        monkeypatch.setattr(attention, "ragged_backward", plain_ragged_backward)

    return switch


def with_working_copy(**changes: Any) -> Learner:
    """A learner as it is on CUDA in bf16, without CUDA."""
    learner = new_learner(**changes)
    learner.working = working_copy(learner.model)
    learner.working_parameters = list(learner.working.parameters())
    return learner


# --- examples and learners -------------------------------------------------------------------------------------------


def half_shared(count: int = 9, seed: int = 0) -> list[Example]:
    """Every second example has the prompt of the first."""
    examples = make_examples(count, seed)
    for e in examples[::2]:
        e.prompt = examples[0].prompt
    return examples


def grouped_examples() -> list[Example]:
    examples = make_examples(24)
    for i, e in enumerate(examples):
        e.prompt = examples[i - i % 4].prompt
    return examples


def device_learner(adapters: bool = False, **changes: Any) -> Learner:
    shape: dict[str, Any] = {"head_dim": 32, "heads": 4, "kv_heads": 2, "hidden_size": 128, "intermediate_size": 320}
    model = small_model(seed=2, scale=0.1, **shape)
    if adapters:
        add_lora(model, rank=4, alpha=8)
    return Learner(model.to(DEVICE), settings(**changes))


def packs_of(
    learner: Learner, examples: Sequence[Example], loss: Loss = sft_loss
) -> list[tuple[Sequence[Example], Objective]]:
    objective = Objective(examples, loss, Totals.of(examples))
    return [(some, objective) for some in micro_batches(examples, learner.config.token_budget)]


def device_gradients(learner: Learner, examples: Sequence[Example], loss: Loss = sft_loss) -> list[Tensor]:
    """Of one step, without moving the weights. The loss has no clipping, where rounding could decide."""
    total: list[Tensor] | None = None
    for part in learner.gradients(packs_of(learner, examples, loss)):
        total = learner.graphs.sums if learner.graphs is not None else add_in_fp32(total, part.gradients)
    assert total is not None
    return [x.clone() for x in total]


def captured_shapes(learner: Learner) -> int:
    assert learner.graphs is not None
    return sum(slot.captured is not None for slot in learner.graphs.slots.values())
