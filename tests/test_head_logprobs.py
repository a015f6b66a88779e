"""The fused head: however its logits are cut and kept, its logprobs, entropies and gradients are those of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from update_pieces import DEVICE, assert_close, gradients, normal, on_cuda, through_kernels

from reasonlab.model import fused
from reasonlab.train import learner as learner_module
from reasonlab.train.learner import token_logprobs

kernels = pytest.fixture(through_kernels)


def head_case(tokens: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden, head = normal(tokens, 16, dtype=dtype), normal(vocabulary, 16, seed=1, dtype=dtype)
    return hidden, head, torch.arange(tokens, device=DEVICE) * 7 % vocabulary


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocabulary", "rows", "keep"), [(32, 50, True), (37, 8, False), (101, 3, False)])
@pytest.mark.parametrize("by", ["torch", "kernels"])
def test_the_fused_head(
    temperature: float,
    vocabulary: int,
    rows: int,
    keep: bool,
    by: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = head_case(20, vocabulary)
    for module in (fused, learner_module):
        monkeypatch.setattr(module, "uses_kernels", lambda x: False)
    expected, expected_entropy = token_logprobs(*case, temperature)
    expected_gradients = gradients([expected], case[:2])
    if by == "kernels":
        monkeypatch.setattr(request.getfixturevalue("kernels"), "VOCABULARY", 16)
    monkeypatch.setattr(fused, "logit_rows", lambda *_: (rows, keep))
    got, entropy = fused.head_logprobs(*case, temperature)
    assert not entropy.requires_grad
    assert_close([got, entropy], [expected, expected_entropy], 1e-6)
    assert_close(gradients([got], case[:2]), expected_gradients, 1e-6)


def test_the_fused_head_passes_the_test_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "logit_rows", lambda *_: (2, False))
    hidden, head, targets = (x.detach().cpu() for x in head_case(3, 5, torch.float64))
    assert torch.autograd.gradcheck(
        lambda h, w: fused.head_logprobs(h, w, targets, 0.8)[0].double(),
        (hidden.requires_grad_(), head.requires_grad_()),
        eps=1e-2,
        atol=1e-2,  # the sums are fp32
    )


def test_the_head_of_bf16_rounds_no_more_than_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = head_case(40, 64, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    expected = (exact[0] @ exact[1].T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    got, _ = fused.head_logprobs(hidden, head, targets, 1.0)
    assert got.dtype == torch.float32
    assert_close([got], [expected], 1e-2)
    for mine, theirs in zip(gradients([got], [hidden, head]), gradients([expected], exact), strict=True):
        assert mine.dtype == torch.bfloat16
        assert F.cosine_similarity(mine.double().flatten(), theirs.flatten(), dim=0) > 0.9999


def test_kept_logits_serve_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "logit_rows", lambda *_: (20, True))
    hidden, head, targets = head_case(20, 32)
    logprobs, _ = fused.head_logprobs(hidden, head, targets, 1.0)
    torch.autograd.grad(logprobs.sum(), [hidden], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(logprobs.sum(), [hidden])


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, targets = head_case(5, 32)
    logprobs, _ = fused.head_logprobs(hidden, head.detach(), targets, 1.0)
    assert_close(gradients([logprobs], [hidden]), gradients([token_logprobs(hidden, head, targets)[0]], [hidden]))


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@on_cuda
def test_kept_logits_are_the_recomputed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, targets = head_case(300, 5000, torch.bfloat16)
    results = []
    for share in (16, 1 << 40):
        monkeypatch.setattr(fused, "KEPT_SHARE", share)
        assert fused.logit_rows(300, head, True)[1] is (share == 16)
        logprobs, entropy = fused.head_logprobs(hidden, head, targets, 0.9)
        results.append([logprobs, entropy, *gradients([logprobs], [hidden, head])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
