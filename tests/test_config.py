"""Recipes: every mistake is one line with a remedy, and what is written loads again as it was."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import reasonlab
from reasonlab.config import (
    METHODS,
    VARIANTS,
    Config,
    GrpoConfig,
    MirrorDescentConfig,
    RestConfig,
    apply_overrides,
    keys,
    load_recipe,
    to_toml,
    validate,
)
from reasonlab.errors import UserError

PACKAGE = Path(reasonlab.__file__).parent


def load(text: str, tmp_path: Path) -> Config:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


def refusal(text: str, tmp_path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(text, tmp_path)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    assert "recipe.toml" in str(caught.value)
    return str(caught.value)


def refused_override(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        apply_overrides(Config(), words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- recipes --------------------------------------------------------------------------------------------------------


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    assert load("", tmp_path) == Config()
    assert isinstance(Config().method, MirrorDescentConfig)


def test_a_recipe_is_read(tmp_path: Path) -> None:
    config = load(
        """
        seed = 7
        [rollout]
        samples = 16
        [problems]
        families = ["sum", "product"]
        levels = [1, 2]
        [learner]
        lr = 3e-4
        betas = [0.8, 0.99]
        [method]
        type = "rest"
        """,
        tmp_path,
    )
    assert (config.seed, config.rollout.samples, config.rollout.prompts) == (7, 16, 32)
    assert (config.problems.families, config.problems.levels) == (("sum", "product"), (1, 2))
    assert (config.learner.lr, config.learner.betas) == (3e-4, (0.8, 0.99))
    assert config.method == RestConfig(type="rest", keep="best")


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("sead = 1", "sead", "seed"),
        ("[learner]\nlearning_rat = 1", "learner.learning_rat", "learner."),
        ("[rollout]\nsample = 1", "rollout.sample", "rollout.samples"),
        ("[rollouts]\nsamples = 1", "rollouts", "rollout"),
        ("[rollout]\nlr = 1", "rollout.lr", "learner.lr"),
        ('[method]\ntype = "mirror_descent"\ntaw = 1', "method.taw", "method.tau"),
        ('[method]\ntype = "grpo"\nclip_hihg = 1', "method.clip_hihg", "method.clip_high"),
    ],
)
def test_an_unknown_key_names_the_nearest(text: str, unknown: str, nearest: str, tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert f"unknown key '{unknown}'" in message
    assert f"Perhaps you meant '{nearest}" in message


def test_a_key_of_another_method_says_so(tmp_path: Path) -> None:
    message = refusal('[method]\ntype = "mirror_descent"\nclip_high = 0.3', tmp_path)
    assert "unknown key 'method.clip_high'" in message
    assert "another method" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("iterations = 0", "iterations"),
        ("seed = 'one'", "seed"),
        ("device = 'tpu'", "device"),
        ("rollout = 3", "rollout"),
        ("[rollout]\ntop_p = 1.5", "rollout.top_p"),
        ("[reward]\nlength_weight = 2.0", "reward.length_weight"),
        ("[learner]\nlr = -1.0", "learner.lr"),
        ("[learner]\nbetas = [0.9]", "learner.betas"),
        (
            '[method]\ntype = "ppo"',
            "method.type: there is no method 'ppo'; there are sft, rest, mirror_descent, grpo",
        ),
        ("[method]\ntau = 0.1", "method.type: the method has no type; there are sft, rest, mirror_descent, grpo, dpo"),
        ('[method]\ntype = "grpo"\nvariant = "gropo"', "method.variant"),
        ('[method]\ntype = "sft"\nstyles = { shouted = 1.0 }', "method.styles"),
    ],
)
def test_a_wrong_value_is_named(text: str, named: str, tmp_path: Path) -> None:
    assert named in refusal(text, tmp_path)


@pytest.mark.parametrize("text", ["seed = ", "[rollout", "seed = 1\nseed = 2", "lr: 3"])
def test_bad_toml_names_the_line(text: str, tmp_path: Path) -> None:
    message = refusal(text, tmp_path)
    assert "not valid TOML" in message
    assert "line" in message


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml does not exist") as caught:
        load_recipe(tmp_path / "none.toml")
    assert "TOML file" in caught.value.remedy


def test_what_is_no_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "binary.toml")


def test_a_config_cannot_be_changed_behind_the_record() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().seed = 3


# --- methods and variants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_sets_its_choices_and_the_recipe_wins_over_them(variant: Any) -> None:
    config = GrpoConfig(type="grpo", variant=variant)
    for choice, value in VARIANTS[variant].items():
        assert getattr(config, choice) == value
    mine = GrpoConfig(type="grpo", variant=variant, average="constant", clip_high=0.77)
    assert (mine.average, mine.clip_high) == ("constant", 0.77)
    assert mine.advantage == config.advantage


# --- overrides ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--learner.lr", "3e-4"], ["--learner.lr=3e-4"], ["--learner.lr=0.0003"]])
def test_both_spellings_of_an_override(words: list[str]) -> None:
    changed = apply_overrides(Config(), words)
    assert changed.learner.lr == 3e-4
    assert changed.model_dump(exclude={"learner"}) == Config().model_dump(exclude={"learner"})


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["--seed", "9"], lambda c: c.seed == 9),
        (["--seed=-9"], lambda c: c.seed == -9),
        (["--problems.levels", "[1, 2]"], lambda c: c.problems.levels == (1, 2)),
        (["--problems.families", '["sum"]'], lambda c: c.problems.families == ("sum",)),
        (["--model.path", "runs/a b/final"], lambda c: c.model.path == "runs/a b/final"),
        (["--model.path=a=b"], lambda c: c.model.path == "a=b"),
        (["--method.per_token", "true"], lambda c: c.method.per_token is True),
        (["--device", "cuda", "--threads", "1"], lambda c: (c.device, c.threads) == ("cuda", 1)),
        (["--learner.lr", "1", "--learner.lr", "2"], lambda c: c.learner.lr == 2),
        (["--method.type", "sft", "--method.styles", "{checked=1}"], lambda c: c.method.styles == {"checked": 1.0}),
    ],
)
def test_values_of_every_kind(words: list[str], read: Any) -> None:
    assert read(apply_overrides(Config(), words))


def test_no_overrides_change_nothing() -> None:
    assert apply_overrides(Config(), []) == Config()


def test_a_new_variant_brings_its_own_choices() -> None:
    start = validate({"method": {"type": "grpo", "variant": "gspo", "kl": 0.1}}, "test")
    changed = apply_overrides(start, ["--method.variant", "dapo"]).method
    assert changed == GrpoConfig(type="grpo", variant="dapo", kl=0.1)


@pytest.mark.parametrize("flip", [False, True], ids=["type first", "type last"])
def test_type_variant_and_choices_may_come_in_any_order(flip: bool) -> None:
    words = ["--method.type=grpo", "--method.variant=dr_grpo", "--method.average=token", "--method.kl=0.1"]
    changed = apply_overrides(Config(), words[::-1] if flip else words)
    assert changed.method == GrpoConfig(type="grpo", variant="dr_grpo", average="token", kl=0.1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--learner.lrr", "1"], "Perhaps you meant 'learner.lr'"),
        (["--lerner.lr", "1"], "Perhaps you meant 'learner.lr'"),
        (["--seed.lr", "1"], "Perhaps you meant 'learner.lr'"),
        (["--method.taw", "1"], "Perhaps you meant 'method.tau'"),
        (["--method.clip_high", "1"], "another method"),
        (["--learner.lr"], "--learner.lr needs a value"),
        (["learner.lr", "1"], "unexpected argument 'learner.lr'"),
        (["--learner.lr", "fast"], "learner.lr"),
        (["--problems.levels", "3"], "problems.levels"),
        (["--xyzzy", "1"], "unknown key 'xyzzy'"),
    ],
)
def test_a_wrong_override_says_what_to_do(words: list[str], told: str) -> None:
    assert told in refused_override(*words)


# --- writing --------------------------------------------------------------------------------------------------------

EXAMPLES: list[dict[str, Any]] = [
    {"type": "mirror_descent", "tau": 0.05, "per_token": True},
    {"type": "rest", "keep": "correct"},
    {"type": "dpo", "data": "pairs.jsonl", "beta": 0.3},
    {"type": "sft", "styles": {"answer": 0.5, "checked": 2.0}},
    *({"type": "grpo", "variant": variant} for variant in VARIANTS),
    {"type": "grpo", "variant": "dapo", "clip_low": 0.0, "clip_high": float("inf"), "kl_in_reward": True},
]


@pytest.mark.parametrize("method", EXAMPLES, ids=lambda m: "-".join(str(v) for v in m.values())[:30])
def test_what_is_written_loads_again(method: dict[str, Any], tmp_path: Path) -> None:
    raw = {
        "seed": -3,
        "method": method,
        "problems": {"families": ["sum", "word"], "levels": []},
        "learner": {"lr": 1.7e-5, "eps": 1e-15, "schedule": "cosine"},
    }
    config = validate(raw, "test")
    assert load(to_toml(config), tmp_path) == config
    assert load(to_toml(apply_overrides(config, [])), tmp_path) == config


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_any_path_survives_the_round_trip(text: str) -> None:
    config = validate({"model": {"path": text}}, "test")
    assert validate(tomllib.loads(to_toml(config)), "test") == config


# --- the keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [{"type": "sft"}, {"type": "dpo", "data": "pairs.jsonl"}])
def test_reflections_need_rollouts(method: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="no rollouts to reflect on"):
        validate({"method": method, "mel": {"weight": 1.0}}, "test")


@pytest.mark.parametrize("method", [{"type": "mirror_descent"}, {"type": "grpo"}, {"type": "grpo", "variant": "rloo"}])
@pytest.mark.parametrize(
    ("rollout", "remedy"),
    [
        ({"samples": 1}, "set rollout.samples to 2 or more"),
        ({"temperature": 0}, "with rollout.temperature 0 all are the same: set it to 1"),
        ({"top_k": 1}, "with rollout.top_k 1 all are the same: set it to 0"),
    ],
)
def test_groups_that_cannot_differ_are_refused(method: dict[str, Any], rollout: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        validate({"method": method, "rollout": rollout}, "recipe")
    assert str(refused.value).startswith(f"recipe: {method['type']} learns from how the rollouts of one problem differ")
    assert remedy in str(refused.value)
    assert "Value error" not in str(refused.value)
    for other in ({"type": "rest"}, {"type": "sft"}, {"type": "grpo", "variant": "reinforce_pp"}):
        validate({"method": other, "rollout": rollout}, "recipe")


def test_there_are_fewer_than_ninety_keys() -> None:
    """Eighty were enough for the tiny world; real models brought data, benchmarks, templates and memory."""
    names = set(keys())
    assert 40 < len(names) < 90
    assert {"seed", "rollout.samples", "learner.lr", "method.tau", "method.variant", "method.styles"} <= names


def test_every_key_can_be_overridden() -> None:
    types = {name: method.model_fields["type"].annotation for method in METHODS for name in method.model_fields}
    types = {name: get_args(kind)[0] for name, kind in types.items()} | {"data": "sft"}
    for name in set(keys()) - {"method.type"}:
        start = Config()
        section, _, last = name.rpartition(".")
        if section == "method":
            needed = ["--method.data", "pairs.jsonl"] if types[last] == "dpo" else []
            start = apply_overrides(start, ["--method.type", types[last], *needed])
        value: Any = start.model_dump(mode="json")
        for part in name.split("."):
            value = value[part]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, dict):
            text = "{" + ", ".join(f"{key} = {item}" for key, item in value.items()) + "}"
        assert apply_overrides(start, [f"--{name}", text]) == start, name


def test_importing_the_config_imports_nothing_heavy() -> None:
    code = "import sys, reasonlab.config; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def attributes_read(path: Path) -> set[str]:
    return {n.attr for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Attribute)}


def test_every_key_is_read_somewhere() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "config.py"]
    read = set().union(*map(attributes_read, sources)) | {"variant"}  # the variant only fills the choices below it
    assert [name for name in sorted(set(keys())) if name.rpartition(".")[2] not in read] == []
