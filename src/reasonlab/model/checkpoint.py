"""Weights in and out in the Hugging Face layout: `config.json`, `model.safetensors` (or shards), tokenizer files.

Only safetensors are read: pickled checkpoints can run code and are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from reasonlab.errors import UserError
from reasonlab.model.config import ModelConfig
from reasonlab.model.rope import inverse_frequencies
from reasonlab.model.transformer import Transformer

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SHARD_BYTES = 4 << 30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_model(directory: Path, with_head: bool = True) -> Transformer:
    """Read a checkpoint directory into an fp32 model on the CPU; `with_head=False` leaves the language head out."""
    config = load_config(directory)
    if not with_head:
        config = replace(config, tied=True)
    with torch.device("meta"):  # no weights are drawn that would be overwritten
        model = Transformer(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tensor = open_tensors(directory)
    state: dict[str, Tensor] = {}
    for name, sources in tensor_layout(config):
        state[name] = torch.empty(shapes[name])
        for source, part in zip(sources, _parts(config, state[name], sources), strict=True):
            try:
                value = tensor(source)
            except KeyError:
                raise UserError(
                    f"{directory} has no tensor {source!r}", "The weights do not belong to its config.json"
                ) from None
            if value.shape != part.shape:
                raise UserError(
                    f"{source} has shape {tuple(value.shape)} where config.json asks for {tuple(part.shape)}",
                    "The weights do not belong to its config.json",
                )
            part.copy_(value)
    model.load_state_dict(state, assign=True)
    model.inverse_frequencies, _ = inverse_frequencies(config.head_dim, config.rope, config.max_positions)
    return model


def save_model(
    model: Transformer, directory: Path, tokenizer_from: Path | None = None, more: Mapping[str, Tensor] | None = None
) -> None:
    """Write weights and config into an existing directory; copy the tokenizer files that lie in `tokenizer_from`.

    LoRA adapters are written merged into the weights, so that what is saved computes what the model computes. `more`
    are tensors of another head, under their Hugging Face names.
    """
    from reasonlab.model.lora import merged_parameters  # it needs the layout below

    parameters = dict(merged_parameters(model))
    tensors: dict[str, Tensor] = {}
    for name, targets in tensor_layout(model.config):
        parts = _parts(model.config, parameters[name].cpu(), targets)
        tensors.update({target: part.contiguous() for target, part in zip(targets, parts, strict=True)})
    tensors.update({name: tensor.detach().cpu().contiguous() for name, tensor in (more or {}).items()})
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(model.config.to_hf(dtype), indent=2) + "\n")
    ends = list(model.config.eos_ids) or None
    generation = {"bos_token_id": model.config.bos_id, "eos_token_id": ends, "pad_token_id": model.config.pad_id}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer_from is not None:
        for file in TOKENIZER_FILES:
            if (tokenizer_from / file).exists():
                shutil.copyfile(tokenizer_from / file, directory / file)


def save_tensors(tensors: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors as they come: one file, or shards with their index, never much more than a shard in memory."""
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}

    def write() -> None:
        shards.append(list(held))
        save_file(held, directory / _shard(len(shards), 0), metadata={"format": "pt"})
        held.clear()

    total = held_bytes = 0
    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > shard_bytes:
            write()
            held_bytes = 0
        held[name] = tensor.contiguous()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    names = [WEIGHTS] if len(shards) == 1 else [_shard(i, len(shards)) for i in range(1, len(shards) + 1)]
    for number, name in enumerate(names, 1):
        (directory / _shard(number, 0)).rename(directory / name)
    if len(names) > 1:
        weight_map = {tensor: name for name, held_names in zip(names, shards, strict=True) for tensor in held_names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shard(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _instead_of(directory: Path) -> str:
    """What to give where somebody gave a run, or the adapter of one."""
    if (directory / "run.json").is_file():
        return f"It is a run: its weights lie in {directory / 'checkpoints' / 'final'}"
    if (directory / "adapter_config.json").is_file():
        return f"It is an adapter: reasonlab models apply {directory} --to DIR makes a checkpoint of it"
    return "Give a Hugging Face model directory"


def load_config(directory: Path) -> ModelConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} is not a checkpoint (no config.json)", _instead_of(directory))
    try:
        config = ModelConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except KeyError as missing:
        raise UserError(f"{path} lacks the key {missing}", "Fetch the checkpoint again") from None
    except (AttributeError, TypeError, ValueError) as error:  # not JSON, not an object, not a number
        raise UserError(f"{path} is not a model's config ({error})", "Fetch the checkpoint again") from None
    return replace(config, eos_ids=tuple(dict.fromkeys((*config.eos_ids, *_generation_ends(directory)))))


def _generation_ends(directory: Path) -> Sequence[int]:
    """generation_config.json often names more end tokens than config.json; a saved model must not lose them."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        return [int(end) for end in ends] if isinstance(ends, list) else () if ends is None else (int(ends),)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Fetch the checkpoint again") from None


def tensor_layout(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Our parameter name, and the Hugging Face tensors that are stacked to make it."""
    yield "embedding.weight", ["model.embed_tokens.weight"]
    for i in range(config.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            yield f"{ours}attention.qkv.{kind}", [f"{theirs}self_attn.{p}_proj.{kind}" for p in "qkv"]
        for kind in ("weight", "bias") if config.output_bias else ("weight",):
            yield f"{ours}attention.output.{kind}", [f"{theirs}self_attn.o_proj.{kind}"]
        if config.qk_norm:
            yield f"{ours}attention.q_norm.weight", [f"{theirs}self_attn.q_norm.weight"]
            yield f"{ours}attention.k_norm.weight", [f"{theirs}self_attn.k_norm.weight"]
        yield f"{ours}attention_norm.weight", [f"{theirs}input_layernorm.weight"]
        yield f"{ours}feed_forward_norm.weight", [f"{theirs}post_attention_layernorm.weight"]
        yield f"{ours}feed_forward.gate_up.weight", [f"{theirs}mlp.{p}_proj.weight" for p in ("gate", "up")]
        yield f"{ours}feed_forward.down.weight", [f"{theirs}mlp.down_proj.weight"]
    yield "final_norm.weight", ["model.norm.weight"]
    if not config.tied:
        yield "head.weight", ["lm_head.weight"]


def stacked_sizes(config: ModelConfig, parts: Sequence[str]) -> list[int]:
    """How many rows each projection has."""
    rows = {"q_proj": config.heads * config.head_dim, "o_proj": config.hidden_size, "down_proj": config.hidden_size}
    rows |= dict.fromkeys(("k_proj", "v_proj"), config.kv_heads * config.head_dim)
    return [rows.get(part, config.intermediate_size) for part in parts]


def _parts(config: ModelConfig, stacked: Tensor, names: Sequence[str]) -> Sequence[Tensor]:
    """Views of the tensors that are stacked in one of our parameters: q, k, v, or gate and up, or the whole."""
    if len(names) == 1:
        return [stacked]
    return torch.split(stacked, stacked_sizes(config, [name.split(".")[-2] for name in names]))


def open_tensors(directory: Path) -> Callable[[str], Tensor]:
    """A function that reads one named tensor from the single file or from the shard that holds it."""
    if (directory / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{directory / INDEX} is not an index of shards", "Fetch the checkpoint again") from None
    elif (directory / WEIGHTS).is_file():
        shards = [WEIGHTS]
    else:
        pickled = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
        found = f"only {', '.join(pickled)}, which is never unpickled" if pickled else "no weights"
        raise UserError(f"{directory} holds {found}", "Convert the checkpoint to model.safetensors")
    files = [open_safetensors(directory / shard) for shard in shards]
    holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        tensor: Tensor = holder[name].get_tensor(name)
        return tensor

    return read


def open_safetensors(path: Path) -> Any:
    """One file of tensors, opened for reading by name."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Fetch or train the checkpoint again") from None
