"""Models with random weights in the shapes of SmolLM2-135M, Qwen2.5-0.5B, a Llama of 10 million and one for tests."""

from __future__ import annotations

import torch

from reasonlab.model.config import ModelConfig
from reasonlab.model.transformer import Transformer

SHAPES = {
    "10m": ModelConfig("llama", 4096, 320, 864, 6, 10, 5, 32),
    "135m": ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, rope={"rope_theta": 1e5}),
    "0.5b": ModelConfig("qwen2", 151936, 896, 4864, 24, 14, 2, 64, rope={"rope_theta": 1e6}, qkv_bias=True),
    "mini": ModelConfig("llama", 512, 32, 64, 2, 4, 2, 8),
}


def random_model(shape: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    with torch.device(device):
        model = Transformer(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.02)
    return model.to(device, dtype)
