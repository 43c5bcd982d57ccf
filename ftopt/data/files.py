"""Files that a user names by a path, a folder or a glob pattern."""

from __future__ import annotations

import glob
from pathlib import Path

from ftopt.errors import UserError


def files_at(source: str | Path, setting: str) -> list[Path]:
    """The file, all files in the folder, or all that match the pattern (``**`` allowed), sorted.

    Messages call ``source`` by the name of its ``setting``.

    Raises:
        UserError: there is no file.
    """
    given = Path(source).expanduser()
    if given.is_file():
        return [given]
    found = given.rglob("*") if given.is_dir() else map(Path, glob.glob(str(given), recursive=True))  # noqa: PTH207
    if not (files := sorted(path for path in found if path.is_file())):
        raise UserError(f"{setting}={str(source)!r}: no file is there; give a file, a folder, or a glob pattern")
    return files


def unreadable(path: Path, error: OSError) -> UserError:
    """The error to raise for a file that cannot be read."""
    return UserError(f"{path} cannot be read: {error.strerror}; give another file, or correct its permissions")
