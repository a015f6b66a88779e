"""GGUF files become directories that compute what the file says: weights, RoPE, tokenizer, end tokens."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import TEMPLATE, gguf_model, write_gguf
from small_models import packed_logits, random_sequences
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

from reasonlab.errors import UserError
from reasonlab.model.checkpoint import load_config, load_model, open_tensors
from reasonlab.model.gguf import GGUFFile, converted_gguf
from reasonlab.model.gguf_header import read_header
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tokenizer import ChatTokenizer
from reasonlab.model.transformer import Transformer
from reasonlab.rollout.engine import Engine
from reasonlab.rollout.types import Request, Sampling

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

USERS_CACHE = os.environ.get("REASONLAB_CACHE", "")  # empty: the default one
SEQUENCES = random_sequences([5, 21, 2], vocabulary=300)
# As llama.cpp mixes them: the finer type for the value and down projections and the head.
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q4_K"}
Q5_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "": "Q5_K"}
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REASONLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def their_greedy(model: Any, start: torch.Tensor, tokens: int) -> list[int]:
    mask = torch.ones_like(start[None])
    whole = model.generate(
        start[None], attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=[2, 0]
    )
    return [int(token) for token in whole[0, len(start) :]]


def assert_same_model(directory: Path, theirs: Any, tolerance: float = 1e-4) -> Transformer:
    """Logits and greedy tokens of the converted directory and of a transformers model."""
    ours = load_model(directory)
    with torch.no_grad():
        for mine, start in zip(packed_logits(ours, SEQUENCES), SEQUENCES, strict=True):
            torch.testing.assert_close(mine, theirs(start[None]).logits[0], atol=tolerance, rtol=0)
    sampling = Sampling(temperature=0.0, max_tokens=10, stop_ids=(2, 0))
    rollouts = Engine(ours, rows=3).generate([Request(s.tolist(), [0]) for s in SEQUENCES], sampling)
    for start, (rollout,) in zip(SEQUENCES, rollouts, strict=True):
        assert rollout.ids == their_greedy(theirs, start, 10)
    return ours


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_gives_what_transformers_reads_from_the_file(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    import transformers

    unpacked = write_gguf(tmp_path / "small.gguf", gguf_model(), kind)
    unpack = getattr(transformers, "GgufConfig", None)
    options = {"quantization_config": unpack(dequantize=True)} if unpack else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="small.gguf", dtype=torch.float32, **options
    ).eval()
    directory = converted_gguf(tmp_path / "small.gguf")
    ours = assert_same_model(directory, theirs)
    assert np.array_equal(ours.embedding.weight.detach().numpy(), unpacked["token_embd.weight"])
    # Stored no coarser than the file, and no finer than it needs to be.
    plain = {"F16": torch.float16, "BF16": torch.bfloat16}
    tensor = open_tensors(directory)
    assert tensor("model.layers.1.mlp.down_proj.weight").dtype == plain.get(kind, torch.float32)
    assert tensor("model.norm.weight").dtype == torch.float32


@pytest.mark.parity
@pytest.mark.parametrize("kinds", [Q4_K_M, Q5_K_M, "F16"], ids=["Q4_K_M", "Q5_K_M", "F16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_architecture_gives_the_model_of_the_unpacked_weights(
    architecture: str, tied: bool, kinds: Any, tmp_path: Path
) -> None:
    head_dim = 128 if architecture == "qwen3" else 64  # not hidden size / heads: the file has to say it
    model = gguf_model(architecture, tied=tied, head_dim=head_dim)
    unpacked = write_gguf(tmp_path / "small.gguf", model, kinds)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small.original").float().eval()
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA if architecture == "mistral" else gguf.MODEL_ARCH[architecture.upper()], 2
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            place, kind = name.rsplit(".", 1)
            value = torch.from_numpy(unpacked[f"{names.get_name(place)}.{kind}"].copy())
            if architecture in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
                heads = parameter.shape[0] // head_dim  # pairs side by side become halves
                value = torch.cat([part[start::2] for part in value.chunk(heads) for start in (0, 1)])
            parameter.copy_(value)
    ours = assert_same_model(converted_gguf(tmp_path / "small.gguf"), theirs)
    assert ours.config.tied == tied
    assert ours.config.norm_eps == 1e-6  # and not its neighbour in single precision


def llama3_factors(head_dim: int, factor: float, theta: float, original: float = 8192.0) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1 and later."""
    found = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original / 1.0:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama3": ("llama", LLAMA3, {"llama.rope.freq_base": 500000.0}),
    "linear": (
        "llama",
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    ),
    "old-linear": (
        "llama",
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        {"llama.rope.scale_linear": 3.0},
    ),
    "yarn": (
        "qwen2",
        YARN,
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 128,
        },
    ),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", ROPES)
