"""Corpora: the bytes of text files, split into a training and a held-out part.

Whole files are held out, chosen by the hash of their names (`HELD_OUT`, about 5 % of all), so that the split is the
same on every machine and in every run. A corpus of a single file is split at 95 % of its length.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftopt.common.plural import count
from ftopt.errors import UserError

HELD_OUT = 0.05
LIMIT_BYTES = 64 << 20
"""Maximum bytes read of each part of a corpus, file by file in the order of the hash."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on, from different files. uint8, 1-D."""

    train: Bytes
    held_out: Bytes


def stdlib_bytes() -> Corpus:
    """All ``.py`` files of the running Python's standard library, without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in ("site-packages", "dist-packages")]  # do not descend
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return _load(files, root)


def text(path: str) -> Corpus:
    """Reads the user's own text files. ``path``: a file, a folder (all files in it), or a glob pattern (``**``
    allowed). UserError: there is no file, or no text in the files."""
    files = files_at(path, "data.path")
    given = Path(path).expanduser()
    return _load(files, given if given.is_dir() else files[0].parent)


def check_length(data: Bytes, context: int) -> None:
    """Raises UserError if ``data`` is shorter than one window of ``context`` bytes plus the byte after it."""
    if data.size <= context:
        raise UserError(
            f"the corpus has {data.size} bytes; a window needs {context + 1}; "
            "give more text in data.path, or a smaller model.context"
        )


def _load(files: Sequence[Path], root: Path) -> Corpus:
    if len(files) == 1:
        data = _read(files)
        cut = int(data.size * (1 - HELD_OUT))
        return Corpus(train=data[:cut], held_out=data[cut:])
    ranked = sorted((_rank(path, root), path) for path in files)
    held = [path for rank, path in ranked if rank < HELD_OUT] or [ranked[0][1]]
    train = [path for _, path in ranked[len(held) :]]
    corpus = Corpus(train=_read(train), held_out=_read(held))
    if not (corpus.train.size and corpus.held_out.size):
        raise UserError(f"the corpus under {root} ({count(len(files), 'file')}) holds no text; give other files")
    return corpus


def _rank(path: Path, root: Path) -> float:
    """A number in [0, 1) that depends only on the file's path relative to ``root``."""
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _read(files: Iterable[Path]) -> Bytes:
    buffer = bytearray()
    for path in files:
        try:
            buffer += path.read_bytes()
        except OSError as error:
            raise unreadable(path, error) from error
        if len(buffer) > LIMIT_BYTES:
            break
    return np.frombuffer(bytes(buffer[:LIMIT_BYTES]), dtype=np.uint8)


def files_at(source: str | Path, setting: str) -> list[Path]:
    """The file, all files in the folder, or all that match the pattern (``**`` allowed), sorted.

    Messages name ``source`` by its ``setting``.

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
