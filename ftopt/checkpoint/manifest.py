"""The manifest: the file whose presence marks a checkpoint as complete, with size and SHA-256 of every other file.

It is read before any other file is trusted, and anybody may have written it: a file that is not exactly a manifest is
refused, with its name and the reason.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from ftopt.errors import UserError
from ftopt.sync.protocol.limits import Number
from ftopt.sync.protocol.wire import MessageError, from_plain

FORMAT = 1
NAME = "manifest.json"
_MAX_BYTES = 16 << 20
_LABEL = re.compile(r"v(\d{8,15})-(\d{1,16})")
_FILE = re.compile(r"[A-Za-z0-9_%~-][A-Za-z0-9_.%~-]{0,399}")
_SHA = re.compile(r"[0-9a-f]{64}")


def _wrong_file(name: str) -> str:
    return "" if _FILE.fullmatch(name) and name != NAME else f"{name!r:.80} is not the name of a file in this folder"


def _wrong_sha(text: str) -> str:
    return "" if _SHA.fullmatch(text) else "it is not a SHA-256"


_FileName = Annotated[str, _wrong_file]


class BadCheckpoint(UserError):
    """A checkpoint cannot be used: the file or folder at ``path`` is wrong. Exit status 2."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class File:
    """A file's size in bytes and its SHA-256 (hex)."""

    bytes: Number
    sha256: Annotated[str, _wrong_sha]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a complete checkpoint.

    Args:
        version: fragment 0's.
        attempt: the attempt that made that version; attempt numbers grow through all lives of a job, so they determine
            which of two checkpoints is newer.
        inner_step: the job's committed inner step.
        replicas: replica id -> the file that describes its part.
        committed: per fragment, the file of the newest version in this checkpoint.
        files: name -> size and digest, of all files except the manifest.

    Raises:
        ValueError: it has no replica or no fragment, or lacks the file of one.
    """

    version: Number
    attempt: Number
    inner_step: Number
    replicas: dict[str, _FileName]
    committed: tuple[_FileName, ...]
    files: dict[_FileName, File]

    def __post_init__(self) -> None:
        if not (self.committed and self.replicas):
            raise ValueError("committed and replicas must each name at least one file")
        for name in (*self.replicas.values(), *self.committed):
            if name not in self.files:
                raise ValueError(f"{name!r:.80} is not among the files")

    def text(self) -> str:
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps(data | {name: dict(sorted(data[name].items())) for name in ("replicas", "files")}, indent=1)


def label(version: int, attempt: int) -> str:
    return f"v{version:08d}-{attempt}"


def order(name: str) -> tuple[int, int] | None:
    """Returns the sort key of a folder name by age, ``(attempt, version)``; None if it is not a checkpoint's name."""
    found = _LABEL.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else None


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read. Raises `BadCheckpoint` for a pipe, which would block for ever, and for a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadCheckpoint(path, "is no regular file")
    return os.fdopen(handle, "rb")


def read_json(path: Path, max_bytes: int) -> Any:
    """Returns the JSON value in a file. BadCheckpoint: it cannot be read, is too large, or is not JSON."""
    try:
        with open_regular(path) as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise BadCheckpoint(path, f"cannot be read: {error.strerror}") from None
    if len(raw) > max_bytes:
        raise BadCheckpoint(path, f"has more than {max_bytes} bytes")
    try:
        return json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(path, f"is not JSON: {error}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest in a file. BadCheckpoint: it is not a manifest; the message says what is wrong."""
    data = read_json(path, _MAX_BYTES)
    if isinstance(data, dict) and (type(found := data.pop("format", None)), found) != (int, FORMAT):
        raise BadCheckpoint(path, f"format {found!r:.20}; this ftopt reads format {FORMAT}")
    try:
        return from_plain(Manifest, data)
    except MessageError as wrong:
        raise BadCheckpoint(path, str(wrong)) from None