def test_scaled_positions_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    architecture, rope, more = ROPES[case]
    model = gguf_model(architecture, rope=rope)
    factors = {"rope_freqs.weight": llama3_factors(64, 32.0, 500000.0)} if case == "llama3" else {}
    write_gguf(tmp_path / "small.gguf", model, more=more, extra_tensors=factors)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small.original").eval()
    ours = assert_same_model(converted_gguf(tmp_path / "small.gguf"), theirs)
    assert dict(ours.config.rope or {}) == rope


def test_positions_end_where_a_sliding_window_begins_to_matter(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model("mistral"), more={"llama.attention.sliding_window": 96})
    assert load_config(converted_gguf(tmp_path / "small.gguf")).max_positions == 96


# --- tokenizer ------------------------------------------------------------------------------------------------------


def tokenizer_of(path: Path) -> ChatTokenizer:
    return ChatTokenizer.load(converted_gguf(path))


def pieces(tokenizer: ChatTokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_of(token) for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["12", "Ċ", "Ċ", "1", "Ġ", "Ġ", "12", "th"]),
        ("smollm", ["1", "2", "ĊĊ", "1", "ĠĠ", "1", "2", "th"]),
        ("qwen2", ["1", "2", "ĊĊ", "1", "Ġ", "Ġ", "1", "2", "th"]),
        ("llama-bpe", ["12", "ĊĊ", "1", "Ġ", "Ġ", "12", "th"]),
        ("tekken", ["1", "2", "ĊĊ", "1", "Ġ", "Ġ", "1", "2", "th"]),
    ],
)
def test_text_is_cut_by_the_rule_that_the_file_names(pre: str, expected: list[str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model(), pre=pre)
    tokenizer = tokenizer_of(tmp_path / "small.gguf")
    assert pieces(tokenizer, "12\n\n1  12th") == expected
    assert tokenizer.decode(tokenizer.encode("12\n\n1  12th é…")) == "12\n\n1  12th é…"
    assert pieces(tokenizer, "a<|im_end|>") == ["a", "<|im_end|>"]
    whole_words_first = pre in ("llama-bpe", "tekken")
    assert pieces(tokenizer, "abc") == (["abc"] if whole_words_first else ["a", "b", "c"])
    composes = pre == "qwen2"
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == composes


def test_a_rule_that_nobody_knows_is_refused(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model(), pre="viking")
    with pytest.raises(UserError, match="'viking'"):
        converted_gguf(tmp_path / "small.gguf")
    assert list((cache / "gguf").iterdir()) == []  # nothing half-made stays


def test_every_end_token_and_the_template_come_along(tmp_path: Path) -> None:
    more = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    write_gguf(tmp_path / "small.gguf", gguf_model(), more=more)
    directory = converted_gguf(tmp_path / "small.gguf")
    assert load_config(directory).eos_ids == (2, 7, 0)  # <|endoftext|> ends by its name
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, 7, 0]
    tokenizer = ChatTokenizer.load(directory)
    assert tokenizer.stop_ids == (2, 7, 0)
    assert tokenizer.template == TEMPLATE


@pytest.mark.parametrize("adds", [True, False, None])
def test_the_beginning_is_written_once(adds: bool | None, tmp_path: Path) -> None:
    said = {} if adds is None else {"tokenizer.ggml.add_bos_token": adds}
    write_gguf(tmp_path / "chat.gguf", gguf_model(), more=said)
    chat = tokenizer_of(tmp_path / "chat.gguf")
    assert chat.prompt_ids("th").count(1) == 1
    write_gguf(tmp_path / "base.gguf", gguf_model(), more=said, without=["tokenizer.chat_template"])
    base = tokenizer_of(tmp_path / "base.gguf")
    assert base.template is None
    assert base.prompt_ids("th").count(1) == bool(adds)


