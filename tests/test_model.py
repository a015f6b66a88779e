"""The transformer computes what transformers computes, and its checkpoints travel both ways."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import from_transformers, in_transformers, packed_logits, random_sequences, shake, small_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.model.attention import PackedCausal
from reasonlab.model.checkpoint import load_config, load_model, save_model, save_tensors
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import SIZES, tiny_config
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

LENGTHS = [7, 33, 1, 12, 33]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VARIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-key-heads": ("llama", {"num_key_value_heads": 6}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "mistral-linear": ("mistral", {"sliding_window": None, "rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN_ROPE}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN_ROPE | {"beta_fast": 16.0, "beta_slow": 2.0}}),
}


def hf_config(family: str, **options: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return FAMILIES[family](**shape | options)


def random_hf(config: Any, seed: int = 0) -> Any:
    model = AutoModelForCausalLM.from_config(config).float().eval()
    shake(model, seed)
    return model


def their_logits(model: Any, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(s[None]).logits[0] for s in sequences]


def greedy(model: Any, start: torch.Tensor, tokens: int) -> list[int]:
    """What transformers generates. The mask is given, or a padding token inside the prompt would be hidden."""
    mask = torch.ones_like(start[None])
    whole = model.generate(start[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return [int(token) for token in whole[0, len(start) :]]


def assert_same_logits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


# --- parity with transformers ---------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("variation", VARIATIONS)
def test_logits_equal_those_of_transformers_both_ways(variation: str, tied: bool, tmp_path: Path) -> None:
    family, options = VARIATIONS[variation]
    theirs = random_hf(hf_config(family, tie_word_embeddings=tied, **options))
    ours = from_transformers(theirs, tmp_path / "theirs")
    sequences = random_sequences(LENGTHS, vocabulary=61)
    expected = their_logits(theirs, sequences)
    assert_same_logits(packed_logits(ours, sequences), expected)
    back = in_transformers(ours, tmp_path / "ours")
    assert type(back) is type(theirs)
    assert_same_logits(their_logits(back, sequences), expected)
    kept = back.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in theirs.state_dict().items())
    assert load_config(tmp_path / "ours") == ours.config
    starts = [s for s in sequences if len(s) < 20]
    sampling = Sampling(temperature=0.0, max_tokens=12, stop_ids=(2,))
    rollouts = Engine(ours, rows=3).generate([Request(s.tolist(), [0]) for s in starts], sampling)
    for start, (rollout,) in zip(starts, rollouts, strict=True):
        assert rollout.ids == greedy(theirs, start, 12)


@pytest.mark.parity
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_agree(seed: int, tmp_path: Path) -> None:
    draw = random.Random(key("test shapes", seed))
    family = draw.choice(list(FAMILIES))
    kv_heads = draw.choice([1, 2, 3])
    options: dict[str, Any] = {
        "hidden_size": draw.choice([16, 40, 56]),
        "intermediate_size": draw.choice([24, 72]),
        "num_hidden_layers": draw.choice([1, 3]),
        "num_attention_heads": kv_heads * draw.choice([1, 2, 4]),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([4, 8, 20]),
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "tie_word_embeddings": draw.choice([True, False]),
        "rope_parameters": draw.choice([LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE]),
    }
    theirs = random_hf(hf_config(family, **options), seed)
    sequences = random_sequences([draw.randint(1, 60) for _ in range(5)], seed, vocabulary=61)
    ours = from_transformers(theirs, tmp_path)
    assert_same_logits(packed_logits(ours, sequences), their_logits(theirs, sequences))


@pytest.mark.parity
def test_sharded_safetensors_load(tmp_path: Path) -> None:
    theirs = random_hf(hf_config("qwen3", tie_word_embeddings=False))
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    sequences = random_sequences(LENGTHS, vocabulary=61)
    assert_same_logits(packed_logits(load_model(tmp_path), sequences), their_logits(theirs, sequences))


@pytest.mark.parity
def test_half_precision_checkpoints_become_fp32(tmp_path: Path) -> None:
    ours = from_transformers(random_hf(hf_config("llama")).bfloat16(), tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    sequences = random_sequences(LENGTHS, vocabulary=61)
    assert_same_logits(packed_logits(ours, sequences), their_logits(theirs, sequences))


@pytest.mark.parity
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_positions_end_where_a_sliding_window_begins_to_matter(family: str, tmp_path: Path) -> None:
    options = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else {}
    theirs = random_hf(hf_config(family, sliding_window=16, **options))
    ours = from_transformers(theirs, tmp_path)
    assert ours.config.max_positions == 16
    sequences = random_sequences([16, 17], vocabulary=61)
    inside, beyond = zip(packed_logits(ours, sequences), their_logits(theirs, sequences), strict=True)
    torch.testing.assert_close(*inside, atol=1e-5, rtol=0)
    assert (beyond[0] - beyond[1]).abs().max() > 1e-3


def test_a_half_precision_copy_keeps_exact_positions() -> None:
    model = small_model()
    exact = model.inverse_frequencies.clone()
    model.bfloat16()
    assert model.embedding.weight.dtype == torch.bfloat16
    assert torch.equal(model.inverse_frequencies, exact)


# --- the pack -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 1000))
@settings(max_examples=30)
def test_packed_attention_is_causal_attention_of_each_sequence_alone(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lengths), 4, 8, generator=generator)
    k, v = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(2))
    attend = PackedCausal(lengths)
    assert attend.positions.tolist() == [i for n in lengths for i in range(n)]
    got = attend(0, q, k, v).split(lengths)
    for part, *qkv in zip(got, *(x.split(lengths) for x in (q, k, v)), strict=True):
        alone = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in qkv), is_causal=True, enable_gqa=True)
        torch.testing.assert_close(part, alone.transpose(0, 1), atol=1e-6, rtol=0)


def test_a_token_sees_neither_its_future_nor_its_neighbours() -> None:
    model = small_model()
    sequences = random_sequences([9, 14, 9])
    before = packed_logits(model, sequences)
    changed = [sequences[0], sequences[1].clone(), sequences[2]]
    changed[1][6] = (changed[1][6] + 1) % model.config.vocab_size
    after = packed_logits(model, changed)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert torch.equal(before[1][:6], after[1][:6])
    assert (before[1][6:] - after[1][6:]).abs().amin(0).max() > 0


# --- config and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"qkv_bias": True, "output_bias": True}, {"qk_norm": True}])
def test_parameter_count_counts_the_parameters(change: dict[str, Any]) -> None:
    model = small_model(**change)
    assert model.config.parameter_count() == sum(p.numel() for p in model.parameters())


def test_both_spellings_of_rope_read_alike() -> None:
    new = hf_config("llama", rope_parameters=LLAMA3_ROPE).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old["rope_theta"] = LLAMA3_ROPE["rope_theta"]
    old["rope_scaling"] = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_theta", "rope_type")}
    old["rope_scaling"]["type"] = "llama3"
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


def test_a_config_may_leave_out_what_transformers_has_defaults_for() -> None:
    raw = hf_config("llama").to_dict()
    full = ModelConfig.from_hf(raw)
    optional = ("num_key_value_heads", "rms_norm_eps", "attention_bias", "pad_token_id")
    spare = {k: raw[k] for k in raw if k not in optional}
    assert ModelConfig.from_hf(spare) == replace(full, kv_heads=full.heads, pad_id=None)


def test_several_end_tokens_survive_the_round_trip(tmp_path: Path) -> None:
    model = small_model(eos_ids=(2, 5))
    save_model(model, tmp_path)
    assert load_config(tmp_path).eos_ids == (2, 5)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


def test_end_tokens_that_only_the_generation_config_names_are_kept(tmp_path: Path) -> None:
    save_model(small_model(eos_ids=(2,)), tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_config(tmp_path).eos_ids == (2, 5)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_config(tmp_path).eos_ids == (2, 7)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config"):
        load_config(tmp_path)


@pytest.mark.parametrize("shard_bytes", [1, 4000, 1 << 30])
def test_tensors_are_written_in_shards_as_they_come(shard_bytes: int, tmp_path: Path) -> None:
    model = small_model(tied=False)
    (tmp_path / "whole").mkdir()
    save_model(model, tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "parts").mkdir()
    save_tensors(iter(tensors.items()), tmp_path / "parts", shard_bytes)
    (tmp_path / "parts" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    names = {file.name for file in (tmp_path / "parts").glob("*.safetensors")}
    assert (names == {"model.safetensors"}) == (shard_bytes == 1 << 30)
    assert len(names) == len(tensors) if shard_bytes == 1 else len(names) < len(tensors)
    loaded = load_model(tmp_path / "parts").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "parts")  # transformers finds its shards too


def test_saving_copies_the_tokenizer_and_is_reproducible(tmp_path: Path) -> None:
    model, source, targets = small_model(), tmp_path / "source", [tmp_path / "a", tmp_path / "b"]
    for directory in (source, *targets):
        directory.mkdir()
    (source / "tokenizer.json").write_text("{}")
    for target in targets:
        save_model(model, target, tokenizer_from=source)
    files = [{file.name: file.read_bytes() for file in target.iterdir()} for target in targets]
    assert files[0] == files[1]
    assert set(files[0]) == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


def test_initial_weights_depend_on_the_seed_alone() -> None:
    weights = []
    for seed in (1, 1, 2):
        model = small_model(qkv_bias=True)
        model.initialise(seed)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["embedding.weight"], weights[2]["embedding.weight"])
    assert weights[0]["blocks.0.attention.qkv.bias"].abs().max() == 0
    assert (weights[0]["final_norm.weight"] == 1).all()


@pytest.mark.parametrize("name", SIZES)
def test_the_ladder_keeps_the_sizes_it_names(name: str) -> None:
    millions = float(name.removeprefix("tiny-").removesuffix("m"))
    config = tiny_config(name, vocab_size=200, bos_id=1, eos_id=2, pad_id=0)
    assert config.parameter_count() / 1e6 == pytest.approx(millions, rel=0.2)
