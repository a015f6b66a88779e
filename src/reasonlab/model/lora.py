"""LoRA: small trained matrices beside frozen weights, in peft's files.

    y = W x + s · B A x        A [r, in], B [out, r], s = α / r  (α / √r with rsLoRA)

Only A and B are trained. B begins at zero, so a fresh adapter changes nothing. Our transformer stores q, k, v and gate,
up stacked in one matrix each; adapters keep peft's parts (`q_proj`, `k_proj`, …), each with rows of its own in the
stacked output, so files travel both ways without change.

    add_lora(model, rank=16, alpha=32)            # freezes the model, adds adapters
    optimizer = AdamW(lora_parameters(model))
    engine_model = merged(model, torch.bfloat16)  # W + s·B A; plain weights for the engine
    refresh_merged(engine_model, model)           # after an update
    save_adapter(model, directory, base="smollm2-135m")
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from reasonlab.errors import UserError
from reasonlab.keys import key
from reasonlab.model.checkpoint import open_safetensors, stacked_sizes, tensor_layout
from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import Transformer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_ADAPTER = ("lora_A.", "lora_B.")
# Keys of adapter_config.json that change nothing here. Any other that is set asks for arithmetic we do not do.
_HARMLESS = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "init_lora_weights"),
    *("inference_mode", "megatron_core", "megatron_config", "qalora_group_size", "layers_pattern", "parent_library"),
}
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base model's weights too


class LoraLinear(nn.Linear):
    """A linear layer with adapters on some of the parts that are stacked in its output. `weight` stays in its place."""

    def __init__(self, base: nn.Linear, sizes: Mapping[str, int]) -> None:
        nn.Module.__init__(self)  # not Linear's own, which would make new weights
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.sizes = dict(sizes)  # rows of each part, in their order
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.rank, self.alpha, self.by_root = 0, 0.0, False

    def add(self, part: str, rank: int, alpha: float, by_root: bool = False) -> None:
        self.lora_A[part] = nn.Parameter(self.weight.new_zeros(rank, self.in_features))
        self.lora_B[part] = nn.Parameter(self.weight.new_zeros(self.sizes[part], rank))
        self.rank, self.alpha, self.by_root = rank, alpha, by_root

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.by_root else self.rank)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        # One product for all A: they read the same x.
        inner = F.linear(x, torch.cat([self.lora_A[part] for part in self.lora_A])).split(self.rank, dim=-1)
        low = dict(zip(self.lora_A, inner, strict=True))
        added = [
            F.linear(low[part], self.lora_B[part]) if part in low else y.new_zeros(*y.shape[:-1], rows)
            for part, rows in self.sizes.items()
        ]
        return y + self.scale * (added[0] if len(added) == 1 else torch.cat(added, dim=-1))

    def merged_weight(self) -> Tensor:
        """W + s · B A, the products in fp32."""
        rows = []
        for part, old in zip(self.sizes, self.weight.split(list(self.sizes.values())), strict=True):
            if part in self.lora_A:
                old = old.float() + self.scale * (self.lora_B[part].float() @ self.lora_A[part].float())
            rows.append(old.to(self.weight.dtype))
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def add_lora(
    model: Transformer,
    rank: int,
    alpha: float,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
    by_root: bool = False,
) -> None:
    """Freeze the model and put a fresh adapter on every named projection of every layer."""
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise UserError(f"LoRA has no target {', '.join(unknown) or 'at all'}", f"Choose among {', '.join(TARGETS)}")
    if rank < 1 or alpha <= 0:
        raise UserError(f"LoRA of rank {rank} and alpha {alpha} learns nothing", "Give a rank and an alpha above 0")
    if has_lora(model):
        raise UserError("the model has adapters already", "Merge them first, or load the model again")
    model.requires_grad_(False)
    for name, parts in _stacks(model.config).items():
        wanted = [part for part in parts if part in targets]
        if not wanted:
            continue
        place, _, own = name.rpartition(".")
        layer = LoraLinear(model.get_submodule(name), parts)  # type: ignore[arg-type]
        for part in wanted:
            layer.add(part, rank, alpha, by_root)
            # As peft begins: A uniform with variance 1 / (3 · in), B zero. Keyed, so that no other draw matters.
            generator = torch.Generator().manual_seed(key(seed, "lora", name, part))
            draw = 2 * torch.rand(rank, layer.in_features, generator=generator) - 1
            with torch.no_grad():
                layer.lora_A[part].copy_(draw / math.sqrt(layer.in_features))
        setattr(model.get_submodule(place), own, layer)


def check_rank(config: ModelConfig, rank: int) -> None:
    """Refuse to train a rank that B A cannot have: the smallest side of the projections is its limit."""
    q, k = config.heads * config.head_dim, config.kv_heads * config.head_dim
    most = min(config.hidden_size, config.intermediate_size, q, k)
    if rank > most:
        raise UserError(
            f"LoRA of rank {rank:,} is larger than the smallest side of the model's projections, {most:,}",
            f"Set model.lora_rank to {most} at most; {min(16, most)} is usual",
        )


def has_lora(model: nn.Module) -> bool:
    return any(True for _ in _adapted(model))


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices, in a fixed order."""
    return [p for _, layer in _adapted(model) for matrices in (layer.lora_A, layer.lora_B) for p in matrices.values()]


