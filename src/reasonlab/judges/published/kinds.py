"""The published judges that can be read, and how a directory is recognised as one of them.

A layout is recognised by its tensors and files. Three pairs of judges share a layout and differ only in what the
conversation begins with or whether they are judges at all; they are told apart by name, which is looked for in the
directory's own name, in that of a Hugging Face cache, in `_name_or_path` of config.json and in the head of README.md.
`kind=` settles it where the name says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from reasonlab.errors import UserError
from reasonlab.judges.formats import Format
from reasonlab.judges.network import DESCRIPTION, Part
from reasonlab.judges.published.formats import SeparatedChat, TaggedLines, TokenLines, WholeChat, WholeText
from reasonlab.judges.published.text import JudgeTokenizer
from reasonlab.judges.published.weights import REWARD_HEAD, VALUE_HEADS, Checkpoint

OWN = "reasonlab"
QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
ACEMATH_SYSTEM = "Please reason step by step, and check your final answer within \\boxed{}."
_README_HEAD = 600  # characters: a model's own name stands there, those it is compared with come later

Reader = Callable[[Checkpoint, JudgeTokenizer, str], tuple[nn.Module, Format]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One published layout: which judges have it, the system turn they were trained with, what their head says."""

    published: str
    system: str
    part: Part
    probability: bool
    read: Reader


def _separated(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    return checkpoint.two_layers(2), SeparatedChat(tokenizer, system)


def _lines(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    return checkpoint.value_head(), TokenLines(tokenizer, checkpoint.config.bos_id)


def _tagged(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    form = TaggedLines(tokenizer)
    return checkpoint.vocabulary_rows((form.minus, form.plus)), form


def _classifier(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    return checkpoint.linear("score", 1), WholeChat(tokenizer, system, checkpoint.config.pad_id)


def _two_layer_outcome(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    return checkpoint.two_layers(1), WholeChat(tokenizer, system, checkpoint.config.pad_id)


def _last_token(checkpoint: Checkpoint, tokenizer: JudgeTokenizer, system: str) -> tuple[nn.Module, Format]:
    return checkpoint.pickled_head(), WholeText(tokenizer)


KINDS: dict[str, Kind] = {
    "qwen2.5-math-prm": Kind("Qwen2.5-Math-PRM-7B, -72B", QWEN_SYSTEM, "step", True, _separated),
    "reasonflux-prm-7b": Kind("ReasonFlux-PRM-7B", "", "step", True, _separated),
    "reasonflux-prm-1.5b": Kind("ReasonFlux-PRM-1.5B", "", "final", True, _last_token),
    "skywork-prm": Kind("Skywork-o1-Open-PRM-Qwen-2.5-1.5B, -7B", "", "step", True, _lines),
    "math-shepherd": Kind("math-shepherd-mistral-7b-prm", "", "step", True, _tagged),
    "acemath-rm": Kind("AceMath-7B-RM, -72B-RM", ACEMATH_SYSTEM, "final", False, _classifier),
    "qwen2.5-math-rm": Kind("Qwen2.5-Math-RM-72B", QWEN_SYSTEM, "final", False, _two_layer_outcome),
    "sequence-classifier": Kind("any ...ForSequenceClassification with one label", "", "final", False, _classifier),
}


def recognise(checkpoint: Checkpoint) -> str:
    """The kind of a checkpoint that is not our own; a UserError that says what is known where it is none."""
    shapes = checkpoint.shapes
    if any(f"{name}.weight" in shapes for name in VALUE_HEADS):
        return "skywork-prm"
    if (checkpoint.directory / REWARD_HEAD).is_file():
        return "reasonflux-prm-1.5b"
    outputs, deep_outputs = (shapes.get(f"{name}.weight", (0,))[0] for name in ("score", "score.2"))
    if deep_outputs == 2:
        return "reasonflux-prm-7b" if _named(checkpoint, "reasonflux") else "qwen2.5-math-prm"
    if deep_outputs == 1:
        return "qwen2.5-math-rm"
    if outputs == 1:
        return "acemath-rm" if _named(checkpoint, "acemath") else "sequence-classifier"
    heads = sorted(name for name in shapes if not name.startswith(("model.", "lm_head.")))
    if heads:
        shown = ", ".join(f"{name} {list(shapes[name])}" for name in heads[:4]) + ", ..." * (len(heads) > 4)
        raise _unknown(checkpoint, f"has no head that is known (beside the backbone: {shown})")
    if _named(checkpoint, "shepherd"):
        return "math-shepherd"
    raise _unknown(checkpoint, "is a language model without a head that scores")


def known() -> str:
    kinds = ", ".join(f"{name} ({kind.published})" for name, kind in KINDS.items())
    return f"Known kinds: {kinds}; and directories with a {DESCRIPTION} of ours. Give kind=... if it is one of these"


def _unknown(checkpoint: Checkpoint, what: str) -> UserError:
    return UserError(f"{checkpoint.directory} {what}", known())


def _named(checkpoint: Checkpoint, word: str) -> bool:
    """Whether the checkpoint calls itself by this word."""
    place = checkpoint.directory.resolve()
    names = [place.name, str(checkpoint.raw.get("_name_or_path", ""))]
    if place.parent.name == "snapshots":  # the Hugging Face cache: models--owner--name/snapshots/commit
        names.append(place.parent.parent.name)
    with suppress(OSError):
        names.append((place / "README.md").read_text(encoding="utf-8", errors="replace")[:_README_HEAD])
    return any(word in name.lower() for name in names)
