"""The judges' losses: against closed forms, against TRL and transformers, and the same however the step is cut."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_sequences, shake, small_model
from torch import Tensor

from reasonlab.config import LearnerConfig
from reasonlab.judges.formats import Encoded, TinyFormat
from reasonlab.judges.learner import JudgedExample, JudgeLearner, judged, judged_list, targets_of, totals_of
from reasonlab.judges.losses import (
    JudgeLoss,
    JudgeTotals,
    Targets,
    bradley_terry,
    outcome_cross_entropy,
    outcome_squared_error,
    process_cross_entropy,
    process_squared_error,
    until_first_wrong,
)
from reasonlab.judges.network import JudgeModel, OutcomeHead, Pack, ProcessHead, save_judge
from reasonlab.model.ladder import resolve_model
from reasonlab.train.batch import micro_batches

NO_STEPS = torch.zeros(0)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def outcome_targets(correct: list[int], lists: list[int], **totals: int) -> Targets:
    count = {"tokens": 1, "sequences": len(correct), "lists": len(set(lists))} | totals
    finals = torch.tensor(correct, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.float64)
    where = torch.zeros(0, dtype=torch.int64)
    return Targets(none, none, where, finals, torch.ones_like(finals), torch.tensor(lists), JudgeTotals(**count))


def gradient(loss: JudgeLoss, steps: list[float], finals: list[float], targets: Targets) -> tuple[Any, ...]:
    s, f = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (steps, finals))
    value, metrics = loss(s, f, targets)
    gradients = torch.autograd.grad(value, (s, f), materialize_grads=True)
    return value.item(), gradients[0].tolist(), gradients[1].tolist(), {k: v.item() for k, v in metrics.items()}


# --- closed forms ----------------------------------------------------------------------------------------------------


def test_list_wise_bradley_terry_by_hand() -> None:
    """Two problems: one right against two wrong, and two right against one wrong; lists lie interleaved."""
    r = [1.0, 0.2, -0.5, 0.3, 2.0, -1.0]
    value, _, got, metrics = gradient(bradley_terry, [], r, outcome_targets([1, 1, 0, 0, 0, 1], [7, 3, 7, 3, 7, 3]))
    # Problem 7: right r0, wrong r2, r4. Problem 3: right r1, r5, wrong r3. k(n − k) = 2 in both, P = 2.
    pairs = [(0, 2), (0, 4), (1, 3), (5, 3)]
    assert value == pytest.approx(sum(-math.log(sigma(r[a] - r[b])) for a, b in pairs) / 2 / 2)
    expected = [0.0] * 6
    for a, b in pairs:
        expected[a] -= (1 - sigma(r[a] - r[b])) / 4
        expected[b] += (1 - sigma(r[a] - r[b])) / 4
    assert got == pytest.approx(expected)
    assert metrics["pair_accuracy"] == pytest.approx(0.25)  # only r0 > r2
    assert metrics["margin"] == pytest.approx(sum(r[a] - r[b] for a, b in pairs) / 4)


def test_equal_scores_cost_log_two_whatever_the_lists() -> None:
    value, _, got, _ = gradient(bradley_terry, [], [3.0] * 6, outcome_targets([1, 0, 0, 0, 0, 0], [0] * 6))
    assert value == pytest.approx(math.log(2))
    assert got == pytest.approx([-0.5, *[0.1] * 5])


def test_pair_wise_is_list_wise_on_lists_of_two() -> None:
    value, _, got, _ = gradient(bradley_terry, [], [0.4, 0.1, -2.0, 1.0], outcome_targets([1, 0, 0, 1], [0, 0, 1, 1]))
    assert value == pytest.approx(-(math.log(sigma(0.3)) + math.log(sigma(3.0))) / 2)
    assert got == pytest.approx([-sigma(-0.3) / 2, sigma(-0.3) / 2, sigma(-3.0) / 2, -sigma(-3.0) / 2])


def test_far_apart_scores_stay_finite() -> None:
    value, _, got, _ = gradient(bradley_terry, [], [-400.0, 400.0], outcome_targets([1, 0], [0, 0]))
    assert value == pytest.approx(800.0)
    assert got == pytest.approx([-1.0, 1.0])


def test_single_responses_by_hand() -> None:
    targets = outcome_targets([1, 0, 0], [0, 0, 0], sequences=6)  # the step has six, this micro-batch three
    value, _, got, metrics = gradient(outcome_cross_entropy, [], [0.5, -1.0, 2.0], targets)
    assert value == pytest.approx(-(math.log(sigma(0.5)) + math.log(sigma(1.0)) + math.log(sigma(-2.0))) / 6)
    assert got == pytest.approx([(sigma(0.5) - 1) / 6, sigma(-1.0) / 6, sigma(2.0) / 6])
    assert metrics["accuracy"] == pytest.approx(2 / 6)
    value, _, got, metrics = gradient(outcome_squared_error, [], [0.5, -1.0, 2.0], targets)
    assert value == pytest.approx((0.25 + 1.0 + 4.0) / 6)
    assert got == pytest.approx([-1 / 6, -2 / 6, 4 / 6])
    assert metrics["accuracy"] == pytest.approx(1 / 6)


def process_targets() -> Targets:
    """Three steps and two; the second response has no target for the whole."""
    return Targets(
        steps=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.25], dtype=torch.float64),
        counted=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
        owner=torch.tensor([0, 0, 0, 1, 1]),
        finals=torch.tensor([0.75, 0.0], dtype=torch.float64),
        has_final=torch.tensor([1.0, 0.0], dtype=torch.float64),
        lists=torch.tensor([0, 1]),
        totals=JudgeTotals(tokens=8, sequences=4, lists=1),
    )


def test_step_and_trajectory_squared_error_by_hand() -> None:
    logits, finals = [0.3, -0.2, 9.0, 1.0, 0.0], [0.4, 5.0]
    value, of_steps, of_finals, metrics = gradient(process_squared_error(2.0, 3.0), logits, finals, process_targets())
    s = [sigma(x) for x in logits]
    step_part = ((s[0] - 1) ** 2 + s[1] ** 2) / 2 + ((s[3] - 1) ** 2 + (s[4] - 0.25) ** 2) / 2  # each over its T
    final_part = (sigma(0.4) - 0.75) ** 2
    assert value == pytest.approx((2 * step_part + 3 * final_part) / 4)
    assert metrics == pytest.approx({"step_error": step_part / 4, "final_error": final_part / 4})

    def slope(y: float, target: float, weight: float) -> float:
        return weight * 2 * (y - target) * y * (1 - y)

    expected = [slope(s[0], 1, 0.25), slope(s[1], 0, 0.25), 0.0, slope(s[3], 1, 0.25), slope(s[4], 0.25, 0.25)]
    assert of_steps == pytest.approx(expected)
    assert of_finals == pytest.approx([slope(sigma(0.4), 0.75, 0.75), 0.0])


def test_step_and_trajectory_cross_entropy_by_hand() -> None:
    logits, finals = [0.3, -0.2, 9.0, 1.0, 0.0], [0.4, 5.0]
    value, of_steps, of_finals, metrics = gradient(process_cross_entropy(2.0, 3.0), logits, finals, process_targets())
    step_part = -(math.log(sigma(0.3)) + math.log(sigma(0.2)) + math.log(sigma(1.0)) + math.log(0.5)) / 8
    final_part = -(0.75 * math.log(sigma(0.4)) + 0.25 * math.log(sigma(-0.4))) / 4
    assert value == pytest.approx(2 * step_part + 3 * final_part)
    assert of_steps == pytest.approx([-sigma(-0.3) / 4, sigma(-0.2) / 4, 0.0, -sigma(-1.0) / 4, (0.5 - 0.25) / 4])
    assert of_finals == pytest.approx([3 * (sigma(0.4) - 0.75) / 4, 0.0])
    assert metrics["step_accuracy"] == pytest.approx(4 / 8)  # a logit of 0 says wrong, and so does 0.25


@pytest.mark.parametrize(
    ("labels", "counted"), [([1, 1, 1], 3), ([1, 0, 1, 0], 2), ([0, 1], 1), ([], 0), ([1, 1, 0], 3)]
)
def test_steps_after_the_first_wrong_one_are_left_out(labels: list[float], counted: int) -> None:
    kept = until_first_wrong(np.array(labels, np.float32))
    assert kept.tolist() == [i < counted for i in range(len(labels))]


# --- however the step is cut -----------------------------------------------------------------------------------------


def random_judge(kind: str) -> JudgeModel:
    judge = JudgeModel(small_model(seed=1), OutcomeHead(24) if kind == "outcome" else ProcessHead(24))
    shake(judge.head, seed=2, scale=1.0)
    return judge


def list_examples() -> list[JudgedExample]:
    """Lists of different sizes. In the second a token straddles the question's end: its prompts are not all alike."""
    examples = []
    for number, (right, wrong) in enumerate([(1, 2), (3, 3), (2, 1), (1, 1)]):
        question, *tails = random_sequences([5, *range(3, 3 + right + wrong)], seed=number)
        encoded = []
        for i, tail in enumerate(tails):
            prompt = 5
            ids = torch.cat((question, tail))
            if number == 1 and i == 0:
                ids[4], prompt = (ids[4] + 1) % 32, 0
            encoded.append(Encoded(ids.numpy(), np.zeros(0, np.int64), len(ids) - 1, prompt))
        examples += judged_list(encoded, [i < right for i in range(right + wrong)], number)
    return examples


