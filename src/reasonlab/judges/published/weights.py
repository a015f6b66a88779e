"""The weights of published judges: a backbone without its language head, and the small head that scores.

Names of the tensors, as the published files have them (uncertain ones with the variants that are accepted):

    backbone               model.embed_tokens.weight, model.layers.N..., model.norm.weight; lm_head.weight is not read
    Qwen2.5-Math-PRM, -RM  score.0.weight, score.0.bias, score.2.weight, score.2.bias  (Linear, ReLU, Linear)
    Skywork-o1-Open-PRM    v_head.summary.weight, v_head.summary.bias; or v_head.weight, v_head.bias
    sequence classifiers   score.weight; and score.bias where there is one
    Math-Shepherd          the rows of "-" and "+" of lm_head.weight
    ReasonFlux-PRM-1.5B    weight, bias in reward_head.pt; also behind `reward_head.` or `linear.`
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reasonlab.errors import UserError
from reasonlab.judges.network import Head, Part
from reasonlab.model.checkpoint import INDEX, WEIGHTS, load_config, open_safetensors, open_tensors, tensor_layout
from reasonlab.model.rope import inverse_frequencies
from reasonlab.model.transformer import Transformer

REWARD_HEAD = "reward_head.pt"
VALUE_HEADS = ("v_head.summary", "v_head")
_REWARD_HEAD_PREFIXES = ("", "reward_head.", "linear.")


class PublishedHead(Head):
    """Layers with one output, or with two classes of which the second is "right".

    P(class 1) of two classes is σ(z₁ − z₀), so one rule serves both: a logit, squashed to (0, 1) where the score is a
    probability. Always fp32: scores are few, and their differences should not be rounded.
    """

    def __init__(self, layers: nn.Module, part: Part, probability: bool) -> None:
        super().__init__()
        self.layers, self.parts, self.probability = layers, (part,), probability

    def logits(self, hidden: Tensor, part: Part) -> Tensor:
        z: Tensor = self.layers(hidden.float())
        return z[:, 0] if z.shape[1] == 1 else z[:, 1] - z[:, 0]

    def squash(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.probability else logits


class Checkpoint:
    """An opened directory: its config, and its tensors by name and shape. No weight is read before it is asked for.

    `config` leaves the language head out.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.raw = _read_json(directory / "config.json")
        config = load_config(directory)
        self.tied = config.tied
        self.config = replace(config, tied=True)
        self._read = open_tensors(directory)
        self.shapes = _shapes(directory)

    def backbone(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """The transformer up to its final norm, read tensor by tensor onto the device: never twice in memory."""
        with torch.device("meta"):
            model = Transformer(self.config)
        wanted = {name: parameter.shape for name, parameter in model.named_parameters()}
        state: dict[str, Tensor] = {}
        used: set[str] = set()
        for name, sources in tensor_layout(self.config):
            parts = [self.tensor(source).to(device, dtype) for source in sources]
            state[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
            if state[name].shape != wanted[name]:
                shape, asked = tuple(state[name].shape), tuple(wanted[name])
                raise self._foreign(f"{' and '.join(sources)} have shape {shape} where config.json asks for {asked}")
            used.update(sources)
        unused = [n for n in self.shapes if n.startswith("model.") and n not in used and "rotary_emb" not in n]
        if unused:
            raise self._foreign(f"config.json does not speak of {unused[0]!r} (and {len(unused) - 1} more tensors)")
        model.load_state_dict(state, assign=True)
        frequencies, _ = inverse_frequencies(self.config.head_dim, self.config.rope, self.config.max_positions)
        model.inverse_frequencies = frequencies.to(device)
        return model.requires_grad_(False).eval()

    def tensor(self, name: str) -> Tensor:
        try:
            return self._read(name)
        except KeyError:
            raise UserError(
                f"{self.directory} has no tensor {name!r}", "Fetch the whole checkpoint, or give another kind"
            ) from None

    def linear(self, name: str, outputs: int) -> nn.Linear:
        """The layer called `name`, with its bias where there is one."""
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self.shapes else None
        return self._linear(self.tensor(f"{name}.weight"), bias, name, outputs)

    def two_layers(self, outputs: int) -> nn.Module:
        """score = Linear(h, h), ReLU, Linear(h, outputs)."""
        return nn.Sequential(
            self.linear("score.0", self.config.hidden_size), nn.ReLU(), self.linear("score.2", outputs)
        )

    def value_head(self) -> nn.Module:
        name = next((name for name in VALUE_HEADS if f"{name}.weight" in self.shapes), VALUE_HEADS[0])
        return self.linear(name, 1)

    def vocabulary_rows(self, tokens: Sequence[int]) -> nn.Module:
        """The language head's logits of these tokens alone."""
        name = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
        return self._linear(self.tensor(name)[list(tokens)], None, name, len(tokens))

    def pickled_head(self) -> nn.Module:
        """`reward_head.pt`, a pickled state dict. Only tensors are unpickled; what could run code is refused."""
        path = self.directory / REWARD_HEAD
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"{path} is missing", "Fetch the whole checkpoint, or give another kind") from None
        except pickle.UnpicklingError:
            raise UserError(
                f"{path} holds more than tensors; it could run code and is not read", "Do not use it"
            ) from None
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error})", "Fetch it again") from None
        for prefix in _REWARD_HEAD_PREFIXES:
            if isinstance(state, dict) and isinstance(state.get(f"{prefix}weight"), Tensor):
                return self._linear(state[f"{prefix}weight"], state.get(f"{prefix}bias"), REWARD_HEAD, 1)
        raise self._foreign(f"{REWARD_HEAD} is not the state dict of a linear layer")

    def _linear(self, weight: Tensor, bias: Tensor | None, name: str, outputs: int) -> nn.Linear:
        wanted = (outputs, self.config.hidden_size)
        if weight.shape != wanted or (bias is not None and bias.shape != wanted[:1]):
            raise self._foreign(f"{name} has shape {tuple(weight.shape)} where {wanted} is wanted")
        layer = nn.Linear(wanted[1], outputs, bias=bias is not None)
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
        return layer.requires_grad_(False)

    def _foreign(self, what: str) -> UserError:
        return UserError(f"in {self.directory}, {what}", "Its files do not belong together, or give another kind")


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor, from the headers of the files."""
    if (directory / INDEX).is_file():
        files = sorted(set(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        files = [WEIGHTS]
    opened = [open_safetensors(directory / file) for file in files]
    return {name: tuple(file.get_slice(name).get_shape()) for file in opened for name in file.keys()}  # noqa: SIM118


def _read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file; {} for whatever `load_config` will complain about in its own words."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
