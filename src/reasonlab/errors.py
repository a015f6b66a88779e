"""The one exception a user is meant to see: what went wrong and what to do about it."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend. The command line prints it on one line and exits with code 2."""

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = message
        self.remedy = remedy
        super().__init__(f"{message.rstrip('.')}. {remedy}" if remedy else message)
