"""The ladder of tiny models, and where the bundled checkpoints lie."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

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


def resolve_model(name_or_path: str) -> Path:
    """The directory of a bundled model or of a checkpoint on disk."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
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
    raise UserError(
        f"there is no model {name_or_path!r}",
        f"Give a checkpoint directory or a bundled name ({', '.join(bundled) or 'none is bundled'})",
    )


def cached_model(name: str) -> Path:
    """Where a rung that does not ship is kept once it was trained."""
    return cache_directory() / "models" / name


def bundled_models() -> dict[str, Path]:
    """Checkpoints that ship inside the package."""
    assets = Path(str(files("reasonlab.model") / "assets"))
    return {name: assets / name for name in MODELS if (assets / name / "model.safetensors").is_file()}
