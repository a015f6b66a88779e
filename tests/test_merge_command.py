"""`reasonlab merge`: the checkpoints it writes, what it refuses, and how little memory it takes."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import packed_logits, random_sequences, small_model
from test_merge import arc, bits, whole_ties
from torch import Tensor

from reasonlab.errors import UserError
from reasonlab.methods.merge_command import run
from reasonlab.model.checkpoint import load_model, save_model
from reasonlab.model.gguf import file_sha256
from reasonlab.model.ladder import resolve_model

METHODS = ("linear", "slerp", "ties", "task_arithmetic")
BASED = ("ties", "task_arithmetic")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """A function that writes a small random model as a directory and returns its name."""

    def write(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **shape: Any) -> str:
        directory = tmp_path / name
        directory.mkdir()
        save_model(small_model(seed, **shape).to(dtype), directory, resolve_model("tiny-1m"))
        return str(directory)

    return write


def change_tensors(directory: str, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    file = Path(directory, "model.safetensors")
    save_file(dict(change(load_file(file))), file, metadata={"format": "pt"})


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def words(method: str, *models: str, out: Path | str, base: str | None = None) -> list[str]:
    return [*models, "--method", method, "--out", str(out), *(["--base", base or models[0]] if method in BASED else [])]


def test_the_merge_is_a_whole_checkpoint(
    checkpoint: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = checkpoint("a", 1), checkpoint("b", 2), tmp_path / "deep" / "merged"
    assert run([a, b, "--weights", "3", "1", "--out", str(out)]) == 0
    assert "0.75 × " in capsys.readouterr().out
    model, one, two = (load_model(Path(directory)) for directory in (out, a, b))
    for merged, x, y in zip(model.parameters(), one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(merged, 0.75 * x + 0.25 * y, rtol=0, atol=1e-6)
    assert all(logits.isfinite().all() for logits in packed_logits(model, random_sequences([5, 3])))
    first = sorted(p.name for p in Path(a).iterdir())
    assert sorted(p.name for p in out.iterdir()) == sorted([*first, "merge.json"])
    for name in set(first) - {"model.safetensors"}:
        assert (out / name).read_bytes() == Path(a, name).read_bytes()
    assert [p.name for p in out.parent.iterdir()] == ["merged"]
    record = json.loads((out / "merge.json").read_text())
    assert record["method"] == "linear"
    assert record["weights"] == [0.75, 0.25]
    assert [source["name"] for source in record["sources"]] == [a, b]
    assert record["sources"][1]["sha256"] == {"model.safetensors": file_sha256(Path(b, "model.safetensors"))}
    assert (record["dtype"], record["tensors"]) == ("float32", len(load_file(Path(a, "model.safetensors"))))
    assert record["parameters"] == one.config.parameter_count()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_a_model_merged_with_itself(
    checkpoint: Callable[..., str], tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    """Byte for byte, the header too: the writer here lays files out as safetensors' own does."""
    a = checkpoint("a", 1, dtype, tied=False)
    assert run([*words(method, a, a, out=tmp_path / "out"), "--weights", "0.3", "0.7"]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == Path(a, "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], lambda base, a, b: (a + b) / 2),
        (["--method", "slerp", "--weights", "3", "1"], lambda base, a, b: arc(a, b, 0.25)),
        (["--method", "slerp", "--t", "0.25"], lambda base, a, b: arc(a, b, 0.25)),
        (
            ["--method", "task_arithmetic", "--base", "BASE", "--scale", "0.5"],
            lambda base, a, b: base + (a - base + b - base) / 2,
        ),
        (
            ["--method", "ties", "--base", "BASE", "--weights", "1", "2"],
            lambda base, a, b: whole_ties(base, [a, b], [1, 2], 0.2, 1.0),
        ),
        (
            ["--method", "ties", "--base", "BASE", "--density", "0.5", "--scale", "2"],
            lambda base, a, b: whole_ties(base, [a, b], [1, 1], 0.5, 2.0),
        ),
    ],
)
def test_options_reach_the_equations(
    checkpoint: Callable[..., str], tmp_path: Path, options: list[str], expected: Callable[..., Tensor]
) -> None:
    base, a, b = (checkpoint(name, seed) for seed, name in enumerate(("base", "a", "b")))
    out = tmp_path / "out"
    assert run([a, b, "--out", str(out), *(base if word == "BASE" else word for word in options)]) == 0
    tensors = [load_file(Path(directory, "model.safetensors")) for directory in (base, a, b)]
    for name, merged in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(merged, expected(*(source[name] for source in tensors)), rtol=1e-6, atol=1e-6)


