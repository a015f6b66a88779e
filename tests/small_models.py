"""Small random models for the tests: ours, and the same weights in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reasonlab.model.attention import PackedCausal
from reasonlab.model.checkpoint import load_model, save_model
from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import Transformer

VOCABULARY = 32


def shake(module: nn.Module, seed: int, scale: float = 0.3) -> None:
    """Random weights that matter: far from their initial values, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            centre = 0.5 if parameter.dim() == 1 else 0.0
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=generator))


def small_model(seed: int = 0, tied: bool = True, scale: float = 0.3, **changes: Any) -> Transformer:
    """A Llama of two layers with grouped queries; its next-token distributions are neither flat nor certain."""
    shape: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "tied": tied,
        "bos_id": 1,
        "eos_ids": (2,),
        "pad_id": 0,
    }
    model = Transformer(ModelConfig(**shape | changes))
    shake(model, seed, scale)
    return model


def in_transformers(model: Transformer, directory: Path) -> Any:
    """The same weights as a transformers model, by way of the files."""
    from transformers import AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def from_transformers(theirs: Any, directory: Path) -> Transformer:
    theirs.save_pretrained(directory)
    return load_model(directory)


def packed_logits(model: Transformer, sequences: list[Tensor]) -> list[Tensor]:
    """The logits of several sequences that lie one behind the other in one pack."""
    attend = PackedCausal([len(s) for s in sequences])
    with torch.no_grad():
        flat = model(torch.cat(sequences), attend.positions, attend) @ model.head_weight.T
    return list(flat.split([len(s) for s in sequences]))


def random_sequences(lengths: list[int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
