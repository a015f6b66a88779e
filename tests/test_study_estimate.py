"""The estimates of `study --dry-run` against independent counts: real parameters, optimizer state, cache buffers, saved
activations and operations, and what must grow with what."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import random_sequences, small_model
from study_estimates import EIGHT, MEL, ROOT, SEVEN, THIRTY_TWO, by_arm, changed, configured, memory_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from reasonlab.config import Config, LearnerConfig
from reasonlab.errors import UserError
from reasonlab.figures.published import kimi_k15
from reasonlab.methods.sft import demonstration, sft_loss
from reasonlab.model.attention import PackedCausal
from reasonlab.model.checkpoint import load_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.transformer import Transformer
from reasonlab.problems.registry import find_benchmark
from reasonlab.problems.suites import SUITES
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling
from reasonlab.studies.estimate import estimate, estimates
from reasonlab.studies.footprint import (
    activation_bytes,
    cache_bytes,
    decoding_rate,
    forward_flops,
    layer_activation_bytes,
    multiplied_weights,
)
from reasonlab.studies.machines import Cluster, ThisMachine, longest_reflection, published_lengths, read_about
from reasonlab.studies.recipe import SCALES, study_recipe

STUDIES = ("k15-dynamics", "long2short", MEL)


# --- formulas against counts -----------------------------------------------------------------------------------------


def test_parameters_of_real_models_from_their_public_shapes() -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

    models = {
        name: shape
        for study in ("k15-dynamics", MEL)
        for name, shape in read_about(study_recipe(study, "paper").about).models.items()
    }
    counts = {
        **{SEVEN: 7_615_616_512, THIRTY_TWO: 32_763_876_352, EIGHT: 8_190_735_360},  # the hub says 7.61B, 32.8B, 8.19B,
        **{"models/Qwen3-4B-Base": 4_022_468_096, "models/Qwen3-14B-Base": 14_768_307_200},  # 4.02B and 14.8B
    }
    assert {name: shape.config().parameter_count() for name, shape in models.items()} == counts
    for shape in models.values():
        kind = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[shape.architecture]
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(kind(**shape.config().to_hf()))
        assert sum(p.numel() for p in theirs.parameters()) == shape.config().parameter_count()


def test_weights_gradients_and_moments_are_those_of_a_learner() -> None:
    from reasonlab.train.learner import Learner

    model = load_model(resolve_model("tiny-0.3m"))
    learner = Learner(model, LearnerConfig())
    ids = np.arange(1, 9)
    learner.step([demonstration(ids[:3], ids[3:])], sft_loss)
    moments = [tensor for state in learner.optimizer.state.values() for tensor in state.values() if tensor.dim() > 0]
    memory = ThisMachine().memory(Config.model_validate({"model": {"path": "tiny-0.3m"}}))
    assert memory.weights == sum(p.nbytes for p in model.parameters())
    assert memory.moments == sum(tensor.nbytes for tensor in moments)
    assert memory.gradients == 2 * memory.weights  # fp32, the sum and one micro-batch's


def test_cache_is_as_large_as_the_buffers_of_a_decoder() -> None:
    settings = {"model": {"path": "tiny-0.3m"}, "threads": 1, "evaluate": {"every": 0}}
    config = Config.model_validate(settings | {"rollout": {"prompts": 3, "samples": 2, "max_tokens": 24, "rows": 64}})
    model = load_model(resolve_model("tiny-0.3m"))
    engine = Engine(model, config.rollout.rows, 1)
    longest = list(range(1, 1 + ThisMachine.prompt_limit))
    engine.generate([Request(longest, [i, i + 100]) for i in range(3)], Sampling(max_tokens=24))
    (decoder,) = engine._decoders.values()
    assert ThisMachine().memory(config).cache == decoder.cache.keys.nbytes + decoder.cache.values.nbytes
    per_token = (decoder.cache.keys.nbytes + decoder.cache.values.nbytes) / (decoder.rows * decoder.columns)
    assert cache_bytes(model.config, 4) == per_token


def plain_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over one whole sequence in matrix products that the counter sees; no mask, so twice the causal work."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0)
    return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_the_counter_sees(tied: bool) -> None:
    model = small_model(tied=tied, hidden_size=40, heads=6, kv_heads=3)
    (ids,) = random_sequences([37])
    with FlopCounterMode(display=False) as forward:
        logits = model(ids, torch.arange(37), plain_attention) @ model.head_weight.T
    linear, causal = forward_flops(model.config, 37, 0), forward_flops(model.config, 0, 37**2)
    assert forward.get_total_flops() == linear + 2 * causal
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def saved_bytes(model: Transformer, tokens: int, bfloat16: bool) -> int:
    """Distinct storage that the forward pass keeps for the backward pass, beside the weights and their bf16 copies."""
    shapes = {tuple(p.shape) for p in model.parameters()} | {
        tuple(p.T.shape) for p in model.parameters() if p.dim() > 1
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    (ids,) = random_sequences([tokens])
    attend = PackedCausal([tokens])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16, bfloat16):
        model(ids, attend.positions, attend)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # norms of bf16 with fp32 weights
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("heads", [{}, {"architecture": "qwen3", "qk_norm": True}], ids=["llama", "qwen3"])
def test_activations_are_what_a_layer_keeps(bfloat16: bool, heads: dict[str, Any]) -> None:
    models = [small_model(layers=n, hidden_size=48, intermediate_size=104, **heads) for n in (2, 5)]
    two, five = (saved_bytes(model, 160, bfloat16) for model in models)  # their difference is three layers
    assert five - two == 3 * 160 * layer_activation_bytes(models[0].config, bfloat16)


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    shape = small_model(layers=6).config
    layer, tokens = layer_activation_bytes(shape, True), 100
    all_layers, recomputed = (activation_bytes(shape, tokens, True, recompute) for recompute in (False, True))
    assert all_layers - recomputed == tokens * (5 * layer - 6 * 4 * shape.hidden_size)


def test_decoding_is_bound_by_traffic_or_by_arithmetic() -> None:
    shape = read_about(study_recipe("k15-dynamics", "paper").about).models[SEVEN].config()
    weights, context = multiplied_weights(shape), np.array([1000.0, 4000.0])
    rate, single = decoding_rate(shape, 1, context * 0, bandwidth=2e12, flops=1e18)
    assert rate == pytest.approx(2e12 / (2 * weights))  # 14 GB through 2 TB/s
    assert single == pytest.approx(1 / rate[0])
    rate, _ = decoding_rate(shape, 16, context, bandwidth=2e12, flops=1e18)
    moved = 2 * weights + 16 * context * 2 * 28 * 4 * 128 * 2
    assert rate == pytest.approx(16 * 2e12 / moved)
    rate, _ = decoding_rate(shape, 16, context * 0, bandwidth=1e18, flops=1e14)
    assert rate == pytest.approx(1e14 / (2 * weights))  # arithmetic: rows do not help


# --- the recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES)
def test_paper_recipes_are_whole(study: str) -> None:
    recipe = study_recipe(study, "paper")
    about = read_about(recipe.about)
    used = {config.model.path for config in recipe.arms.values()}
    assert used <= set(about.models) if study == MEL else used == set(about.models)  # MEL: two more to choose from
    assert all(find_benchmark(name).role == "train" for name in about.data)
    tests = [name for suite in about.suites for name in (SUITES[suite].benchmarks if suite in SUITES else (suite,))]
    first = next(iter(recipe.arms.values())).evaluate.problems
    for asked in {"k15-dynamics": [first], "long2short": [recipe.settings.questions]}.get(
        study, [first, recipe.settings.questions]
    ):
        assert asked == sum(find_benchmark(name).size for name in tests)
    rows = estimates(study, recipe)
    assert {row.arm for row in rows if row.memory} == set(recipe.arms)
    assert all(row.fits for row in rows if row.memory)
    for config in recipe.arms.values():  # a response of full length with its prompt has to fit the positions
        assert about.lengths.prompt_limit + config.rollout.max_tokens <= 32768
        if about.mel is not None:
            longest = longest_reflection(config, about.lengths.prompt_limit, about.mel)
            assert longest <= config.learner.token_budget <= 32768


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_printed_within_the_columns(study: str, scale: str) -> None:
    recipe = study_recipe(study, scale)
    text = estimate(study, recipe)
    assert max(map(len, text.splitlines())) < 120
    assert "Nothing was run" in text
    assert "Assumptions" in text
    assert all(any(line.startswith(f"{arm} ") for line in text.splitlines()) for arm in recipe.arms)
    if scale == "paper":
        hardware = read_about(recipe.about).hardware
        words = " ".join(text.split())
        assert all(part in words for part in ("GPU-hours", hardware.training_reason, f"{hardware.price:g} US dollars"))
    else:
        assert "GPU-hours" not in text
        assert "tokens/s" in text


def test_tokens_follow_the_published_curve() -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    rows = by_arm("k15-dynamics", recipe)
    total = kimi_k15()["dynamics"]["panels"]["total"]
    between = [  # four iterations lie between two points
        a + (b - a) * part / 4 for a, b in zip(total["tokens"], total["tokens"][1:], strict=False) for part in range(4)
    ]
    main = rows["mirror-descent"]
    assert main.generated_tokens == pytest.approx(512 * 16 * sum(between))
    assert main.mean_length == pytest.approx(5824, abs=1)
    assert main.evaluated_tokens == pytest.approx(1932 * sum(total["tokens"]))  # every fourth iteration, both ends
    assert rows["rest"].generated_tokens == pytest.approx(512 * 16 * sum(between[:48]))
    prompts = 512 * 150 * 48
    assert rows["rest"].trained_tokens == pytest.approx(rows["rest"].generated_tokens / 16 + prompts)  # the best of 16


def test_published_lengths_by_name() -> None:
    at = np.array([0.0, 2.0, 1000.0])
    assert published_lengths("figure 5", at).tolist() == [1307, (1307 + 1558) / 2, 9655]
    assert published_lengths("figure 8, large", at)[0] == 2149
    assert published_lengths("figure 7, k1.5-long", at).tolist() == [(1320 + 4199) / 2] * 3


def test_operations_of_an_arm_by_hand() -> None:
    recipe = changed(study_recipe("long2short", "paper"), "lengths|spread", 0)
    recipe = changed(recipe, "lengths|mean|long", 1000)
    long = by_arm("long2short", recipe)["long"]
    shape = read_about(recipe.about).models[SEVEN].config()
    sequences = 100 * 512 * 16
    forward = 2 * multiplied_weights(shape) * (sequences * 1000 + 100 * 512 * 150)
    forward += 2 * 28 * 3584 * 1150**2 * sequences
    assert long.flops == pytest.approx(4 * forward)  # forward, backward, and the logprobs before five steps
    hours = 1.2 * long.flops / (989e12 * 0.3) / 3600
    assert long.gpu_hours == pytest.approx(hours + 64 * long.rollout_seconds / 3600)
    assert long.cost == pytest.approx(2.5 * long.gpu_hours)


def test_methods_need_different_things() -> None:
    rows = by_arm("long2short", study_recipe("long2short", "paper"))
    for arm in ("warm-up", "shortest", "merge+rs", "dpo"):
        memory = memory_of(rows[arm])
        assert rows[arm].generated_tokens == rows[arm].rollout_seconds == memory.cache == memory.engine == 0
        assert (memory.reference > 0) == (arm == "dpo")
    dpo, sft = memory_of(rows["dpo"]), memory_of(rows["shortest"])
    assert 1.9 < dpo.activations / sft.activations < 2  # a pair shares a micro-batch; the chunk of logits is the same
    assert [row for row in rows if rows[row].memory is None] == [
        *("warm-up data", "samples", "merged samples", "test answers")
    ]
    assert rows["samples"].generated_tokens == pytest.approx(8192 * 8 * (1320 + 4199) / 2)


# --- what must grow with what ----------------------------------------------------------------------------------------


def test_more_gpus_hold_less_each_and_end_sooner() -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    few, many = (by_arm("k15-dynamics", changed(recipe, "hardware|gpus", n)) for n in (32, 128))
    for arm, row in few.items():
        one, other = memory_of(row), memory_of(many[arm])
        assert (one.weights, one.moments) == (4 * other.weights, 4 * other.moments)
        assert (one.activations, one.cache) == (other.activations, other.cache)
        assert row.update_seconds == pytest.approx(4 * many[arm].update_seconds)
        assert row.rollout_seconds > many[arm].rollout_seconds
        assert row.gpu_hours <= many[arm].gpu_hours * (1 + 1e-9)  # fewer rows and longer tails cost


@pytest.mark.parametrize(
    ("section", "less", "more", "measure"),
    [
        ("rollout", {"max_tokens": 20000}, {"max_tokens": 30720}, "memory.cache"),
        ("rollout", {"rows": 8}, {"rows": 48}, "memory.rollout"),
        ("rollout", {"prompts": 256}, {"prompts": 512}, "gpu_hours"),
        ("rollout", {"samples": 8}, {"samples": 16}, "generated_tokens"),
        ("rollout", {"segment_tokens": 2048}, {"segment_tokens": 0}, "rollout_seconds"),
        ("rollout", {"rows": 48}, {"rows": 4}, "rollout_seconds"),
        ("learner", {"token_budget": 32768}, {"token_budget": 65536}, "memory.activations"),
        ("learner", {"epochs": 1}, {"epochs": 2}, "flops"),
        ("learner", {"inner_steps": 1}, {"inner_steps": 2}, "flops"),
        ("evaluate", {"every": 8}, {"every": 4}, "evaluated_tokens"),
    ],
)
def test_more_of_a_setting_takes_more(section: str, less: Any, more: Any, measure: str) -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    recipe = replace(recipe, arms={"mirror-descent": recipe.arms["mirror-descent"]})
    found = []
    for changes in (less, more):
        value: Any = estimates("k15-dynamics", configured(recipe, section, **changes))[0]
        for name in measure.split("."):
            value = getattr(value, name)
        found.append(value)
    assert found[0] < found[1]


def test_a_larger_model_takes_more_of_everything() -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    machine, config = Cluster(read_about(recipe.about)), recipe.arms["mirror-descent"]
    large = config.model_copy(update={"model": config.model.model_copy(update={"path": THIRTY_TWO})})
    small_memory, large_memory = machine.memory(config), machine.memory(large)
    for part in ("weights", "gradients", "moments", "activations", "working", "engine"):
        assert getattr(small_memory, part) < getattr(large_memory, part)
    means = np.array([3000.0])
    assert machine.decoding_seconds(config, 8192, means) < machine.decoding_seconds(large, 8192, means)


def test_what_does_not_fit_is_said() -> None:
    recipe = changed(study_recipe("k15-dynamics", "paper"), "hardware|memory_gib", 80)
    rows = by_arm("k15-dynamics", recipe)
    assert not any(row.fits for row in rows.values())
    assert " NO" in estimate("k15-dynamics", recipe)


def test_a_pass_is_no_shorter_than_its_longest_response() -> None:
    recipe = configured(study_recipe("k15-dynamics", "paper"), "rollout", segment_tokens=0)
    machine, config = Cluster(read_about(recipe.about)), recipe.arms["mirror-descent"]
    step = 2 * multiplied_weights(machine.shape(config)) / (0.5 * 4.8e12)
    one = machine.decoding_seconds(config, 1, np.array([5000.0]))
    assert one >= 5000 * step  # ln 1 = 0: the longest of one is the mean
    few = machine.decoding_seconds(config, 64, np.array([5000.0]))
    assert few == pytest.approx(5000 * (1 + 0.9 * math.log(64)) * step)
    assert machine.decoding_seconds(config, 64, np.array([20000.0])) == pytest.approx(30720 * step)


def test_tiny_times_scale_with_size_and_threads() -> None:
    machine, means = ThisMachine(), np.array([50.0])

    def seconds(model: str, **changes: Any) -> tuple[float, float]:
        config = Config.model_validate({"model": {"path": model}, **changes})
        return machine.decoding_seconds(config, 100, means), machine.training_seconds(config, 5000, 0)

    assert seconds("tiny-1m") == (pytest.approx(5000 / 8000, rel=0.01), pytest.approx(5000 / 10000, rel=0.01))
    assert seconds("tiny-1m", threads=4) == pytest.approx([x / 2 for x in seconds("tiny-1m")])
    assert all(a < b for a, b in zip(seconds("tiny-0.3m"), seconds("tiny-10m"), strict=True))
    assert seconds("tiny-10m", device="cuda")[1] == pytest.approx(5000 / 397e3, rel=0.01)
    assert seconds("tiny-32m", device="cuda")[1] == pytest.approx(5000 / 263e3, rel=0.1)  # measured 263,000


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("hardware|gpus", None, "about.hardware.gpus"),
        ("hardware|gpus", 0, "about.hardware.gpus"),
        ("hardware|gpus", 63, "hardware.gpus is no multiple of tensor_parallel"),
        ("hardware|training_utilisation", 1.5, "about.hardware.training_utilisation"),
        ("hardware|colour", "green", "about.hardware.colour"),
        ("hardware", None, "about.hardware"),
        (f"models|{SEVEN}|layers", "many", f"about.models.{SEVEN}.layers"),
        (f"models|{SEVEN}", None, "about.models has no shape for"),
        ("lengths|mean|rest", None, "about.lengths.mean has no entry 'rest'"),
        ("lengths|mean|rest", "figure 11", "about.lengths.mean: 'figure 11'"),
        ("lengths|mean|rest", "figure 7, k9", "about.lengths.mean: 'figure 7, k9'"),
        ("lengths|mean|rest", True, "about.lengths.mean.rest"),
        ("lengths|mean|rest", -5, "about.lengths.mean.rest"),
        ("lengths|mean|rest", [], "about.lengths.mean.rest"),
    ],
)
def test_a_mistake_in_about_names_its_key(path: str, value: Any, named: str) -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    recipe = changed(recipe, path, value)
    with pytest.raises(UserError) as mistake:
        estimate("k15-dynamics", recipe)
    assert named in str(mistake.value)


def test_a_misspelt_key_is_named_before_the_one_it_stands_for() -> None:
    recipe = study_recipe("k15-dynamics", "paper")
    with pytest.raises(UserError, match=r"about\.hardware\.gpsu"):
        estimates("k15-dynamics", changed(changed(recipe, "hardware|gpus", None), "hardware|gpsu", 64))


@pytest.mark.parametrize(("heading", "study"), [("## An example", "k15-dynamics"), ("## mel-vs-grpo", MEL)])
def test_the_example_in_the_docs_is_what_is_printed(heading: str, study: str) -> None:
    page = (ROOT / "docs" / "paper-scale.md").read_text(encoding="utf-8")
    example = page.split(heading)[1].split("\n## ")[0]
    shown = [line.removeprefix("    ") for line in example.splitlines() if line.startswith("    ")]
    shown = [line for line in shown if not line.startswith("reasonlab ")]
    printed = estimate(study, study_recipe(study, "paper")).splitlines()
    assert len(shown) > 10
    assert set(shown) <= set(printed)