def test_the_record_says_what_the_settings_do_not(
    checkpoint: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = checkpoint("a", 1), checkpoint("b", 2)
    assert run([*words("slerp", a, a, out=tmp_path / "same"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tensors_merged_linearly"] == record["tensors"]
    assert record["out"] == str(tmp_path / "same")
    assert run(words("slerp", a, b, out=tmp_path / "apart")) == 0
    assert "0 of them nearly parallel" in capsys.readouterr().out
    # One of the two changes is nothing at all, and half of the other is kept.
    assert run([*words("ties", a, b, out=tmp_path / "ties"), "--density", "0.5"]) == 0
    assert "25.0 % of the changes kept (density 0.5)" in capsys.readouterr().out
    assert json.loads((tmp_path / "ties" / "merge.json").read_text())["base"]["name"] == a


@pytest.mark.parity
def test_shards_are_read_and_written(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """Transformers reads the shards, and so do we, as sources of another merge."""
    from transformers import AutoModelForCausalLM

    a, b = checkpoint("a", 1), checkpoint("b", 2)
    assert run([a, b, "--out", str(tmp_path / "whole")]) == 0
    assert run([a, b, "--out", str(tmp_path / "split"), "--shard-gib", str(9000 / 2**30)]) == 0
    files = sorted((tmp_path / "split").glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert not (tmp_path / "split" / "model.safetensors").exists()
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    shards = [load_file(file) for file in files]
    assert all(sum(map(len, map(bits, shard.values()))) <= 9000 or len(shard) == 1 for shard in shards)
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(len, map(bits, whole.values())))
    joined = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert {name: bits(tensor) for name, tensor in joined.items()} == {name: bits(t) for name, t in whole.items()}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "split").state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in whole.items())
    assert run([str(tmp_path / "split"), str(tmp_path / "whole"), "--out", str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())


def test_mixed_dtypes_stay_aligned(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """fp32 norms among bf16 matrices, one of them with an odd number of entries."""
    a = checkpoint("a", 1, torch.bfloat16, hidden_size=25, vocab_size=33)
    change_tensors(a, lambda tensors: {n: t.float() if t.dim() == 1 else t for n, t in tensors.items()})
    assert run([a, a, "--out", str(tmp_path / "out")]) == 0
    merged, before = load_file(tmp_path / "out" / "model.safetensors"), load_file(Path(a, "model.safetensors"))
    assert all(bits(merged[name]) == bits(tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["dtype"] == "bfloat16, float32"


def test_tied_heads(checkpoint: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied, stored, untied = checkpoint("tied", 1), checkpoint("stored", 2), checkpoint("untied", 3, tied=False)
    change_tensors(stored, lambda tensors: tensors | {head: tensors[embedding].clone()})
    assert run([tied, stored, "--out", str(tmp_path / "one")]) == 0
    assert head not in load_file(tmp_path / "one" / "model.safetensors")
    assert capsys.readouterr().err == ""
    assert run([tied, untied, "--out", str(tmp_path / "two")]) == 0
    assert "head of its own" in capsys.readouterr().err
    a, b = (load_file(Path(directory, "model.safetensors")) for directory in (tied, untied))
    assert torch.equal(load_file(tmp_path / "two" / "model.safetensors")[head], (a[embedding] + b[head]) / 2)
    model = load_model(tmp_path / "two")
    assert not model.config.tied
    assert torch.equal(model.head_weight, (a[embedding] + b[head]) / 2)


def test_stored_rope_frequencies_are_no_weights(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    a, b = checkpoint("a", 1), checkpoint("b", 2)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(a, lambda tensors: tensors | {name: torch.ones(4)})
    assert run([a, b, "--out", str(tmp_path / "out")]) == 0
    assert name not in load_file(tmp_path / "out" / "model.safetensors")


def test_warnings(checkpoint: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = checkpoint("a", 1), checkpoint("b", 2)
    (tmp_path / "b" / "tokenizer.json").write_text(
        json.dumps(json.loads((tmp_path / "b" / "tokenizer.json").read_text()))
    )
    assert run([a, b, "--out", str(tmp_path / "same")]) == 0
    assert capsys.readouterr().err == "", "the same tokenizer, only written differently"
    rules = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    rules["added_tokens"][0]["content"] = "<other>"
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(rules))
    (tmp_path / "b" / "chat_template.jinja").write_text("another")
    change_json(tmp_path / "b" / "config.json", rms_norm_eps=1e-5)
    assert run([a, b, "--out", str(tmp_path / "other")]) == 0
    said = capsys.readouterr().err
    for part in ("the tokenizers of", "the chat templates of", "norm_eps 1e-05"):
        assert part in said
    (tmp_path / "b" / "tokenizer.json").unlink()
    assert run([a, b, "--out", str(tmp_path / "none")]) == 0
    assert "has no tokenizer.json" in capsys.readouterr().err


# -- what it refuses


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "linear merge needs two models"),
        (["B", "--weights", "1"], "1 weights for 2 models"),
        (["B", "--weights", "1", "x"], "takes numbers"),
        (["B", "--weights", "nan", "1"], "not finite"),
        (["B", "--weights", "1", "-1"], "sum to zero"),
        (["B", "B", "--method", "slerp"], "two models, not 3"),
        (["B", "--method", "slerp", "--t", "1.5"], "between 0 .A. and 1"),
        (["B", "--method", "slerp", "--t", "0.5", "--weights", "1", "1"], "the same thing twice"),
        (["B", "--method", "ties"], "ties needs --base"),
        (["B", "--method", "task_arithmetic"], "task_arithmetic needs --base"),
        (["B", "--method", "ties", "--base", "B", "--density", "0"], "above 0, at most 1"),
        (["B", "--method", "ties", "--base", "B", "--scale", "inf"], "finite"),
        (["B", "--method", "ties", "--base", "B", "--weights", "2", "-1"], "no negative weights"),
        (["B", "--base", "B"], "--base does nothing in a linear merge. It is for --method ties or task_arithmetic"),
        (["B", "--density", "0.5"], "--density does nothing"),
        (["B", "--t", "0.5"], "--t does nothing"),
        (["B", "--shard-gib", "0"], "must be positive"),
        (["no-such-model"], "there is no model"),
    ],
)
def test_wrong_words(checkpoint: Callable[..., str], tmp_path: Path, options: list[str], says: str) -> None:
    a, b = checkpoint("a", 1), checkpoint("b", 2)
    with pytest.raises(UserError, match=says):
        run([a, *(b if word == "B" else word for word in options), "--out", str(tmp_path / "out")])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def _poison(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.norm.weight"][3] = value
        return tensors

    return change


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_poison(math.nan), "model.norm.weight of .*b has NaN"),
        (_poison(-math.inf), "model.norm.weight of .*b has NaN or infinite"),
        (
            lambda t: {n: x for n, x in t.items() if "q_proj" not in n},
            "b has no tensor .*0.self_attn.q_proj.* and 1 more",
        ),
        (lambda t: t | {"extra": torch.zeros(1)}, "a has no tensor extra, which .*b has"),
        (lambda t: t | {"model.norm.weight": torch.zeros(7)}, r"shape \(7,\) in .*b where .*a has \(24,\)"),
        (lambda t: t | {"model.norm.weight": torch.zeros(24, dtype=torch.int8)}, "stored as I8"),
    ],
)
def test_wrong_tensors(checkpoint: Callable[..., str], tmp_path: Path, method: str, change: Any, says: str) -> None:
    a, b = checkpoint("a", 1), checkpoint("b", 2)
    change_tensors(b, change)
    with pytest.raises(UserError, match=says):
        run(words(method, a, b, out=tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_models_of_different_shapes(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    a, out = checkpoint("a", 1), str(tmp_path / "out")
    for field, value in {"vocab_size": 40, "layers": 3, "hidden_size": 32, "kv_heads": 4}.items():
        other = checkpoint(field, 2, **{field: value})
        with pytest.raises(UserError, match=f"has {field} {value} where"):
            run([a, other, "--out", out])
    other = checkpoint("qwen", 2, architecture="qwen2", qkv_bias=True)
    with pytest.raises(UserError, match=r"has architecture qwen2 where .* has llama"):
        run([a, other, "--out", out])
    with pytest.raises(UserError, match="has architecture qwen2"):
        run(words("ties", a, a, out=out, base=other))


def test_what_is_no_checkpoint_or_there_already(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    a = checkpoint("a", 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="is not a checkpoint"):
        run([a, str(tmp_path / "empty"), "--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match="empty exists"):
        run([a, a, "--out", str(tmp_path / "empty")])
    pickled = Path(checkpoint("pickled", 2))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="never unpickled"):
        run([a, str(pickled), "--out", str(tmp_path / "out")])
    cut = Path(checkpoint("cut", 2), "model.safetensors")
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        run([a, str(cut.parent), "--out", str(tmp_path / "out")])


def test_weights_too_large_for_their_dtype(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    a, b = checkpoint("a", 1, torch.float16), checkpoint("b", 2, torch.float16)
    with pytest.raises(UserError, match="does not fit into float16"):
        run([*words("task_arithmetic", a, b, out=tmp_path / "out"), "--scale", "1e6"])
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_files() -> Iterator[int]:
    """Files may not grow beyond this size, which looks like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield 20_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing(
    checkpoint: Callable[..., str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    a = checkpoint("a", 1)
    size = request.getfixturevalue("small_files")
    assert Path(a, "model.safetensors").stat().st_size > size
    with pytest.raises(UserError, match="no space left"):
        run([a, a, "--out", str(tmp_path / "out")])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(["--help"])
    assert exit_.value.code == 0
    assert "example: reasonlab merge" in capsys.readouterr().out


# -- memory

_MEASURE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from reasonlab.methods.merge_command import run

def memory(key):
    return 1024 * int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0])

def naive(a, b, out):
    x, y = load_file(a + "/model.safetensors"), load_file(b + "/model.safetensors")
    save_file({name: (x[name] + y[name]) / 2 for name in x}, out)

a, b, warm_up, out = sys.argv[1:]
run([warm_up, warm_up, "--out", out + "-warm-up"])
for job in (
    lambda: run([a, b, "--out", out + "-linear"]),
    lambda: run([a, b, "--method", "ties", "--base", a, "--out", out + "-ties"]),
    lambda: naive(a, b, out + "-naive.safetensors"),
):
    before = memory("VmRSS")
    job()
    print("grew by", memory("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory where Linux shows it")
def test_memory_is_that_of_a_few_tensors(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """The peak of a merge of two models of 60 MB, one single file each, against loading both."""
    shape = {"hidden_size": 384, "intermediate_size": 1024, "layers": 8, "vocab_size": 1000, "head_dim": 96}
    a, b, warm_up = checkpoint("a", 1, **shape), checkpoint("b", 2, **shape), checkpoint("warm-up", 3)
    size = Path(a, "model.safetensors").stat().st_size
    assert size > 50e6
    found = subprocess.run(
        [sys.executable, "-c", _MEASURE, a, b, warm_up, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    streamed, streamed_ties, naive = (
        int(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("grew by")
    )
    assert streamed < size / 2
    assert streamed_ties < size / 2
    assert naive > 2.5 * size
