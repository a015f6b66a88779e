"""Packs with shared beginnings: how their tokens lie, and ragged attention to them, which is padded attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, gradients_of, make_examples, watch_gradients
from update_pieces import (
    DEVICE,
    assert_close,
    gradients,
    normal,
    on_cuda,
    ragged_switch,
    settings,
    through_kernels,
)

from reasonlab.judges.formats import Encoded
from reasonlab.judges.network import Pack
from reasonlab.model import attention
from reasonlab.model.attention import PackedCausal
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, Layout, Totals, micro_batches
from reasonlab.train.learner import Learner

with_ragged = pytest.fixture(ragged_switch)


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


# --- ragged attention ------------------------------------------------------------------------------------------------


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
LONG_LAYOUTS = {
    "apart": ([150, 64, 1, 65, 128], None),
    "prompts": shared_prompts([(130, (70, 200, 1)), (64, (65, 64, 66)), (3, (300,))]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_ragged_attention_is_padded_attention(name: str, kv_heads: int, with_ragged: Callable[[bool], None]) -> None:
    lengths, tokens = LAYOUTS[name]
    packed = PackedCausal(lengths, DEVICE, tokens)
    assert packed.ragged is not None
    q, k, v = (normal(packed.count, heads, 8, seed=i) for i, heads in enumerate((4, kv_heads, kv_heads)))
    results = []
    for on in (False, True):
        with_ragged(on)
        out = packed(0, q, k, v)
        results.append([out, *gradients([out], [q, k, v])])
    assert_close(results[1], results[0])


@pytest.mark.parametrize(("name", "layout"), [*LAYOUTS.items(), *((f"long {n}", x) for n, x in LONG_LAYOUTS.items())])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "busy"), [(4, 2, 16, 1), (3, 3, 24, 1), (4, 1, 8, 10**9)])
def test_the_kernels_attend_as_padded_attention_does(
    name: str,
    layout: tuple[list[int], np.ndarray | None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    busy: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the heads of a group added up by one program, and apart."""
    through_kernels(monkeypatch)
    from reasonlab.model import attention_kernels

    monkeypatch.setattr(attention_kernels, "BUSY", busy)
    packed = PackedCausal(layout[0], DEVICE, layout[1])
    shape = (heads, kv_heads, kv_heads)
    x = normal(packed.count, sum(shape), head_dim)
    results = []
    for on in (False, True):
        monkeypatch.setattr(attention, "takes_ragged", lambda q, on=on: on)
        out = packed(0, *x.split(shape, dim=1))
        results.append([out, *gradients([out], [x])])
    assert_close(results[1], results[0])


def test_a_group_asks_its_prompt_once() -> None:
    lengths, tokens = shared_prompts([(4, (6, 3, 9)), (7, (2, 2))])
    ragged = PackedCausal(lengths, "cpu", tokens).ragged
    assert ragged is not None
    assert ragged.at is not None
    assert ragged.key_blocks is not None
    assert ragged.at.tolist() == [0, 1, 2, 3, 19, 20, 21, 22, 23, 24, 25]
    # What is asked where: tokens of one's own, and places in `at`.
    assert sorted(ragged.blocks.T.tolist()) == [
        [0, 0, 9, 0, 0],
        [9, 9, 11, 0, 4],
        [11, 11, 19, 0, 4],
        [19, 19, 27, 4, 4],
        [27, 27, 28, 4, 11],
    ]
    # The longest work stands first: ten queries ask the first prompt, one the second.
    assert ragged.key_blocks.T.tolist() == [[0, 4, 9, 19], [4, 11, 27, 28]]


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 150), st.lists(st.integers(1, 200), min_size=1, max_size=4)), min_size=1, max_size=5
    ),
    more=st.integers(0, 9),
)
def test_every_pair_of_query_and_key_is_in_the_tables_once(groups: list[tuple[int, list[int]]], more: int) -> None:
    lengths, tokens = shared_prompts(groups)
    pieces = PackedCausal(lengths, "cpu", tokens).pieces
    assert pieces is not None
    count = int(tokens.max()) + 1
    seen = np.zeros((count, count), int)
    start = 0
    for n in lengths:
        sequence = tokens[start : start + n]
        seen[np.ix_(sequence, sequence)] |= np.tri(n, dtype=int)
        start += n
    by_queries, by_keys = np.zeros_like(seen), np.zeros_like(seen)
    blocks = pieces.query_blocks(pieces.query_blocks().shape[1] + more)
    work = blocks[0] - blocks[1] + blocks[4] - blocks[3]
    assert (np.diff(work) <= 0).all()
    for first, begin, end, asked, asked_end in blocks.T:
        for query in range(first, min(first + attention.BLOCK, end)):
            by_queries[query, begin : query + 1] += 1
            by_queries[query, pieces.at[asked:asked_end]] += 1
            by_keys[query:end, query] += 1  # the same blocks as keys
    for first, end, query, query_end in pieces.key_blocks(pieces.key_blocks().shape[1] + more).T:
        for place in range(first, min(first + attention.BLOCK, end)):
            by_keys[query:query_end, pieces.at[place]] += 1
    assert np.array_equal(by_queries, seen)
    assert np.array_equal(by_keys, seen)


