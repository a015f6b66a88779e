"""Text to token ids for judges: the checkpoint's own tokenizer and chat template, with whole conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reasonlab.errors import UserError
from reasonlab.model.tokenizer import ChatTokenizer


class JudgeTokenizer:
    """The tokenizer of one published judge."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._chat = ChatTokenizer.load(directory)
        self.specials: Mapping[str, str] = self._chat.specials
        self.id_of, self.token_of = self._chat.id_of, self._chat.token_of
        self.encode, self.encode_with_ends = self._chat.encode, self._chat.encode_with_ends

    def decode(self, ids: Sequence[int]) -> str:
        return self._chat.decode(ids)

    def conversation(self, system: str, question: str, answer: str) -> str:
        """The chat template's text of a whole conversation; no system turn where `system` is empty."""
        if self._chat.template is None:
            raise UserError(
                f"{self.directory} has no chat template, and this judge reads conversations",
                "Fetch tokenizer_config.json and chat_template.jinja of the checkpoint as well",
            )
        turns = [("system", system)] * bool(system) + [("user", question), ("assistant", answer)]
        return self._chat.render(turns)
