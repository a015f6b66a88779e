"""Reading a command's words: mistakes are one line with a remedy, and recipe keys may stand among the options."""

from __future__ import annotations

import argparse
import difflib
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from reasonlab.errors import UserError


class _WrongError(Exception):
    """What argparse finds wrong."""


class Parser(argparse.ArgumentParser):
    """argparse with errors like ours, for a command and all its parts: no long usage, but the option meant instead."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Nothing stays unknown: a part of a command, which knows its own options, tells rather than the whole."""
        try:
            found, unknown = super().parse_known_args(args, namespace)
        except _WrongError as error:  # a required option is perhaps only misspelt
            for word in args or ():
                if word.startswith("--") and self._near(word):
                    raise UserError(f"unexpected argument {word!r}", self._remedy(word)) from None
            raise UserError(str(error), self._remedy()) from None
        if unknown:
            raise UserError(f"unexpected argument {unknown[0]!r}", self._remedy(unknown[0]))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise _WrongError(message)

    def _near(self, word: str) -> str:
        """The option that is meant by one that does not exist."""
        options = [option for option in self._option_string_actions if option.startswith("--")]
        return "" if word.partition("=")[0] in options else nearest_option(word, options)

    def _remedy(self, word: str = "") -> str:
        near = self._near(word)
        return f"Perhaps you meant {near}" if near else f"Run `{self.prog} --help` for the options"


def nearest_option(word: str, options: Collection[str]) -> str:
    """The option that a misspelt one was perhaps to be; empty where none is like it."""
    near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.8)
    return near[0] if near else ""


def add_device_argument(parser: argparse._ActionsContainer) -> None:
    """`--device`, None where it is not given: only `hardware.prepare` looks, so that --help needs no torch."""
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one, else cpu")


def given_options(words: Sequence[str]) -> list[str]:
    """The options among a command's words, as they were typed; no value of an option begins like one."""
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def without_overrides(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the `--key value` for the recipe; argparse would take a value for the recipe.

    An override is every option that is not among the command's `own`.
    """
    kept: list[str] = []
    overrides: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if not word.startswith("--") or word.partition("=")[0] in own:
            kept.append(word)
            continue
        if near := nearest_option(word, own):
            raise UserError(f"unexpected argument {word!r}", f"Perhaps you meant {near}")
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):  # no value begins so
            overrides.append(rest.popleft())
    return kept, overrides


def check_resumed(name: str, recipe: object, others: bool, remedy: str) -> None:
    """`--resume RUN` was given: there is nothing else to say."""
    if recipe is not None:
        instead = f"Leave out {recipe} to continue the run, or --resume to start another"
        raise UserError(f"{name} takes a recipe or --resume RUN, not both", instead)
    if others:
        raise UserError("--resume takes no other options", remedy)