def test_a_sentencepiece_vocabulary_begins_once_and_puts_a_space_first_unless_the_file_says_no(tmp_path: Path) -> None:
    text = "th ab é[INST] th"
    for name, said in (("plain", {}), ("bare", {"tokenizer.ggml.add_space_prefix": False})):
        write_gguf(tmp_path / f"{name}.gguf", gguf_model(), more=said, sentencepiece=True)
        tokenizer = tokenizer_of(tmp_path / f"{name}.gguf")
        first = "▁th" if name == "plain" else "th"
        middle = ["▁", "ab", "▁", "<0xC3>", "<0xA9>", "[INST]", "▁th"]
        assert pieces(tokenizer, text) == [first, *middle]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode("th", add_special_tokens=True)[0] == 1
        assert tokenizer.prompt_ids("th").count(1) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_tokenizer_that_lies_beside_the_file_is_not_taken_for_its_own(architecture: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model(architecture), pre="qwen2")
    other = Tokenizer(models.BPE(vocab={"a": 0, "<s>": 1}, merges=[]))
    other.save(str(tmp_path / "tokenizer.json"))
    assert pieces(tokenizer_of(tmp_path / "small.gguf"), "12 th") == ["1", "2", "Ġ", "th"]


@pytest.mark.parity
def test_transformers_reads_the_directory_alike(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "small.gguf", gguf_model(), pre="smollm", more={"tokenizer.ggml.add_bos_token": True})
    directory = converted_gguf(tmp_path / "small.gguf")
    theirs, ours = AutoTokenizer.from_pretrained(directory), ChatTokenizer.load(directory)
    for text in ("12\n\n1  12th", "<|im_start|>user th é"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.encode(text) == ours.encode(text, add_special_tokens=True)
    turns = [{"role": "user", "content": "th 12"}]
    rendered = theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert rendered == ours.chat_text("th 12")
    assert theirs(rendered, add_special_tokens=False)["input_ids"] == ours.prompt_ids("th 12")


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_file_is_converted_once_and_known_by_its_content(tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model())
    directory = resolve_model(str(tmp_path / "small.gguf"))
    stamp = (directory / "config.json").stat().st_mtime_ns
    (tmp_path / "small.gguf").rename(tmp_path / "renamed")
    assert resolve_model(str(tmp_path / "renamed")) == directory
    assert (directory / "config.json").stat().st_mtime_ns == stamp
    write_gguf(tmp_path / "other.gguf", gguf_model(seed=1))
    assert resolve_model(str(tmp_path / "other.gguf")) != directory


@pytest.mark.parametrize("keep", [5, 40, 3000, 0.6])
def test_a_truncated_file_is_named_and_nothing_stays(keep: float, tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model())
    whole = (tmp_path / "small.gguf").read_bytes()
    (tmp_path / "small.gguf").write_bytes(whole[: int(keep if keep > 1 else keep * len(whole))])
    with pytest.raises(UserError, match=r"small\.gguf"):
        converted_gguf(tmp_path / "small.gguf")
    assert list((cache / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"extra_tensors": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}}, "ffn_gate_inp"),
        ({"extra_tensors": {"rope_freqs.weight": np.linspace(1, 3, 32, dtype=np.float32)}}, "not Llama 3's"),
        ({"more": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"more": {"llama.rope.dimension_count": 32}}, "part of each head"),
        ({"without": ["llama.block_count"]}, r"llama\.block_count"),
        ({"more": {"general.architecture": "gemma"}}, "gemma"),
        ({"more": {"split.count": 3}}, "one of 3 parts"),
    ],
)
def test_what_cannot_be_computed_is_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model(), **options)
    with pytest.raises(UserError, match=told) as caught:
        converted_gguf(tmp_path / "small.gguf")
    assert caught.value.remedy


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "small.gguf", gguf_model(), "Q4_0")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(UserError, match=r"has 0\.0 GB left"):
        converted_gguf(tmp_path / "small.gguf")
    assert list((cache / "gguf").iterdir()) == []


