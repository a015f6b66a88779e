"""The learner: the same update however the batch is cut, and the update that the formulas ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import VOCABULARY, in_transformers, packed_logits, small_model
from torch import Tensor

from reasonlab.config import GrpoConfig, LearnerConfig, MirrorDescentConfig
from reasonlab.methods.grpo import Grpo
from reasonlab.methods.mirror_descent import MirrorDescent
from reasonlab.methods.sft import demonstration, sft_loss
from reasonlab.model.checkpoint import save_model
from reasonlab.model.transformer import Transformer
from reasonlab.train import learner as learner_module
from reasonlab.train.batch import Example, TokenBatch, Totals, micro_batches, pack
from reasonlab.train.learner import Learner, Loss, StepResult, schedule, token_logprobs

ONE_PACK = 1_000_000
LOSSES: dict[str, Loss] = {
    "sft": sft_loss,
    "mirror_descent": MirrorDescent(MirrorDescentConfig(tau=0.3)).loss,
    "grpo": Grpo(GrpoConfig(type="grpo"), max_tokens=32).loss,
    "gspo": Grpo(GrpoConfig(type="grpo", variant="gspo", clip_low=0.5, clip_high=0.5), max_tokens=32).loss,
}


def make_examples(count: int = 9, seed: int = 0) -> list[Example]:
    """Ragged examples with masked tokens, advantages of both signs and old logprobs near those of a random model."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        prompt, response = (rng.integers(0, VOCABULARY, int(rng.integers(1, n))) for n in (12, 25))
        mask = rng.random(len(response)) < 0.8
        logprobs = rng.normal(-3, 0.5, len(response)).astype(np.float32)
        examples.append(Example(prompt, response, logprobs, mask, advantage=float(rng.normal())))
    return examples


EXAMPLES = make_examples()


def settings(**changes: Any) -> LearnerConfig:
    """A large `eps` keeps Adam's step smooth where a gradient is nearly zero, so that rounding stays rounding."""
    return LearnerConfig(**{"lr": 0.01, "eps": 1e-3, "clip_grad_norm": 1e9} | changes)


def new_learner(workers: int = 1, temperature: float = 1.0, tied: bool = True, **changes: Any) -> Learner:
    return Learner(small_model(seed=2, tied=tied), settings(**changes), workers, temperature)


def watch_gradients(learner: Learner) -> list[list[Tensor]]:
    """The gradients that reach the optimizer, one list for each of its steps."""
    seen: list[list[Tensor]] = []

    def note(*_: Any) -> None:
        seen.append([p.grad.clone() for p in learner.parameters if p.grad is not None])

    learner.optimizer.register_step_pre_hook(note)
    return seen


def gradients_of(
    examples: Sequence[Example], loss: Loss, totals: Totals | None = None, **changes: Any
) -> tuple[StepResult, list[Tensor]]:
    learner = new_learner(**changes)
    seen = watch_gradients(learner)
    return learner.step(examples, loss, totals), seen[0]


def weights(learner: Learner) -> list[Tensor]:
    return [p.detach().clone() for p in learner.parameters]


def assert_close(got: Sequence[Tensor], expected: Sequence[Tensor], atol: float = 1e-6) -> None:
    """Up to the rounding of sums as large as the largest element: which way it falls, the machine decides."""
    largest = max(float(b.abs().max()) for b in expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=atol * max(largest, 1.0), rtol=1e-5)


# --- the same update however the batch is cut -----------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("budget", [1, 40, 90])
def test_the_token_budget_changes_nothing(loss: str, budget: int) -> None:
    whole, cut = new_learner(token_budget=ONE_PACK), new_learner(token_budget=budget)
    assert len(micro_batches(EXAMPLES, ONE_PACK)) == 1
    assert len(micro_batches(EXAMPLES, budget)) > 1
    expected, got = (learner.step(EXAMPLES, LOSSES[loss]) for learner in (whole, cut))
    assert_close(weights(cut), weights(whole))
    for field in ("loss", "grad_norm", "entropy"):
        assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-4, abs=1e-6)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert any((a != b).any() for a, b in zip(weights(whole), weights(new_learner()), strict=True))


@pytest.mark.parametrize("budget", [1, 60])
def test_the_number_of_workers_changes_not_one_bit(budget: int) -> None:
    results = []
    for workers in (1, 2, 3):
        learner = new_learner(workers=workers, token_budget=budget)
        steps = [learner.step(make_examples(seed=i), LOSSES["grpo"]) for i in range(3)]
        results.append((steps, weights(learner)))
    for steps, tensors in results[1:]:
        assert steps == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[0][1], strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pack_is_the_sum_of_its_sequences(loss: str) -> None:
    packed, together = gradients_of(EXAMPLES, LOSSES[loss], token_budget=ONE_PACK)
    totals = Totals.of(EXAMPLES)
    parts = [gradients_of([e], LOSSES[loss], totals) for e in EXAMPLES]
    assert packed.loss == pytest.approx(sum(result.loss for result, _ in parts), rel=1e-6, abs=1e-6)
    assert_close(together, [torch.stack(same).sum(0) for same in zip(*(g for _, g in parts), strict=True)])


