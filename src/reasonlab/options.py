"""Reading a command's words: mistakes are one line with a remedy, and recipe keys may stand among the options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from reasonlab.errors import UserError


class Parser(argparse.ArgumentParser):
    """argparse with errors like ours, for a command and all its parts: no long usage, but the option meant instead."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Nothing stays unknown: a part of a command, which knows its own options, tells rather than the whole."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            raise UserError(f"unexpected argument {unknown[0]!r}", self._remedy(unknown[0]))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UserError(message, self._remedy())

    def _remedy(self, word: str = "") -> str:
        options = [option for option in self._option_string_actions if option.startswith("--")]
        near = nearest_option(word, options)
        return f"Perhaps you meant {near}" if near else f"Run `{self.prog} --help` for the options"


def nearest_option(word: str, options: Collection[str]) -> str:
    """The option that a misspelt one was perhaps to be; empty where none is like it."""
    near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.8)
    return near[0] if near else ""


def without_overrides(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the `--key value` for the recipe; argparse would take a value for the recipe.

    An override is every option that is not among the command's `own`.
    """
    kept: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("--") or word.partition("=")[0] in own:
            kept.append(word)
            continue
        overrides.append(word)
        if near := nearest_option(word, own):
            raise UserError(f"unexpected argument {word!r}", f"Perhaps you meant {near}")
        if "=" not in word and (value := next(rest, None)) is not None:
            overrides.append(value)
    return kept, overrides
