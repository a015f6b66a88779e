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
from test_learner import EXAMPLES, LOSSES, ONE_PACK, gradients_of, make_examples, new_learner, settings, watch_gradients
from torch import Tensor, nn

from reasonlab.judges.formats import Encoded
from reasonlab.judges.network import Pack
from reasonlab.methods.sft import sft_loss
from reasonlab.model import attention, fused
from reasonlab.model.attention import PackedCausal, Pieces, Span, bounds_of
from reasonlab.model.lora import add_lora
from reasonlab.model.rope import rotate
from reasonlab.train import graphs
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, Layout, TokenBatch, Totals, micro_batches
from reasonlab.train.graphs import Caps, filled_size, power_of_two
from reasonlab.train.learner import Learner, Loss, Objective, add_in_fp32, read_pack, token_logprobs, working_copy

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
    """Flash attention as its kernels define it, query by query: no keys give zeros and a total of +∞.

    Keys that no piece has are not read, and nobody writes their gradients: what is there is not a number.
    """
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
    for unwritten in (of_k, of_v):
        unwritten[int(keys.bounds[-1]) :] = torch.nan
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
    assert keys.bounds[-1] <= len(k)
    assert queries.longest >= int(queries.bounds.diff().max())
    assert keys.longest >= int(keys.bounds.diff().max())
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
    assert (ragged.own.longest, ragged.queries.longest, ragged.keys.longest) == (9, 10, 7)
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


# --- packs that are filled up to few shapes --------------------------------------------------------------------------


def half_shared(count: int = 9, seed: int = 0) -> list[Example]:
    """Every second example has the prompt of the first."""
    examples = make_examples(count, seed)
    for e in examples[::2]:
        e.prompt = examples[0].prompt
    return examples


EITHER = {"apart": make_examples, "shared": half_shared}


def filling(**changes: Any) -> Learner:
    """A learner that fills its packs up as on CUDA, where it would capture them next. Here all is launched."""
    learner = new_learner(**changes)
    learner.graphs = learner.new_graphs()
    return learner


def test_nothing_is_filled_up_without_cuda() -> None:
    assert new_learner().graphs is None
    assert with_working_copy().graphs is None


def test_sizes_are_few_and_not_much_larger() -> None:
    assert [filled_size(n) for n in (1, 64, 65, 1000, 1025, 16384, 20416)] == [64, 64, 128, 1024, 1152, 16384, 20480]
    sizes = [filled_size(n) for n in range(1024, 65537)]
    assert all(n <= size <= 1.125 * n for n, size in enumerate(sizes, 1024))
    assert len(set(sizes)) == 1 + 6 * graphs.PARTS // 2


def test_caps_are_powers_of_two_that_never_shrink() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 256, 257)] == [1, 1, 2, 4, 256, 512]
    caps = Caps()
    apart = Pieces(np.array([300, 5]), np.array([305]), np.array([0]), np.zeros(0, np.int64))
    assert caps.grown(apart) == caps._replace(longest=512)
    shared = Pieces(np.full(17, 9), np.full(3, 800), np.array([0, 700, 0]), np.arange(700))
    assert caps.grown(shared) == Caps(32, 256, 16, 1024, 1024, 1024)
    assert caps.grown(shared).grown(apart) == Caps(32, 512, 16, 1024, 1024, 1024)


def test_pieces_of_no_length_fill_up() -> None:
    assert bounds_of(np.array([3, 4])).tolist() == [0, 3, 7]
    assert bounds_of(np.array([3, 4]), 4).tolist() == [0, 3, 7, 7, 7]


@pytest.mark.parametrize("make", EITHER)
def test_a_filled_layout_begins_with_the_layout(make: str) -> None:
    layout = Layout.of(EITHER[make]())
    filled = layout.filled(500, 300, 7)
    assert len(filled.ids) == 500
    assert len(filled.readers) == len(filled.targets) == 300
    for name in ("ids", "lengths", "sequences", "readers", "targets"):
        whole, beginning = getattr(filled, name), getattr(layout, name)
        assert list(whole[: len(beginning)]) == list(beginning), name
    added = filled.lengths[len(layout.lengths) :]
    assert sum(added) == 500 - len(layout.ids)
    assert max(added) == 7
    assert min(added) > 0
    assert filled.sequences[len(layout.sequences) :].tolist() == list(range(len(layout.ids), 500))
    same = layout.filled(len(layout.ids), len(layout.readers), 7)
    assert list(same.lengths) == layout.lengths