# --- the header -----------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def place(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(keys: list[bytes], places: list[bytes], version: int = 3, data: bytes = bytes(64)) -> bytes:
    """A file with 64 bytes of tensors, at the default alignment."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(places), len(keys)) + b"".join(keys + places)
    return head + bytes(-len(head) % 32) + data


GOOD = header([key("a", 8, text("é")), key("b", 9, array(8, 2, text("x") + text("")))], [place("t", (4, 2))])
NUMBERS = {
    "uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31),
    "float32": 0.1, "uint64": 2**64 - 1, "int64": -(2**63), "float64": 0.1, "bool": True,
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("alignment", [None, 64])
def test_the_header_is_what_the_package_reads(alignment: int | None, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "all.gguf"), "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for kind, value in NUMBERS.items():
        getattr(writer, f"add_{kind}")(f"one.{kind}", value)
        code = gguf.GGUFValueType[kind.upper()]
        writer.add_key_value(f"many.{kind}", [value, value], gguf.GGUFValueType.ARRAY, sub_type=code)
    writer.add_array("words", ["", "é…", "Ġa b"])
    random = np.random.default_rng(0)
    writer.add_tensor("vector", random.random(5).astype(np.float32))
    writer.add_tensor("halves", random.random((3, 7)).astype(np.float16))
    blocks = gguf.quantize(random.random((4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = gguf.GGUFReader(tmp_path / "all.gguf")
    metadata, tensors = read_header(tmp_path / "all.gguf")
    said = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert metadata == said
    assert {name: type(value) for name, value in metadata.items()} == {n: type(v) for n, v in said.items()}
    assert list(tensors) == [tensor.name for tensor in theirs.tensors] == ["vector", "halves", "blocks"]
    for tensor in theirs.tensors:
        ours = tensors[tensor.name]
        assert (ours.kind, list(ours.shape)) == (tensor.tensor_type, tensor.shape.tolist()[::-1])
        assert ours.data.tobytes() == tensor.data.tobytes()


def test_a_header_that_ends_anywhere_is_told(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(GOOD[:-32])  # the tensor has half of the room
    assert read_header(path).metadata == {"a": "é", "b": ["x", ""]}
    for end in range(5, len(GOOD) - 32):
        path.write_bytes(GOOD[:end])
        with pytest.raises(UserError, match=r"small\.gguf is not a whole GGUF file"):
            GGUFFile(path)


HUGE = 2**63
HOSTILE = {
    "version 1": header([], [], version=1),
    "version 4": header([], [], version=4),
    "more keys than there are": b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
    "more tensors than there are": b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
    "a key past the end": header([struct.pack("<Q", HUGE)], []),
    "a string past the end": header([key("a", 8, struct.pack("<Q", 2**64 - 1))], []),
    "a string that is not UTF-8": header([key("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []),
    "more numbers than there are": header([key("a", 9, array(4, HUGE))], []),
    "more strings than there are": header([key("a", 9, array(8, HUGE))], []),
    "an unknown type": header([key("a", 13, bytes(8))], []),
    "an array of an unknown type": header([key("a", 9, array(99, 1, bytes(8)))], []),
    "arrays in arrays": header([key("a", 9, array(9, 1) * 5000)], []),
    "a key twice": header([key("a", 0, b"1")] * 2, []),
    "a tensor twice": header([], [place("t", (4,))] * 2),
    "no alignment": header([key("general.alignment", 4, bytes(4))], []),
    "an odd alignment": header([key("general.alignment", 4, struct.pack("<I", 24))], []),
    "an alignment in words": header([key("general.alignment", 8, text("32"))], []),
    "a tensor past the end": header([], [place("t", (4,), offset=64)]),
    "a tensor far past the end": header([], [place("t", (4,), offset=2**64 - 1)]),
    "a tensor larger than the file": header([], [place("t", (2**62, 2**62))]),
    "a tensor of an unknown type": header([], [place("t", (4,), kind=4)]),
    "a tensor of no dimension": header([], [place("t", ())]),
    "a tensor of many dimensions": header([], [place("t", (1,) * 70)]),
    "a row that is no whole block": header([], [place("t", (31,), kind=8)]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_header_that_lies_is_told(case: str, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(HOSTILE[case])
    with pytest.raises(UserError, match=r"small\.gguf is not a whole GGUF file"):
        GGUFFile(tmp_path / "small.gguf")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "small.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UserError, match="big-endian"):
        GGUFFile(tmp_path / "small.gguf")


# --- the real one ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parity
def test_smollm2_speaks_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REASONLAB_CACHE", USERS_CACHE)
    try:
        directory = resolve_model("smollm2-135m")
    except UserError as error:
        pytest.skip(str(error))
    from transformers import AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ours, tokenizer = load_model(directory), ChatTokenizer.load(directory)
    question = "Natalia sold 48 clips in April, and half as many in May.\n\n1. How many in May?\n\n2. How many in all?"
    ids = torch.tensor(tokenizer.prompt_ids(question))
    turns = [{"role": "user", "content": question}]
    rendered = AutoTokenizer.from_pretrained(directory).apply_chat_template(turns, add_generation_prompt=True)
    assert list(rendered["input_ids"]) == ids.tolist()
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(ours, [ids])[0], theirs(ids[None]).logits[0], atol=1e-4, rtol=0)
    sampling = Sampling(temperature=0.0, max_tokens=40, stop_ids=tokenizer.stop_ids)
    ((rollout,),) = Engine(ours, rows=1).generate([Request(ids.tolist(), [0])], sampling)
    assert rollout.ids == their_greedy(theirs, ids, 40)