def test_tokens_in_another_order_are_padded(with_ragged: Callable[[bool], None]) -> None:
    tokens = np.array([1, 0, 2, 1, 3])
    packed = PackedCausal([3, 2], DEVICE, tokens)
    assert packed.ragged is None
    with_ragged(True)
    q = normal(4, 2, 8)
    assert packed(0, q, q, q).shape == q.shape


def test_a_learner_with_ragged_attention(with_ragged: Callable[[bool], None]) -> None:
    examples = [Example(e.prompt[:3], e.response, e.logprobs, e.mask, e.advantage) for e in EXAMPLES]
    for e in examples[::2]:
        e.prompt = examples[0].prompt
    with_ragged(False)
    expected_result, expected = gradients_of(examples, LOSSES["grpo"], token_budget=150)
    with_ragged(True)
    result, got = gradients_of(examples, LOSSES["grpo"], token_budget=150)
    assert_close(got, expected)
    assert result.loss == pytest.approx(expected_result.loss, abs=1e-6)


@pytest.mark.parametrize(
    ("busy", "shape"),
    [
        (10**9, {"heads": 3, "kv_heads": 1}),
        pytest.param(1, {"heads": 3, "kv_heads": 1}, marks=pytest.mark.slow),
        pytest.param(10**9, {"heads": 6, "kv_heads": 2, "head_dim": 12}, marks=pytest.mark.slow),
    ],
)
def test_a_model_whose_kernels_all_work_together(
    busy: int, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: gradients of attention lie as the projection has them, in packs that are filled up."""
    through_kernels(monkeypatch)
    from reasonlab.model import attention_kernels, fused

    monkeypatch.setattr(attention_kernels, "BUSY", busy)
    long = np.arange(70) % 30
    prompts = [long[:5]] * 3 + [long[:1]] * 2 + [long] * 3
    examples = [
        Example(prompt, np.roll(long, i)[:n], np.full(n, -3, np.float32), np.ones(n, bool), 0.5 - i % 2)
        for i, (prompt, n) in enumerate(zip(prompts, (4, 1, 2, 1, 3, 2, 9, 1), strict=True))
    ]
    laid, side_by_side = [], fused.side_by_side

    def watched(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        found = side_by_side(parts)
        laid.append(found.data_ptr() == parts[0].data_ptr())
        return found

    monkeypatch.setattr(fused, "side_by_side", watched)
    monkeypatch.setattr(learner_module, "micro_batches", lambda examples, *_: [list(examples)])  # all in one pack
    results = []
    for on in (True, False):
        for module in (fused, learner_module):
            monkeypatch.setattr(module, "uses_kernels", lambda x, on=on: on)
        monkeypatch.setattr(attention, "takes_ragged", lambda q, on=on: on)
        learner = Learner(
            small_model(seed=3, layers=1, **shape).to(DEVICE), settings(token_budget=4096, bfloat16=False)
        )
        if on:
            learner.graphs = learner.new_graphs()  # launches where there is nothing to capture
        seen = watch_gradients(learner)
        results.append((learner.step(examples, LOSSES["grpo"]).loss, seen[0]))
    assert_close(results[0][1], results[1][1], 1e-5)
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert laid
    assert all(laid)


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), [*LAYOUTS.items(), *((f"long {n}", x) for n, x in LONG_LAYOUTS.items())])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 32), (9, 3, 64), (14, 2, 64), (4, 1, 128), (6, 2, 80)]
)
@pytest.mark.parametrize("busy", [1, 10**9])
@pytest.mark.gpu
@on_cuda
def test_the_kernels_in_half_precision(
    name: str,
    layout: tuple[list[int], np.ndarray | None],
    heads: int,
    kv_heads: int,
    head_dim: int,
    busy: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bf16 against padded attention in fp32, and through views of one projection, as a layer has them."""
    from reasonlab.model import attention_kernels

    monkeypatch.setattr(attention_kernels, "BUSY", busy)
    packed = PackedCausal(layout[0], DEVICE, layout[1])
    shape = (heads, kv_heads, kv_heads)
    low = normal(packed.count, sum(shape), head_dim, dtype=torch.bfloat16)
    high = low.detach().float().requires_grad_()
    assert attention.takes_ragged(low)
    assert not attention.takes_ragged(high)
    results = []
    for x in (low, high):
        out = packed(0, *x.split(shape, dim=1))
        results.append([out, *gradients([out], [x])])
    assert_close(results[0], results[1], 2e-2)
    for a, b in zip(*results, strict=True):
        assert F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0) > 0.9999