@pytest.mark.parametrize("make", EITHER)
@pytest.mark.parametrize("flash", [False, True], ids=["padded", "ragged"])
def test_what_fills_a_pack_up_changes_nothing(make: str, flash: bool, with_flash: Callable[[bool], None]) -> None:
    with_flash(flash)
    learner, layout = new_learner(), Layout.of(EITHER[make]())
    results = []
    for one in (layout, layout.filled(400, 350, 32)):
        attend = PackedCausal(one.lengths, "cpu", one.sequences)
        ids, readers, targets = (torch.from_numpy(x) for x in (one.ids, one.readers, one.targets))
        logprobs, entropies = read_pack(learner.model, 0.9, True, True, ids, attend.positions, attend, readers, targets)
        real = logprobs[: len(layout.readers)]
        slopes = torch.autograd.grad(real.cos().sum(), learner.parameters)
        results.append([real, entropies[: len(real)], *slopes])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("make", EITHER)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_learner_that_fills_packs_up(make: str, loss: str, with_flash: Callable[[bool], None]) -> None:
    with_flash(True)
    examples = EITHER[make]()
    expected_result, expected = gradients_of(examples, LOSSES[loss], token_budget=150)
    learner = filling(token_budget=150)
    assert learner.graphs is not None
    seen = watch_gradients(learner)
    result = learner.step(examples, LOSSES[loss])
    assert_close(seen[0], expected)
    for field in ("loss", "grad_norm", "entropy", "mismatch", "mean_mismatch"):
        assert getattr(result, field) == pytest.approx(getattr(expected_result, field), rel=1e-4, abs=1e-6), field
    assert result.metrics == pytest.approx(expected_result.metrics, rel=1e-4, abs=1e-6)
    shared = {slot.inputs.shape.shared for slot in learner.graphs.slots.values()}
    assert (True in shared) is (make == "shared")


def test_the_sums_of_a_step_begin_at_zero(with_flash: Callable[[bool], None]) -> None:
    """They stay where they are from step to step, whatever the optimizer does with `grad`."""
    with_flash(True)
    learner, plain = filling(token_budget=150), new_learner(token_budget=150)
    seen, expected = watch_gradients(learner), watch_gradients(plain)
    for seed in range(3):
        for one in (learner, plain):
            one.step(half_shared(seed=seed), LOSSES["sft"])
        assert all(p.grad is None for p in learner.parameters)
    for got, right in zip(seen, expected, strict=True):
        assert_close(got, right, 1e-4)


