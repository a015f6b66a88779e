"""The Triton kernels compute what the torch operations compute (in Triton's interpreter where there is no CUDA)."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_sequences, small_model
from torch import Tensor

from reasonlab.keys import key
from reasonlab.model.transformer import Transformer
from reasonlab.rollout import decoder as decoder_module
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.operations import FULL, RUNNING, STOPPED, Cache, Place, Rows, TorchOperations
from reasonlab.rollout.types import Request, Rollout, Sampling

pytest.importorskip("triton", reason="needs Triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

from reasonlab.rollout import kernels  # noqa: E402
from reasonlab.rollout.kernels import TUNING, Kernels  # noqa: E402

TORCH = TorchOperations()
if DEVICE.type == "cpu":  # two repairs of the interpreter of Triton 3.6
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """It makes an index of an array of one element, which NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot_of_bf16(self: Any, a: Any, b: Any, *more: Any) -> Any:
        """It multiplies the bits of bf16 numbers: NumPy does not know the type. As fp32 they are exact."""
        return create_dot(self, *(as_float32(x) for x in (a, b)), *more)

    def as_float32(x: Any) -> Any:
        if x.dtype.scalar != interpreter.tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter.InterpreterBuilder.create_dot = create_dot_of_bf16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=bound, rtol=bound)


# --- attention -------------------------------------------------------------------------------------------------------


def rows_at(positions: list[int], codes: list[int] | None = None, max_tokens: int = 4) -> Rows:
    rows = Rows.empty(len(positions), max_tokens, DEVICE)
    rows.positions.copy_(torch.tensor(positions))
    rows.finish.copy_(torch.tensor(codes or [RUNNING] * len(positions)))
    rows.limits.fill_(max_tokens)
    return rows


COLUMNS = 300


def attention_model(heads: int, kv_heads: int, head_dim: int, qk_norm: bool, dtype: torch.dtype) -> Transformer:
    shape = {"hidden_size": 16, "layers": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return small_model(seed=4, qk_norm=qk_norm, **shape).to(DEVICE, dtype)


def cache_of(model: Transformer, rows: int, dtype: torch.dtype) -> Cache:
    shape = (1, rows, model.config.kv_heads, COLUMNS, model.config.head_dim)
    return Cache(*(random(*shape, seed=seed, dtype=dtype) for seed in (2, 3)))


def attended(operations: TorchOperations | Kernels, model: Transformer, x: Tensor, cache: Cache, rows: Rows) -> Tensor:
    """What the attention of the only layer makes of its input."""
    angles = rows.positions[:, None, None] * model.inverse_frequencies
    attend = operations.attention(cache, rows, COLUMNS)
    with torch.no_grad():
        return model.blocks[0].attention(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), 0, attend)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "qk_norm", "splits"),
    [
        (4, 4, 32, False, 1),
        (9, 3, 64, False, 1),
        (9, 3, 64, False, 2),
        (14, 1, 64, False, 8),
        (4, 2, 128, True, 1),
        (4, 1, 128, True, 4),
        (6, 1, 8, True, 2),
        (4, 2, 80, False, 1),
    ],
)
def test_attention(
    heads: int, kv_heads: int, head_dim: int, qk_norm: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "attention_splits", lambda programs, columns: splits)
    model = attention_model(heads, kv_heads, head_dim, qk_norm, torch.float32)
    positions = [0, 1, 63, 64, 65, COLUMNS - 1]
    rows, x = rows_at(positions), random(len(positions), 16, seed=1)
    cache = cache_of(model, len(positions), torch.float32)
    mine = Cache(*(part.clone() for part in cache))
    expected = attended(TORCH, model, x, cache, rows)
    got = attended(Kernels(model, COLUMNS), model, x, mine, rows)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for part, other in zip(mine, cache, strict=True):
        close(part, other)


