"""The shape of a decoder-only transformer, read from and written to a Hugging Face `config.json`.

Four dense families are covered by one set of switches: Llama and Mistral (no biases), Qwen2 (bias on q, k, v) and
Qwen3 (RMSNorm on every head of q and k). Anything else is refused by name rather than loaded wrongly.

A sliding window of w tokens (Mistral 7B v0.1) is full attention for texts of up to w tokens. Such a model is read as
one that takes w positions at most: what it computes is exact, and longer texts are refused by whoever asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from reasonlab.errors import UserError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
CLASS_NAMES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MISTRAL_WINDOW = 4096  # what transformers takes where a Mistral's config.json does not say


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Every number that decides the shape and the arithmetic of the model."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] | None = None  # {"rope_theta", "rope_type", ...} in transformers' own words
    max_positions: int = 2048
    tied: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`; unsupported architectures and options raise an error that lists what is supported."""
        kind = raw.get("model_type")
        if kind not in CLASS_NAMES:
            raise UserError(
                f"model type {kind!r} is not supported",
                f"Supported: {', '.join(f'{k} ({c})' for k, c in CLASS_NAMES.items())}",
            )
        _refuse_unsupported(raw)
        heads = int(raw["num_attention_heads"])
        eos = raw.get("eos_token_id")
        bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=kind,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or (128 if kind == "qwen3" else int(raw["hidden_size"]) // heads)),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=_read_rope(raw),
            max_positions=min((int(raw.get("max_position_embeddings", 2048)), *_window(raw))),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or bias,
            output_bias=kind != "qwen2" and bias,
            qk_norm=kind == "qwen3",
            bos_id=raw.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
            pad_id=raw.get("pad_token_id"),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """The `config.json` that transformers (and vLLM) load as this model."""
        rope = dict(self.rope or {"rope_theta": 10000.0, "rope_type": "default"})
        raw: dict[str, Any] = {
            "architectures": [CLASS_NAMES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],  # read by releases older than the rope_parameters key
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None),
            "pad_token_id": self.pad_id,
            "dtype": dtype,
        }
        if self.architecture in ("llama", "qwen3"):
            raw["attention_bias"] = self.qkv_bias
        if self.architecture == "mistral":
            raw["sliding_window"] = None  # `max_positions` is within it
        if rope.get("rope_type", "default") != "default":
            raw["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
        return raw

    def parameter_count(self) -> int:
        """Number of weights, a tied head counted once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        attention += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden_size


def _read_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("original_max_position_embeddings", raw.get("original_max_position_embeddings"))
    if rope["original_max_position_embeddings"] is None:
        del rope["original_max_position_embeddings"]
    if rope["rope_type"] not in ROPE_TYPES:
        raise UserError(f"RoPE type {rope['rope_type']!r} is not supported", f"Supported: {', '.join(ROPE_TYPES)}")
    return rope


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    problems = []
    if raw.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={raw['hidden_act']!r} (only silu)")
    if raw.get("mlp_bias"):
        problems.append("mlp_bias=true")
    if _slides(raw) and raw.get("model_type") != "mistral" and not raw.get("sliding_window"):
        problems.append("sliding-window attention of no stated width")
    if raw.get("quantization_config"):
        problems.append("quantised weights")
    if problems:
        raise UserError(
            f"this {raw.get('model_type')} checkpoint uses {', '.join(problems)}, which is not supported",
            "Use a dense checkpoint with full attention, SwiGLU and unquantised weights",
        )


def _slides(raw: Mapping[str, Any]) -> bool:
    layer_types = raw.get("layer_types")
    if layer_types:
        return "sliding_attention" in layer_types
    return raw.get("model_type") == "mistral" or bool(raw.get("use_sliding_window"))


def _window(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The width of the sliding window, if there is one."""
    window = raw.get("sliding_window", MISTRAL_WINDOW) if _slides(raw) else None
    return () if window is None else (int(window),)
