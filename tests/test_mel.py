"""Meta-Experience Learning: the second term by hand, its masks, what is kept, and the loop around it."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from test_loop import Silent, config, train

from reasonlab.config import GrpoConfig, LearnerConfig, MelConfig
from reasonlab.grading.grade import Grade
from reasonlab.methods import mel
from reasonlab.methods.group import Group
from reasonlab.methods.grpo import Grpo
from reasonlab.methods.mel import Experience, contrastive_pairs, internalised
from reasonlab.methods.mel_prompts import LanguageModelPrompts, TinyWorldPrompts
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.problems.problem import Problem
from reasonlab.rollout.types import Rollout
from reasonlab.runs import RunReader
from reasonlab.train.batch import Totals
from reasonlab.train.learner import Learner, Objective
from reasonlab.train.loop import resume, start
from reasonlab.train.recorded import given

GRPO = {"type": "grpo"}
FINAL = "checkpoints/final/model.safetensors"


def problem(name: str) -> Problem:
    return Problem(name, "1+1=?", "2", "sum", 1)


def graded(name: str, verdicts: str) -> Group:
    """A group with one rollout for each letter: c(orrect), w(rong), e(rror)."""
    words = {"c": "correct", "w": "wrong", "e": "error"}
    rollouts = [given([1, 7], [10 + i, 2]) for i in range(len(verdicts))]
    return Group(problem(name), rollouts, [Grade(words[v], None, "") for v in verdicts])  # type: ignore[arg-type]


def experience(name: str, ids: list[int], verdict: str = "correct", context: tuple[int, ...] = (1, 8, 9)) -> Experience:
    wrong, right = given([1], [3]), given([1], [4])
    reflection, replay = given(context, ids), given([1], [5])
    verdict_of_replay = Grade(verdict, None, "")  # type: ignore[arg-type]
    return Experience(problem(name), 0.5, wrong, right, reflection, reflection, "", replay, verdict_of_replay)


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_only_mixed_groups_have_pairs_and_errors_are_neither_right_nor_wrong() -> None:
    for verdicts in ("cccc", "wwww", "ccee", "weee", "eeee"):
        assert contrastive_pairs(graded("p", verdicts), 3, Random(0)) == []
    (pair,) = contrastive_pairs(graded("p", "ecwe"), 3, Random(0))
    assert [rollout.ids[0] for rollout in pair] == [11, 12]


def test_pairs_are_different_and_uniform() -> None:
    group = graded("p", "ccwww")
    assert len({(id(a), id(b)) for a, b in contrastive_pairs(group, 6, Random(1))}) == 6
    assert len(contrastive_pairs(group, 99, Random(1))) == 6
    seen = Counter(
        tuple(rollout.ids[0] for rollout in contrastive_pairs(group, 1, Random(seed))[0]) for seed in range(1200)
    )
    assert set(seen) == {(a, b) for a in (10, 11) for b in (12, 13, 14)}
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 20.5  # χ²(5) at 0.1 %


# --- the loss --------------------------------------------------------------------------------------------------------


def weights(settings: MelConfig, experiences: list[Experience], problems: int) -> list[float]:
    """What every token's −log π is multiplied by in the end."""
    kept = internalised(settings, experiences, problems)
    assert kept is not None
    examples, totals = kept
    return [e.advantage / totals.sequences for e in examples for _ in e.response]


def test_every_token_weighs_one_over_problems_reflections_and_length() -> None:
    experiences = [
        experience("a", [5, 6, 2]),
        experience("a", [5, 2]),
        experience("b", [5, 6, 7, 2]),
        experience("b", [9, 9], "wrong"),
        experience("c", [9], "error"),
    ]
    expected = [1 / (8 * 2 * 3)] * 3 + [1 / (8 * 2 * 2)] * 2 + [1 / (8 * 1 * 4)] * 4
    np.testing.assert_allclose(weights(MelConfig(weight=1.0), experiences, 8), expected)
    np.testing.assert_allclose(weights(MelConfig(weight=0.5), experiences, 8), np.array(expected) / 2)
    by_kept = MelConfig(weight=1.0, normalise="kept")
    np.testing.assert_allclose(weights(by_kept, experiences, 8), np.array(expected) * 8 / 2)
    everything = weights(MelConfig(weight=1.0, replay_filter=False), experiences, 8)
    assert len(everything) == 3 + 2 + 4 + 2 + 1