@pytest.mark.parametrize("splits", [1, 4])
def test_attention_in_bf16(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_splits", lambda programs, columns: splits)
    model = attention_model(9, 3, 64, False, torch.bfloat16)
    rows, x = rows_at([0, 40, 200]), random(3, 16, seed=1, dtype=torch.bfloat16)
    cache = cache_of(model, 3, torch.bfloat16)
    exact = Cache(*(part.float() for part in cache))
    got = attended(Kernels(model, COLUMNS), model, x, cache, rows)
    expected = attended(TORCH, model.float(), x.float(), exact, rows)
    assert (got.dtype, (got.float() - expected).norm() / expected.norm() < 0.01) == (torch.bfloat16, True)
    for part, other in zip(cache, exact, strict=True):
        close(part, other, torch.bfloat16)


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_of_a_group_read_what_they_share_in_one_of_them(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "attention_splits", lambda programs, columns: splits)
    model = attention_model(9, 3, 64, False, torch.float32)
    rows, x = rows_at([90, 70, 69, 200]), random(4, 16, seed=1)
    cache = cache_of(model, 4, torch.float32)
    for part in cache:
        part[:, [0, 2], :, :69] = part[:, 1:2, :, :69]  # three rows share 69 tokens; the last has its own
    expected = attended(TORCH, model, x, Cache(*(part.clone() for part in cache)), rows)
    rows.leaders.copy_(torch.tensor([1, 1, 1, 3]))
    rows.shared.copy_(torch.tensor([69, 69, 69, 150]))
    for part in cache:
        part[:, [0, 2], :, :69] = math.nan  # nobody reads their own
    got = attended(Kernels(model, COLUMNS), model, x, cache, rows)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_attention_passes_over_rows_that_have_ended() -> None:
    model = attention_model(4, 2, 32, False, torch.float32)
    rows = rows_at([5, 7, 9], [RUNNING, STOPPED, FULL])
    cache = cache_of(model, 3, torch.float32)
    before = Cache(*(part.clone() for part in cache))
    attended(Kernels(model, COLUMNS), model, random(3, 16, seed=1), cache, rows)
    for part, kept in zip(cache, before, strict=True):
        assert torch.equal(part[:, 1:], kept[:, 1:])
        assert not torch.equal(part[:, 0], kept[:, 0])


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (2, 80), (1, 8)])
def test_contexts_are_stored_where_the_reference_stores_them(kv_heads: int, head_dim: int) -> None:
    model = small_model().to(DEVICE)
    wave = Cache(*(random(2, 170, kv_heads, head_dim, seed=seed) for seed in (7, 8)))
    places = [Place(4, 3, 0, 7), Place(0, 1, 7, 8), Place(8, 2, 8, 8), Place(2, 1, 40, 170)]  # 65 and more: two blocks
    expected, got = (Cache(*torch.zeros(2, 2, 10, kv_heads, 140, head_dim, device=DEVICE)) for _ in range(2))
    TORCH.store(expected, wave, places)
    Kernels(model, 1).store(got, wave, places)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
        assert theirs[:, 6, :, :7].abs().min() > 0
        assert not theirs[:, [1, 3, 7, 8, 9]].any()


@pytest.mark.parametrize(("rows", "columns", "parts"), [(1024, 512, 1), (1, 64, 1), (1, 512, 2), (2, 1 << 16, 16)])
def test_long_rows_are_split_where_rows_are_few(rows: int, columns: int, parts: int) -> None:
    assert kernels.attention_splits(rows * 2, columns) == parts


# --- drawing ---------------------------------------------------------------------------------------------------------


def triton_draw(logits: Tensor, rows: Rows, stop_ids: Tensor, sampling: Sampling) -> None:
    Kernels(small_model().to(DEVICE), 1).draw(logits, rows, stop_ids, sampling)


def drawing_rows(n: int, seed: int) -> Rows:
    rows = rows_at([3 + i for i in range(n)], max_tokens=9)
    rows.seeds.copy_(torch.tensor([key("kernel", seed, i) for i in range(n)]))
    rows.counts.copy_(torch.arange(n) % 9)
    rows.tokens.fill_(1)
    return rows