def test_the_order_of_examples_changes_nothing_but_rounding() -> None:
    a, b = new_learner(token_budget=60), new_learner(token_budget=60)
    a.step(EXAMPLES, LOSSES["grpo"])
    b.step(EXAMPLES[::-1], LOSSES["grpo"])
    assert_close(weights(b), weights(a))


def test_totals_may_count_examples_that_were_left_out() -> None:
    """Examples with advantage zero contribute nothing but their number."""
    silent = [Example(e.prompt, e.response, e.logprobs, e.mask, advantage=0.0) for e in EXAMPLES[5:]]
    for loss in (LOSSES["grpo"], LOSSES["sft"]):
        full, expected = gradients_of([*EXAMPLES[:5], *silent], loss)
        short, got = gradients_of(EXAMPLES[:5], loss, Totals.of(EXAMPLES))
        assert_close(got, expected)
        assert short.loss == pytest.approx(full.loss, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=20), st.integers(1, 60))
def test_micro_batches_deal_out_every_example_once(sizes: list[tuple[int, int]], budget: int) -> None:
    examples = [demonstration([1] * prompt, [2] * response) for prompt, response in sizes]
    packs = micro_batches(examples, budget)
    assert sorted(id(e) for p in packs for e in p) == sorted(id(e) for e in examples)
    for members in packs:
        assert sum(e.length for e in members) <= budget or len(members) == 1


def test_a_pack_lays_tokens_and_sequences_side_by_side() -> None:
    first, second = (
        Example(
            np.array([1]),
            np.arange(n),
            np.arange(n, dtype=np.float32) - 9,
            np.arange(n) > 0,
            advantage=float(n),
            reference=np.full(n, -n, np.float32),
        )
        for n in (2, 3)
    )
    batch = pack([first, second], Totals.of([first, second]), "cpu")
    assert (batch.totals.tokens, batch.totals.sequences) == (3, 2)
    assert batch.old.tolist() == [-9, -8, -9, -8, -7]
    assert batch.mask.tolist() == [0, 1, 0, 1, 1]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]
    assert batch.lengths.tolist() == [1, 2]
    assert batch.per_token(batch.advantage).tolist() == [2, 2, 3, 3, 3]
    assert batch.sum_by_sequence(batch.old).tolist() == [-17, -24]
    assert batch.reference is not None
    assert batch.reference.tolist() == [-2, -2, -3, -3, -3]
    second.reference = None
    assert pack([first, second], batch.totals, "cpu").reference is None


