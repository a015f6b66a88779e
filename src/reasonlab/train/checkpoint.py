"""Checkpoints of a run: a Hugging Face directory plus `trainer/`, written aside and renamed, so whole or absent.

There is no random state to keep: every draw is keyed by what it is for. Optimizer moments are safetensors, the rest
is JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reasonlab.model.checkpoint import save_model
from reasonlab.model.lora import has_lora, save_adapter
from reasonlab.runs.files import explained, replace_directory, write_aside
from reasonlab.train.learner import Learner

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
FINAL = "final"  # the checkpoint at the end of a run
ADAPTER = "adapter"  # of LoRA; the weights beside it are merged
SOURCE = "source.json"  # success rates of problems, unfinished rollouts


@dataclass(slots=True)
class TrainState:
    """Where a run stands after a finished iteration."""

    iteration: int = 0
    learner_steps: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0


def checkpoint_name(iteration: int) -> str:
    return f"step-{iteration:06d}"


def save_checkpoint(
    run: Path, name: str, learner: Learner, state: TrainState, source: dict[str, Any], tokenizer_from: Path, base: str
) -> Path:
    """Write `checkpoints/name`, then point `checkpoints/latest` at it. `base` is the model as the recipe names it."""
    folder = run / "checkpoints"
    temporary, final = folder / f".{name}.{os.getpid()}.tmp", folder / name
    with explained(final):
        try:
            (temporary / "trainer").mkdir(parents=True)
            save_model(learner.model, temporary, tokenizer_from)
            if has_lora(learner.model):
                (temporary / ADAPTER).mkdir()
                file = Path(base).expanduser()
                save_adapter(learner.model, temporary / ADAPTER, str(file.resolve()) if file.exists() else base)
            save_file(optimizer_tensors(learner), temporary / "trainer" / OPTIMIZER)
            (temporary / "trainer" / STATE).write_text(json.dumps(asdict(state), indent=2) + "\n")
            (temporary / "trainer" / SOURCE).write_text(json.dumps(source) + "\n")
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise _as_os_error(error) from error
    replace_directory(temporary, final)
    write_aside(folder / "latest", f"{name}\n".encode())
    return final


def load_checkpoint(directory: Path, learner: Learner) -> tuple[TrainState, dict[str, Any]]:
    """Put optimizer moments and counters back (the weights were loaded with the model); also the source's state."""
    tensors = load_file(directory / "trainer" / OPTIMIZER)
    learner.optimizer.state.clear()
    for index, parameter in enumerate(learner.parameters):
        mine = {key.split(".", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{index}.")}
        if mine:
            # Adam's step counter stays where torch's fused implementation keeps it: beside the parameter.
            learner.optimizer.state[parameter] = {k: v.to(learner.device) for k, v in mine.items()}
    state = TrainState(**json.loads((directory / "trainer" / STATE).read_text()))
    learner.steps = state.learner_steps
    return state, json.loads((directory / "trainer" / SOURCE).read_text())


def optimizer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, parameter in enumerate(learner.parameters)
        for name, value in learner.optimizer.state.get(parameter, {}).items()
    }


def newest_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the most iterations. Half-written ones have hidden names and do not count.

    That may be `final`: a run that stopped at its time limit, or is to be longer, can go on from there.
    """
    found = sorted((run / "checkpoints").glob("step-*"))
    final = run / "checkpoints" / FINAL
    if (final / "trainer" / STATE).is_file():
        name = checkpoint_name(iterations_done(final))
        if not found or name >= found[-1].name:
            return final
    return found[-1] if found else None


def iterations_done(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "trainer" / STATE).read_text())["iteration"])


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what killed processes left half-written."""
    folder = run / "checkpoints"
    for old in [*sorted(folder.glob("step-*"))[:-keep], *folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def _as_os_error(error: Exception) -> Exception:
    """safetensors hides a full disk in the text of an error of its own; give it back its number."""
    number = re.search(r"os error (\d+)", str(error))
    if isinstance(error, OSError) or number is None:
        return error
    return OSError(int(number[1]), os.strerror(int(number[1])))
