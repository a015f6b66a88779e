"""The command line as a newcomer meets it: help, mistakes, small real commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from reasonlab.cli import COMMANDS, TRAIN_OPTIONS, main
from reasonlab.config import keys
from reasonlab.hardware import default_device
from reasonlab.judges.settings import JudgeConfig
from reasonlab.model.checkpoint import load_model, save_model
from reasonlab.model.ladder import model_name, resolve_model
from reasonlab.options import without_overrides

ROOT = Path(__file__).parent.parent
SMOKE = str(ROOT / "recipes" / "smoke.toml")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reasonlab.cli", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    code = "import sys; from reasonlab.cli import main; main(['--help']); print(sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
        assert name in output
    modules = output.splitlines()[-1]
    for heavy in ("torch", "numpy", "pydantic", "transformers", "matplotlib", "rich"):
        assert f"'{heavy}'" not in modules


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"example: reasonlab {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "Perhaps you meant `reasonlab train`"),
        (["train"], "train needs a recipe"),
        (["train", "no/such.toml"], "does not exist"),
        (["train", SMOKE, "--learner.lrr", "1"], "Perhaps you meant 'learner.lr'"),
        (["train", SMOKE, "--learner.lr"], "needs a value"),
        (["train", SMOKE, "--iterations", "--dry-run"], "--iterations needs a value"),
        (["data", "curate", "pool.jsonl", "--outt", "x"], "Perhaps you meant --out"),
        (["judge", "train", "--learner.bogus", "1"], "learner.bogus"),
        (["judge", "train", SMOKE, "--resume", "x"], "a recipe or --resume RUN, not both"),
        (["train", SMOKE, "--learner.lr", "-1", "--dry-run"], "learner.lr"),
        (["train", SMOKE, "--model.path", "no-such-model"], "there is no model 'no-such-model'"),
        (["train", SMOKE, "--problems.families", '["sums"]'], "no family 'sums'"),
        (["train", SMOKE, "--minutes", "0"], "leaves no time"),
        (["train", SMOKE, "--resume", "x"], "train takes a recipe or --resume RUN, not both"),
        (["train", "--resume", "x", "--learner.lr", "1"], "--resume takes no other options"),
        (["train", "--resume", "x", "--seed", "0"], "--resume takes no other options"),  # also not the default
        (["train", "--resume", "x", "--iterations=90", "--seed", "3"], "--resume takes no other options"),
        (["train", "--iterations", "3"], "train needs a recipe"),
        (["train", "--lerner.lr", SMOKE], "Perhaps you meant 'learner.lr'"),
        (["train", "--dry-rn", SMOKE], "Perhaps you meant --dry-run"),
        (["train", SMOKE, "another.toml"], "unexpected argument 'another.toml'"),
        (["train", SMOKE, "--method.type", "foo"], "no method 'foo'; there are sft, rest, mirror_descent, grpo, dpo"),
        (["demo", "--minutes", "0"], "leaves no time"),
        (["demo", "--minutes", "-2"], "leaves no time"),
        (["demo", "--resume", "x", "--seed", "0"], "--resume takes no other options"),
        (["demo", "--resume", "no/such/run"], "there is no run in"),
        (["train", "--resume", "no/such/run"], "there is no run in"),
        (["eval", "no-such-model"], "there is no model"),
        (["eval", "tiny-0.3m", "--levels", "two"], "is not a list of numbers"),
        (["eval", "tiny-0.3m", "--levels", "6"], "has no level 6"),
        (["eval", "tiny-0.3m", "--problems", "0"], "--problems 0 leaves nothing to ask"),
        (["eval", "tiny-0.3m", "--benchmark", "tiny/sum", "--split", "test"], "--split is for the suite tiny"),
        (["eval", "tiny-0.3m", "--limt", "5"], "unexpected argument '--limt'. Perhaps you meant --limit"),
        (["eval", "tiny-0.3m", "--k", "many"], "invalid int value: 'many'. Run `reasonlab eval --help`"),
        (["data", "list", "--dta", "x"], "Perhaps you meant --data"),
        (["figures", "no/such/run"], "neither a study nor a run"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else None,
)
def test_mistakes_are_one_line_with_a_remedy(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists(), "a mistake must not leave a run behind"


def test_bad_toml_and_wrong_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text("iterations = = 3")
    assert main(["train", str(recipe)]) == 2
    assert "not valid TOML" in capsys.readouterr().err
    broken = tmp_path / "model"
    broken.mkdir()
    save_model(load_model(resolve_model("tiny-0.3m")), broken)
    (broken / "model.safetensors").write_bytes(b"nonsense")
    assert main(["eval", str(broken)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("key", [["--iterations", "7"], ["--iterations=7"]])
def test_overrides_and_recipe_come_in_any_order(key: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    resolved = []
    for words in ([*key, SMOKE, "--dry-run"], [SMOKE, "--dry-run", *key], ["--dry-run", *key, SMOKE]):
        assert main(["train", *words]) == 0
        resolved.append(capsys.readouterr().out)
    assert "iterations = 7\n" in resolved[0]
    assert len(set(resolved)) == 1


def test_no_recipe_key_is_taken_for_a_misspelt_option() -> None:
    for known in (sorted(set(keys())), list(JudgeConfig.model_fields)):
        words = [word for key in known for word in (f"--{key}", "1")]
        assert without_overrides(words, TRAIN_OPTIONS) == ([], words)


def test_dry_run_prints_a_recipe_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", SMOKE, "--dry-run", "--method.type", "grpo", "--method.variant", "dapo"]) == 0
    resolved = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(resolved)
    assert main(["train", str(tmp_path / "again.toml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == resolved
    assert 'average = "token"' in resolved


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.path", "no-such-model"], "there is no model 'no-such-model'"),
        (["--model.lora_rank", "5000"], "Set model.lora_rank to"),
        (["--problems.path", "no-such.jsonl"], "there is no file no-such.jsonl"),
        (["--problems.path", "gsm8k_trian"], "Perhaps you meant 'gsm8k_train'"),
        (["--method.type", "sft", "--method.data", "no-such.jsonl"], "the examples in no-such.jsonl cannot be read"),
        (["--evaluate.suite", "gsm8k_tset"], "Perhaps you meant 'gsm8k_test'"),
    ],
)
def test_dry_run_refuses_what_the_run_would(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", SMOKE, "--dry-run", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.out.startswith("seed = "), "the recipe is printed all the same"


def test_dry_run_plans_for_what_is_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REASONLAB_DATA", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["--device", "cuda", "--problems.path", "gsm8k_train", "--evaluate.suite", "gsm8k_test"]
    assert main(["train", SMOKE, "--dry-run", *words]) == 0
    said = capsys.readouterr().err
    assert "its questions: the data of gsm8k_test was not found" in said
    assert "its prompts: the data of gsm8k_train was not found" in said
    assert "no CUDA device is here" in said
    assert "memory plan for" in said


def test_eval_and_bench_print_scores_with_their_protocol(tmp_path: Path) -> None:
    result = run("eval", "tiny-0.3m", "--problems", "24", "--k", "2", "--out", str(tmp_path / "answers.jsonl"))
    assert result.returncode == 0, result.stderr
    assert re.search("tiny-0.3m runs on (cpu|cuda) in float32\n", result.stderr), "beside the scores, not among them"
    assert "tiny validation avg@2 = " in result.stdout
    assert "24 questions, T=1, 160 tokens at most" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    machine = run("eval", "tiny-0.3m", "--problems", "24", "--k", "2", "--json")
    scores = json.loads(machine.stdout)["scores"]["tiny"]
    right = sum(row["verdict"] == "correct" for row in rows) / 48
    assert scores["accuracy"]["estimate"] == pytest.approx(right)
    bench = run("bench", "rollout", "--check", "--json", "--model", "tiny-0.3m", "--prompts", "8", "--device", "cpu")
    assert json.loads(bench.stdout)["logprob_diff_max"] < 1e-4


@pytest.mark.parametrize(("there_is_one", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device_is_cuda_where_there_is_one(
    there_is_one: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there_is_one)
    assert default_device() == device


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "tiny-0.3m", "--problems", "2"],
        ["bench", "rollout", "--model", "tiny-0.3m", "--prompts", "1"],
        ["data", "sample", "tiny-0.3m", "--keep", "long", "--problems", "2", "--out", "OUT"],
        ["data", "curate", "tiny", "--model", "tiny-0.3m", "--problems", "2", "--out", "OUT"],
        ["judge", "pool", "tiny-0.3m", "--problems", "2", "--out", "OUT"],
    ],
)
def test_commands_that_are_not_told_a_device_take_the_default(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reasonlab.hardware.default_device", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # so that it shows which one was taken
    assert main([str(tmp_path / "out.jsonl") if word == "OUT" else word for word in words]) == 2
    assert "no CUDA device is available" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[: 1 if words[0] == "eval" else 2], "--help"])
    assert "default: cuda where there is one, else cpu" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("tiny-1m", "tiny-1m"),
        ("models/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("runs/gsm8k-sft/checkpoints/final", "gsm8k-sft"),
        ("checkpoints/step-000010", "here"),
        ("../here/checkpoints/final", "here"),
    ],
)
def test_a_checkpoint_goes_by_the_name_of_its_run(
    given: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert model_name(given) == name