def test_with_mean_length_every_token_weighs_the_same() -> None:
    """The mean is over what is kept, and a reflection then weighs in proportion to its length."""
    experiences = [
        experience("a", [5, 6, 2]),
        experience("b", [5, 6, 7, 8, 2]),
        experience("b", [5], "correct"),
        experience("c", [9] * 50, "wrong"),
    ]
    mean = (3 + 5 + 1) / 3
    expected = [1 / (8 * mean)] * 3 + [1 / (8 * 2 * mean)] * 6
    np.testing.assert_allclose(weights(MelConfig(weight=1.0, length="mean"), experiences, 8), expected)
    unfiltered = MelConfig(weight=1.0, length="mean", replay_filter=False)
    assert weights(unfiltered, experiences, 8)[0] == pytest.approx(1 / (8 * (3 + 5 + 1 + 50) / 4))
    alone = [experience("a", [5, 6, 2])]
    assert weights(MelConfig(weight=1.0, length="mean"), alone, 8) == weights(MelConfig(weight=1.0), alone, 8)


# A policy that can be enumerated: two letters and an end, at most three tokens, the next token by place and the one
# before it. A reflection is any of its fifteen texts.
LONGEST, LETTERS, END = 3, (0, 1), 2


def texts(begun: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if len(begun) == LONGEST or END in begun:
        return [begun]
    return [text for token in (*LETTERS, END) for text in texts((*begun, token))]


def log_policy(table: torch.Tensor, text: tuple[int, ...]) -> torch.Tensor:
    """Σ_t log π(M_t | M_<t), from logits [place, token before (or none), token]."""
    before = (END, *text[:-1])
    logs = table.log_softmax(-1)
    return torch.stack([logs[place, before[place], token] for place, token in enumerate(text)]).sum()


def gradient_of(value: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, table, retain_graph=True)[0]


def expected_update(settings: MelConfig, table: torch.Tensor, helps: dict[tuple[int, ...], bool]) -> torch.Tensor:
    """E over M ~ π of what `internalised` makes of it: minus the gradient of the second term, for a single problem."""
    total = torch.zeros_like(table)
    for text in texts():
        log = log_policy(table, text)
        made = [experience("a", list(text), "correct" if helps[text] else "wrong")]
        if internalised(settings, made, 1) is not None:
            total += log.detach().exp() * weights(settings, made, 1)[0] * gradient_of(log, table)
    return total


@pytest.mark.parametrize("seed", range(3))
def test_the_nll_of_own_reflections_is_the_policy_gradient_of_helping_briefly(seed: int) -> None:
    """E[(k/|M|) ∇log π(M)] = ∇E[k/|M|], by summing over all reflections; without the filter k is 1."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(LONGEST, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    probabilities = {text: log_policy(table, text).exp() for text in texts()}
    assert sum(p.item() for p in probabilities.values()) == pytest.approx(1)
    helps = {text: bool(torch.rand((), generator=generator) < 0.5) for text in texts()}

    def reward_gradient(reward: dict[tuple[int, ...], float]) -> torch.Tensor:
        return gradient_of(torch.stack([p * reward[text] for text, p in probabilities.items()]).sum(), table)

    filtered = expected_update(MelConfig(weight=1.0), table, helps)
    short_helpers = {text: helps[text] / len(text) for text in texts()}
    torch.testing.assert_close(filtered, reward_gradient(short_helpers))
    assert filtered.abs().max() > 0.01
    unfiltered = expected_update(MelConfig(weight=1.0, replay_filter=False), table, helps)
    torch.testing.assert_close(unfiltered, reward_gradient({text: 1 / len(text) for text in texts()}))
    assert unfiltered[0, END, END] > 0, "ending at once pays"


@pytest.mark.parametrize("seed", range(3))
def test_with_mean_length_shortness_pays_less_the_more_are_kept(seed: int) -> None:
    """Every reflection helps, so all that can be learned is length. A single one is its own mean; with more of them in
    the mean what is left falls, towards E[∇log π] = 0 for a mean that is fixed."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(LONGEST, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    logs = [log_policy(table, text) for text in texts()]
    chances = torch.stack(logs).detach().exp().numpy()
    scores = np.stack([gradient_of(log, table).numpy().ravel() for log in logs])
    np.testing.assert_allclose(chances @ scores, 0, atol=1e-12)  # the fixed mean
    lengths = [len(text) for text in texts()]

    def pull(kept: int) -> float:
        """Size of E[Σ_i ∇log π(M_i) / mean length] / kept over all draws of so many."""
        total = np.zeros(scores.shape[1])
        for draw in itertools.product(range(len(lengths)), repeat=kept):
            made = [experience(str(i), list(texts()[place])) for i, place in enumerate(draw)]
            found = internalised(MelConfig(weight=1.0, length="mean"), made, kept)
            assert found is not None
            chance = np.prod(chances[list(draw)])
            total += chance * sum(
                e.advantage / found[1].sequences * scores[place] for e, place in zip(found[0], draw, strict=True)
            )
        return float(np.linalg.norm(total))

    own = float(np.linalg.norm(chances / lengths @ scores))
    one, two, three = pull(1), pull(2), pull(3)
    assert one == pytest.approx(own)
    assert own > 0.05
    assert two < 0.75 * one
    assert three < 0.75 * two


def test_a_reflection_whose_replay_fails_contributes_exactly_nothing() -> None:
    assert internalised(MelConfig(weight=1.0), [experience("a", [5, 6], "wrong")], 4) is None
    both = internalised(MelConfig(weight=1.0), [experience("a", [5, 6]), experience("b", [7, 8], "wrong")], 4)
    alone = internalised(MelConfig(weight=1.0), [experience("a", [5, 6])], 4)
    assert both is not None
    assert alone is not None
    assert [e.response.tolist() for e in both[0]] == [e.response.tolist() for e in alone[0]] == [[5, 6]]
    assert both[1] == alone[1]


def rollout_of(model_learner: Learner, prompt: list[int], ids: list[int]) -> Rollout:
    return Rollout(prompt, ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int32))


