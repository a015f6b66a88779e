"""DPO: the loss against TRL's on identical tensors and against its closed form; pairs and what is chosen for them."""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reasonlab.config import DpoConfig, LearnerConfig
from reasonlab.grading.grade import Grade
from reasonlab.methods.dpo import Dpo
from reasonlab.methods.group import Group
from reasonlab.methods.long2short import LONGER, preference_pairs, shortest_correct
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.train.batch import Example, Totals, micro_batches, pack
from reasonlab.train.learner import Learner

PAIRS = [(3, 9), (1, 12), (7, 12), (5, 2)]  # lengths of chosen and rejected


def problem(name: str = "p") -> Problem:
    return Problem(name, "1+1=?", "2", "sum", 1)


def drawn(seed: int) -> tuple[list[Example], list[Tensor]]:
    """Examples of random pairs, and the policy's logprobs of each."""
    generator = torch.Generator().manual_seed(seed)
    examples, logprobs = [], []
    for pair, lengths in enumerate(PAIRS):
        for sign, length in zip((1.0, -1.0), lengths, strict=True):
            logprobs.append(-2 * torch.rand(length, generator=generator, dtype=torch.float64))
            reference = (-2 * torch.rand(length, generator=generator)).numpy()
            ids = np.arange(length)
            new = Example(np.array([1]), ids, np.zeros(length, np.float32), np.ones(length, bool), sign)
            new.reference, new.pair = reference, pair
            examples.append(new)
    return examples, logprobs


def our_loss(beta: float, examples: list[Example], logprobs: list[Tensor]) -> tuple[float, list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in logprobs]
    batch = pack(examples, Totals.of(examples), "cpu")
    loss, _ = Dpo(DpoConfig(type="dpo", data="x", beta=beta)).loss(torch.cat(leaves), batch)
    return float(loss.detach()), list(torch.autograd.grad(loss, leaves))


def their_loss(beta: float, examples: list[Example], logprobs: list[Tensor]) -> tuple[float, list[Tensor]]:
    """TRL's `DPOTrainer._compute_loss`, unchanged, on a stand-in that hands over given logprobs."""
    trl = pytest.importorskip("trl.trainer.dpo_trainer")
    order = [*range(0, len(examples), 2), *range(1, len(examples), 2)]  # TRL: all chosen, then all rejected
    width = max(len(x) for x in logprobs)
    leaves = [x.clone().requires_grad_() for x in logprobs]
    padded = torch.stack([torch.cat([leaves[i], torch.zeros(width - len(leaves[i]))]) for i in order])
    mask = torch.stack(
        [(torch.arange(width + 1) > 0) & (torch.arange(width + 1) <= len(leaves[i])) for i in order]
    ).long()
    reference = torch.tensor([float(examples[i].reference.astype(np.float64).sum()) for i in order])  # type: ignore[union-attr]
    nothing = torch.zeros_like(padded)
    outputs = SimpleNamespace(
        log_probs=padded, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), aux_loss=None
    )
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=0.0,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    half = len(PAIRS)
    inputs = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference[:half].double(),
        "ref_rejected_logps": reference[half:].double(),
    }
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    return float(loss.detach()), list(torch.autograd.grad(loss, leaves))


@pytest.mark.parity
@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_trls(beta: float, seed: int) -> None:
    examples, logprobs = drawn(seed)
    mine, my_gradient = our_loss(beta, examples, logprobs)
    theirs, their_gradient = their_loss(beta, examples, logprobs)
    assert mine == pytest.approx(theirs, rel=1e-6)
    for a, b in zip(my_gradient, their_gradient, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9)


def test_loss_is_log_two_at_the_reference_and_falls_along_the_preference() -> None:
    examples, _ = drawn(3)
    at_reference = [torch.from_numpy(e.reference.astype(np.float64)) for e in examples]  # type: ignore[union-attr]
    loss, gradient = our_loss(0.2, examples, at_reference)
    assert loss == pytest.approx(math.log(2))
    for e, g in zip(examples, gradient, strict=True):  # d/dlogp = ∓ β σ(0) / P for every token
        np.testing.assert_allclose(g, -e.advantage * 0.2 * 0.5 / len(PAIRS), rtol=1e-6)