def step_examples() -> list[JudgedExample]:
    rng = np.random.default_rng(0)
    examples = []
    for number, count in enumerate([3, 1, 0, 5, 2, 4]):
        ids = random_sequences([4 + 3 * count + 2], seed=number)[0].numpy()
        encoded = Encoded(ids, 3 + 3 * np.arange(1, count + 1), len(ids) - 1, 4)
        labels = (rng.random(count) < 0.7).astype(np.float32)
        final = None if number % 3 == 2 else float(rng.random())
        examples.append(judged(encoded, final, labels.tolist(), until_first_wrong(labels)))
    return examples


CASES: dict[str, tuple[str, JudgeLoss]] = {
    "list-wise": ("outcome", bradley_terry),
    "cross-entropy": ("outcome", outcome_cross_entropy),
    "squared error": ("outcome", outcome_squared_error),
    "process, squared error": ("process", process_squared_error(1.0, 0.5)),
    "process, cross-entropy": ("process", process_cross_entropy(1.0, 0.5)),
}


def step_with(case: str, budget: int, workers: int = 1) -> tuple[Any, list[Tensor], list[Tensor]]:
    kind, loss = CASES[case]
    settings = LearnerConfig(lr=0.01, eps=1e-3, clip_grad_norm=1e9, token_budget=budget)
    learner = JudgeLearner(random_judge(kind), settings, workers)
    seen: list[list[Tensor]] = []
    learner.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in learner.parameters]))
    result = learner.learn(list_examples() if kind == "outcome" else step_examples(), loss)
    return result, seen[0], [p.detach().clone() for p in learner.parameters]


