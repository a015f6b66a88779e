"""The fast parts of an update compute what the plain ones compute: kernels, the head, ragged attention, bf16 weights.

Without CUDA the Triton kernels run in Triton's interpreter, and the flash kernels of torch are replaced by what they
are documented to compute; what is built around them is the real thing.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, gradients_of, make_examples, new_learner, settings, watch_gradients
from torch import Tensor, nn

from reasonlab.judges.formats import Encoded
from reasonlab.judges.network import Pack
from reasonlab.model import attention, fused
from reasonlab.model.attention import PackedCausal, Span
from reasonlab.model.rope import rotate
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, Layout, Totals, micro_batches
from reasonlab.train.learner import Learner, token_logprobs, working_copy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BENCHMARK = Path(__file__).parents[1] / "benchmarks/update.py"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


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


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
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
from reasonlab.model import kernels

low, high, number, ids = "*bf16", "*fp32", "i32", "*i64"
types = {
    **dict.fromkeys(("branch", "weight", "normed", "of_normed", "of_branch", "gate_up", "of_out", "gradient"), low),
    **dict.fromkeys(("out", "x", "logits"), low),
    **dict.fromkeys(("total", "inverse", "of_total", "of_x", "parts", "cos", "sin"), high),
    **dict.fromkeys(("logprobs", "entropies", "totals", "slopes"), high),
    **dict.fromkeys(("width", "tokens", "programs", "turned", "heads", "half", "vocabulary"), number),
    **dict.fromkeys(("eps", "sign", "factor"), "fp32"),
    "targets": ids,
}
constants = {"WITH_BRANCH": True, "WITH_TOTAL": True, "BLOCK": 1024, "HEADS": 16, "HALF": 32}
functions = [f for f in vars(kernels).values() if isinstance(f, triton.JITFunction)]
for function in functions:
    own = {(i,): constants[name] for i, name in enumerate(function.arg_names) if name in constants}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=own)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print(len(functions))
"""


def test_the_kernels_compile_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    """The interpreter knows no types: a variable that changes its own in a loop is an error to the compiler alone."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 7


# --- the head --------------------------------------------------------------------------------------------------------


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


# --- ragged attention ------------------------------------------------------------------------------------------------


def plain_flash(q: Tensor, k: Tensor, v: Tensor, queries: Span, keys: Span, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention as its kernels define it, query by query: no keys give zeros and a total of +∞."""
    out, total = torch.zeros_like(q), torch.full((q.shape[1], len(q)), torch.inf, device=q.device)
    for scores, here, there in flash_scores(q, k, queries, keys, causal):
        if scores.numel():
            value = v[there].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[here] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(q.dtype)
            total[:, here] = scores.logsumexp(-1)
    return out, total


def plain_flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    queries: Span,
    keys: Span,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    gradient, out = gradient.float(), out.float()
    for scores, here, there in flash_scores(q, k, queries, keys, causal):
        weights = (scores - total[:, here, None]).exp()
        key, value = (x[there].float().repeat_interleave(group, 1) for x in (k, v))
        along = torch.einsum("qhd,khd->hqk", gradient[here], value)
        slope = weights * (along - (gradient[here] * out[here]).sum(-1).T[:, :, None]) * q.shape[-1] ** -0.5
        of_q[here] += torch.einsum("hqk,khd->qhd", slope, key)
        of_k[there] += torch.einsum("hqk,qhd->khd", slope, q[here].float()).unflatten(1, (-1, group)).sum(2)
        of_v[there] += torch.einsum("hqk,qhd->khd", weights, gradient[here]).unflatten(1, (-1, group)).sum(2)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


def flash_scores(q: Tensor, k: Tensor, queries: Span, keys: Span, causal: bool) -> list[tuple[Tensor, slice, slice]]:
    assert queries.bounds.dtype == keys.bounds.dtype == torch.int32
    assert len(queries.bounds) == len(keys.bounds)
    assert queries.bounds[-1] == len(q)
    assert keys.bounds[-1] == len(k)
    assert queries.longest == int(queries.bounds.diff().max())
    assert keys.longest == int(keys.bounds.diff().max())
    result = []
    for i in range(len(queries.bounds) - 1):
        here, there = (slice(int(span.bounds[i]), int(span.bounds[i + 1])) for span in (queries, keys))
        key = k[there].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q[here].float(), key) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        result.append((scores, here, there))
    return result


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Attention by way of the flash kernels, which are replaced where there is no CUDA."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(attention, "flash_takes", lambda q: on)
        monkeypatch.setattr(attention, "flash_forward", plain_flash)
        monkeypatch.setattr(attention, "flash_backward", plain_flash_backward)

    return switch


