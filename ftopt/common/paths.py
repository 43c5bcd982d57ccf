"""Paths as users write them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ftopt.errors import UserError


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path, with a leading ``~`` replaced by the home folder. UserError: there is no such home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{os.fspath(path)}: {error}; write the path without ~") from None


def near(path: Path) -> Path:
    """``path`` as it is from the working directory, if it is in it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def new_file(path: Path, mode: int = 0o666) -> int:
    """Opens a temporary file of this program's, to be renamed later, and returns its descriptor. A leftover file or
    symbolic link of that name is removed first: following a link that others made could overwrite a file elsewhere.

    Raises:
        OSError: the file cannot be created, or somebody creates it at the same time.
    """
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def replace_text(path: Path, text: str) -> None:
    """Writes a file in one step: it has the former text, or all of this one. OSError: it cannot be written; the former
    file stays."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(new_file(draft), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
