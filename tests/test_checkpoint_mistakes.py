"""Checkpoints that cannot be read are refused with their file, their key and a remedy, and pickles are not opened."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_models import small_model
from transformers import MistralConfig

from reasonlab.errors import UserError
from reasonlab.model.checkpoint import load_config, load_model, save_model
from reasonlab.model.config import ModelConfig
from reasonlab.model.ladder import resolve_model
from reasonlab.model.transformer import Transformer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_model(small_model(), tmp_path)
    return tmp_path


def refusal(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_model(directory)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))


# --- the config -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "gpt2", None])
def test_unsupported_architectures_list_the_supported_ones(kind: str | None, checkpoint: Path) -> None:
    change_config(checkpoint, model_type=kind)
    message = refusal(checkpoint)
    assert repr(kind) in message
    for name in ("llama", "mistral", "qwen2", "qwen3", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"):
        assert name in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_unsupported_options_are_named_and_the_remedy_says_what_works(
    change: dict[str, Any], named: str, checkpoint: Path
) -> None:
    change_config(checkpoint, **change)
    message = refusal(checkpoint)
    assert named in message
    assert "full attention" in message


def test_a_sliding_window_that_is_switched_off_is_no_obstacle(checkpoint: Path) -> None:
    change_config(checkpoint, use_sliding_window=False, sliding_window=16)
    assert load_model(checkpoint).config.max_positions == 2048
    full = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["full_attention"] * 2,
    }
    assert ModelConfig.from_hf(json.loads((checkpoint / "config.json").read_text()) | full).max_positions == 2048


def test_a_mistral_that_is_silent_has_the_window_that_transformers_gives_it(checkpoint: Path) -> None:
    change_config(checkpoint, model_type="mistral", max_position_embeddings=32768, sliding_window="absent")
    assert load_config(checkpoint).max_positions == MistralConfig().sliding_window == 4096
    change_config(checkpoint, sliding_window=None)
    assert load_config(checkpoint).max_positions == 32768


def test_unsupported_rope_lists_the_supported_types(checkpoint: Path) -> None:
    change_config(checkpoint, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    message = refusal(checkpoint)
    assert "'longrope'" in message
    assert "default, linear, llama3, yarn" in message


def test_a_directory_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "It is an adapter" in refusal(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert "its weights lie in" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "\udcff"])
def test_a_broken_config_is_named(text: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "config.json" in refusal(checkpoint)


@pytest.mark.parametrize(("value", "told"), [("absent", "lacks the key 'hidden_size'"), (None, "config.json")])
def test_a_config_with_a_hole_is_named(value: str | None, told: str, checkpoint: Path) -> None:
    change_config(checkpoint, hidden_size=value)
    assert told in refusal(checkpoint)


# --- the weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 5, 100, 2000], ids=lambda n: f"{n} bytes")
def test_a_truncated_weight_file_is_named(keep: int, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(checkpoint)
    assert "model.safetensors" in message
    assert "again" in message


def test_a_directory_without_weights_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "no weights" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ({"hidden_size": 32}, "model.embed_tokens.weight"),
        ({"intermediate_size": 48}, "mlp.gate_proj.weight"),
        ({"num_key_value_heads": 1}, "self_attn.k_proj.weight"),
        ({"vocab_size": 33}, "model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"tie_word_embeddings": False}, "lm_head.weight"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_weights_that_do_not_fit_the_config_are_named(change: dict[str, Any], tensor: str, checkpoint: Path) -> None:
    change_config(checkpoint, **change)
    message = refusal(checkpoint)
    assert tensor in message
    assert "do not belong to its config.json" in message


def test_projections_of_unequal_width_are_named_one_by_one(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, checkpoint / "model.safetensors")
    message = refusal(checkpoint)
    assert name in message
    assert "(40, 23)" in message
    assert "(40, 24)" in message


def sharded(directory: Path) -> Path:
    """Split the single file of a checkpoint into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    half = len(tensors) // 2
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard, part in (("model-1.safetensors", names[:half]), ("model-2.safetensors", names[half:])):
        save_file({name: tensors[name] for name in part}, directory / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    sharded(checkpoint)
    (checkpoint / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in refusal(checkpoint)


def test_a_tensor_that_its_shard_lacks_is_named(checkpoint: Path) -> None:
    sharded(checkpoint)
    tensors = load_file(checkpoint / "model-2.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, checkpoint / "model-2.safetensors")
    assert "model.norm.weight" in refusal(checkpoint)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(text: str, checkpoint: Path) -> None:
    sharded(checkpoint).write_text(text)
    assert "model.safetensors.index.json" in refusal(checkpoint)


def test_an_unknown_model_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model 'tiny-7m'") as caught:
        resolve_model("tiny-7m")
    assert "checkpoint directory" in caught.value.remedy
    assert resolve_model(str(tmp_path)) == tmp_path


# --- pickles --------------------------------------------------------------------------------------------------------


class _Trap:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def trapped(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint that also holds a live malicious pickle, and the file that the pickle would create."""
    marker = tmp_path_factory.mktemp("marker") / "unpickled"
    payload = pickle.dumps(_Trap(marker))
    pickle.loads(payload)  # noqa: S301 - the trap works
    assert marker.exists()
    marker.unlink()
    for name in ("pytorch_model.bin", "consolidated.pth", "training_args.bin"):
        (checkpoint / name).write_bytes(payload)
    return checkpoint, marker


def test_a_pickled_checkpoint_is_refused_and_not_opened(trapped: tuple[Path, Path]) -> None:
    directory, marker = trapped
    (directory / "model.safetensors").unlink()
    message = refusal(directory)
    assert "pytorch_model.bin" in message
    assert "never unpickled" in message
    assert "Convert the checkpoint to model.safetensors" in message
    assert not marker.exists()


def test_a_pickle_beside_the_weights_is_ignored(trapped: tuple[Path, Path]) -> None:
    directory, marker = trapped
    assert isinstance(load_model(directory), Transformer)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["shard", "weights"])
def test_a_pickle_that_poses_as_safetensors_is_refused(place: str, trapped: tuple[Path, Path]) -> None:
    directory, marker = trapped
    if place == "shard":
        sharded(directory).write_text(json.dumps({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}))
    else:
        (directory / "model.safetensors").write_bytes((directory / "pytorch_model.bin").read_bytes())
    assert "cannot be read" in refusal(directory)
    assert not marker.exists()
