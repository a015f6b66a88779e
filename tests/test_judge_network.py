"""The judge's model: what it reads, how it is packed, and the files that transformers loads as the same judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import VOCABULARY, random_sequences, shake, small_model
from torch import Tensor

from reasonlab.errors import UserError
from reasonlab.judges.formats import NOWHERE, ChatFormat, Encoded, TinyFormat, is_tiny, own_format, windows
from reasonlab.judges.network import JudgeModel, OutcomeHead, Pack, ProcessHead, fresh_judge, load_judge, save_judge
from reasonlab.judges.types import Candidate
from reasonlab.model.attention import PackedCausal
from reasonlab.model.checkpoint import save_model
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tokenizer import ChatTokenizer

TINY = resolve_model("tiny-0.3m")
WORKED = Candidate("p", "3*4+5=?", "<think>3*4=12;12+5=17</think>Answer:17")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"architecture": "qwen2", "qkv_bias": True},
    "qwen3": {"architecture": "qwen3", "qk_norm": True},
}


def random_judge(kind: str = "outcome", **changes: Any) -> JudgeModel:
    backbone = small_model(seed=5, **changes)
    judge = JudgeModel(backbone, OutcomeHead(24) if kind == "outcome" else ProcessHead(24))
    shake(judge.head, seed=6)
    return judge


def whole(ids: Tensor) -> Encoded:
    return Encoded(ids.numpy(), np.zeros(0, np.int64), len(ids) - 1)


def saved(judge: JudgeModel, directory: Path, kind: Any = "outcome") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_judge(judge, TinyFormat(kind), directory, TINY)
    return directory


# --- formats ---------------------------------------------------------------------------------------------------------


def test_a_process_judge_reads_at_the_last_token_of_each_step_and_at_the_end() -> None:
    form = TinyFormat("process")
    encoded = form.encode(WORKED)
    prefixes = [form.tokenizer.decode(encoded.ids[: place + 1].tolist()) for place in encoded.steps]
    start = "<bos>3*4+5=?\n<think>3*4=12;"
    assert prefixes == [start, start + "12+5=17</think>", start + "12+5=17</think>Answer:17"]
    assert form.tokenizer.decode(encoded.ids.tolist()) == prefixes[-1] + "<eos>"
    assert encoded.final == len(encoded.ids) - 1
    assert form.tokenizer.decode(encoded.ids[: encoded.prompt].tolist()) == "<bos>3*4+5=?\n"


@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_the_chat_format_of_a_tiny_model_gives_the_tokens_of_the_tiny_format(kind: Any) -> None:
    chat = ChatFormat(kind, "tiny", ChatTokenizer.load(TINY))
    for response in (WORKED.response, WORKED.response + "<eos>", "", "\nAnswer:1", "Answer:x;;"):
        candidate = Candidate("p", WORKED.question, response)
        ours, theirs = TinyFormat(kind).encode(candidate), chat.encode(candidate)
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.steps.tolist() == theirs.steps.tolist()
        assert (ours.final, ours.prompt) == (theirs.final, theirs.prompt)
        assert ours.ids.tolist().count(TinyFormat(kind).tokenizer.eos_id) == 1


def test_an_opening_of_the_thinking_is_not_doubled(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ bos_token + messages[0]['content'] }}\n<think>")
    form = ChatFormat("process", "tiny", ChatTokenizer.load(tmp_path / "model"))
    for response in ("<think>1;2</think>3", "1;2</think>3"):
        ids = form.encode(Candidate("p", "q", response)).ids.tolist()
        assert form.tokenizer.decode(ids) == "<bos>q\n<think>1;2</think>3"


def test_a_model_without_template_or_end_token(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    form = ChatFormat("outcome", "newline", ChatTokenizer.load(tmp_path / "model"))
    assert form.tokenizer.decode(form.encode(Candidate("p", "q", "r")).ids.tolist()) == "q\nr"  # the end is not shown
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no end token"):
        ChatFormat("outcome", "newline", ChatTokenizer.load(tmp_path / "model"))


def test_which_format_a_checkpoint_gets(tmp_path: Path) -> None:
    assert is_tiny(TINY)
    assert isinstance(own_format(TINY, "process"), TinyFormat)
    shutil.copytree(TINY, tmp_path / "model")
    stored = json.loads((TINY / "tokenizer.json").read_text())
    stored["model"]["vocab"]["zebra"] = stored["model"]["vocab"].pop("<reserved_0>")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(stored))
    assert isinstance(own_format(tmp_path / "model", "process"), ChatFormat)


# --- windows ---------------------------------------------------------------------------------------------------------


def test_what_fits_is_one_window_and_an_outcome_judge_refuses_the_rest() -> None:
    encoded = TinyFormat("process").encode(WORKED)
    assert windows(encoded, len(encoded.ids), "p") == [encoded]
    outcome = TinyFormat("outcome").encode(WORKED)
    with pytest.raises(UserError, match=r"problem 'p' has 30 tokens, the judge reads 29"):
        windows(outcome, len(outcome.ids) - 1, "p")


def test_a_step_too_long_for_any_window_is_refused_by_its_number() -> None:
    long = Candidate("p", "1+1=?", "1+1=2;" + "9" * 60 + ";Answer:2")
    with pytest.raises(UserError, match=r"step 2 of a response to problem 'p' has 61 tokens; .* room for 40"):
        windows(TinyFormat("process").encode(long), 40 + 7, "p")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.integers(0, 5),
    st.integers(0, 3),
    st.integers(0, 30),
    st.booleans(),
)
def test_windows_score_every_step_once_with_nothing_missing_in_between(
    sizes: list[int], prompt: int, tail: int, more: int, final: bool
) -> None:
    """Tokens are numbered, so that each window shows what it holds."""
    ids = np.arange(prompt + sum(sizes) + tail)
    steps = prompt - 1 + np.cumsum(sizes)
    encoded = Encoded(ids, steps, len(ids) - 1 if final else NOWHERE, prompt)
    room = prompt + max(sizes) + tail + more  # any step fits, the last with its tail
    scored: list[int] = []
    for window in windows(encoded, room, "p"):
        assert len(window.ids) <= room
        assert window.ids[:prompt].tolist() == list(range(prompt))
        body = window.ids[prompt:]
        assert (np.diff(body) == 1).all()
        scored += window.ids[window.steps].tolist()
        starts = {prompt, *(steps + 1).tolist()}
        assert body[0] in starts
    assert scored == steps.tolist()
    assert (window.final != NOWHERE) == final
    assert window.ids[-1] == ids[-1]
    if len(ids) > room:
        # Context: a window goes back to steps that were scored before, where there is room for them.
        second = windows(encoded, room, "p")[1]
        first_scored = second.ids[second.steps[0]]
        size = sizes[int(np.searchsorted(steps, first_scored))]
        before = sizes[int(np.searchsorted(steps, first_scored)) - 1]
        if size + tail + before <= room - prompt and before <= (room - prompt) // 2:
            assert second.ids[prompt] < first_scored - size + 1


# --- packs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_do_not_depend_on_the_pack(name: str) -> None:
    judge = random_judge("process", **ARCHITECTURES[name])
    prompt = random_sequences([6], seed=1)[0]
    tails = random_sequences([3, 9, 1, 20, 9, 2], seed=2)
    sequences = [torch.cat((prompt, tail)) for tail in tails] + [torch.cat((prompt, tails[3], tails[1]))]
    encoded = [Encoded(s.numpy(), np.array([5, len(s) - 1]), len(s) - 1, 6) for s in sequences]
    with torch.no_grad():
        together = judge(Pack.of(encoded))
        alone = [judge(Pack.of([one])) for one in encoded]
    for part in (0, 1):
        torch.testing.assert_close(together[part], torch.cat([one[part] for one in alone]), atol=1e-5, rtol=0)
    assert together[1].std() > 0.01
    assert len(Pack.of(encoded).ids) <= sum(len(s) for s in sequences) - 6 * 6  # the prompt is there once


def test_a_common_beginning_is_computed_once() -> None:
    a, b = np.arange(10), np.array([0, 1, 2, 9, 9])
    none = np.zeros(0, np.int64)
    pack = Pack.of([Encoded(a, np.array([4]), 9), Encoded(b, np.array([1, 4]), NOWHERE), Encoded(b, none, 4)])
    assert pack.ids.tolist() == [*range(10), 9, 9]
    assert pack.sequences.tolist() == [*range(10), 0, 1, 2, 10, 11, 0, 1, 2, 10, 11]
    assert pack.steps.tolist() == [4, 1, 11]
    assert pack.finals.tolist() == [9, 11]


def test_hidden_states_of_some_rows_are_those_of_all() -> None:
    model = small_model(seed=3)
    ids = torch.cat(random_sequences([7, 11]))
    attend, rows = PackedCausal([7, 11]), torch.tensor([17, 2, 2, 6])
    with torch.no_grad():
        every, some = model(ids, attend.positions, attend), model(ids, attend.positions, attend, rows)
    torch.testing.assert_close(some, every[rows], atol=1e-6, rtol=0)


def test_a_step_cannot_see_what_comes_after_it() -> None:
    judge = fresh_judge(TINY, "process", 0)
    form = TinyFormat("process")
    first = form.encode(WORKED)
    other = form.encode(Candidate("p", WORKED.question, "<think>3*4=12;99-98=1;1+1=2</think>Answer:0"))
    with torch.no_grad():
        (a, b, *_), _ = judge(Pack.of([first]))
        (c, d, *_), _ = judge(Pack.of([other]))
    assert a.item() == pytest.approx(c.item(), abs=1e-6)
    assert abs(b.item() - d.item()) > 1e-4


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_loads_the_outcome_judge_and_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    judge = random_judge(**ARCHITECTURES[name])
    theirs, loading = AutoModelForSequenceClassification.from_pretrained(
        saved(judge, tmp_path / "judge"), output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert type(theirs).__name__.endswith("ForSequenceClassification")
    sequences = [s.clamp(min=3) for s in random_sequences([5, 17, 9])]  # no padding inside
    padded = torch.zeros(3, 17, dtype=torch.int64)
    for row, s in zip(padded, sequences, strict=True):
        row[: len(s)] = s
    with torch.no_grad():
        expected = theirs.eval()(input_ids=padded, attention_mask=(padded > 0).long()).logits
        _, ours = judge(Pack.of([whole(s) for s in sequences]))
    assert expected.shape == (3, 1)
    torch.testing.assert_close(ours, expected[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parity
def test_the_chat_template_of_transformers_makes_the_same_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(saved(fresh_judge(TINY, "outcome", 0), tmp_path / "judge"))
    turns = [{"role": "user", "content": WORKED.question}, {"role": "assistant", "content": WORKED.response}]
    theirs = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    assert theirs == TinyFormat("outcome").encode(WORKED).ids.tolist()


@pytest.mark.parity
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_an_outcome_judge_of_transformers_is_read(tmp_path: Path, shard_size: str) -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_labels=1, pad_token_id=0, tie_word_embeddings=False, **shape)
    theirs = LlamaForSequenceClassification(config).eval()
    shake(theirs, 3)
    theirs.save_pretrained(tmp_path, max_shard_size=shard_size)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, tmp_path / file)
    judge, form = load_judge(tmp_path)
    assert isinstance(form, TinyFormat)
    (ids,) = (s.clamp(min=3) for s in random_sequences([12]))
    with torch.no_grad():
        expected = theirs(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(judge(Pack.of([whole(ids)]))[1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["outcome", "process"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_judge_comes_back_bit_for_bit(kind: Any, name: str, tmp_path: Path) -> None:
    judge = random_judge(kind, **ARCHITECTURES[name])
    again, form = load_judge(saved(judge, tmp_path / "judge", kind))
    assert form.describe() == TinyFormat(kind).describe()
    before, after = judge.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parity
def test_the_backbone_of_a_process_judge_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModel

    judge = random_judge("process")
    theirs = AutoModel.from_pretrained(saved(judge, tmp_path / "judge", "process")).eval()
    ids = random_sequences([9])[0]
    attend = PackedCausal([9])
    with torch.no_grad():
        expected = theirs(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(judge.backbone(ids, attend.positions, attend), expected, atol=1e-5, rtol=1e-5)


def test_padding_that_is_the_end_token_is_not_written(tmp_path: Path) -> None:
    """transformers would take the end token for padding and read the score before it."""
    config = json.loads((saved(random_judge(pad_id=2), tmp_path / "judge") / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert config["pad_token_id"] is None


def test_what_is_no_judge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tensor 'score.weight'"):
        load_judge(TINY)
    directory = saved(random_judge("process"), tmp_path / "judge", "process")
    (directory / "judge.json").write_text('{"kind": "oracle"}')
    with pytest.raises(UserError, match="names the kind 'oracle'"):
        load_judge(directory)
    (directory / "judge.json").write_text('{"kind": "process", "text": "tiny"}')
    with pytest.raises(UserError, match="lacks the key 'steps'"):
        load_judge(directory)
    (directory / "judge.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        load_judge(directory)


@pytest.mark.parametrize("tied", [True, False])
def test_a_judge_has_the_backbone_of_its_base_and_no_language_head(tied: bool, tmp_path: Path) -> None:
    base = small_model(seed=4, tied=tied)
    save_model(base, tmp_path)
    judge = fresh_judge(tmp_path, "process", 0)
    parameters = dict(base.named_parameters())
    parameters.pop("head.weight", None)
    assert dict(judge.backbone.named_parameters()).keys() == parameters.keys()
    assert all(torch.equal(value, parameters[name]) for name, value in judge.backbone.named_parameters())


def test_a_fresh_head_depends_on_the_seed_alone() -> None:
    a, b, c = (fresh_judge(TINY, "outcome", seed).head.score.weight for seed in (0, 0, 1))  # type: ignore[union-attr]
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert 0.01 < a.std().item() < 0.03