@torch.no_grad()
def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the plain model that computes the same, by name; for a model without adapters its own."""
    adapted = {f"{name}.weight": layer for name, layer in _adapted(model)}
    for name, parameter in model.named_parameters():
        if name in adapted:
            yield name, adapted[name].merged_weight()
        elif not any(mark in name for mark in _ADAPTER):
            yield name, parameter.detach()


def merged(model: Transformer, dtype: torch.dtype | None = None) -> Transformer:
    """A plain model with the adapters in its weights. Where the type stays, frozen weights are shared, not copied."""
    with torch.device("meta"):
        plain = Transformer(model.config)
    state = {name: tensor.to(dtype or tensor.dtype) for name, tensor in merged_parameters(model)}
    plain.load_state_dict(state, assign=True)
    plain.inverse_frequencies = model.inverse_frequencies
    return plain.requires_grad_(False)


@torch.no_grad()
def refresh_merged(plain: Transformer, model: Transformer) -> None:
    """Bring what `merged` made up to date with the adapters; only matrices that have one are written."""
    for name, layer in _adapted(model):
        weight: Tensor = plain.get_submodule(name).weight  # type: ignore[assignment]
        weight.copy_(layer.merged_weight())


# --- files ----------------------------------------------------------------------------------------------------------


def save_adapter(model: Transformer, directory: Path, base: str | None = None) -> None:
    """Write peft's `adapter_config.json` and `adapter_model.safetensors` into an existing directory."""
    layers = dict(_adapted(model))
    if not layers:
        raise UserError("the model has no adapters to save", "Train it with LoRA first")
    any_layer = next(iter(layers.values()))
    tensors = {_PREFIX + their: tensor.detach().cpu().contiguous() for their, tensor in _named_adapters(model)}
    alpha = any_layer.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": any_layer.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "use_rslora": any_layer.by_root,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [part for part in TARGETS if any(part in layer.lora_A for layer in layers.values())],
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(model: Transformer, directory: Path) -> None:
    """Put the adapter of a directory on the model: on a plain one anew, on one with adapters in their place."""
    config = _read_config(directory)
    file = open_safetensors(directory / WEIGHTS)
    tensors: dict[str, Tensor] = {name.removeprefix(_PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    targets = sorted({name.split(".")[-3] for name in tensors if ".lora_A." in name}, key=_order)
    rank, alpha, by_root = int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora"))
    if not has_lora(model):
        add_lora(model, rank, alpha, targets, by_root=by_root)
    own = dict(_named_adapters(model))
    odd = sorted(set(own) ^ set(tensors)) or [
        name for name, tensor in tensors.items() if tensor.shape != own[name].shape
    ]
    if odd:
        raise UserError(
            f"the adapter in {directory} does not fit the model (first difference: {odd[0]})",
            "Give the base model it was trained on; all layers must have the same targets and rank",
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    for _, layer in _adapted(model):
        layer.alpha, layer.by_root = alpha, by_root


def adapter_base(directory: Path) -> str | None:
    """The base model that an adapter names."""
    named = _read_config(directory).get("base_model_name_or_path")
    return str(named) if named else None


def _adapter_below(directory: Path) -> Path | None:
    """The adapter of a checkpoint, or of the final or newest checkpoint of a run."""
    steps = sorted(directory.glob("checkpoints/step-*"), reverse=True)
    checkpoints = [directory, directory / "checkpoints" / "final", *steps]
    adapters = [checkpoint / "adapter" for checkpoint in checkpoints]
    return next((adapter for adapter in adapters if (adapter / CONFIG).is_file()), None)


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        odd = [name for name, value in config.items() if value and name not in _HARMLESS and value != "none"]
        if config["peft_type"] != "LORA":
            odd.insert(0, f"peft_type {config['peft_type']}")
        if config.get("init_lora_weights") not in _PLAIN_STARTS:
            odd.append(f"init_lora_weights {config['init_lora_weights']}")
        float(config["r"]), float(config["lora_alpha"])
    except FileNotFoundError:
        below = _adapter_below(directory)
        remedy = f"One lies below it: {below}" if below else "Give a directory that peft saved"
        raise UserError(f"{directory} holds no adapter (no {CONFIG})", remedy) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not an adapter's config ({error})", "Save the adapter again with peft") from None
    if odd:
        raise UserError(
            f"the adapter in {directory} uses {', '.join(odd)}, which is not supported",
            "Merge it with peft (merge_and_unload) and give the whole model",
        )
    return dict(config)


# --- names ----------------------------------------------------------------------------------------------------------


def _adapted(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def _stacks(config: ModelConfig) -> dict[str, dict[str, int]]:
    """Our linear layers that can have adapters, with the rows of each part that is stacked in them."""
    found: dict[str, dict[str, int]] = {}
    for ours, theirs in tensor_layout(config):
        parts = [name.split(".")[-2] for name in theirs]
        if ours.endswith(".weight") and set(parts) <= set(TARGETS):
            found[ours.removesuffix(".weight")] = dict(zip(parts, stacked_sizes(config, parts), strict=True))
    return found


def _named_adapters(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every trained matrix under the name that peft gives it, less its prefix."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for ours, theirs in tensor_layout(model.config):
        for name in theirs:
            module = name.rpartition(".")[0]
            places[ours.rpartition(".")[0]][module.split(".")[-1]] = module
    for name, layer in _adapted(model):
        for letter, matrices in (("A", layer.lora_A), ("B", layer.lora_B)):
            for part, parameter in matrices.items():
                yield f"{places[name][part]}.lora_{letter}.weight", parameter


def _order(target: str) -> int:
    return TARGETS.index(target) if target in TARGETS else len(TARGETS)