# --- logprobs at the head -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logprobs_are_those_of_the_full_logits_in_the_order_given(temperature: float, tied: bool) -> None:
    learner = new_learner(temperature=temperature, tied=tied, token_budget=50)
    sequences = [torch.from_numpy(np.concatenate((e.prompt, e.response))) for e in EXAMPLES]
    for example, ids, logits, got in zip(
        EXAMPLES, sequences, packed_logits(learner.model, sequences), learner.logprobs(EXAMPLES), strict=True
    ):
        every = (logits / temperature).log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        np.testing.assert_allclose(got, every[len(example.prompt) - 1 :], atol=1e-5, rtol=0)
        assert got.dtype == np.float32


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_chunked_head_changes_nothing(rows: int, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, expected = gradients_of(EXAMPLES, LOSSES["grpo"], tied=tied)
    all_logprobs = new_learner(tied=tied).logprobs(EXAMPLES)
    monkeypatch.setattr(learner_module, "HEAD_ELEMENTS", rows * VOCABULARY)
    chunked, got = gradients_of(EXAMPLES, LOSSES["grpo"], tied=tied)
    assert_close(got, expected)
    assert chunked.loss == pytest.approx(whole.loss, abs=1e-6)
    assert chunked.entropy == pytest.approx(whole.entropy, abs=1e-5)
    for a, b in zip(new_learner(tied=tied).logprobs(EXAMPLES), all_logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_logits_of_a_batch_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 50
    hidden, head = torch.randn(tokens, 8, requires_grad=True), torch.randn(VOCABULARY, 8, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens,))

    def largest_with_logits() -> int:
        kept: list[torch.Size] = []

        def keep(x: Tensor) -> Tensor:
            kept.append(x.shape)
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            token_logprobs(hidden, head, targets)[0].sum()
        return max((shape[0] for shape in kept if len(shape) == 2 and shape[1] == VOCABULARY), default=0)

    assert largest_with_logits() == tokens
    monkeypatch.setattr(learner_module, "HEAD_ELEMENTS", 5 * VOCABULARY)
    assert largest_with_logits() == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_is_the_mean_over_tokens_in_the_loss(temperature: float) -> None:
    learner = new_learner(temperature=temperature, token_budget=40)
    sequences = [torch.from_numpy(np.concatenate((e.prompt, e.response))) for e in EXAMPLES]
    total = 0.0
    for example, logits in zip(EXAMPLES, packed_logits(learner.model, sequences), strict=True):
        p = (logits[len(example.prompt) - 1 : -1].double() / temperature).softmax(-1)
        total += float((-(p * p.log()).sum(-1) * torch.from_numpy(example.mask)).sum())
    result = learner.step(EXAMPLES, sft_loss)
    assert result.entropy == pytest.approx(total / sum(e.mask.sum() for e in EXAMPLES), rel=1e-5)


def test_the_mismatch_is_the_largest_distance_from_the_sampled_logprobs() -> None:
    learner = new_learner(token_budget=40)
    now = learner.logprobs(EXAMPLES)
    expected = max(np.abs((a - e.logprobs) * e.mask).max() for a, e in zip(now, EXAMPLES, strict=True))
    assert learner.step(EXAMPLES, sft_loss).mismatch == pytest.approx(expected, rel=1e-5)


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sft_equals_cross_entropy_in_transformers(tied: bool, tmp_path: Path) -> None:
    # Token 0 is the padding, whose embedding transformers never trains; real text does not contain it.
    examples = [demonstration(e.prompt.clip(1).tolist(), e.response.clip(1).tolist()) for e in EXAMPLES]
    theirs = in_transformers(small_model(seed=2, tied=tied), tmp_path / "weights")
    width = max(e.length for e in examples)
    ids, labels = torch.zeros(len(examples), width, dtype=torch.int64), torch.full((len(examples), width), -100)
    attention = torch.zeros_like(ids)
    for i, e in enumerate(examples):
        ids[i, : e.length] = torch.from_numpy(np.concatenate((e.prompt, e.response)))
        labels[i, len(e.prompt) : e.length] = torch.from_numpy(e.response)
        attention[i, : e.length] = 1
    logits = theirs(ids, attention_mask=attention).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()

    result, gradients = gradients_of(examples, sft_loss, tied=tied, token_budget=60)
    assert result.loss == pytest.approx(loss.item(), abs=1e-5)
    named = in_their_layout(gradients, tied, tmp_path)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(named) == set(expected)
    for name, gradient in named.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def in_their_layout(gradients: Sequence[Tensor], tied: bool, directory: Path) -> dict[str, Tensor]:
    """Gradients by their Hugging Face names: saved as if they were the weights of a model."""
    model = small_model(tied=tied)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.copy_(gradient)
    save_model(model, directory)
    return load_file(directory / "model.safetensors")


# --- the optimizer --------------------------------------------------------------------------------------------------


def test_adamw_by_hand() -> None:
    lr, (b1, b2), eps, decay = 0.01, (0.8, 0.9), 1e-6, 0.1
    learner = new_learner(lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    seen = watch_gradients(learner)
    w = [p.detach().double() for p in learner.parameters]
    m = [torch.zeros_like(x) for x in w]
    v = [torch.zeros_like(x) for x in w]
    for t in range(1, 5):
        learner.step(make_examples(seed=t), sft_loss)
        g = [x.double() for x in seen[-1]]
        for i in range(len(w)):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            v[i] = b2 * v[i] + (1 - b2) * g[i] ** 2
            w[i] = w[i] * (1 - lr * decay) - lr * (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
        assert_close([p.double() for p in learner.parameters], w)


def test_the_step_is_that_of_torch_adamw() -> None:
    learner = new_learner(weight_decay=0.1, lr=0.003)
    seen = watch_gradients(learner)
    other = [torch.nn.Parameter(p.detach().clone()) for p in learner.parameters]
    optimizer = torch.optim.AdamW(other, lr=0.003, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for seed in range(3):
        learner.step(make_examples(seed=seed), sft_loss)
        for parameter, gradient in zip(other, seen[-1], strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert_close(weights(learner), [p.detach() for p in other])


def test_large_gradients_are_clipped_and_small_ones_are_not() -> None:
    free, expected = gradients_of(EXAMPLES, sft_loss)
    assert free.grad_norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in expected)), rel=1e-5)
    clipped, got = gradients_of(EXAMPLES, sft_loss, clip_grad_norm=0.01)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    assert math.sqrt(sum(float(g.square().sum()) for g in got)) == pytest.approx(0.01, rel=1e-3)
    assert_close(got, [g * 0.01 / free.grad_norm for g in expected])
    _, same = gradients_of(EXAMPLES, sft_loss, clip_grad_norm=2 * free.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))


def test_a_reset_optimizer_starts_afresh() -> None:
    learner = new_learner()
    learner.step(EXAMPLES, sft_loss)
    fresh = Learner(copy_of(learner.model), settings())
    learner.reset_optimizer()
    for one in (learner, fresh):
        one.step(make_examples(seed=1), sft_loss)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(fresh), strict=True))