def real_pairs() -> list[Example]:
    """Pairs of real token ids, some sharing a prompt, with logprobs of a reference that is not the model itself."""
    rng = np.random.default_rng(0)
    examples = []
    for pair in range(9):
        prompt = np.arange(5, 12) + pair // 3
        for sign in (1.0, -1.0):
            ids = rng.integers(4, 40, size=int(rng.integers(2, 30)))
            new = Example(prompt, ids, np.zeros(len(ids), np.float32), np.ones(len(ids), bool), sign)
            new.reference, new.pair = rng.normal(-2, 0.5, len(ids)).astype(np.float32), pair
            examples.append(new)
    return examples


def test_gradients_do_not_depend_on_the_split_into_micro_batches() -> None:
    results = []
    for budget in (40, 100, 10_000):
        model = load_model(resolve_model("tiny-0.3m"))
        learner = Learner(model, LearnerConfig(token_budget=budget, lr=1e-3, clip_grad_norm=1e9))
        result = learner.step(real_pairs(), Dpo(DpoConfig(type="dpo", data="x", beta=0.05)).loss)
        results.append((result.loss, result.grad_norm, result.metrics["margin"], result.metrics["preferred"]))
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-4)


@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_pair_is_never_split(budget: int, drawn_pairs: list[tuple[int, int]]) -> None:
    examples = []
    for pair, (prompt, length) in enumerate(drawn_pairs):
        for size in (length, 41 - length):
            new = Example(np.full(3, prompt), np.zeros(size, np.int64), np.zeros(size, np.float32), np.ones(size, bool))
            new.pair = pair
            examples.append(new)
    packs = micro_batches(examples, budget)
    assert sorted(id(e) for one in packs for e in one) == sorted(id(e) for e in examples)
    where = [{e.pair for e in one} for one in packs]
    assert sum(len(pairs) for pairs in where) == len(drawn_pairs)


# --- which samples are learned from ----------------------------------------------------------------------------------


def sampled(*rollouts: tuple[int, str], name: str = "p") -> Group:
    """A group of (length, verdict)."""
    made = [Rollout([1], [i] * length, np.zeros(length, np.float32), "stop") for i, (length, _) in enumerate(rollouts)]
    return Group(problem(name), made, [Grade(verdict, None, "") for _, verdict in rollouts])  # type: ignore[arg-type]


def test_pairs_are_those_of_the_report() -> None:
    """Chosen: the shortest correct. Rejected: longer wrong ones, and correct ones at least 1.5 times as long."""
    group = sampled((10, "correct"), (14, "correct"), (15, "correct"), (9, "wrong"), (11, "wrong"), (30, "error"))
    pairs = preference_pairs([group])
    assert [pair.lengths.tolist() for pair in pairs] == [[10, 15], [10, 11]]
    assert [pair.correct.tolist() for pair in pairs] == [[True, True], [True, False]]
    assert LONGER == 1.5


def test_no_pairs_without_a_correct_sample_and_not_more_than_asked_for() -> None:
    assert preference_pairs([sampled((5, "wrong"), (9, "wrong"))]) == []
    many = sampled((2, "correct"), *[(length, "wrong") for length in range(3, 12)])
    assert [pair.lengths[1] for pair in preference_pairs([many], most_pairs=3)] == [11, 10, 9]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["correct", "wrong", "timeout"])), min_size=1, max_size=8)
)
def test_shortest_correct_against_a_plain_search(rollouts: list[Any]) -> None:
    lengths = [length for length, verdict in rollouts if verdict == "correct"]
    found = shortest_correct([sampled(*rollouts)])
    assert [len(r.ids) for _, r in found] == ([min(lengths)] if lengths else [])