@pytest.mark.parametrize("budget", [1, 25, 60, 100_000])
@pytest.mark.parametrize("case", CASES)
def test_the_split_into_micro_batches_changes_nothing(case: str, budget: int) -> None:
    kind, loss = CASES[case]
    judge, examples = random_judge(kind), list_examples() if kind == "outcome" else step_examples()
    logits = judge(Pack.of([e.encoded for e in examples]))
    value, metrics = loss(*logits, targets_of(examples, totals_of(examples), "cpu"))
    expected = torch.autograd.grad(value, list(judge.parameters()))
    result, got, _ = step_with(case, budget)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert result.loss == pytest.approx(value.item(), rel=1e-5)
    assert result.metrics == pytest.approx({k: v.item() for k, v in metrics.items()}, rel=1e-4, abs=1e-6)
    assert all((g != 0).any() for g in expected)


@pytest.mark.parametrize("case", ["list-wise", "process, squared error"])
def test_the_number_of_workers_changes_not_one_bit(case: str) -> None:
    (one, _, expected), (two, _, got) = (step_with(case, 25, workers) for workers in (1, 2))
    assert one == two
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_list_is_never_split() -> None:
    packs = micro_batches(list_examples(), 1)
    assert sorted(len(pack) for pack in packs) == [2, 3, 3, 6]
    assert all(len({e.pair for e in pack}) == 1 for pack in packs)


def test_responses_packed_together_have_the_gradient_of_responses_alone() -> None:
    """What responses share is computed once, and gets the gradients of all of them."""
    judge, examples = random_judge("outcome"), list_examples()[3:9]
    totals = totals_of(examples)
    _, together = judge(Pack.of([e.encoded for e in examples]))
    alone = torch.cat([judge(Pack.of([e.encoded]))[1] for e in examples])
    results = [
        torch.autograd.grad(bradley_terry(NO_STEPS, logits, targets_of(examples, totals, "cpu"))[0], judge.parameters())
        for logits in (together, alone)
    ]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