def copied(rows: Rows) -> Rows:
    return Rows(rows.numbers.clone(), rows.ids.clone(), rows.logprobs.clone())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize(("vocabulary", "block"), [(32, 4096), (1000, 128), (5003, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_draw(
    temperature: float, vocabulary: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TUNING, "vocabulary_block", block)
    n = 20
    logits = (random(n, vocabulary, seed=vocabulary) * 3).to(dtype)
    logits[0, : vocabulary // 2] = -torch.inf
    logits[1, vocabulary // 2 :] = -torch.inf
    expected = drawing_rows(n, vocabulary)
    expected.finish[3], expected.finish[4] = STOPPED, FULL
    got = copied(expected)
    sampling = Sampling(temperature=temperature, max_tokens=9)
    stop_ids = torch.arange(0, vocabulary, 5, device=DEVICE)[:7]
    TORCH.draw(logits, expected, stop_ids, sampling)
    triton_draw(logits, got, stop_ids, sampling)
    running = [i for i in range(n) if i not in (3, 4)]
    assert torch.equal(got.numbers[:, running], expected.numbers[:, running])
    assert torch.equal(got.ids[running], expected.ids[running])
    close(got.logprobs[running], expected.logprobs[running])
    assert not got.ids[[3, 4]].any()
    assert torch.equal(got.numbers[:, [3, 4]], drawing_rows(n, vocabulary).numbers[:, [3, 4]] + _codes(got))


def _codes(rows: Rows) -> Tensor:
    codes = torch.zeros_like(rows.numbers[:, :2])
    codes[5] = rows.finish[[3, 4]]
    return codes


@pytest.mark.parametrize("top_p", [0.05, pytest.param(0.5, marks=pytest.mark.slow), 0.95])
@pytest.mark.parametrize(("vocabulary", "block"), [(32, 4096), (1000, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_draw_from_the_most_likely(
    top_p: float, vocabulary: int, block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many equal logits: of those at the edge the first ones stay, as after a stable sort."""
    monkeypatch.setattr(TUNING, "vocabulary_block", block)
    n = 16
    logits = (random(n, vocabulary, seed=vocabulary) * 3).to(dtype)
    logits[::2] = logits[::2].round() / 2
    logits[1, : vocabulary // 2] = -torch.inf
    logits[4], logits[4, ::3] = 1.0, 2.0
    logits[8:] -= 20
    expected = drawing_rows(n, vocabulary)
    expected.finish[3] = FULL
    got = copied(expected)
    sampling = Sampling(temperature=0.6, top_p=top_p, max_tokens=9)
    stop_ids = torch.arange(0, vocabulary, 5, device=DEVICE)[:7]
    TORCH.draw(logits, expected, stop_ids, sampling)
    triton_draw(logits, got, stop_ids, sampling)
    running = [i for i in range(n) if i != 3]
    assert torch.equal(got.numbers[:, running], expected.numbers[:, running])
    assert torch.equal(got.ids[running], expected.ids[running])
    close(got.logprobs[running], expected.logprobs[running])
    assert not got.ids[3].any()


def test_draw_falls_back_for_the_first_k(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SORTED_LOGITS", 5 * 50)  # of five rows
    logits, sampling = random(12, 50) * 2, Sampling(top_k=3, top_p=0.9, max_tokens=9)
    expected = drawing_rows(12, 0)
    got = copied(expected)
    stop_ids = torch.tensor([1], device=DEVICE)
    TORCH.draw(logits, expected, stop_ids, sampling)
    triton_draw(logits, got, stop_ids, sampling)
    assert torch.equal(got.numbers, expected.numbers)


def test_tokens_without_probability_are_never_drawn() -> None:
    n = 60
    logits = torch.full((n, 64), -200.0, device=DEVICE)
    logits[:, [20, 40]] = 0.0
    rows = drawing_rows(n, 1)
    rows.counts.zero_()
    triton_draw(logits, rows, torch.tensor([], dtype=torch.int64, device=DEVICE), Sampling(max_tokens=9))
    assert set(rows.tokens.tolist()) == {20, 40}


# --- the whole step --------------------------------------------------------------------------------------------------

REQUESTS = [
    Request(prompt.tolist(), [key("kernel rollout", i, j) for j in range(2)])
    for i, prompt in enumerate(random_sequences([5, 1], 0))
]


def generate(model: Transformer, sampling: Sampling) -> list[Rollout]:
    return [rollout for group in Engine(model, rows=3).generate(REQUESTS, sampling) for rollout in group]


def compare(model: Transformer, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    model = model.to(DEVICE)
    monkeypatch.setattr(decoder_module, "operations_for", lambda model, columns: TORCH)
    expected = generate(model, sampling)
    monkeypatch.setattr(decoder_module, "operations_for", Kernels)
    got = generate(model, sampling)
    for a, b in zip(got, expected, strict=True):
        assert (a.ids, a.finish) == (b.ids, b.finish)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)
    return got


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "qwen3", "qk_norm": True, "kv_heads": 1},
        {"architecture": "qwen2", "qkv_bias": True, "kv_heads": 4, "tied": False},
        {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
    ],
    ids=["qwen3", "qwen2", "yarn"],
)
def test_the_engine_samples_the_same_through_the_kernels(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small_model(seed=6, **changes), Sampling(max_tokens=4), monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_ragged_rollouts_through_the_kernels(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=9, stop_ids=(2, 7, 13, 19, 20), repetition_window=8)
    rollouts = compare(small_model(seed=6), sampling, monkeypatch)
    assert len({len(r.ids) for r in rollouts}) > 1


# --- for a GPU that is not here --------------------------------------------------------------------------------------


def test_the_kernels_compile_for_hopper() -> None:
    """What the interpreter does not see: types, shapes, shared memory, and that memory is read in wide pieces."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    output = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    built = {line["kernel"]: line for line in map(json.loads, output.stdout.splitlines())}
    assert len(built) == 20
    assert all(line["shared"] <= 227 * 1024 for line in built.values())
    attention = [line for name, line in built.items() if name.startswith("attend")]
    assert all(line["asynchronous"] > 0 for line in attention)
    assert all(line["matrix"] > 0 for line in attention if line["kernel"].endswith("bf16"))
    assert built["masses bf16"]["wide"] > 0
    assert built["store bf16"]["wide"] > 0
