"""The benchmark registry: one typed entry a set.

The entries are data (`assets/benchmarks.toml`); this module gives them types, adds the families of the tiny world, and
takes a user's own JSON lines file for a benchmark too.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from reasonlab.errors import UserError
from reasonlab.problems.families import FAMILIES

Role = Literal["test", "judge", "train"]  # judge: the gold is a label on a given solution, not an answer
AnswerType = Literal["integer", "number", "expression", "choice", "mixed", "index", "rating", "text", "family"]
Extraction = Literal["boxed", "answer_line", "hash", "choice", "tiny"]
Layout = Literal["plain", "choices", "solution", "step"]
HubAnswer = Literal["plain", "integer", "hash", "boxed", "list", "letter", "first_choice"]
Row = dict[str, Any]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TINY_PREFIX = "tiny/"
TINY_SIZE = 100  # problems of the test split, levels 2 to 5, for each family
TINY_LEVELS = (2, 3, 4, 5)
OWN_FILE_SUFFIXES = (".jsonl", ".jsonl.gz")
QUESTION_COLUMNS = ("problem", "question", "prompt")

_REGISTRY = Path(__file__).parent / "assets" / "benchmarks.toml"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Baseline(_Entry):
    """A published number, in percent, and who published it."""

    model: str
    metric: str
    value: float
    source: str


class Hub(_Entry):
    """Where a set lies on the Hugging Face hub, and which of its columns become ours."""

    repo: str
    config: str | None = None
    split: str
    columns: Mapping[str, str | tuple[str, ...]]  # ours: theirs; several of theirs are joined (or are the choices)
    answer: HubAnswer = "plain"
    where: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    size: int | None = None  # where it differs from the local file's
    gated: bool = False


class Benchmark(_Entry):
    """All that is known of a set: what it asks, how it is asked, how answers are read, where it is, who scored what."""

    name: str
    title: str
    role: Role = "test"
    size: int | None = None  # None only for a user's own file
    without_gold: int = 0  # rows that have no gold; they cannot be graded and are left out
    answer: AnswerType = "expression"
    prompt: str = "boxed"
    extraction: Extraction = "boxed"
    layout: Layout = "plain"
    language: Literal["en", "zh"] = "en"
    licence: str
    file: str | None = None
    sha256: str | None = None  # of the JSON lines before compression
    where: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    hub: Hub | None = None
    notes: str = ""
    baselines: tuple[Baseline, ...] = ()

    @property
    def family(self) -> str | None:
        """The family of the tiny world this set is drawn from, if it is one."""
        return self.name.removeprefix(TINY_PREFIX) if self.name.startswith(TINY_PREFIX) else None

    def prompt_for(self, question: str) -> str:
        """The question with the set's instruction, as a user turn (the tiny world's needs none)."""
        return prompts()[self.prompt].replace("{question}", question)


@cache
def prompts() -> Mapping[str, str]:
    """The instruction templates by name."""
    return {str(name): str(text) for name, text in _registry_file()["prompts"].items()}


@cache
def benchmarks() -> Mapping[str, Benchmark]:
    """Every registered set by name, the tiny world's families last."""
    named = {name: Benchmark(name=name, **entry) for name, entry in _registry_file()["benchmarks"].items()}
    return named | {entry.name: entry for entry in map(_tiny, FAMILIES)}


def find_benchmark(name: str) -> Benchmark:
    """A registered set, or a user's own file where the name is a path to one."""
    if name in benchmarks():
        return benchmarks()[name]
    if name.endswith(OWN_FILE_SUFFIXES):
        return _own_file(Path(name))
    near = difflib.get_close_matches(name, benchmarks(), n=1)
    hint = f"Perhaps you meant {near[0]!r}" if near else "`reasonlab data list` shows them all"
    raise UserError(f"there is no benchmark {name!r}", f"{hint}; a file of your own must end in .jsonl or .jsonl.gz")


def _registry_file() -> dict[str, Any]:
    return tomllib.loads(_REGISTRY.read_text(encoding="utf-8"))


def _tiny(family: str) -> Benchmark:
    return Benchmark(
        name=TINY_PREFIX + family,
        title=f"Tiny world, {family}",
        size=TINY_SIZE,
        answer="family",
        prompt="tiny",
        extraction="tiny",
        licence="generated; ships with reasonlab",
        notes=FAMILIES[family].asks,
    )


def _own_file(path: Path) -> Benchmark:
    if not path.is_file():
        raise UserError(
            f"there is no file {path}", "Give the path of a .jsonl or .jsonl.gz file, or a benchmark's name"
        )
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Benchmark(name=name, title=f"{path.name} (own file)", licence="the user's own", file=str(path.absolute()))
