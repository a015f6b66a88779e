"""Small GGUF files with random weights, written by the `gguf` package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from small_models import small_model
from tokenizers import pre_tokenizers

from reasonlab.model.checkpoint import save_model
from reasonlab.model.transformer import Transformer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}:{% endfor %}"
# Places of the half-precision scales in a block of 256, and its size. The package unpacks these types but cannot pack.
_K_SCALES = {"Q2_K": ((80, 82), 84), "Q3_K": ((108,), 110), "Q4_K": ((0, 2), 144), "Q5_K": ((0, 2), 176)}
_K_SCALES |= {"Q6_K": ((208,), 210)}


def gguf_model(architecture: str = "llama", seed: int = 0, **changes: Any) -> Transformer:
    """A model whose rows are whole blocks of 256."""
    shape: dict[str, Any] = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "layers": 2}
    shape |= {"heads": 4, "kv_heads": 2, "head_dim": 64, "max_positions": 512, "scale": 0.05}
    shape |= {"bos_id": 1, "eos_ids": (2, 0), "pad_id": None, "qkv_bias": architecture == "qwen2"}
    shape |= {"architecture": architecture, "qk_norm": architecture == "qwen3"}
    return small_model(seed, **shape | changes)


def packed(value: NDArray[Any], kind: str, seed: int) -> NDArray[np.uint8]:
    """Blocks of a type: the array's, or random ones of about its size where the package cannot pack."""
    import gguf

    if kind not in _K_SCALES:
        return np.asarray(gguf.quantize(value, gguf.GGMLQuantizationType[kind]))
    places, size = _K_SCALES[kind]
    rows, columns = value.shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    for place in places:
        scales = (1e-5 * (1 + random.random((rows, columns // 256)))).astype(np.float16)
        blocks[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def their_tensors(model: Transformer, directory: Path) -> dict[str, NDArray[Any]]:
    """The model's weights under GGUF's names; q and k of a Llama with the rotary pairs side by side."""
    import gguf

    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, directory)
    config = model.config
    names = gguf.get_tensor_name_map(
        {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[gguf_architecture(model)], config.layers
    )
    found = {}
    for name, value in load_file(directory / "model.safetensors").items():
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if heads and gguf_architecture(model) == "llama":
            value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        place, kind = name.rsplit(".", 1)
        found[f"{names.get_name(place)}.{kind}"] = np.ascontiguousarray(value)
    return found


def gguf_architecture(model: Transformer) -> str:
    return "llama" if model.config.architecture == "mistral" else model.config.architecture


def write_gguf(
    path: Path,
    model: Transformer,
    kinds: Mapping[str, str] | str = "F32",
    pre: str = "default",
    more: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, NDArray[Any]] | None = None,
    without: Sequence[str] = (),
    sentencepiece: bool = False,
) -> dict[str, NDArray[Any]]:
    """Write the file and return what its tensors are once unpacked, under GGUF's names.

    `kinds` is the type of all matrices, or of those whose name contains a key (others F32). `more` are further keys of
    the metadata, `without` those to leave out.
    """
    import gguf

    config, arch = model.config, gguf_architecture(model)
    writer = gguf.GGUFWriter(str(path), arch)
    # The merges make all of these but the last.
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "ĊĊ", "ĠĠ", "12", "abc"]
    tokens += [f"<spare{i}>" for i in range(config.vocab_size - len(tokens))]
    metadata: dict[str, Any] = {
        f"{arch}.context_length": config.max_positions,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.heads,
        f"{arch}.attention.head_count_kv": config.kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.rope.dimension_count": config.head_dim,
        f"{arch}.vocab_size": config.vocab_size,
        f"{arch}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "llama" if sentencepiece else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (metadata | dict(more or {})).items():
        if key in without:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    if sentencepiece:
        _add_sentencepiece(writer, config.vocab_size)
    else:
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
        writer.add_token_merges(["t h", "Ċ Ċ", "Ġ Ġ", "1 2"])
    unpacked: dict[str, NDArray[Any]] = {}
    tensors = their_tensors(model, path.with_suffix(".original"))
    for seed, (name, value) in enumerate({**tensors, **(extra_tensors or {})}.items()):
        kind = "F32"
        if value.ndim == 2:
            kind = kinds if isinstance(kinds, str) else next((k for part, k in kinds.items() if part in name), "F32")
        if kind == "F32":
            writer.add_tensor(name, value)
            unpacked[name] = value
        elif kind == "F16":
            writer.add_tensor(name, value.astype(np.float16))
            unpacked[name] = value.astype(np.float16).astype(np.float32)
        else:
            blocks, code = packed(value, kind, seed), gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, blocks, raw_dtype=code)
            unpacked[name] = gguf.dequantize(blocks, code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unpacked


def _add_sentencepiece(writer: Any, size: int) -> None:
    """A vocabulary as of Llama 2: bytes to fall back to, pieces with scores, `▁` for a space."""
    pieces = ["▁", "a", "b", "t", "h", "th", "▁th", "ab", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "[INST]"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4]
    spare = size - len(tokens)
    writer.add_token_list(tokens + [f"<spare{i}>" for i in range(spare)])
    writer.add_token_types(types + [1] * spare)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(size - 259)])
