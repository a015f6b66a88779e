"""Small random chat models as files: directories as of Hugging Face, with tokenizer and template, and GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_models import in_transformers, small_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from reasonlab.model.transformer import Transformer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>\n{% endif %}{% endif %}"
)
SPECIALS = ("<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>")


def checkpoint(directory: Path, thinking: bool = False) -> Transformer:
    """A random Llama with a byte-level tokenizer, a chat template, and two tokens that end an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet, "th", "Ġth"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("Ġ", "th")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS[:5]))
    tokenizer.add_tokens(list(SPECIALS[5:]))
    model = small_model(
        seed=3, scale=0.4, vocab_size=len(vocabulary), bos_id=0, eos_ids=(1, 2), pad_id=None, max_positions=512
    )
    in_transformers(model, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template = TEMPLATE.replace("{% if thinking %}", "{% if true %}") if thinking else TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    return model


def write_gguf(path: Path, model: Transformer, tensors: dict[str, np.ndarray], quantised: bool) -> None:
    """A Llama in GGUF: its own names, q and k with the rotary pairs interleaved, a GPT-2 style vocabulary."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    c = model.config
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokens += [f"<spare{i}>" for i in range(c.vocab_size - len(tokens))]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(c.max_positions)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}:{% endfor %}")
    for name, value in tensors.items():
        if quantised and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Transformer, directory: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    found = {}
    for name, value in load_file(directory / "model.safetensors").items():
        words = name.removesuffix(".weight").split(".")
        heads = {"q_proj": model.config.heads, "k_proj": model.config.kv_heads}.get(words[-1])
        if heads:
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        known = whole.get(".".join(words))
        found[f"{known or f'blk.{words[2]}.{parts[words[-1]]}'}.weight"] = np.ascontiguousarray(value)
    return found
