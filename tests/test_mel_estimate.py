"""The estimates of Meta-Experience Learning: reflections, replays and updates by hand, and as they were run."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from study_estimates import EIGHT, MEL, ROOT, branch_of, by_arm, changed, configured, memory_of

from reasonlab.config import MelConfig
from reasonlab.errors import UserError
from reasonlab.figures.published import mel
from reasonlab.studies.estimate import estimate
from reasonlab.studies.footprint import activation_bytes, cache_bytes, forward_flops, multiplied_weights
from reasonlab.studies.machines import Cluster, published_retention, read_about
from reasonlab.studies.recipe import SCALES, study_recipe


def test_the_settings_of_the_mel_paper() -> None:
    """As published; what the paper does not say is not tested."""
    recipe = study_recipe(MEL, "paper")
    about = read_about(recipe.about)
    config = recipe.arms["mel"]
    assert config.model.path == EIGHT
    assert about.models[EIGHT].hub == "Qwen/Qwen3-8B-Base"
    assert (config.rollout.prompts, config.rollout.samples, config.rollout.temperature) == (128, 8, 1.0)
    assert (config.learner.lr, config.learner.inner_steps, config.learner.epochs) == (1e-6, 1, 1)
    assert (config.method.type, config.mel.weight, config.mel.length) == ("grpo", 1.0, "own")
    assert (config.iterations, config.evaluate.every, config.evaluate.temperature) == (140, 10, 0.0)
    assert (recipe.settings.samples, recipe.settings.temperature) == (8, 0.6)
    hardware = about.hardware
    assert (hardware.gpu, hardware.gpus, hardware.peak_tflops, hardware.bandwidth_tb) == ("NVIDIA H20", 8, 148, 4.0)
    assert set(recipe.arms) == {"grpo", "mel", "grpo-matched"}


def test_reflections_by_hand() -> None:
    """Without spread and with a constant share that is kept, all of it can be written down."""
    recipe = changed(changed(study_recipe(MEL, "paper"), "lengths|spread", 0), "mel|kept", 0.25)
    rows, shape = by_arm(MEL, recipe), read_about(recipe.about).models[EIGHT].config()
    grpo, branch = rows["grpo"], branch_of(rows["mel"])
    count = 140 * 64  # half of 128 problems, one pair each
    context = 150 + 330 + 2 * 1500
    assert (branch.reflections, branch.context, branch.reflection, branch.replay) == (count, context, 500, 1500)
    assert branch.generated_tokens == count * (500 + 1500)
    assert branch.trained_tokens == count / 4 * (context + 500)
    forward = 2 * multiplied_weights(shape) * (context + 500) + 2 * 36 * 4096 * (context + 500) ** 2
    assert branch.flops == pytest.approx(count / 4 * forward)
    mel = rows["mel"]
    assert mel.generated_tokens == grpo.generated_tokens + branch.generated_tokens
    assert mel.trained_tokens == grpo.trained_tokens + branch.trained_tokens
    assert mel.flops == pytest.approx(grpo.flops + 3 * branch.flops)
    assert mel.update_seconds - grpo.update_seconds == pytest.approx(1.2 * 3 * branch.flops / (8 * 148e12 * 0.45))
    assert mel.rollout_seconds - grpo.rollout_seconds == pytest.approx(1.2 * branch.seconds)


def test_reading_writing_and_replaying_take_their_time() -> None:
    recipe = changed(study_recipe(MEL, "paper"), "lengths|spread", 0)
    machine, config = Cluster(read_about(recipe.about)), recipe.arms["mel"]
    shape, context = machine.shape(config), 150 + 330 + 2 * 1500
    read = forward_flops(shape, 64 * context, 64 * context**2) / (8 * 148e12 * 0.45)
    bandwidth, weights, token = 0.5 * 4e12, 2 * multiplied_weights(shape), cache_bytes(shape, 2)
    wrote = 500 * (weights + 8 * (context + 250) * token) / bandwidth  # eight rows on each GPU
    replayed = 1500 * (weights + 8 * (150 + 500 + 750) * token) / bandwidth
    assert branch_of(by_arm(MEL, recipe)["mel"]).seconds == pytest.approx(140 * (read + wrote + replayed))


def test_the_squares_of_long_contexts_are_those_of_drawn_lengths() -> None:
    """Wrong and right attempts of random length around the mean, drawn; reflections of fixed length."""
    recipe = changed(study_recipe(MEL, "paper"), "mel|kept", 1.0)
    shape, branch = read_about(recipe.about).models[EIGHT].config(), branch_of(by_arm(MEL, recipe)["mel"])
    attempts = np.random.default_rng(0).gamma(1 / 0.9**2, 1500 * 0.9**2, size=(2, 400_000))  # mean 1500, spread 0.9
    n = 150 + 330 + attempts.sum(axis=0) + 500
    drawn = forward_flops(shape, 8960 * float(n.mean()), 8960 * float((n**2).mean()))
    assert branch.flops == pytest.approx(drawn, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "context", "learned", "kept", "writes"),
    [
        ({"contrast": False}, 150 + 330 + 1500, 500, 0.25, True),
        ({"replay_filter": False}, 150 + 330 + 3000, 500, 1.0, True),
        ({"max_tokens": 200}, 150 + 330 + 3000, 200, 0.25, True),
        ({"learn": "correct"}, 150, 1500, 1.0, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_ablations_are_counted_as_they_are(
    changes: dict[str, Any], context: float, learned: float, kept: float, writes: bool
) -> None:
    recipe = changed(study_recipe(MEL, "paper"), "mel|kept", 0.25)
    arm = recipe.arms["mel"].model_copy(update={"mel": MelConfig(weight=1.0, **{"max_tokens": 1024, **changes})})
    branch = branch_of(by_arm(MEL, replace(recipe, arms={**recipe.arms, "mel": arm}))["mel"])
    assert (branch.context, branch.reflection, branch.kept) == (context, learned, kept)
    assert branch.trained_tokens == pytest.approx(8960 * kept * (context + learned))
    assert branch.generated_tokens == (8960 * (learned + 1500) if writes else 0)
    assert (branch.seconds > 0) == writes


def test_the_nll_is_in_every_optimizer_step() -> None:
    recipe = study_recipe(MEL, "paper")
    one, four = (by_arm(MEL, configured(recipe, "learner", inner_steps=steps)) for steps in (1, 4))
    more = 4 * branch_of(one["mel"]).trained_tokens
    assert four["mel"].trained_tokens - four["grpo"].trained_tokens == pytest.approx(more)
    twice = by_arm(MEL, configured(recipe, "mel", pairs=2))
    assert branch_of(twice["mel"]).reflections == 2 * branch_of(one["mel"]).reflections
    assert twice["grpo"].branch is one["grpo"].branch is None


@pytest.mark.parametrize("scale", SCALES)
def test_matched_grpo_generates_as_much_as_mel(scale: str) -> None:
    recipe = study_recipe(MEL, scale)
    rows = by_arm(MEL, recipe)
    grpo, mel, matched = (rows[arm].generated_tokens for arm in ("grpo", "mel", "grpo-matched"))
    prompts = recipe.arms["grpo"].rollout.prompts
    assert mel > grpo
    assert matched == pytest.approx(mel, rel=0.5 / prompts)
    assert matched / grpo == pytest.approx(round(prompts * mel / grpo) / prompts)
    assert recipe.arms["grpo-matched"].rollout.prompts == prompts, "the recipe itself is left alone"


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_and_the_base_model_answer_eight_times(scale: str) -> None:
    recipe = study_recipe(MEL, scale)
    answers = by_arm(MEL, recipe)["test answers"]
    count = (len(recipe.arms) + 1) * recipe.settings.questions * 8
    assert answers.generated_tokens == pytest.approx(count * answers.mean_length)
    assert answers.memory is None


def test_what_was_run_at_gpu_scale_is_near_what_is_estimated() -> None:
    """The committed results. Lengths and shares come from them, so this says that the pieces add up."""
    results = ROOT / "results" / MEL / "gpu"
    recipe = study_recipe(MEL, "gpu")
    rows, record = by_arm(MEL, recipe), json.loads((results / "verdicts.json").read_text())
    measured = {arm["arm"]: arm["generated_tokens"] / len(record["seeds"]) for arm in record["arms"]}
    for arm in ("grpo", "mel", "grpo-matched", "mel-wrong-only", "mel-heavy", "rft-mix"):
        assert rows[arm].generated_tokens == pytest.approx(measured[arm], rel=0.1), arm
    with (results / "experience.csv").open() as file:
        extra = [float(row["extra_tokens"]) for row in csv.DictReader(file) if row["arm"] == "mel"]
    assert branch_of(rows["mel"]).generated_tokens == pytest.approx(sum(extra), rel=0.1)


def test_longer_contexts_are_in_the_memory() -> None:
    """A micro-batch holds one example of full length, and the cache a reflection on every problem."""
    recipe = configured(study_recipe(MEL, "paper"), "learner", token_budget=1)
    rows = by_arm(MEL, recipe)
    shape = read_about(recipe.about).models[EIGHT].config()
    longest = 1024 + 330 + 2 * 7168 + 1024
    assert memory_of(rows["mel"]).activations == activation_bytes(shape, longest, True, True)
    assert memory_of(rows["grpo"]).activations == activation_bytes(shape, 1024 + 7168, True, True)
    few = by_arm(MEL, configured(recipe, "rollout", rows=16))
    assert memory_of(few["grpo"]).cache == 16 * (1024 + 7168) * cache_bytes(shape, 2)
    assert memory_of(few["mel"]).cache == 16 * longest * cache_bytes(shape, 2)  # 128 problems on 8 GPUs


def test_published_retention_by_name() -> None:
    at = np.array([0.0, 20.0, 1000.0])
    assert published_retention("figure 9, 8B", at) == pytest.approx([0.33, 0.415, 0.58])
    assert set(mel()["retention"]["curves"]) == {"4B", "8B", "14B"}


def test_the_assumed_share_of_mixed_problems_is_what_its_reason_says() -> None:
    """1 − E[p⁸] − E[(1 − p)⁸] for success rates from a Beta distribution of concentration 1 around the mean reward."""
    ends = [
        curve[arm][at][1] for curve in [mel()["reward"]["curves"]["8B"]] for arm in ("grpo", "mel") for at in (0, 1)
    ]

    def mixed(mean: float) -> float:
        none, every = (math.prod((x + i) / (1 + i) for i in range(8)) for x in (1 - mean, mean))
        return 1 - none - every

    about = read_about(study_recipe(MEL, "paper").about).mel
    assert about is not None
    assert mixed(min(ends)) == pytest.approx(0.36, abs=0.005)
    assert mixed(max(ends)) == pytest.approx(0.61, abs=0.005)
    assert mixed(min(ends)) < about.mixed < mixed(max(ends))
    assert "0.36 to 0.61" in about.mixed_reason


def test_the_text_has_the_formulas_of_mel_only_where_it_is() -> None:
    with_mel, without = (
        " ".join(estimate(study, study_recipe(study, "paper")).split()) for study in (MEL, "k15-dynamics")
    )
    about = read_about(study_recipe(MEL, "paper").about)
    assert about.mel is not None
    for part in (
        "reflections = mixed share × prompts × pairs",
        "n = question + instruction + wrong + right + reflection",
        "round(prompts × tokens generated by mel / by grpo)",
        about.mel.mixed_reason,
        about.mel.reason,
        about.lengths.reason,
        about.models_reason,
    ):
        assert part in with_mel
        assert part not in without
    assert "Kimi k1.5 report" in without
    assert "Kimi" not in with_mel


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("mel", None, "[about.mel] is missing"),
        ("mel|mixed", 1.5, "about.mel.mixed"),
        ("mel|mixed", None, "about.mel.mixed"),
        ("mel|reflections", 500, "about.mel.reflections"),
        ("mel|kept", "figure 9, 32B", "about.mel.kept: 'figure 9, 32B'"),
        ("mel|kept", -0.1, "about.mel.kept"),
        ("lengths|mean|test answers", None, "about.lengths.mean has no entry 'test answers'"),
    ],
)
def test_a_mistake_about_mel_names_its_key(path: str, value: Any, named: str) -> None:
    with pytest.raises(UserError) as mistake:
        estimate(MEL, changed(study_recipe(MEL, "paper"), path, value))
    assert named in str(mistake.value)


@pytest.mark.parametrize(("size", "rows"), [("4B", 48), ("8B", 48), ("14B", 14)])
def test_the_sizes_of_the_mel_paper_fit_its_machine(size: str, rows: int) -> None:
    """And cost what the page says."""
    recipe = configured(study_recipe(MEL, "paper"), "model", path=f"models/Qwen3-{size}-Base")
    found = by_arm(MEL, configured(recipe, "rollout", rows=rows))
    assert all(row.fits for row in found.values() if row.memory)
    hours = " | ".join(f"{row.gpu_hours:.0f}" for row in found.values())
    page = (ROOT / "docs" / "paper-scale.md").read_text(encoding="utf-8")
    assert f"| {size} | {rows} | {hours} |" in page