def copy_of(model: Transformer) -> Transformer:
    twin = Transformer(model.config)
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.2]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 0.6, 0.2]),
    ],
)
def test_schedules(kind: Any, expected: list[float]) -> None:
    config = LearnerConfig(schedule=kind, warmup_steps=4, decay_steps=12, final_lr_ratio=0.2)
    assert [schedule(config, step) for step in (0, 1, 2, 3, 4, 6, 8, 12)] == pytest.approx(expected)
    assert schedule(config, 500) == pytest.approx(1 if kind == "constant" else 0.2)


def test_without_warm_up_or_decay_the_rate_is_constant() -> None:
    assert {schedule(LearnerConfig(schedule="cosine"), step) for step in range(50)} == {1.0}


def test_the_schedule_reaches_the_optimizer() -> None:
    learner = new_learner(warmup_steps=3)
    rates = []
    for _ in range(4):
        rates.append(learner.step(EXAMPLES, sft_loss).lr)
        assert learner.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.01 / 3, 0.02 / 3, 0.01, 0.01])


# --- losses that are not numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_pack_with_a_non_finite_loss_is_dropped_and_counted(bad: float) -> None:
    poisoned = [*EXAMPLES[:4], demonstration([1], [2, 3]), *EXAMPLES[4:]]
    poisoned[4].advantage = bad
    totals = Totals.of(poisoned)
    result, got = gradients_of(poisoned, sft_loss, token_budget=1)
    expected_result, expected = gradients_of(EXAMPLES, sft_loss, totals, token_budget=1)
    assert result.nonfinite == 1
    assert expected_result.nonfinite == 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert result.loss == expected_result.loss


def test_a_step_of_nothing_but_non_finite_losses_moves_nothing() -> None:
    learner = new_learner(token_budget=1, weight_decay=0.1)
    before = weights(learner)
    bad = [Example(e.prompt, e.response, e.logprobs, e.mask, advantage=math.nan) for e in EXAMPLES if e.mask.any()]
    result = learner.step(bad, sft_loss)
    assert result.nonfinite == len(bad)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))


def test_a_non_finite_gradient_moves_nothing_and_the_next_step_works() -> None:
    def spike(logprobs: Tensor, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return (logprobs - logprobs.detach()).abs().sqrt().sum(), {}  # zero, with an infinite slope

    learner = new_learner()
    before = weights(learner)
    result = learner.step(EXAMPLES, spike)
    assert result.nonfinite == 1
    assert not math.isfinite(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))
    assert learner.step(EXAMPLES, sft_loss).nonfinite == 0
    assert all(torch.isfinite(w).all() for w in weights(learner))
    assert learner.steps == 2


def test_a_step_whose_tokens_are_all_masked_is_no_alarm() -> None:
    masked = [Example(e.prompt, e.response, e.logprobs, np.zeros_like(e.mask), e.advantage) for e in EXAMPLES]
    for loss in (*LOSSES.values(), Grpo(GrpoConfig(type="grpo", variant="dapo"), max_tokens=32).loss):
        learner = new_learner()
        before = weights(learner)
        result = learner.step(masked, loss)
        assert (result.nonfinite, result.loss, result.entropy) == (0, 0.0, 0.0)
        assert all(math.isfinite(value) for value in result.metrics.values())
        assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))


def test_an_empty_step_is_a_step() -> None:
    learner = new_learner(workers=2)
    before = weights(learner)
    result = learner.step([], sft_loss)
    assert (result.loss, result.grad_norm, result.nonfinite, result.metrics) == (0.0, 0.0, 0, {})
    assert learner.logprobs([]) == []
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))


def test_training_lowers_the_loss() -> None:
    learner = new_learner(workers=2, eps=1e-8, lr=0.003, token_budget=100)
    examples = [demonstration(e.prompt.tolist(), e.response.tolist()) for e in EXAMPLES]
    losses = [learner.step(examples, sft_loss).loss for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
