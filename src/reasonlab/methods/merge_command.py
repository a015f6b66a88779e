"""`reasonlab merge A B … --out DIR`: merge checkpoints tensor by tensor into a new Hugging Face checkpoint.

Every tensor is read from each source, merged, written and let go before the next one, so the peak of memory is a few
tensors, not a few models. Sources are mapped through a handle that lives as long as one tensor, because the pages of
a mapping count as the process's own until it is closed. safetensors' own writer wants a whole shard in memory, so the
shards are written here: a header that is known before the arithmetic begins, then the bytes of each tensor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from reasonlab import __version__
from reasonlab.errors import UserError
from reasonlab.methods.merge import (
    NEARLY_PARALLEL,
    cosine,
    is_finite,
    linear,
    slerp,
    task_arithmetic,
    ties,
    trim,
)
from reasonlab.model.checkpoint import INDEX, TOKENIZER_FILES, WEIGHTS, load_config, open_tensors
from reasonlab.model.config import ModelConfig
from reasonlab.model.gguf import file_sha256
from reasonlab.model.ladder import resolve_model
from reasonlab.model.tokenizer import ChatTokenizer
from reasonlab.options import Parser
from reasonlab.runs.files import explained, replace_directory

USES = {
    "linear": ("weights",),
    "slerp": ("weights", "t"),
    "ties": ("weights", "base", "density", "scale"),
    "task_arithmetic": ("weights", "base", "scale"),
}
RECORD = "merge.json"
SHARD_GIB = 4.0
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Besides the weights and config.json: what makes the first model's directory usable, in old and new spellings.
COPIED = (
    *TOKENIZER_FILES,
    "generation_config.json",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.model",
)
# Two models that differ in one of these are not two points of one space of weights ...
_SHAPE = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "qkv_bias",
    "output_bias",
    "qk_norm",
)
# ... and in one of these they compute differently with the same weights.
_ARITHMETIC = ("rope", "norm_eps")


@dataclass(frozen=True, slots=True)
class Settings:
    """A method and its numbers, of which each method uses its own (`USES`)."""

    method: str
    weights: tuple[float, ...]
    t: float = 0.5
    density: float = 0.2
    scale: float = 1.0

    def described(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key in ("method", *USES[self.method])}


class Stored(NamedTuple):
    """Where a tensor lies and what it is; `name` is the one in the file, and `dtype` safetensors' word for it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Source:
    """One of the models that are merged, or the base; nothing of its weights is in memory."""

    name: str
    directory: Path
    config: ModelConfig
    tensors: dict[str, Stored]

    @classmethod
    def open(cls, name: str) -> Source:
        directory = resolve_model(name)
        config = load_config(directory)
        tensors = {}
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    entry = opened.get_slice(key)
                    tensors[key] = Stored(file, key, tuple(entry.get_shape()), entry.get_dtype())
        # Old Llama checkpoints store the frequencies of RoPE, which are computed from config.json.
        tensors = {key: stored for key, stored in tensors.items() if not key.endswith("rotary_emb.inv_freq")}
        if config.tied and EMBEDDING in tensors:
            tensors[HEAD] = tensors[EMBEDDING]
        return cls(name, directory, config, tensors)

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        with safe_open(stored.file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(stored.name)
        if not is_finite(tensor):
            raise UserError(f"{stored.name} of {self.name} has NaN or infinite weights", "Merge a sound checkpoint")
        return tensor

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "sha256": {file.name: file_sha256(file) for file in weight_files(self.directory)}}


