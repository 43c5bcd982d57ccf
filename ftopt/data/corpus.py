"""Corpora: bytes of text files, train and held-out apart.

The split goes by file: a file is held out when the hash of its name says so (`HELD_OUT`, about 5 % of all), so it is
the same on every machine and every run. A corpus of a single file is split at 95 % of its length.
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftopt.errors import UserError

HELD_OUT = 0.05
LIMIT_BYTES = 64 << 20
"""Bytes kept of a corpus; a larger one is cut, file by file, in the order of the hash."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on, from unlike files. uint8, 1-D."""

    train: Bytes
    held_out: Bytes


def stdlib_bytes() -> Corpus:
    """All ``.py`` files of the running Python's own library (not of what is installed into it)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
    ]
    return _load(sorted(files), root)


def text(path: str) -> Corpus:
    """The user's own text files.

    Args:
        path: a file, a folder (all files in it), or a glob pattern (``**`` allowed).

    Raises:
        UserError: nothing is there, or it is empty.
    """
    given = Path(path).expanduser()
    if given.is_dir():
        files = sorted(item for item in given.rglob("*") if item.is_file())
    elif given.is_file():
        files = [given]
    else:
        files = sorted(Path(item) for item in glob.glob(str(given), recursive=True) if Path(item).is_file())  # noqa: PTH207
    if not files:
        raise UserError(f"data.path={path!r}; no file is there; give a text file, a folder, or a glob pattern")
    root = given if given.is_dir() else files[0].parent
    return _load(files, root)


def _load(files: Sequence[Path], root: Path) -> Corpus:
    if len(files) == 1:
        return _split_tail(_read(files))
    ranked = sorted((_rank(path, root), path) for path in files)
    held = [path for rank, path in ranked if rank < HELD_OUT] or [ranked[0][1]]
    train = [path for _, path in ranked if path not in set(held)]
    corpus = Corpus(train=_read(train), held_out=_read(held))
    if not (corpus.train.size and corpus.held_out.size):
        raise UserError(f"the {len(files)} files of the corpus under {root} hold no text; give other files")
    return corpus


def _split_tail(data: Bytes) -> Corpus:
    cut = int(data.size * (1 - HELD_OUT))
    return Corpus(train=data[:cut], held_out=data[cut:])


def _rank(path: Path, root: Path) -> float:
    """A number in [0, 1) that depends on the file's place below ``root`` alone."""
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _read(files: Iterable[Path]) -> Bytes:
    buffer = bytearray()
    for path in files:
        try:
            buffer += path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}; give other files or mend its permissions"
            ) from error
        if len(buffer) > LIMIT_BYTES:
            break
    return np.frombuffer(bytes(buffer[:LIMIT_BYTES]), dtype=np.uint8)
