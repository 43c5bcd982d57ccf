"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from ftopt.errors import UserError


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path; ``~`` at its beginning is the home folder. UserError: there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{os.fspath(path)}: {error}; write the path without ~") from None


def expanded(text: str) -> str:
    """The same as text. Without ``~`` it stays as it was written, for the messages that quote it."""
    return str(user_path(text)) if text.startswith("~") else text