def run(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    settings = _settings(arguments)
    out = arguments.out.expanduser()
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists", "Choose a new --out; a merge never overwrites")
    sources = [Source.open(name) for name in arguments.models]
    base = Source.open(arguments.base) if arguments.base else None
    for warning in check([*sources, *([base] if base else [])]):
        print(f"warning: {warning}", file=sys.stderr)
    record = merge_checkpoints(sources, base, settings, out, int(arguments.shard_gib * 2**30), _progress)
    print(json.dumps({"out": str(out), **record}, indent=1) if arguments.json else "\n".join(_report(record, out)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="reasonlab merge",
        description="merge models of one architecture by arithmetic on their weights, without training "
        "(long2short of Kimi k1.5: average a long thinker with a short one)",
        epilog="example: reasonlab merge long-cot short-cot --weights 0.6 0.4 --out merged\n"
        "         reasonlab merge long-cot short-cot --method slerp --t 0.4 --out merged\n"
        "         reasonlab merge math code --method ties --base base --density 0.2 --out merged\n\n"
        "methods, with w the weights, θ0 the base and λ the scale:\n"
        "  linear           Σ w θ / Σ w\n"
        "  slerp            from A (t = 0) to B (t = 1) along the arc between them, tensor by tensor;\n"
        "                   linear where two tensors are nearly parallel (|cos| > 0.9995)\n"
        "  ties             θ0 + λ · mean of the largest changes θ − θ0 that have the elected sign\n"
        "  task_arithmetic  θ0 + λ Σ w (θ − θ0)\n\n"
        "The dtype, config.json, tokenizer and chat template are those of A. Weights are summed in fp64 and rounded\n"
        "to fp32 and then to the dtype of A.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="bundled names or checkpoint directories: A, B, …")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new directory for the merged model")
    parser.add_argument("--method", choices=tuple(USES), default="linear", help="default: linear")
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="W",
        help="one a model, after the models (default: all equal). linear divides them by their sum; ties uses their "
        "ratios; task_arithmetic takes them as they are (default: 1 each); slerp reads t = w_B / (w_A + w_B)",
    )
    parser.add_argument("--base", metavar="MODEL", help="ties, task_arithmetic: the model that all were trained from")
    parser.add_argument("--t", type=float, help="slerp, instead of --weights: 0 is A, 1 is B (default: 0.5)")
    parser.add_argument("--density", type=float, help="ties: share of each change that is kept (default: 0.2)")
    parser.add_argument("--scale", type=float, help="ties, task_arithmetic: λ (default: 1)")
    parser.add_argument(
        "--shard-gib", type=float, default=SHARD_GIB, metavar="G", help="largest file of weights (default: 4)"
    )
    parser.add_argument("--json", action="store_true", help="print the record (merge.json) as JSON")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    """The method's numbers, with defaults; an option that the method would ignore is an error."""
    method, count = arguments.method, len(arguments.models)
    for option in ("t", "density", "scale", "base"):
        if getattr(arguments, option) is not None and option not in USES[method]:
            users = " or ".join(name for name, options in USES.items() if option in options)
            raise UserError(f"--{option} does nothing in a {method} merge", f"It is for --method {users}")
    if "base" in USES[method] and arguments.base is None:
        raise UserError(f"{method} needs --base MODEL", "Give the model that the others were trained from")
    if method == "slerp" and count != 2:
        raise UserError(f"slerp merges two models, not {count}", "Use --method linear for more")
    if method == "linear" and count < 2:
        raise UserError("a linear merge needs two models or more", "For instance: reasonlab merge A B --out merged")
    if not (math.isfinite(arguments.shard_gib) and arguments.shard_gib > 0):
        raise UserError("--shard-gib must be positive", "The default is 4")
    weights = _weights(arguments.weights, method, count)
    if method == "linear":
        return Settings(method, tuple(weight / math.fsum(weights) for weight in weights))
    if method == "slerp":
        if arguments.t is not None and arguments.weights is not None:
            raise UserError("--t and --weights say the same thing twice", "Give one of them")
        t = weights[1] / math.fsum(weights) if arguments.t is None else arguments.t
        if not 0 <= t <= 1:
            raise UserError(f"t is {t:g}", "It must lie between 0 (A) and 1 (B)")
        return Settings(method, (1 - t, t), t=t)
    given = {option: getattr(arguments, option) for option in ("density", "scale")}
    settings = Settings(method, weights, **{option: value for option, value in given.items() if value is not None})
    if not math.isfinite(settings.scale):
        raise UserError(f"--scale is {settings.scale}", "Give a finite number")
    if not 0 < settings.density <= 1:
        raise UserError(f"--density is {settings.density:g}", "It is a share: above 0, at most 1")
    if method == "ties" and min(weights) < 0:
        raise UserError("ties takes no negative weights", "Use --method task_arithmetic to subtract a change")
    return settings


def _weights(words: Sequence[str] | None, method: str, count: int) -> tuple[float, ...]:
    if words is None:
        return (1.0,) * count
    try:
        weights = tuple(float(word) for word in words)
    except ValueError as error:
        raise UserError(f"--weights takes numbers ({error})", "Name the models first, then --weights") from None
    if len(weights) != count:
        raise UserError(f"{len(weights)} weights for {count} models", "Give one weight a model, in their order")
    if not all(map(math.isfinite, weights)):
        raise UserError("a weight is not finite", "Give ordinary numbers")
    if method != "task_arithmetic" and math.fsum(weights) == 0:
        raise UserError("the weights sum to zero", f"A {method} merge divides by their sum")
    return weights


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or the shards that its index names."""
    open_tensors(directory)  # says what is wrong with pickled, missing, broken and half-fetched weights
    if not (directory / INDEX).is_file():
        return [directory / WEIGHTS]
    shards = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [directory / shard for shard in sorted(set(shards))]


def check(sources: Sequence[Source]) -> list[str]:
    """Refuse models that are not of one shape; return warnings about what the merge silently takes from the first."""
    first, *others = sources
    for stored in (stored for source in sources for stored in source.tensors.values() if stored.dtype not in DTYPES):
        known = ", ".join(str(dtype)[6:] for dtype in DTYPES.values())
        raise UserError(f"{stored.name} in {stored.file} is stored as {stored.dtype}", f"Only {known} can be merged")
    for other in others:
        for field in _SHAPE:
            mine, theirs = getattr(first.config, field), getattr(other.config, field)
            if mine != theirs:
                what = f"{other.name} has {field} {theirs} where {first.name} has {mine}"
                raise UserError(what, "Only models of one architecture and size can be merged")
        _check_tensors(first, other)
    return [warning for other in others for warning in _differences(first, other)]


def _check_tensors(first: Source, other: Source) -> None:
    for lacking, having in ((other, first), (first, other)):
        names = sorted(having.tensors.keys() - lacking.tensors.keys())
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"{lacking.name} has no tensor {names[0]}{more}, which {having.name} has"
            raise UserError(what, "Only checkpoints with the same tensors can be merged")
    for name, stored in first.tensors.items():
        mine, theirs = stored.shape, other.tensors[name].shape
        if mine != theirs:
            what = f"{name} has shape {theirs} in {other.name} where {first.name} has {mine}"
            raise UserError(what, "Only checkpoints with the same shapes can be merged")


def _differences(first: Source, other: Source) -> list[str]:
    """What two models that can be merged do differently outside their weights."""
    found = []
    for field in _ARITHMETIC:
        mine, theirs = getattr(first.config, field), getattr(other.config, field)
        if mine != theirs:
            found.append(f"{other.name} has {field} {theirs}; the merge has that of {first.name}, {mine}")
    if first.config.tied != other.config.tied:
        tied, untied = (first, other) if first.config.tied else (other, first)
        found.append(
            f"{untied.name} has a head of its own and {tied.name} has not: the merge has one, into which the "
            f"embedding of {tied.name} goes as its head"
        )
    lacking = [source.name for source in (first, other) if not (source.directory / "tokenizer.json").is_file()]
    if lacking:
        found.append(f"{lacking[0]} has no tokenizer.json: whether the tokenizers agree is not known")
        return found
    if _tokenization(first.directory) != _tokenization(other.directory):
        found.append(f"the tokenizers of {first.name} and {other.name} differ: the merge has that of {first.name}")
    if ChatTokenizer.load(first.directory).template != ChatTokenizer.load(other.directory).template:
        found.append(f"the chat templates of {first.name} and {other.name} differ: the merge has that of {first.name}")
    return found


def _tokenization(directory: Path) -> dict[str, Any]:
    """All that decides which ids a text becomes, in one spelling whichever release wrote the file."""
    try:
        rules = json.loads(Tokenizer.from_file(str(directory / "tokenizer.json")).to_str())
    except Exception as error:  # the package raises bare Exceptions
        raise UserError(f"{directory / 'tokenizer.json'} cannot be read ({error})", "Fetch it again") from None
    return {part: rules.get(part) for part in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def merge_checkpoints(
    sources: Sequence[Source],
    base: Source | None,
    settings: Settings,
    out: Path,
    shard_bytes: int = int(SHARD_GIB * 2**30),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write the merge of checked sources as the new directory `out`, whole or not at all; return its `merge.json`."""
    first, everyone = sources[0], [*sources, *([base] if base else [])]
    tied = all(source.config.tied for source in everyone)
    plan = {name: stored for name, stored in first.tensors.items() if not (tied and name == HEAD)}
    counts: Counter[str] = Counter()

    def merged(name: str) -> Tensor:
        progress(counts["tensors"], len(plan))
        counts["tensors"] += 1
        tensor = _merge_tensor(settings, [s.read(name) for s in sources], base.read(name) if base else None, counts)
        if not is_finite(tensor):
            what = f"{name} of the merge does not fit into {str(tensor.dtype)[6:]}"
            raise UserError(what, "Use smaller --weights or --scale")
        return tensor

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with explained(out):
        try:
            temporary.mkdir(parents=True)
            write_weights(temporary, plan, merged, shard_bytes)
            _copy_companions(first.directory, temporary, tied)
            record = _record(settings, sources, base, plan, counts)
            (temporary / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    replace_directory(temporary, out)
    return record


def _merge_tensor(settings: Settings, models: Sequence[Tensor], base: Tensor | None, counts: Counter[str]) -> Tensor:
    if settings.method == "linear":
        return linear(models, settings.weights)
    if base is None:
        a, b = models
        cos = cosine(a, b)
        counts["merged linearly"] += abs(cos) > NEARLY_PARALLEL
        return slerp(a, b, settings.t, cos)
    if settings.method == "task_arithmetic":
        return task_arithmetic(base, models, settings.weights, settings.scale)
    trims = [trim(base, model, settings.density) for model in models]
    counts["kept"] += sum(found.kept for found in trims)
    return ties(base, models, settings.weights, [found.threshold for found in trims], settings.scale)


def write_weights(
    directory: Path, plan: Mapping[str, Stored], tensor: Callable[[str], Tensor], shard_bytes: int
) -> None:
    """Write the planned tensors, each asked for when its turn comes: one file, or shards of at most this size."""
    shards: list[list[str]] = []
    room = 0
    for name, stored in plan.items():
        if not shards or _bytes(stored) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= _bytes(stored)
    holder = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS
        _write_shard(directory / file, {name: plan[name] for name in names}, tensor)
        holder.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, plan.values()))}, "weight_map": holder}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, plan: Mapping[str, Stored], tensor: Callable[[str], Tensor]) -> None:
    """A safetensors file: the header's length in eight bytes, the header in JSON, and the tensors one by one."""
    # Wide entries first, as safetensors orders them, so that each tensor begins at a multiple of its entry's size.
    names = sorted(plan, key=lambda name: -DTYPES[plan[name].dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + _bytes(plan[name])
        header[name] = {"dtype": plan[name].dtype, "shape": plan[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensor(name).view(-1).view(torch.uint8).numpy().data)


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * DTYPES[stored.dtype].itemsize


def _copy_companions(source: Path, target: Path, tied: bool) -> None:
    """What makes weights a model; config.json differs from the first model's only where the merge unties the head."""
    text = (source / "config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    if config.get("tie_word_embeddings", False) and not tied:
        text = json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _record(
    settings: Settings, sources: Sequence[Source], base: Source | None, plan: Mapping[str, Stored], counts: Counter[str]
) -> dict[str, Any]:
    """What was merged and how. Of slerp it says how many tensors were nearly parallel, of ties how much was kept."""
    parameters = sum(math.prod(stored.shape) for stored in plan.values())
    record: dict[str, Any] = {
        **settings.described(),
        "sources": [source.described() for source in sources],
        "base": base.described() if base else None,
        "dtype": ", ".join(sorted({str(DTYPES[stored.dtype])[6:] for stored in plan.values()})),
        "tensors": len(plan),
        "parameters": parameters,
        "reasonlab": __version__,
    }
    if settings.method == "slerp":
        record["tensors_merged_linearly"] = counts["merged linearly"]
    if settings.method == "ties":
        record["share_kept"] = counts["kept"] / (len(sources) * parameters)
    return record


def _report(record: Mapping[str, Any], out: Path) -> list[str]:
    parts = [f"{w:g} × {source['name']}" for w, source in zip(record["weights"], record["sources"], strict=True)]
    base = f" over {record['base']['name']}" if record["base"] else ""
    lines = [
        f"{out}: {record['method']} merge of {', '.join(parts)}{base}",
        f"{record['tensors']} tensors, {record['parameters']:,} weights, {record['dtype']}",
    ]
    if "tensors_merged_linearly" in record:
        lines.append(f"{record['tensors_merged_linearly']} of them nearly parallel, where slerp is linear")
    if "share_kept" in record:
        lines.append(f"{100 * record['share_kept']:.1f} % of the changes kept (density {record['density']:g})")
    return lines


def _progress(done: int, total: int) -> None:
    """A counter for whoever watches; nothing in a log."""
    if sys.stderr.isatty():
        print(f"\r{done + 1}/{total} tensors", end="\n" if done + 1 == total else "", file=sys.stderr, flush=True)
