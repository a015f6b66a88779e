"""`reasonlab eval` of checkpoints on disk: Hugging Face directories with their chat templates, and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_checkpoints import checkpoint, gguf_tensors, write_gguf
from evaluations import evaluate, own_set, rows_of
from small_models import in_transformers, small_model
from tokenizers import Tokenizer

from reasonlab.cli import main
from reasonlab.model.checkpoint import load_model
from reasonlab.model.tokenizer import ChatTokenizer

# --- any Hugging Face checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parity
def test_a_checkpoint_answers_what_transformers_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, out = tmp_path / "model", tmp_path / "evaluation"
    checkpoint(directory)
    sums = own_set(tmp_path / "sums.jsonl", 5)
    words = [str(directory), "--benchmark", str(sums), "--temperature", "0", "--max-tokens", "40", "--out", str(out)]
    evaluate(capsys, *words)
    theirs = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ours = ChatTokenizer.load(directory)
    assert ours.stop_ids == (1, 2)
    settings = json.loads((out / "settings.json").read_text())
    assert settings["sampling"]["stop_ids"] == [1, 2]
    finishes = set()
    for row in rows_of(out):
        asked = settings["benchmarks"]["sums"]["template"].replace("{question}", row["question"])
        messages = [{"role": "user", "content": asked}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.prompt_ids(asked) == ids
        assert ids.count(0) == 1, "one beginning, not two"
        made = theirs.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=40
        )
        new = made[0, len(ids) :].tolist()
        assert row["tokens"] == len(new)
        finishes.add(row["finish"])
        assert row["text"] == tokenizer.decode(new[:-1] if new[-1] in (1, 2) else new, skip_special_tokens=False)
    assert finishes == {"stop", "length"}, "both ends of an answer are met"


def test_a_template_that_opens_the_thinking_does_not_hide_that_it_never_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, out = tmp_path / "model", tmp_path / "evaluation"
    checkpoint(directory, thinking=True)
    words = [str(directory), "--benchmark", str(own_set(tmp_path / "sums.jsonl", 3)), "--max-tokens", "8"]
    evaluate(capsys, *words, "--out", str(out))
    assert all(row["text"].startswith("<think>\n") and row["tokens"] <= 8 for row in rows_of(out))
    switched = ChatTokenizer.load(directory, {"thinking": True}).chat_text("x")
    assert switched == "<s><|user|>x<|end|>\n<|assistant|><think>\n"


def test_a_budget_beyond_the_context_and_options_of_other_models_are_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, sums = tmp_path / "model", own_set(tmp_path / "sums.jsonl", 3)
    checkpoint(directory)
    words = ["eval", str(directory), "--benchmark", str(sums)]
    for more, said in (
        (["--max-tokens", "500"], "but the model reads 512 at most. Give --max-tokens"),
        (["--force", "think"], "--force is for the tiny models"),
        (["--endpoint-model", "x"], "--endpoint-model is for endpoints"),
        (["--extraction", "guess"], "there is no extraction 'guess'"),
        (["--suite", "k16"], "Perhaps you meant 'k15'"),
    ):
        assert main([*words, *more]) == 2
        assert said in capsys.readouterr().err
    (directory / "tokenizer.json").unlink()
    assert main(words) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_chat_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    from reasonlab.errors import UserError

    checkpoint(tmp_path)
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        (tmp_path / "chat_template.jinja").write_text(attack)
        with pytest.raises(UserError, match="chat template fails"):
            ChatTokenizer.load(tmp_path).chat_text("x")


def test_truncation_and_padding_left_in_the_tokenizer_are_switched_off(tmp_path: Path) -> None:
    """tokenizer.json remembers how its last training used it; a prompt must still be read whole, and nothing more."""
    checkpoint(tmp_path)
    text = "one two four five"
    whole = ChatTokenizer.load(tmp_path).encode(text)
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(3)
    stored.enable_padding(length=64)
    stored.save(str(tmp_path / "tokenizer.json"))
    assert ChatTokenizer.load(tmp_path).encode(text) == whole
    assert len(whole) == len(text)


def test_a_whole_conversation_is_rendered_by_the_template(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path)
    text = tokenizer.render([("user", "1+1?"), ("assistant", "2")])
    assert text == "<s><|user|>1+1?<|end|>\n<|assistant|>2<|end|>\n"
    assert tokenizer.render([("user", "1+1?")], to_be_answered=True) == tokenizer.chat_text("1+1?")


# --- GGUF --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "q8_0"])
def test_a_gguf_file_is_converted_once_and_then_a_directory(
    quantised: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    monkeypatch.setenv("REASONLAB_CACHE", str(tmp_path / "cache"))
    shape = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "max_positions": 256}
    model = small_model(tied=False, bos_id=0, eos_ids=(1,), pad_id=None, **shape)
    in_transformers(model, tmp_path / "original")
    tensors = gguf_tensors(model, tmp_path / "original")
    write_gguf(tmp_path / "small.gguf", model, tensors, quantised)
    sums = own_set(tmp_path / "sums.jsonl", 3)
    words = [str(tmp_path / "small.gguf"), "--benchmark", str(sums), "--temperature", "0", "--max-tokens", "20"]
    first = json.loads(evaluate(capsys, *words, "--json"))
    (converted,) = (tmp_path / "cache" / "gguf").iterdir()
    loaded = load_model(converted)
    if quantised:
        kind = gguf.GGMLQuantizationType.Q8_0
        expected = gguf.dequantize(gguf.quantize(tensors["token_embd.weight"], kind), kind)
        assert np.array_equal(loaded.embedding.weight.detach().numpy(), expected)
    else:
        theirs = dict(loaded.named_parameters())
        assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.named_parameters())
    stamp = (converted / "model.safetensors").stat().st_mtime_ns
    second = json.loads(evaluate(capsys, *words, "--json"))
    assert second["scores"] == first["scores"]
    assert (converted / "model.safetensors").stat().st_mtime_ns == stamp
    (tmp_path / "other.gguf").write_bytes(b"nonsense")
    assert main(["eval", str(tmp_path / "other.gguf")]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