# --- other implementations -------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_loss_and_gradient_equal_those_of_trls_reward_trainer(tmp_path: Path) -> None:
    """Its `compute_loss` runs unchanged on a stand-in for the trainer, with our judge as transformers loads it."""
    from transformers import AutoModelForSequenceClassification
    from trl.trainer.reward_trainer import RewardTrainer

    judge, chosen, rejected = random_judge("outcome"), *(random_sequences(n, seed=9) for n in ([9, 4, 12], [3, 15, 7]))
    save_judge(judge, TinyFormat("outcome"), tmp_path, resolve_model("tiny-0.3m"))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    sequences = [s.clamp(min=3) for s in (*chosen, *rejected)]
    padded = torch.zeros(6, 15, dtype=torch.int64)
    for row, s in zip(padded, sequences, strict=True):
        row[: len(s)] = s
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=None),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    expected = RewardTrainer.compute_loss(trainer, theirs, inputs)
    expected.backward()

    encoded = [Encoded(s.numpy(), np.zeros(0, np.int64), len(s) - 1) for s in sequences]
    examples = [e for i in range(3) for e in judged_list([encoded[i], encoded[3 + i]], [True, False], i)]
    learner = JudgeLearner(judge, LearnerConfig(clip_grad_norm=1e9))
    seen: dict[str, Tensor] = {}
    learner.optimizer.register_step_pre_hook(lambda *_: seen.update((n, p.grad) for n, p in judge.named_parameters()))
    result = learner.learn(examples, bradley_terry)
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    assert result.metrics["pair_accuracy"] == pytest.approx(trainer._metrics["train"]["accuracy"][0])
    assert result.metrics["margin"] == pytest.approx(trainer._metrics["train"]["margin"][0], rel=1e-4)
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    torch.testing.assert_close(seen["head.score.weight"], gradients["score.weight"], atol=1e-5, rtol=1e-4)
    for ours, name in (
        ("backbone.embedding.weight", "model.embed_tokens.weight"),
        ("backbone.blocks.0.attention.output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("backbone.blocks.1.feed_forward.down.weight", "model.layers.1.mlp.down_proj.weight"),
    ):
        torch.testing.assert_close(seen[ours], gradients[name], atol=1e-5, rtol=1e-3)
        assert seen[ours].abs().max() > 1e-3


@pytest.mark.parity
def test_step_loss_and_gradient_equal_those_of_token_classification(tmp_path: Path) -> None:
    """TRL's PRMTrainer minimises the loss of a token classifier with two classes, labels at the ends of steps alone.

    The installed TRL has no such trainer any more, so transformers' classifier, whose loss it used, stands here. Two
    classes with a softmax are one logit with a sigmoid: the difference of their rows.
    """
    from transformers import AutoModelForTokenClassification

    judge = random_judge("process")
    assert isinstance(judge.head, ProcessHead)
    save_judge(judge, TinyFormat("process"), tmp_path, resolve_model("tiny-0.3m"))
    theirs = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=2)
    shake(theirs.score, 4)
    with torch.no_grad():
        judge.head.rows.weight[0] = theirs.score.weight[1] - theirs.score.weight[0]
        judge.head.rows.bias[0] = theirs.score.bias[1] - theirs.score.bias[0]
    examples = [e for e in step_examples() if len(e.steps)]
    width = max(e.length for e in examples)
    ids, mask = (torch.zeros(len(examples), width, dtype=torch.int64) for _ in range(2))
    labels = torch.full_like(ids, -100)
    for row, e in enumerate(examples):
        ids[row, : e.length], mask[row, : e.length] = torch.from_numpy(e.encoded.ids), 1
        labels[row, e.encoded.steps[e.mask]] = torch.from_numpy(e.steps[e.mask]).long()
    expected = theirs.eval()(input_ids=ids, attention_mask=mask, labels=labels).loss
    expected.backward()

    learner = JudgeLearner(judge, LearnerConfig(clip_grad_norm=1e9))
    seen: dict[str, Tensor] = {}
    learner.optimizer.register_step_pre_hook(lambda *_: seen.update((n, p.grad) for n, p in judge.named_parameters()))
    result = learner.learn(examples, process_cross_entropy(1.0, 0.0))
    assert result.loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(seen["head.rows.weight"][0], theirs.score.weight.grad[1], atol=1e-5, rtol=1e-4)
    ours, expected_gradient = seen["backbone.embedding.weight"], theirs.model.embed_tokens.weight.grad
    torch.testing.assert_close(ours[1:], expected_gradient[1:], atol=1e-5, rtol=1e-3)  # padding never gets one there
    assert expected_gradient.abs().max() > 1e-3