def unsound(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return (logprobs * batch.mask).sum() * torch.inf, {}


def of_few(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Depends on the first three logprobs alone."""
    return (logprobs[:3] ** 2).sum() / batch.totals.tokens, {"few": logprobs[:3].sum()}


def test_a_loss_that_is_not_finite_adds_nothing(with_flash: Callable[[bool], None]) -> None:
    with_flash(True)
    learner, totals = filling(token_budget=ONE_PACK), Totals.of(EXAMPLES)
    packs = len(micro_batches(EXAMPLES, ONE_PACK, even=4))
    assert learner.step_on([Objective(EXAMPLES, unsound, totals)]).nonfinite == packs
    assert learner.graphs is not None
    assert all(not total.any() for total in learner.graphs.sums)
    seen = watch_gradients(learner)
    both = [Objective(EXAMPLES, unsound, totals), Objective(EXAMPLES, LOSSES["sft"], totals)]
    assert learner.step_on(both).nonfinite == packs
    assert_close(seen[0], gradients_of(EXAMPLES, LOSSES["sft"])[1])


def test_a_loss_of_few_logprobs(with_flash: Callable[[bool], None]) -> None:
    with_flash(True)
    expected_result, expected = gradients_of(EXAMPLES, of_few)
    learner = filling()
    seen = watch_gradients(learner)
    assert learner.step(EXAMPLES, of_few).metrics == pytest.approx(expected_result.metrics, rel=1e-5)
    assert_close(seen[0], expected)


def test_adapters_alone_get_gradients(with_flash: Callable[[bool], None]) -> None:
    with_flash(True)
    results = []
    for fills in (False, True):
        model = small_model(seed=2)
        add_lora(model, rank=2, alpha=4)
        learner = Learner(model, settings())
        learner.graphs = learner.new_graphs() if fills else None
        seen = watch_gradients(learner)
        learner.step(half_shared(), LOSSES["grpo"])
        results.append(seen[0])
    assert len(results[0]) == len(learner.parameters) < len(list(model.parameters()))
    assert_close(results[1], results[0])


def test_shapes_are_few_and_forgotten(with_flash: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with_flash(True)
    updates = filling().graphs
    assert updates is not None
    layouts = {count: Layout.of(make_examples(count)) for count in (1, 8, 9, 20)}
    sizes = {count: (filled_size(len(x.ids)), filled_size(len(x.readers)), False) for count, x in layouts.items()}
    assert sizes[8] == sizes[9]
    assert len(set(sizes.values())) == 3
    for count in (8, 1, 9):
        updates.forward(layouts[count])
    assert list(updates.slots) == [(*sizes[1], Caps()), (*sizes[8], Caps())], "the one used last stands last"
    for count in (20, 8, 1):
        updates.forward(layouts[count])
    grown = Caps(sequences=32)
    assert list(updates.slots) == [(*sizes[n], grown) for n in (20, 8, 1)], "a cap that has grown stays"
    monkeypatch.setattr(graphs, "MOST", 2)
    updates.forward(layouts[8])
    updates.forward(layouts[20])
    assert list(updates.slots) == [(*sizes[n], grown) for n in (8, 20)]


def test_autograd_keeps_nothing_of_a_pass(with_flash: Callable[[bool], None]) -> None:
    """Its nodes remember the stream they were made on: one that outlived its pass would spoil the next capture."""
    with_flash(True)
    learner = filling()
    parts = []

    def node_of_a_weight() -> Any:
        return torch.autograd.graph.get_gradient_edge(learner.working_parameters[0]).node

    def marks(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert "used before" not in node_of_a_weight().metadata
        node_of_a_weight().metadata["used before"] = True
        assert "used before" in node_of_a_weight().metadata
        value = (logprobs * batch.mask).sum()
        return value, {"still with its gradient": value * 2}

    for part in learner.gradients(packs_of(learner, EXAMPLES, marks) * 2):
        parts.append(part)
        assert "used before" not in node_of_a_weight().metadata
    assert len(parts) == 2


def test_weights_that_move_away_are_not_read_where_they_were(with_flash: Callable[[bool], None]) -> None:
    with_flash(True)
    learner = filling()
    assert learner.graphs is not None
    learner.step(EXAMPLES, LOSSES["sft"])
    sums = learner.graphs.sums
    learner.step(EXAMPLES, LOSSES["sft"])
    assert learner.graphs.sums is sums
    learner.model.final_norm.weight.data = learner.model.final_norm.weight.data.clone()
    learner.step(EXAMPLES, LOSSES["sft"])
    assert learner.graphs.sums is not sums


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


@pytest.mark.parametrize("fills", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["as it is", "filled up"])
@pytest.mark.skipif(DEVICE == "cuda", reason="the tests on a device do it in earnest")
def test_all_of_it_together(
    kernels: Any, with_flash: Callable[[bool], None], fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update as it is on CUDA in bf16: the working copy, the kernels, ragged attention, and a shared prompt."""
    examples = [Example(EXAMPLES[0].prompt, e.response[:7], e.logprobs[:7], e.mask[:7], e.advantage) for e in EXAMPLES]
    with monkeypatch.context() as plain:
        for module in (fused, learner_module):
            plain.setattr(module, "uses_kernels", lambda x: False)
        expected, exact = gradients_of(examples, LOSSES["grpo"])
    with_flash(True)
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


def device_learner(adapters: bool = False, **changes: Any) -> Learner:
    shape: dict[str, Any] = {"head_dim": 32, "heads": 4, "kv_heads": 2, "hidden_size": 128, "intermediate_size": 320}
    model = small_model(seed=2, scale=0.1, **shape)
    if adapters:
        add_lora(model, rank=4, alpha=8)
    return Learner(model.to(DEVICE), settings(**changes))


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
    assert float((got - expected).norm() / expected.norm()) < 0.1  # 0.06 on an H200, and 0.012 on real shapes


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


@pytest.fixture
def two_learners(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Learner, Learner]]:
    """Of the same weights: one that captures, one that launches everything from Python."""

    def make(adapters: bool = False, **changes: Any) -> tuple[Learner, Learner]:
        learners = []
        for capture in (True, False):
            monkeypatch.setattr(graphs, "CAPTURE", capture)
            learner = device_learner(adapters, **changes)
            assert (learner.graphs is not None) is capture
            learners.append(learner)
        return learners[0], learners[1]

    return make


def apart(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return float((flat(got) - flat(expected)).norm() / flat(expected).norm())


ROUNDING = 0.02  # of bf16, where matrices of other sizes are multiplied in another order


@pytest.mark.parametrize("budget", [100, 400, 4096])
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize("make", [make_examples, grouped_examples], ids=["apart", "grouped"])
@pytest.mark.gpu
@on_cuda
def test_captured_gradients_are_the_launched_ones(
    two_learners: Any, make: Callable[[], list[Example]], adapters: bool, budget: int
) -> None:
    learner, plain = two_learners(adapters, token_budget=budget)
    expected = device_gradients(plain, make())
    for number in range(4):
        assert apart(device_gradients(learner, make()), expected) < ROUNDING, f"time {number}"
    assert captured_shapes(learner) == len(learner.graphs.slots)


@pytest.mark.gpu
@on_cuda
def test_a_replay_gives_the_same_bits_again(two_learners: Any) -> None:
    learner, _ = two_learners(token_budget=4096)
    examples = make_examples(24)
    for _ in range(3):
        first = device_gradients(learner, examples)
    assert captured_shapes(learner) == 1
    device_gradients(learner, make_examples(24, seed=9))  # another pack through the same graphs
    assert len(learner.graphs.slots) == 1
    assert all(torch.equal(a, b) for a, b in zip(device_gradients(learner, examples), first, strict=True))


@pytest.mark.gpu
@on_cuda
def test_shapes_in_turn_and_caps_that_grow(two_learners: Any) -> None:
    """Graphs share their memory: each must find its own inputs, and nothing of the others."""
    learner, plain = two_learners(token_budget=1024)
    long = np.arange(300) % 30
    longer = [Example(long[:200], long, np.full(300, -3, np.float32), np.ones(300, bool), 1.0) for _ in range(2)]
    kinds = [make_examples(3), make_examples(12, seed=1), grouped_examples(), make_examples(6, seed=2)]
    expected = [device_gradients(plain, examples) for examples in (*kinds, longer)]
    for _ in range(4):
        for examples, right in zip(kinds, expected, strict=False):
            assert apart(device_gradients(learner, examples), right) < ROUNDING
    before = learner.graphs.caps
    assert captured_shapes(learner) > 2
    assert apart(device_gradients(learner, longer), expected[-1]) < ROUNDING
    assert learner.graphs.caps != before
    assert captured_shapes(learner) == 0
    for _ in range(3):
        for examples, right in zip((*kinds, longer), expected, strict=True):
            assert apart(device_gradients(learner, examples), right) < ROUNDING
    assert captured_shapes(learner) == len(learner.graphs.slots) > 2


@pytest.mark.gpu
@on_cuda
def test_losses_between_the_graphs(two_learners: Any) -> None:
    learner, plain = two_learners(token_budget=4096)
    examples = grouped_examples()
    for _ in range(3):
        device_gradients(learner, examples)
    assert captured_shapes(learner) == 1
    assert all(not x.any() for x in device_gradients(learner, examples, unsound))
    for loss in (of_few, LOSSES["sft"], LOSSES["mirror_descent"]):
        assert apart(device_gradients(learner, examples, loss), device_gradients(plain, examples, loss)) < ROUNDING
    assert captured_shapes(learner) == 1


@pytest.mark.gpu
@on_cuda
def test_captured_steps_learn_what_launched_ones_learn(two_learners: Any) -> None:
    """The graphs read the weights as they are after each step."""
    results = []
    for learner in two_learners(token_budget=400, lr=1e-3):
        losses = [learner.step(grouped_examples(), LOSSES["sft"]).loss for _ in range(12)]
        assert all(p.grad is None for p in learner.parameters)
        results.append(losses)
    assert results[0][-1] < results[0][0] - 0.1
    assert results[0] == pytest.approx(results[1], abs=0.02)


@pytest.mark.gpu
@on_cuda
def test_all_graphs_share_the_memory_of_the_largest(two_learners: Any) -> None:
    sizes = {}
    for counts in ((480, 480), (480, 60, 60, 120, 120, 240, 240, 480)):  # the first sets the caps
        learner, _ = two_learners(token_budget=1 << 14)
        for count in counts:
            device_gradients(learner, make_examples(count))
        assert captured_shapes(learner) == len(set(counts))
        sizes[len(set(counts))] = learner.graphs.held
    assert 0 < sizes[4] < 1.5 * sizes[1]


@pytest.mark.gpu
@on_cuda
def test_weights_that_move_away_are_captured_anew(two_learners: Any) -> None:
    learner, plain = two_learners(token_budget=4096)
    examples = grouped_examples()
    for _ in range(3):
        device_gradients(learner, examples)
    with torch.no_grad():
        for one in (learner, plain):
            weight = one.working.final_norm.weight
            weight.data = weight.data * 3
    for _ in range(3):
        assert apart(device_gradients(learner, examples), device_gradients(plain, examples)) < ROUNDING
    assert captured_shapes(learner) == 1


@pytest.mark.gpu
@on_cuda
def test_short_memory_is_left_to_others(two_learners: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, plain = two_learners(token_budget=2048)
    examples = grouped_examples()
    for _ in range(3):
        device_gradients(learner, examples)
    assert captured_shapes(learner) == 1
    assert learner.graphs.held > 0
    monkeypatch.setattr(learner.graphs, "free_memory", lambda: 0)
    more = make_examples(12, seed=1)  # another shape, under the same caps
    for _ in range(3):
        assert apart(device_gradients(learner, more), device_gradients(plain, more)) < ROUNDING
    assert captured_shapes(learner) == 0
    assert learner.graphs.held == 0


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
    sides = ["ours", "eager", "recomputed-layers", "transformers"]
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