def shared_prompts(groups: Sequence[tuple[int, Sequence[int]]]) -> tuple[list[int], np.ndarray]:
    """Prompts of such lengths, each with responses of such lengths, laid out as a learner does it."""
    examples = []
    for number, (prompt, responses) in enumerate(groups):
        for n in responses:
            examples.append(
                Example(np.full(prompt, number), np.zeros(n, int), np.zeros(n, np.float32), np.ones(n, bool))
            )
    layout = Layout.of(examples)
    return layout.lengths, layout.sequences


def candidate(ids: Sequence[int]) -> Encoded:
    return Encoded(np.array(ids), np.zeros(0, np.int64), len(ids) - 1)


def tree() -> tuple[list[int], np.ndarray]:
    """Candidates that share beginnings of several lengths with the one before: what judges read."""
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 6, 7, 8], [1, 2, 3, 6, 7, 9], [1, 2, 3, 6, 7, 9], [4, 4], [4, 5]]
    pack = Pack.of([candidate(ids) for ids in texts])
    return pack.lengths, pack.sequences


LAYOUTS = {
    "apart": ([5, 1, 9, 3], None),
    "one": ([7], None),
    "prompts": shared_prompts([(4, (6, 3, 9)), (7, (2,)), (1, (1, 5)), (3, (1, 1, 4))]),
    "answers of one token": shared_prompts([(4, (1, 1)), (2, (1,))]),
    "tree": tree(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ragged_attention_is_padded_attention(name: str, kv_heads: int, with_flash: Callable[[bool], None]) -> None:
    lengths, tokens = LAYOUTS[name]
    packed = PackedCausal(lengths, DEVICE, tokens)
    assert packed.ragged is not None
    q, k, v = (normal(packed.count, heads, 8, seed=i) for i, heads in enumerate((4, kv_heads, kv_heads)))
    results = []
    for on in (False, True):
        with_flash(on)
        out = packed(0, q, k, v)
        results.append([out, *gradients([out], [q, k, v])])
    assert_close(results[1], results[0])


def test_a_group_asks_its_prompt_once() -> None:
    lengths, tokens = shared_prompts([(4, (6, 3, 9)), (7, (2, 2))])
    ragged = PackedCausal(lengths, "cpu", tokens).ragged
    assert ragged is not None
    assert ragged.queries is not None
    assert ragged.keys is not None
    assert ragged.own.bounds.tolist() == [0, 9, 11, 19, 27, 28]
    assert ragged.queries.bounds.tolist() == [0, 9, 19, 27, 28]
    assert ragged.keys.bounds.tolist() == [0, 0, 4, 4, 11]
    assert ragged.at is not None
    assert ragged.at.tolist() == [0, 1, 2, 3, 19, 20, 21, 22, 23, 24, 25]


def test_tokens_in_another_order_are_padded(with_flash: Callable[[bool], None]) -> None:
    tokens = np.array([1, 0, 2, 1, 3])
    packed = PackedCausal([3, 2], DEVICE, tokens)
    assert packed.ragged is None
    with_flash(True)
    q = normal(4, 2, 8)
    assert packed(0, q, q, q).shape == q.shape


def test_a_learner_with_ragged_attention(with_flash: Callable[[bool], None]) -> None:
    examples = [Example(e.prompt[:3], e.response, e.logprobs, e.mask, e.advantage) for e in EXAMPLES]
    for e in examples[::2]:
        e.prompt = examples[0].prompt
    with_flash(False)
    expected_result, expected = gradients_of(examples, LOSSES["grpo"], token_budget=150)
    with_flash(True)
    result, got = gradients_of(examples, LOSSES["grpo"], token_budget=150)
    assert_close(got, expected)
    assert result.loss == pytest.approx(expected_result.loss, abs=1e-6)


# --- bf16 weights ----------------------------------------------------------------------------------------------------


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


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


def with_working_copy(**changes: Any) -> Learner:
    """A learner as it is on CUDA in bf16, without CUDA."""
    learner = new_learner(**changes)
    learner.working = working_copy(learner.model)
    learner.working_parameters = list(learner.working.parameters())
    return learner


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests on a device do it in earnest")
def test_all_of_it_together(kernels: Any, with_flash: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An update as it is on CUDA in bf16: the working copy, the kernels, ragged attention, and a shared prompt."""
    examples = [Example(EXAMPLES[0].prompt, e.response[:7], e.logprobs[:7], e.mask[:7], e.advantage) for e in EXAMPLES]
    with monkeypatch.context() as plain:
        for module in (fused, learner_module):
            plain.setattr(module, "uses_kernels", lambda x: False)
        expected, exact = gradients_of(examples, LOSSES["grpo"])
    with_flash(True)
    learner = with_working_copy(token_budget=60)
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


def test_frozen_weights_are_not_learned() -> None:
    model = small_model(seed=2)
    model.embedding.weight.requires_grad_(False)
    learner = Learner(model, settings())
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner.step(EXAMPLES, LOSSES["sft"])
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(before) - {"embedding.weight"}


# --- memory, numbers, packing ----------------------------------------------------------------------------------------


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


def test_the_mean_mismatch() -> None:
    learner = new_learner(token_budget=40)
    now = learner.logprobs(EXAMPLES)
    distances = np.concatenate([np.abs(a - e.logprobs)[e.mask] for a, e in zip(now, EXAMPLES, strict=True)])
    result = learner.step(EXAMPLES, LOSSES["sft"])
    assert result.mean_mismatch == pytest.approx(distances.mean(), rel=1e-5)
    assert result.mismatch == pytest.approx(distances.max(), rel=1e-5)


def test_nothing_is_read_from_the_device_between_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `float(tensor)` waits for the device. A step needs two: its numbers, and the norm of the gradient."""
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
        assert reads == 1, "the numbers come through tolist"


def plain_layout(examples: Sequence[Example]) -> dict[str, list[int]]:
    """What `Layout` says of itself, token by token."""
    ids: list[int] = []
    places: dict[tuple[int, ...], list[int]] = {}
    sequences, readers, lengths, targets = [], [], [], []
    for e in examples:
        prompt = tuple(e.prompt.tolist())
        if prompt not in places:
            places[prompt] = list(range(len(ids), len(ids) + len(prompt)))
            ids += prompt
        own = list(range(len(ids), len(ids) + len(e.response) - 1))
        ids += e.response[:-1].tolist()
        sequence = places[prompt] + own
        sequences += sequence
        readers += sequence[len(prompt) - 1 :]
        lengths.append(len(sequence))
        targets += e.response.tolist()
    return {"ids": ids, "lengths": lengths, "sequences": sequences, "readers": readers, "targets": targets}


@pytest.mark.parametrize("seed", range(5))
def test_the_layout_token_by_token(seed: int) -> None:
    examples = make_examples(12, seed)
    for e in examples[seed::3]:
        e.prompt = examples[0].prompt.copy()
    for some in (examples, *micro_batches(examples, 60)):
        layout = Layout.of(some)
        for name, expected in plain_layout(some).items():
            assert list(getattr(layout, name)) == expected, name
        assert math.isclose(Totals.of(some).tokens, sum(int(e.mask.sum()) for e in some))


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (9, 3, 64), (14, 2, 64), (4, 1, 128)])
@pytest.mark.gpu
@on_cuda
def test_the_flash_kernels_do_what_they_are_said_to_do(
    name: str, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 against padded attention in fp32, and through views of one projection, as a layer has them."""
    lengths, tokens = LAYOUTS[name]
    packed = PackedCausal(lengths, DEVICE, tokens)
    shape = (heads, kv_heads, kv_heads)
    low = normal(packed.count, sum(shape), head_dim, dtype=torch.bfloat16)
    high = low.detach().float().requires_grad_()
    assert attention.flash_takes(low)
    assert not attention.flash_takes(high)
    results = []
    for x in (low, high):
        out = packed(0, *x.split(shape, dim=1))
        results.append([out, *gradients([out], [x])])
    assert_close(results[0], results[1], 2e-2)
    for a, b in zip(*results, strict=True):
        assert F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.9999


def device_learner(**changes: Any) -> Learner:
    shape = {"head_dim": 32, "heads": 4, "kv_heads": 2, "hidden_size": 128, "intermediate_size": 320}
    return Learner(small_model(seed=2, scale=0.1, **shape).to(DEVICE), settings(**changes))


def grouped_examples() -> list[Example]:
    examples = make_examples(24)
    for i, e in enumerate(examples):
        e.prompt = examples[i - i % 4].prompt
    return examples


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
    assert float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.gpu
@on_cuda
def test_micro_batches_do_not_wait_for_the_device() -> None:
    learner, examples = device_learner(token_budget=100), grouped_examples()
    learner.step(examples, LOSSES["grpo"])  # compiles the kernels
    packs = [
        (some, learner_module.Objective(some, LOSSES["grpo"], Totals.of(examples)))
        for some in micro_batches(examples, 100)
    ]
    assert len(packs) > 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        parts = list(learner.gradients(packs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(parts) == len(packs)


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


# --- the benchmark ---------------------------------------------------------------------------------------------------


def test_the_benchmark_in_miniature(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("update_benchmark", BENCHMARK)
    assert specification is not None
    assert specification.loader is not None
    benchmark = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = benchmark  # dataclasses look there for the types of their fields
    specification.loader.exec_module(benchmark)
    sides = ["ours", "recomputed-layers", "transformers"]
    arguments = "--device cpu --shapes tiny --sequences 6 --length 24 --prompt 4 --group 3 --budget 60 --repetitions 1"
    out = tmp_path / "update.json"
    results = benchmark.main([*arguments.split(), "--json", str(out), "--sides", *sides])["tiny"]
    assert [one.side for one in results] == sides
    for one in results:
        assert one.tokens_per_s > 0
        assert one.away < 1e-5
        assert one.cosine > 0.999999
        assert one.worst < 1e-4
    assert json.loads(out.read_text())["results"]["tiny"][0]["side"] == "ours"
