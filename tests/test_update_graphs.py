"""CUDA graphs of an update: packs filled up to few shapes change nothing, and a captured pass is the launched one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import small_model
from test_learner import EXAMPLES, LOSSES, ONE_PACK, gradients_of, make_examples, new_learner, settings, watch_gradients
from torch import Tensor
from update_pieces import (
    ROUNDING,
    apart,
    assert_close,
    captured_shapes,
    device_gradients,
    device_learner,
    grouped_examples,
    half_shared,
    on_cuda,
    packs_of,
    ragged_switch,
    with_working_copy,
)

from reasonlab.model.attention import PackedCausal, Pieces
from reasonlab.model.lora import add_lora
from reasonlab.train import graphs
from reasonlab.train.batch import Example, Layout, TokenBatch, Totals, micro_batches
from reasonlab.train.graphs import Caps, filled_size, power_of_two
from reasonlab.train.learner import Learner, Objective, read_pack

with_ragged = pytest.fixture(ragged_switch)


# --- packs that are filled up to few shapes --------------------------------------------------------------------------


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
    assert caps.grown(apart) == caps
    shared = Pieces(np.full(17, 9), np.full(3, 800), np.array([0, 700, 0]), np.arange(700))
    assert caps.grown(shared) == Caps(32, 16, 1024)
    assert caps.grown(shared).grown(apart) == Caps(32, 16, 1024)


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
@pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])
def test_what_fills_a_pack_up_changes_nothing(make: str, ragged: bool, with_ragged: Callable[[bool], None]) -> None:
    with_ragged(ragged)
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
def test_a_learner_that_fills_packs_up(make: str, loss: str, with_ragged: Callable[[bool], None]) -> None:
    with_ragged(True)
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


def test_the_sums_of_a_step_begin_at_zero(with_ragged: Callable[[bool], None]) -> None:
    """They stay where they are from step to step, whatever the optimizer does with `grad`."""
    with_ragged(True)
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


def test_a_loss_that_is_not_finite_adds_nothing(with_ragged: Callable[[bool], None]) -> None:
    with_ragged(True)
    learner, totals = filling(token_budget=ONE_PACK), Totals.of(EXAMPLES)
    packs = len(micro_batches(EXAMPLES, ONE_PACK, even=4))
    assert learner.step_on([Objective(EXAMPLES, unsound, totals)]).nonfinite == packs
    assert learner.graphs is not None
    assert all(not total.any() for total in learner.graphs.sums)
    seen = watch_gradients(learner)
    both = [Objective(EXAMPLES, unsound, totals), Objective(EXAMPLES, LOSSES["sft"], totals)]
    assert learner.step_on(both).nonfinite == packs
    assert_close(seen[0], gradients_of(EXAMPLES, LOSSES["sft"])[1])


def test_a_loss_of_few_logprobs(with_ragged: Callable[[bool], None]) -> None:
    with_ragged(True)
    expected_result, expected = gradients_of(EXAMPLES, of_few)
    learner = filling()
    seen = watch_gradients(learner)
    assert learner.step(EXAMPLES, of_few).metrics == pytest.approx(expected_result.metrics, rel=1e-5)
    assert_close(seen[0], expected)


def test_adapters_alone_get_gradients(with_ragged: Callable[[bool], None]) -> None:
    with_ragged(True)
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


def test_shapes_are_few_and_forgotten(with_ragged: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with_ragged(True)
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


def test_autograd_keeps_nothing_of_a_pass(with_ragged: Callable[[bool], None]) -> None:
    """Its nodes remember the stream they were made on: one that outlived its pass would spoil the next capture."""
    with_ragged(True)
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


def test_weights_that_move_away_are_not_read_where_they_were(with_ragged: Callable[[bool], None]) -> None:
    with_ragged(True)
    learner = filling()
    assert learner.graphs is not None
    learner.step(EXAMPLES, LOSSES["sft"])
    sums = learner.graphs.sums
    learner.step(EXAMPLES, LOSSES["sft"])
    assert learner.graphs.sums is sums
    learner.model.final_norm.weight.data = learner.model.final_norm.weight.data.clone()
    learner.step(EXAMPLES, LOSSES["sft"])
    assert learner.graphs.sums is not sums


# --- on a device -----------------------------------------------------------------------------------------------------


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
    answers = [np.roll(long, i)[:200] for i in range(2)]  # one pack, and a beginning of 280 tokens that they share
    longer = [Example(long[:280], ids, np.full(200, -3, np.float32), np.ones(200, bool), 1.0) for ids in answers]
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
