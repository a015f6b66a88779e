"""GGUF files: converted once into a Hugging Face directory in the cache, and from then on loaded like any other.

The cache is named by the file's SHA-256, so a renamed file is found again and a changed one is not mistaken. Weights
are stored as fp32, four bytes each, exactly as transformers dequantises them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.runs.files import cache_directory, replace_directory

_MAGIC = b"GGUF"


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_gguf(path: Path) -> Path:
    """The Hugging Face directory of a GGUF file, made now if it is not in the cache."""
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise UserError(f"{path} is not a GGUF file", "Give a checkpoint directory, a GGUF file or a bundled name")
    target = cache_directory() / "gguf" / file_sha256(path)
    if target.is_dir():
        return target
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise UserError(f"GGUF files need {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        _convert(path, unfinished)
        replace_directory(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return target


def _convert(path: Path, target: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    # Releases that can compute on packed weights must be told to unpack them.
    packed = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": packed(dequantize=True)} if packed else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, **unpack
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # whatever transformers meets in a file it does not support
        first = str(error).strip().split("\n")[0]
        raise UserError(
            f"transformers cannot read {path.name} ({first})", "Give the model as a Hugging Face directory"
        ) from error
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):  # the weights are plain now, and no longer there
        config.pop(name, None)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tied = {"lm_head.weight"} if config.get("tie_word_embeddings") else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
