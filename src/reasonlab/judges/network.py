"""A judge: the transformer without its language head, and a head that turns hidden states into scores.

    outcome   r(x, y) = w·h at the end token. No bias and no squashing: exactly `…ForSequenceClassification` with one
              label, so the saved directory loads with transformers and gives the same number.
    process   s_t = σ(w₁·h + b₁) at the last token of step t, and s = σ(w₂·h + b₂) at the end token for the whole.
              Saved as the backbone, `judge.safetensors` with the head and `judge.json`.

Candidates are read in packs: sequences one behind the other, and what two of them have in common at the beginning
(the question, and what samples of one policy begin alike) is computed once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from reasonlab.errors import UserError
from reasonlab.judges.formats import NOWHERE, Encoded, Format, Kind, open_format, own_format
from reasonlab.keys import key
from reasonlab.model.attention import PackedCausal, to_device
from reasonlab.model.checkpoint import load_model, open_safetensors, open_tensors, save_model
from reasonlab.model.config import CLASS_NAMES
from reasonlab.model.transformer import Transformer

Part = Literal["step", "final"]
HEAD = "judge.safetensors"
DESCRIPTION = "judge.json"
HEAD_SCALE = 0.02  # standard deviation of a fresh head's weights


class Head(nn.Module):
    """Hidden states to scores. A score is `squash(logit)`; losses that take logarithms start from the logit."""

    parts: tuple[Part, ...]  # what the head can score

    def logits(self, hidden: Tensor, part: Part) -> Tensor:
        """[places, hidden] -> [places]."""
        raise NotImplementedError

    def squash(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class OutcomeHead(Head):
    """One number for the whole, unbounded."""

    parts = ("final",)

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def logits(self, hidden: Tensor, part: Part) -> Tensor:
        logits: Tensor = self.score(hidden)
        return logits.squeeze(-1)

    def squash(self, logits: Tensor) -> Tensor:
        return logits


class ProcessHead(Head):
    """A row for steps and a row for the whole, both in (0, 1)."""

    parts = ("step", "final")

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.rows = nn.Linear(hidden_size, 2)

    def logits(self, hidden: Tensor, part: Part) -> Tensor:
        row = self.parts.index(part)
        return hidden @ self.rows.weight[row] + self.rows.bias[row]


HEADS: dict[Kind, type[OutcomeHead] | type[ProcessHead]] = {"outcome": OutcomeHead, "process": ProcessHead}


class JudgeModel(nn.Module):
    """Any supported backbone with any head."""

    def __init__(self, backbone: Transformer, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    @property
    def embedding(self) -> nn.Embedding:
        return self.backbone.embedding

    @property
    def positions(self) -> int:
        return self.backbone.config.max_positions

    def read(self, hidden: Tensor, part: Part) -> Tensor:
        """Scores from the hidden states at the places where they are read."""
        return self.head.squash(self.head.logits(hidden, part))

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Logits of all steps, [steps], and of the candidates that are read as a whole, [finals], as the pack has them.

        Logits are fp32 whatever the backbone computes in.
        """
        device = self.embedding.weight.device
        attend = PackedCausal(pack.lengths, device, pack.sequences)
        ids, rows = (to_device(x, device) for x in (pack.ids, np.concatenate((pack.steps, pack.finals))))
        hidden = self.backbone(ids, attend.positions, attend, rows)
        of_steps, of_finals = hidden.split((len(pack.steps), len(pack.finals)))
        return self._logits(of_steps, "step"), self._logits(of_finals, "final")

    def _logits(self, hidden: Tensor, part: Part) -> Tensor:
        """In the head's own precision, fp32 unless somebody cast it: scores close together must stay apart."""
        if not len(hidden):
            return hidden.new_zeros(0, dtype=torch.float32)
        dtype = next((parameter.dtype for parameter in self.head.parameters()), torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head.logits(hidden.to(dtype), part).float()


@dataclass(frozen=True, slots=True)
class Pack:
    """Several candidates as one flat list of tokens that holds each common beginning once."""

    ids: NDArray[np.int64]
    lengths: list[int]
    sequences: NDArray[np.int64]  # the flat token at each place of each candidate, one behind the other
    steps: NDArray[np.int64]  # the flat token at which each step is read
    finals: NDArray[np.int64]  # and each candidate as a whole, where it is

    @classmethod
    def of(cls, candidates: Sequence[Encoded]) -> Pack:
        """Candidates that begin alike should be neighbours: each shares its beginning with the one before it."""
        fresh: list[NDArray[np.int64]] = []
        sequences: list[NDArray[np.int64]] = []
        size, before = 0, np.zeros(0, np.int64)
        for one in candidates:
            common = common_beginning(before, one.ids)
            fresh.append(one.ids[common:])
            new = np.arange(size, size + len(one.ids) - common)
            sequences.append(np.concatenate((sequences[-1][:common], new)) if common else new)
            size, before = size + len(new), one.ids
        pairs = list(zip(candidates, sequences, strict=True))
        empty = [np.zeros(0, np.int64)]
        return cls(
            ids=np.concatenate(fresh + empty),
            lengths=[len(sequence) for sequence in sequences],
            sequences=np.concatenate(sequences + empty),
            steps=np.concatenate([sequence[one.steps] for one, sequence in pairs] + empty),
            finals=np.array([sequence[one.final] for one, sequence in pairs if one.final != NOWHERE], np.int64),
        )


def common_beginning(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many tokens two sequences have in common before they first differ."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


# --- making, saving and loading --------------------------------------------------------------------------------------


def fresh_judge(base: Path, kind: Kind, seed: int) -> JudgeModel:
    """The backbone of a checkpoint with a new head: weights normal(0, 0.02) by the seed, biases 0."""
    backbone = load_model(base, with_head=False)
    head = HEADS[kind](backbone.config.hidden_size)
    generator = torch.Generator().manual_seed(key(seed, "judge-head"))
    with torch.no_grad():
        for parameter in head.parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * HEAD_SCALE
            parameter.copy_(drawn if parameter.dim() > 1 else torch.zeros_like(parameter))
    return JudgeModel(backbone, head)


def save_judge(
    model: JudgeModel, form: Format, directory: Path, tokenizer_from: Path, notes: dict[str, Any] | None = None
) -> None:
    """Write a judge into an existing directory, with the tokenizer files that lie in `tokenizer_from`.

    `notes` go into `judge.json` for whoever wants to know how the judge came to be.
    """
    outcome = isinstance(model.head, OutcomeHead)
    if not outcome and not isinstance(model.head, ProcessHead):
        raise UserError(f"a judge with a {type(model.head).__name__} cannot be saved", "Keep its published files")
    more = {"score.weight": model.head.score.weight} if isinstance(model.head, OutcomeHead) else {}
    save_model(model.backbone, directory, tokenizer_from, more)
    config = json.loads((directory / "config.json").read_text())
    causal = CLASS_NAMES[model.backbone.config.architecture]
    name = "ForSequenceClassification" if outcome else "Model"
    config |= {"architectures": [causal.replace("ForCausalLM", name)], "tie_word_embeddings": False}
    if outcome:
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if config["pad_token_id"] in model.backbone.config.eos_ids:
        # transformers reads the last token that is not padding, but ours is the end token. Without a padding token it
        # reads the last one, and refuses batches instead of reading them elsewhere.
        config["pad_token_id"] = None
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").unlink()
    if not outcome:
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in model.head.state_dict().items()}
        save_file(head, directory / HEAD, metadata={"format": "pt"})
    (directory / DESCRIPTION).write_text(json.dumps({**form.describe(), **(notes or {})}, indent=2) + "\n")


def load_judge(directory: Path) -> tuple[JudgeModel, Format]:
    """A judge of ours in fp32 on the CPU, or any outcome judge in transformers' layout with one label."""
    description = _description(directory)
    kind: Kind = description.get("kind", "outcome")
    if kind not in HEADS:
        raise UserError(f"{directory / DESCRIPTION} names the kind {kind!r}", f"Kinds are {', '.join(HEADS)}")
    backbone = load_model(directory, with_head=False)
    head = HEADS[kind](backbone.config.hidden_size)
    tensor = open_tensors(directory) if kind == "outcome" else open_safetensors(directory / HEAD).get_tensor
    for name, parameter in head.named_parameters():
        try:
            value = tensor(name)
        except Exception:  # the two readers miss a tensor with different errors
            raise UserError(f"{directory} has no tensor {name!r}", "It is not the checkpoint of a judge") from None
        if value.shape != parameter.shape:
            raise UserError(
                f"{name} in {directory} has shape {tuple(value.shape)} where a judge has {tuple(parameter.shape)}",
                "Only judges with a single score are read",
            )
        with torch.no_grad():
            parameter.copy_(value)
    form = open_format(description, directory) if description else own_format(directory, "outcome")
    return JudgeModel(backbone, head), form


def _description(directory: Path) -> dict[str, Any]:
    path = directory / DESCRIPTION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error})", "Train the judge again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} does not describe a judge", "Train the judge again")
    return found
