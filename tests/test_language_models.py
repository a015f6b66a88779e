"""Language models in the one loop: chat templates, end tokens, solutions, resuming.

The models are random and tiny; their tokenizers, templates and files are those of real checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_checkpoints import checkpoint, gguf_tensors, write_gguf
from evaluations import rows_of
from language_model_runs import event, rows_file, sums_recipe, teach, trained
from small_models import small_model
from test_loop import Silent

from reasonlab.cli import main
from reasonlab.config import validate
from reasonlab.errors import UserError
from reasonlab.figures.dynamics import read_dynamics
from reasonlab.model.checkpoint import load_model
from reasonlab.model.lora import adapter_base, load_adapter, merged_parameters
from reasonlab.model.text_format import open_format
from reasonlab.model.tokenizer import ChatTokenizer
from reasonlab.problems.problem import Problem
from reasonlab.runs import RunReader
from reasonlab.train.exchange import Exchange
from reasonlab.train.learner import Learner
from reasonlab.train.loop import resume, start
from reasonlab.train.memory import trained_parameters
from reasonlab.train.recorded import RecordedResponses, demonstration, read_responses
from reasonlab.train.solutions import worked_solution

FINAL = "checkpoints/final/model.safetensors"


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return sums_recipe(tmp_path)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught"))


def as_toml(raw: dict[str, Any], path: Path) -> str:
    from reasonlab.config import to_toml

    path.write_text(to_toml(validate(raw, "test")))
    return str(path)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_grpo_from_the_command_line_and_resumed_to_the_same_bytes(
    tmp_path: Path, recipe: dict[str, Any], taught: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["model"] = {"path": str(taught)}
    file = as_toml(recipe, tmp_path / "recipe.toml")
    assert main(["train", file, "--out", str(tmp_path / "whole")]) == 0
    said = capsys.readouterr().out
    assert "memory plan" in said
    assert "<s><|user|>What is" in said, "the rendered prompt is on the screen, special tokens and all"
    metrics = RunReader(tmp_path / "whole").metrics()
    assert all(0 < line["train/accuracy"] < 1 for line in metrics[1:]), "right and wrong answers, graded by mathematics"
    before = load_model(taught).state_dict()["embedding.weight"]
    assert not torch.equal(load_model(tmp_path / "whole/checkpoints/final").state_dict()["embedding.weight"], before)

    trainer = start(validate(recipe, "test"), tmp_path / "cut", ["test"], Silent())
    trainer._evaluate(0)
    for number in (1, 2):
        trainer._iteration(number)
        trainer._checkpoint()
    del trainer  # as if killed
    assert main(["train", "--resume", str(tmp_path / "cut")]) == 0
    assert (tmp_path / "cut" / FINAL).read_bytes() == (tmp_path / "whole" / FINAL).read_bytes()
    for step in (1, 2, 3):
        name = f"rollouts/{step:06d}.jsonl.gz"
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"type": "mirror_descent"}},
        {"method": {"type": "rest", "keep": "best"}},
        {"method": {"type": "grpo", "variant": "dapo", "kl": 0.05}},
        {"method": {"type": "grpo"}, "rollout": {"prompts": 3, "samples": 4, "max_tokens": 24, "segment_tokens": 8}},
        {"method": {"type": "grpo"}, "mel": {"weight": 1.0, "max_tokens": 8, "replay_filter": False}},
    ],
    ids=["mirror descent", "rest", "dapo with a reference", "partial rollouts", "reflections"],
)
def test_every_method_trains_a_language_model(
    tmp_path: Path, recipe: dict[str, Any], taught: Path, changes: dict[str, Any]
) -> None:
    raw = {**recipe, "model": {"path": str(taught)}, "evaluate": {"every": 0}, **changes}
    if "mel" in changes:  # the instruction alone has more bytes than the model reads
        with pytest.raises(UserError, match="a reflection and what it is about may have"):
            start(validate(raw, "test"), tmp_path / "short", ["test"], Silent()).run()
        shutil.copytree(taught, tmp_path / "long")
        shape = json.loads((taught / "config.json").read_text())
        (tmp_path / "long/config.json").write_text(json.dumps({**shape, "max_position_embeddings": 4096}))
        raw["model"] = {"path": str(tmp_path / "long")}
    reader, _ = trained(raw, tmp_path / "run")
    losses = [line["train/loss"] for line in reader.metrics() if "train/loss" in line]
    assert losses
    assert np.isfinite(losses).all()
    assert sum(line["train/accuracy"] for line in reader.metrics()) > 0


def test_a_rank_beyond_the_projections_is_refused(tmp_path: Path, recipe: dict[str, Any]) -> None:
    shape = load_model(Path(recipe["model"]["path"])).config
    least = shape.kv_heads * shape.head_dim
    assert least < shape.hidden_size
    for rank in (least + 1, 100_000_000):
        raw = {**recipe, "model": {**recipe["model"], "lora_rank": rank}}
        with pytest.raises(UserError, match=f"Set model.lora_rank to {least} at most"):
            start(validate(raw, "test"), tmp_path / "run", ["test"], Silent())
    start(
        validate({**recipe, "model": {**recipe["model"], "lora_rank": least}}, "test"), tmp_path / "run", [], Silent()
    )


def test_adapters_are_trained_alone_and_resumed_to_the_same_bytes(
    tmp_path: Path, recipe: dict[str, Any], taught: Path
) -> None:
    recipe |= {"model": {"path": str(taught), "lora_rank": 2, "lora_alpha": 8}, "learner": {"lr": 1e-2}}
    reader, _ = trained(recipe, tmp_path / "whole")
    updated = [line["train/logprob_diff/max"] for line in reader.metrics() if "train/logprob_diff/max" in line]
    assert len(updated) > 1
    assert max(updated) < 1e-3, "the engine samples with the adapters that the learner trains"
    before, after = load_model(taught).state_dict(), load_model(tmp_path / "whole/checkpoints/final").state_dict()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"qkv", "output", "gate_up", "down"}
    adapted = load_model(taught)
    load_adapter(adapted, tmp_path / "whole/checkpoints/final/adapter")
    for name, weight in merged_parameters(adapted):
        assert torch.equal(weight, after[name]), name
    assert adapter_base(tmp_path / "whole/checkpoints/final/adapter") == str(taught.resolve())
    trainer = start(validate(recipe, "test"), tmp_path / "cut", ["test"], Silent())
    assert sum(p.numel() for p in trainer.learner.parameters) == trained_parameters(trainer.config, adapted.config)
    trainer._iteration(1)
    trainer._checkpoint()
    del trainer
    resume(tmp_path / "cut", Silent()).run()
    assert (tmp_path / "cut" / FINAL).read_bytes() == (tmp_path / "whole" / FINAL).read_bytes()


def test_the_training_curve_is_what_eval_says_of_the_checkpoint(
    tmp_path: Path, recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    reader, _ = trained(recipe, tmp_path / "run")
    out, suite = tmp_path / "evaluation", recipe["evaluate"]["suite"]
    words = ["--benchmark", suite, "--temperature", "0", "--max-tokens", "24", "--out", str(out), "--top-p", "1"]
    assert main(["eval", str(tmp_path / "run/checkpoints/final"), *words]) == 0
    recorded = [(row["problem"], row["text"], row["verdict"]) for row in reader.evaluation("held", 3)]
    assert recorded == [(row["problem"], row["text"], row["verdict"]) for row in rows_of(out)]
    dynamics = read_dynamics(tmp_path / "run")
    assert sorted({point.iteration for point in dynamics.points}) == [0, 2, 3]
    assert main(["figures", str(tmp_path / "run")]) == 0


def test_sft_then_rl_ask_and_answer_in_the_same_form(tmp_path: Path, recipe: dict[str, Any]) -> None:
    """A response learnt by heart is found again by rollouts, ended by its end token and graded as right."""
    one = [{"id": "p1", "question": "What is 1 plus 1?", "answer": "2", "response": "So it is \\boxed{2}."}]
    file = rows_file(tmp_path / "one.jsonl", one)
    sft = {
        **recipe,
        "iterations": 60,
        "method": {"type": "sft", "data": file},
        "rollout": {"prompts": 4, "max_tokens": 24},
        "learner": {"lr": 1e-2},
        "evaluate": {"every": 0},
        "checkpoint": {"every": 100},
    }
    reader, _ = trained(sft, tmp_path / "sft")
    loss = [line["train/loss"] for line in reader.metrics()]
    assert loss[-1] < 0.05 < 1 < loss[0]
    rl = {**recipe, "iterations": 1, "model": {"path": str(tmp_path / "sft/checkpoints/final")}}
    rl |= {"problems": {"path": file}, "rollout": {**recipe["rollout"], "prompts": 1, "max_tokens": 40}}
    reader, _ = trained(rl, tmp_path / "rl")
    row = next(row for row in reader.rollouts(1) if row["verdict"] == "correct")
    assert (row["text"], row["finish"], row["extracted"]) == ("So it is \\boxed{2}.", "stop", "2")
    assert reader.metrics()[1]["train/accuracy"] > 0.5


def test_preference_pairs_are_read_as_text(tmp_path: Path, recipe: dict[str, Any]) -> None:
    pairs = [
        {"question": f"What is {n}?", "response": f"\\boxed{{{n}}}", "rejected": "no idea, none"} for n in range(4)
    ]
    dpo = {**recipe, "method": {"type": "dpo", "data": rows_file(tmp_path / "pairs.jsonl", pairs)}}
    reader, _ = trained({**dpo, "iterations": 4, "learner": {"lr": 1e-3}}, tmp_path / "dpo")
    margins = [line["train/margin"] for line in reader.metrics() if "train/margin" in line]
    assert margins[-1] > margins[0]


def test_an_out_of_memory_error_becomes_advice(
    tmp_path: Path,
    recipe: dict[str, Any],
    taught: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe["model"] = {"path": str(taught)}

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Learner, "step_on", full)
    assert main(["train", as_toml(recipe, tmp_path / "r.toml"), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: the GPU ran out of memory")
    assert "learner.token_budget" in error
    assert RunReader(tmp_path / "run").run["status"] == "failed"


# --- what the model sees ---------------------------------------------------------------------------------------------


def test_the_template_is_rendered_once_and_every_end_token_ends(tmp_path: Path, recipe: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    # As many published checkpoints: config.json names one end token, generation_config.json all of them.
    for name, ends in (("config.json", 1), ("generation_config.json", [1, 2])):
        file = tmp_path / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    more = {**recipe["rollout"], "samples": 32}
    reader, observer = trained({**recipe, "rollout": more, "iterations": 1}, tmp_path / "run")
    shown = event(reader, "example")
    assert shown["stop_ids"] == [1, 2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    question = next(row["question"] for row in reader.rollouts(1) if row["problem"] == shown["problem"])
    asked = f"{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
    messages = [{"role": "user", "content": asked}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert shown["prompt"] == rendered
    assert rendered.count("<s>") == 1
    assert any(rendered in note for note in observer.notes)
    stopped = [row for row in reader.rollouts(1) if row["finish"] == "stop"]
    assert stopped
    assert not any(end in row["text"] for row in reader.rollouts(1) for end in ("</s>", "<|end|>"))
    final = ChatTokenizer.load(tmp_path / "run/checkpoints/final")
    assert final.stop_ids == (1, 2), "what was trained ends its answers as its base did"


def test_both_end_tokens_are_met(tmp_path: Path, recipe: dict[str, Any]) -> None:
    trainer = start(validate(recipe, "test"), tmp_path / "run", ["test"], Silent())
    ends = set()
    for number in range(1, 12):
        for group in trainer.source.groups(number):
            ends |= {rollout.ids[-1] for rollout in group.rollouts if rollout.finish == "stop"}
            assert all(not {1, 2} & set(rollout.ids[:-1]) for rollout in group.rollouts)
    assert ends == {1, 2}


def test_a_thought_that_the_template_opens_belongs_to_the_response(tmp_path: Path, recipe: dict[str, Any]) -> None:
    checkpoint(tmp_path / "thinker", thinking=True)
    raw = {**recipe, "model": {"path": str(tmp_path / "thinker")}, "iterations": 1}
    reader, _ = trained(raw, tmp_path / "run")
    assert all(row["text"].startswith("<think>\n") for row in reader.rollouts(1))
    form = open_format(tmp_path / "thinker", load_model(tmp_path / "thinker").config.vocab_size)
    exchange = Exchange(form)
    problem = Problem("p", "What is 1 plus 1?", "2", "f")
    text = "<think>\nOne and one.</think>\\boxed{2}"
    rollout = demonstration(problem, text, exchange)
    assert form.shown(rollout.prompt + rollout.ids).count("<think>") == 1
    assert exchange.text(rollout.ids) == text
    assert exchange.grade(problem, exchange.text(rollout.ids)).verdict == "correct"
    assert exchange.grade(problem, "<think>\nIt is \\boxed{2}").verdict == "wrong", "a thought is no answer"


def test_template_arguments_reach_the_template(tmp_path: Path, recipe: dict[str, Any]) -> None:
    raw = {**recipe, "iterations": 1, "evaluate": {"every": 0}}
    raw["model"] = {**recipe["model"], "template_arguments": {"thinking": True}}
    reader, _ = trained(raw, tmp_path / "run")
    assert event(reader, "example")["prompt"].endswith("<|assistant|><think>\n")


def test_a_gguf_file_is_a_model_to_train(
    tmp_path: Path, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    monkeypatch.setenv("REASONLAB_CACHE", str(tmp_path / "cache"))
    shape = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "max_positions": 256}
    model = small_model(tied=False, bos_id=0, eos_ids=(1,), pad_id=None, **shape)
    (tmp_path / "original").mkdir()
    from reasonlab.model.checkpoint import save_model

    save_model(model, tmp_path / "original")
    write_gguf(tmp_path / "small.gguf", model, gguf_tensors(model, tmp_path / "original"), quantised=False)
    raw = {**recipe, "model": {"path": str(tmp_path / "small.gguf"), "lora_rank": 2}, "iterations": 1}
    reader, _ = trained({**raw, "evaluate": {"every": 0}}, tmp_path / "run")
    named = adapter_base(tmp_path / "run/checkpoints/final/adapter")
    assert named == str(tmp_path / "small.gguf"), "not what it was converted to"
    assert len(reader.rollouts(1)) == 12
    assert (tmp_path / "run/checkpoints/final/tokenizer.json").is_file()


@pytest.mark.parametrize("sampling", ["rollouts", "evaluation"])
def test_responses_beyond_the_context_are_refused_before_there_is_a_run(
    tmp_path: Path, recipe: dict[str, Any], sampling: str
) -> None:
    raw = {**recipe, "rollout": {**recipe["rollout"], "max_tokens": 500}, "evaluate": {"every": 0}}
    if sampling == "evaluation":
        rows = [{"question": "What is 2+2?", "response": "4"}]
        raw |= {"method": {"type": "sft", "data": rows_file(tmp_path / "sft.jsonl", rows)}}
        start(validate(raw, "test"), tmp_path / "never asked", ["test"], Silent())
        raw |= {"evaluate": recipe["evaluate"]}
    with pytest.raises(UserError, match="the model reads 512 at most") as refused:
        start(validate(raw, "test"), tmp_path / "run", ["test"], Silent())
    assert not (tmp_path / "run").exists()
    assert main(["train", as_toml(raw, tmp_path / "recipe.toml"), "--dry-run"]) == 2
    longest = int(refused.value.remedy.removeprefix("Set rollout.max_tokens "))
    start(
        validate({**raw, "rollout": {**recipe["rollout"], "max_tokens": longest}}, "test"),
        tmp_path / "run",
        [],
        Silent(),
    )


# --- SFT -------------------------------------------------------------------------------------------------------------


@pytest.mark.parity
def test_the_sft_loss_is_that_of_transformers_with_masked_labels(tmp_path: Path, recipe: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"question": f"What is {n}{n}?", "response": "Well, " * n + f"\\boxed{{{n}{n}}}"} for n in range(1, 6)]
    raw = {**recipe, "method": {"type": "sft", "data": rows_file(tmp_path / "sft.jsonl", rows)}, "iterations": 1}
    raw |= {"rollout": {"prompts": 5, "max_tokens": 8}, "evaluate": {"every": 0}}
    raw["learner"] = {"lr": 1e-3, "token_budget": 300}  # several micro-batches
    reader, _ = trained(raw, tmp_path / "run")
    theirs, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "model"),
    )
    total, count = 0.0, 0
    for row in rows:
        asked = f"{row['question']}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["response"]}]
        whole = tokenizer.apply_chat_template(turns, return_dict=False)
        prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        assert whole[: len(prompt)] == prompt
        end = len(whole) - whole[::-1].index(2)  # what the template writes behind the end token is not learnt
        labels = [-100] * len(prompt) + whole[len(prompt) : end] + [-100] * (len(whole) - end)
        learnt = end - len(prompt)
        with torch.no_grad():
            loss = theirs(torch.tensor([whole]), labels=torch.tensor([labels])).loss
        total, count = total + float(loss) * learnt, count + learnt
    assert reader.metrics()[0]["train/loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    ("solution", "answer", "written"),
    [
        ("He has 48/2 = <<48/2=24>>24 left.\n#### 24", "24", "He has 48/2 = 24 left.\nThe answer is \\boxed{24}."),
        ("So $<<1000*2=2000>>2000.\n#### 2,000", "2000", "So $2000.\nThe answer is \\boxed{2000}."),
        ("Thus $x=\\boxed{\\frac12}$.", "\\frac12", "Thus $x=\\boxed{\\frac12}$."),
        ("Add them up.", "7", "Add them up.\nThe answer is \\boxed{7}."),
    ],
)
def test_solutions_end_with_a_box(solution: str, answer: str, written: str) -> None:
    assert worked_solution(solution, answer) == written


def test_the_solutions_of_a_pool_are_imitated_where_they_are_right(tmp_path: Path, recipe: dict[str, Any]) -> None:
    rows = [
        {"id": "a", "question": "What is 2 plus 2?", "answer": "4", "solution": "2+2 = <<2+2=4>>4\n#### 4"},
        {"id": "b", "question": "What is 3 plus 3?", "answer": "6", "solution": "It is \\boxed{7}."},
        {"id": "c", "question": "What is 4 plus 4?", "answer": "8"},
    ]
    raw = {**recipe, "method": {"type": "sft"}, "problems": {"path": rows_file(tmp_path / "own.jsonl", rows)}}
    reader, observer = trained({**raw, "iterations": 2}, tmp_path / "run")
    texts = {row["text"] for step in (1, 2) for row in reader.rollouts(step)}
    assert texts == {"2+2 = 4\nThe answer is \\boxed{4}."}
    assert any("1 problems without a solution and 1 whose solution" in text for text in observer.notes)
    without = {**recipe, "method": {"type": "sft"}}
    with pytest.raises(UserError, match="no solutions to imitate"):
        start(validate(without, "test"), tmp_path / "none", ["test"], Silent())
    with pytest.raises(UserError, match="needs responses to imitate"):
        start(validate({**without, "problems": {}}, "test"), tmp_path / "none", ["test"], Silent())


def test_what_a_language_model_sampled_can_be_learnt_from_by_its_own_kind(
    tmp_path: Path, recipe: dict[str, Any], taught: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(taught), tmp_path / "kept.jsonl"
    words = ["--keep", "shortest", "--path", recipe["problems"]["path"], "--samples", "4", "--max-tokens", "24"]
    assert main(["data", "sample", model, *words, "--out", str(out), "--threads", "1"]) == 0
    assert "kept" in capsys.readouterr().out
    groups = read_responses(out, False, Exchange(open_format(Path(model), load_model(Path(model)).config.vocab_size)))
    assert all(group.rollouts[0].ids[-1] in (1, 2) for group in groups)
    again = {**recipe, "iterations": 1, "method": {"type": "sft", "data": str(out)}, "model": {"path": model}}
    reader, _ = trained(again, tmp_path / "again")
    assert reader.metrics()[1]["train/loss"] < 1.0
    with pytest.raises(UserError, match="another tokenizer"):
        read_responses(out, pairs=False)


def test_what_is_imitated_is_graded_and_nothing_is_said_without_a_gold(tmp_path: Path, recipe: dict[str, Any]) -> None:
    rows = [
        {"id": "right", "question": "What is 2+2?", "response": "The answer is \\boxed{4.0}.", "answer": 4},
        {"id": "zero", "question": "What is 2-2?", "response": "The answer is \\boxed{5}.", "answer": 0},
        {"id": "open", "question": "What is it?", "response": "The answer is \\boxed{6}."},
        {"id": "same", "question": "What is 2+3?", "response": "The answer is \\boxed{2+3}.", "answer": 5},
    ]
    sft = {"type": "sft", "data": rows_file(tmp_path / "rows.jsonl", rows)}
    short = {**recipe, "iterations": 1, "evaluate": {"every": 0}, "rollout": {**recipe["rollout"], "prompts": 4}}
    reader, _ = trained({**short, "method": sft}, tmp_path / "sft")
    verdicts = {row["problem"]: row["verdict"] for row in reader.rollouts(1)}
    assert verdicts == {"right": "correct", "zero": "wrong", "open": "error", "same": "wrong"}
    assert [row["rule"] for row in reader.rollouts(1) if row["problem"] == "same"] == ["not worked out"]
    line = reader.metrics()[0]
    assert (line["train/accuracy"], line["train/ungraded"], line["train/not_worked_out"]) == (1 / 3, 1, 0.25)
    assert line["train/right_by_value"] == 1
    one = {"type": "sft", "data": rows_file(tmp_path / "open.jsonl", rows[2:3])}
    reader, observer = trained({**short, "method": one}, tmp_path / "open")
    assert "train/accuracy" not in reader.metrics()[0]
    assert reader.metrics()[0]["train/updates"] == 1, "learnt from, graded or not"
    assert any("not graded: the row has no answer" in note for note in observer.notes)


def test_a_rejected_response_is_called_what_it_is(tmp_path: Path, recipe: dict[str, Any]) -> None:
    rows = [
        {
            "id": "longer",
            "question": "What is 2+2?",
            "answer": "4",
            "response": "\\boxed{4}",
            "rejected": "So \\boxed{4}",
        },
        {
            "id": "swapped",
            "question": "What is 3+3?",
            "answer": "6",
            "response": "\\boxed{7}",
            "rejected": "\\boxed{6}",
        },
        {"id": "open", "question": "Say it.", "response": "\\boxed{1}", "rejected": "\\boxed{2}"},
    ]
    dpo = {"type": "dpo", "data": rows_file(tmp_path / "pairs.jsonl", rows)}
    reader, _ = trained({**recipe, "method": dpo, "iterations": 1, "evaluate": {"every": 0}}, tmp_path / "dpo")
    found: dict[str, list[str]] = {}
    for row in reader.rollouts(1):
        found.setdefault(row["problem"], []).append(row["verdict"])
    assert found == {"longer": ["correct"] * 2, "swapped": ["wrong", "correct"], "open": ["error"] * 2}


def test_an_example_that_the_model_cannot_read_is_left_out(tmp_path: Path, recipe: dict[str, Any]) -> None:
    rows = [{"question": "Say a.", "response": "a"}, {"question": "Say much.", "response": "b" * 600}]
    raw = {**recipe, "method": {"type": "sft", "data": rows_file(tmp_path / "long.jsonl", rows)}, "iterations": 1}
    trainer = start(validate(raw, "test"), tmp_path / "run", ["test"], Silent())
    assert isinstance(trainer.source, RecordedResponses)
    assert [group.problem.question for group in trainer.source.rows] == ["Say a."]
    assert "longer than the 512 tokens" in trainer.notices[0]