def test_the_gradient_is_grpos_plus_the_nlls_computed_by_hand() -> None:
    """Against autograd on the formula written out, token by token, with an independent forward of each sequence."""
    model = load_model(resolve_model("tiny-0.3m"))
    learner = Learner(model, LearnerConfig(token_budget=50))
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, 40, size=n).tolist() for n in (3, 5, 4, 6)]
    group = Group(
        problem("a"),
        [rollout_of(learner, [1, 20, 21], one) for one in ids],
        [Grade("correct", None, ""), Grade("wrong", None, ""), Grade("wrong", None, ""), Grade("correct", None, "")],
        np.array([1.0, 0.0, 0.0, 1.0]),
    )
    reflections = [experience("a", [30, 31, 32]), experience("b", [33, 34])]
    method = Grpo(GrpoConfig(type="grpo"), 64)
    examples = method.examples([group])
    learned = internalised(MelConfig(weight=0.7), reflections, 5)
    assert learned is not None
    from reasonlab.train.loop import on_policy

    objectives = [
        Objective(examples, on_policy(method.loss), Totals.of(examples)),
        Objective(learned[0], mel.nll, learned[1]),
    ]
    packs = [([e], objective) for objective in objectives for e in objective.examples]
    summed = [torch.zeros_like(p) for p in learner.parameters]
    for *_, gradients in learner.gradients(packs):
        for total, gradient in zip(summed, gradients, strict=True):
            total += gradient

    def logprobs(prompt: Any, response: Any) -> torch.Tensor:
        flat, _ = learner._forward([mel.demonstration(prompt, response)], with_entropy=False)
        return flat

    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    by_hand = torch.zeros(())
    for one, advantage in zip(ids, advantages, strict=True):  # ratio 1: d(min(rA, clip(r)A)) = A dlogπ
        by_hand = by_hand - float(advantage) * logprobs([1, 20, 21], one).mean() / 4
    for one in reflections:
        by_hand = by_hand - 0.7 * logprobs(one.reflection.prompt, one.reflection.ids).mean() / 5
    expected = torch.autograd.grad(by_hand, learner.parameters)
    for mine, theirs in zip(summed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_no_loss_on_the_context() -> None:
    """A token of the context is read, never predicted: its logprob is not in the loss."""
    learned = internalised(MelConfig(weight=1.0), [experience("a", [5, 6], context=(1, 8, 9, 10, 11))], 1)
    assert learned is not None
    (example,), totals = learned
    assert example.prompt.tolist() == [1, 8, 9, 10, 11]
    assert example.response.tolist() == [5, 6]
    assert totals.tokens == int(example.mask.sum()) == 2


# --- the loop --------------------------------------------------------------------------------------------------------


def final(run: Path) -> bytes:
    return (run / FINAL).read_bytes()


def mixed(**changes: Any) -> dict[str, Any]:
    """Settings under which the tiny base has mixed groups."""
    common = {"method": GRPO, "rollout": {"prompts": 6, "samples": 6, "max_tokens": 64}, "evaluate": {"every": 0}}
    return {**common, "mel": {"weight": 1.0, "max_tokens": 24, "replay_filter": False}, **changes}


def test_metrics_and_experiences_are_kept(tmp_path: Path) -> None:
    _, observer = train(tmp_path / "run", **mixed())
    reader = RunReader(tmp_path / "run")
    for step, metrics in enumerate(observer.iterations, start=1):
        rows = reader.experiences(step)
        assert len(rows) == metrics["train/mel/reflections"] > 0
        assert metrics["train/mel/mixed_frac"] == pytest.approx(len(rows) / 6)
        assert metrics["train/mel/retention"] == pytest.approx(np.mean([row["helped"] for row in rows]))
        assert metrics["train/mel/extra_tokens"] > 0
        assert metrics["train/mel/nll"] > 0
        groups = {(row["problem"], row["text"]): row["verdict"] for row in reader.rollouts(step)}
        for row in rows:
            assert groups[row["problem"], row["wrong"]] == "wrong"
            assert groups[row["problem"], row["right"]] == "correct"


def test_without_mixed_groups_mel_is_grpo_bit_for_bit(tmp_path: Path) -> None:
    """One sample a problem: no group is mixed. (REINFORCE++ without group baseline still learns from such groups.)"""
    host = {"type": "grpo", "variant": "reinforce_pp"}
    settings: dict[str, Any] = {"method": host, "rollout": {"prompts": 8, "samples": 1, "max_tokens": 64}}
    train(tmp_path / "host", evaluate={"every": 0}, **settings)
    train(tmp_path / "mel", evaluate={"every": 0}, mel={"weight": 1.0}, **settings)
    assert final(tmp_path / "host") == final(tmp_path / "mel")
    train(tmp_path / "base", evaluate={"every": 0}, **{**settings, "learner": {"lr": 1e-12}})
    assert final(tmp_path / "host") != final(tmp_path / "base"), "the host learned nothing: the comparison is empty"


def test_mel_changes_the_update_and_weight_zero_does_not(tmp_path: Path) -> None:
    train(tmp_path / "mel", **mixed())
    train(tmp_path / "off", **mixed(mel={"weight": 0.0, "replay_filter": False}))
    train(tmp_path / "grpo", **mixed(mel={}))
    assert final(tmp_path / "off") == final(tmp_path / "grpo") != final(tmp_path / "mel")


@pytest.mark.parametrize("method", [GRPO, {"type": "rest", "keep": "correct"}, {"type": "mirror_descent"}])
@pytest.mark.parametrize(
    "ablation", [{"contrast": False}, {"learn": "heuristic"}, {"learn": "correct"}, {"pairs": 3, "normalise": "kept"}]
)
def test_every_ablation_runs_over_every_host(tmp_path: Path, method: Any, ablation: dict[str, Any]) -> None:
    settings = {"weight": 1.0, "max_tokens": 16, "replay_filter": False, **ablation}
    outcome, observer = train(tmp_path / "run", **mixed(method=method, mel=settings, iterations=1))
    assert outcome.status == "finished"
    assert np.isfinite(observer.iterations[0]["train/loss"])
    rows = RunReader(tmp_path / "run").experiences(1)
    assert rows
    if ablation.get("learn") == "correct":
        assert not any(row["reflection"] or row["replay"] for row in rows), "nothing is generated"
        assert observer.iterations[0]["train/mel/extra_tokens"] == 0
    else:
        assert all(row["reflection"] and row["replay"] for row in rows)
        assert observer.iterations[0]["train/mel/extra_tokens"] > 0
        assert observer.iterations[0]["time/reflect_s"] > 0
    assert all(0 < row["success"] < 1 for row in rows), "only mixed groups are reflected on"


def test_killed_between_iterations_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    train(tmp_path / "whole", **mixed())
    run = tmp_path / "cut"
    trainer = start(config(**mixed()), run, ["test"], Silent())
    trainer._iteration(1)
    trainer._checkpoint()
    groups = trainer.source.groups(2)  # killed in the middle of the second: after rollouts and reflections
    trainer._reflect(2, groups)
    del trainer
    resume(run, Silent()).run()
    assert final(run) == final(tmp_path / "whole")


def test_reflections_do_not_depend_on_the_other_groups(tmp_path: Path) -> None:
    trainer = start(config(**mixed()), tmp_path / "run", ["test"], Silent())
    groups = trainer.source.groups(1)
    together = {one.problem.id: one.reflection.ids for one in trainer._reflect(1, groups)}
    for group in groups:
        for one in trainer._reflect(1, [group]):
            assert one.reflection.ids == together[one.problem.id]


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_language_model_prompts_hold_what_they_should_and_nothing_twice() -> None:
    prompts = LanguageModelPrompts()
    asked = prompts.retrospective("What is {wrong}?", "I say \\frac{1}{2} {right}", "it is {question}")
    assert asked.count("What is {wrong}?") == 1
    assert asked.index("\\frac{1}{2} {right}") < asked.index("it is {question}"), "the wrong attempt comes first"
    for section in ("[1]", "[2]", "[3]", "[4]"):
        assert section in asked
    alone = prompts.retrospective("Q", "W", None)
    assert "W" in alone
    assert "right" not in alone.split("<problem>")[1]
    hinted = prompts.hinted("Q?", "If a then {question}.")
    assert "If a then {question}." in hinted
    assert hinted.endswith("Q?")
    assert "\\boxed{}" in hinted


def test_the_rules_of_a_reflection_are_its_fourth_section() -> None:
    text = "[1] Where it failed: x\n[2] y\n[3] z\n[4] Rules:\n[Units]: if a then b.\n[Signs]: if c then d."
    assert LanguageModelPrompts().heuristic(text) == "[Units]: if a then b.\n[Signs]: if c then d."
    assert LanguageModelPrompts().heuristic("no sections at all") == ""
    assert TinyWorldPrompts().heuristic("nonsense") == ""
