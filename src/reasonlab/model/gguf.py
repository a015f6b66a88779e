"""GGUF files: converted once into a Hugging Face directory in the cache, and from then on loaded like any other.

The cache is named by the file's SHA-256, so a renamed file is found again and a changed one is not mistaken. Tensors
that the file holds as numbers (F32, F16, BF16) are kept as they are; blocks of any quantised type (Q8_0, Q4_0, Q4_1,
Q4_K, Q5_K, Q6_K and the others that the `gguf` package knows) are unpacked to fp32, since scale × integer has more
digits than a half has. What the metadata says and we cannot compute is refused, not left out.

Everything llama.cpp changes on the way in is changed back: names, the order of rows in q and k of a Llama (it turns
neighbouring pairs where transformers turns halves), and Llama 3's RoPE, which a file holds as a tensor of factors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reasonlab.errors import UserError
from reasonlab.model.checkpoint import save_tensors, tensor_layout
from reasonlab.model.config import Architecture, ModelConfig
from reasonlab.model.gguf_header import StoredTensor, read_header
from reasonlab.model.gguf_tokenizer import end_ids, save_tokenizer
from reasonlab.model.rope import inverse_frequencies
from reasonlab.runs.files import cache_directory, explained, replace_directory

_MAGIC = b"GGUF"
_FORMAT = 2  # of what is made here; directories of an older one are not used
_AS_DIRECTORY = "Give the model as a Hugging Face directory"
ARCHITECTURES: dict[str, Architecture] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # Mistral is a "llama"
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ROPE_FACTORS = "rope_freqs.weight"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def gguf_directory(sha256: str) -> Path:
    """Where the conversion of the GGUF file with this checksum lies, or will lie."""
    return cache_directory() / "gguf" / f"{sha256}-{_FORMAT}"


def converted_gguf(path: Path) -> Path:
    """The Hugging Face directory of a GGUF file, made now if it is not in the cache."""
    _check_magic(path)
    target = gguf_directory(file_sha256(path))
    if not target.is_dir():
        convert_gguf(path, target)
    return target


def check_package() -> None:
    """The package that unpacks blocks comes with reasonlab; a machine with a hand-made installation may lack it."""
    if find_spec("gguf") is None:
        raise UserError("GGUF files need the package gguf", f"{sys.executable} -m pip install gguf")


def convert_gguf(path: Path, target: Path) -> None:
    """Write the Hugging Face directory of a GGUF file; it appears whole or not at all."""
    _check_magic(path)
    check_package()
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name[:16]}.", suffix=".tmp", dir=target.parent))
        try:
            unfinished.chmod(0o755)  # tempfile's are private; a cache may be shared
            file = GGUFFile(path)
            config = file.model_config()
            _check_space(config, target)
            save_tensors(file.tensors(config), unfinished)
            dtype = file.float_type("token_embd.weight") or torch.float32
            raw = config.to_hf(str(dtype).removeprefix("torch."))
            (unfinished / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
            generation = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids) or None}
            generation["pad_token_id"] = config.pad_id
            (unfinished / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
            save_tokenizer(path, file.metadata, unfinished)
            replace_directory(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


class GGUFFile:
    """An opened file: its metadata in Python's types, and its tensors by name, read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.metadata, self._tensors = read_header(path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise UserError(f"{path} is not a whole GGUF file ({error})", "Fetch it again") from None
        self.kind = str(self.metadata.get("general.architecture"))

    def model_config(self) -> ModelConfig:
        """The shape of the model, by the file's metadata and the tensors that are there."""
        parts = int(self.metadata.get("split.count", 1))
        if parts > 1:
            raise UserError(f"{self.path.name} is one of {parts} parts", "Join them with llama-gguf-split --merge")
        if self.kind not in ARCHITECTURES:
            raise UserError(
                f"{self.path.name} holds the architecture {self.kind!r}, which is not supported",
                f"Supported in GGUF files: {', '.join(ARCHITECTURES)} (Mistral and SmolLM2 are a llama there)",
            )
        heads, hidden = int(self._say("attention.head_count")), int(self._say("embedding_length"))
        head_dim = int(self._say("attention.key_length", hidden // heads))
        positions = int(self._say("context_length"))
        config = ModelConfig(
            architecture=ARCHITECTURES[self.kind],
            vocab_size=int(self._known("token_embd.weight").shape[0]),
            hidden_size=hidden,
            intermediate_size=int(self._say("feed_forward_length")),
            layers=int(self._say("block_count")),
            heads=heads,
            kv_heads=int(self._say("attention.head_count_kv", heads)),
            head_dim=head_dim,
            norm_eps=_short(self._say("attention.layer_norm_rms_epsilon")),
            rope=self._rope(head_dim, positions),
            max_positions=min(positions, int(self._say("attention.sliding_window", 0)) or positions),
            tied="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            qk_norm=self.kind == "qwen3",
            bos_id=self.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_ids=end_ids(self.metadata),
            pad_id=self.metadata.get("tokenizer.ggml.padding_token_id"),
        )
        self._refuse_what_is_left(config)
        return config

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model under its Hugging Face name."""
        for _, names in tensor_layout(config):
            for name in names:
                tensor = self.tensor(_their_name(name))
                heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
                yield name, _halves(tensor, heads) if heads and self.kind == "llama" else tensor

    def float_type(self, name: str) -> torch.dtype | None:
        """The type of a tensor that is stored as plain numbers, None of one that is stored in blocks."""
        return _FLOATS.get(self._known(name).kind.name)

    def tensor(self, name: str) -> Tensor:
        """One tensor, unpacked."""
        from gguf import dequantize

        stored = self._known(name)
        plain = self.float_type(name)
        if plain is not None:  # viewed, because numpy has no bf16
            return torch.from_numpy(stored.data.copy()).view(plain).reshape(stored.shape)
        try:
            return torch.from_numpy(dequantize(stored.data, stored.kind)).reshape(stored.shape)
        except NotImplementedError:
            kind = stored.kind.name
            raise UserError(f"{self.path.name} holds {kind}, which gguf cannot unpack", _AS_DIRECTORY) from None

    def _known(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path.name} has no tensor {name!r}", "Fetch the file again")
        return self._tensors[name]

    def _say(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.kind}.{key}", default)
        if value is None:
            raise UserError(f"{self.path.name} lacks the key {self.kind}.{key}", "Fetch the file again")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UserError(f"{self.path.name} has layers that differ in {key}", _AS_DIRECTORY)
            value = value[0]
        return value

    def _rope(self, head_dim: int, positions: int) -> dict[str, Any]:
        """RoPE in transformers' words. Llama 3 writes no words but the factors; they must be those of its rule."""
        if int(self._say("rope.dimension_count", head_dim)) != head_dim:
            raise UserError(f"{self.path.name} turns only a part of each head", _AS_DIRECTORY)
        rope: dict[str, Any] = {"rope_theta": _short(self._say("rope.freq_base", 10000.0)), "rope_type": "default"}
        kind = self._say("rope.scaling.type", "none")
        linear = float(self._say("rope.scale_linear", 1.0))  # the old spelling
        factor = float(self._say("rope.scaling.factor", linear))
        if kind == "none" and linear != 1.0:
            kind = "linear"
        if kind == "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = int(self._say("rope.scaling.original_context_length", 0)) or positions
            known = rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            said = {
                key: self.metadata.get(f"{self.kind}.rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")
            }
            if any(float(self._say(f"rope.scaling.{key}", 1.0)) != 1.0 for key in ("attn_factor", "yarn_attn_factor")):
                raise UserError(f"{self.path.name} scales attention in its own way", _AS_DIRECTORY)
            return known | {key: _short(value) for key, value in said.items() if value is not None}
        if kind != "none":
            raise UserError(f"{self.path.name} scales RoPE by {kind!r}, which is not supported", _AS_DIRECTORY)
        if _ROPE_FACTORS not in self._tensors:
            return rope
        factors = self.tensor(_ROPE_FACTORS).double()
        llama3 = rope | {
            "rope_type": "llama3",
            "factor": _short(float(factors.max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        plain, _ = inverse_frequencies(head_dim, rope, positions)
        scaled, _ = inverse_frequencies(head_dim, llama3, positions)
        if not torch.allclose(plain.double() / factors, scaled.double(), rtol=1e-5, atol=0):
            raise UserError(f"{self.path.name} scales RoPE by factors that are not Llama 3's", _AS_DIRECTORY)
        return llama3

    def _refuse_what_is_left(self, config: ModelConfig) -> None:
        used = {_their_name(name) for _, names in tensor_layout(config) for name in names} | {_ROPE_FACTORS}
        unknown = [name for name in self._tensors if name not in used]
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            raise UserError(
                f"{self.path.name} has a tensor {unknown[0]!r}{more} that no dense model has", _AS_DIRECTORY
            )


def _their_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    place, kind = name.rsplit(".", 1)
    if place in _TOP_NAMES:
        return f"{_TOP_NAMES[place]}.{kind}"
    _, _, layer, part = place.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows (x₀ y₀ x₁ y₁ …) of every head become (x₀ x₁ … y₀ y₁ …)."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


def _short(number: float) -> float:
    """1e-05, which a file holds in single precision, as it was written and not as 9.999999747378752e-06."""
    return float(f"{float(number):.7g}")


def _check_space(config: ModelConfig, target: Path) -> None:
    """Before anything is written: at most four bytes a weight."""
    needed, free = 4 * config.parameter_count(), shutil.disk_usage(target.parent).free
    if needed > free:
        what = (
            f"the converted model takes up to {needed / 1e9:.1f} GB, and {target.parent} has {free / 1e9:.1f} GB left"
        )
        raise UserError(what, "Free some space there, or name another cache directory with REASONLAB_CACHE")


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise UserError(f"{path} is not a GGUF file", "Give a checkpoint directory, a GGUF file or a model's name")
