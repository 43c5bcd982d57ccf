"""The manifest: the file whose presence marks a checkpoint as complete, with size and SHA-256 of every other file.

It is read before any other file is trusted, and anybody may have written it: whatever is not exactly a manifest is
refused with the file and the reason.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ftopt.errors import UserError

FORMAT = 1
NAME = "manifest.json"
_MAX_BYTES = 16 << 20
_MAX_INT = (1 << 53) - 1
_LABEL = re.compile(r"v(\d{8,15})-(\d{1,16})")
_FILE = re.compile(r"[A-Za-z0-9_%~-][A-Za-z0-9_.%~-]{0,399}")
_SHA = re.compile(r"[0-9a-f]{64}")


class BadCheckpoint(UserError):
    """A checkpoint cannot be used: the file or folder at ``path`` is wrong. Exit status 2."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class File:
    """A file's size in bytes and its SHA-256 (hex)."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a complete checkpoint.

    Args:
        version: fragment 0's.
        attempt: the attempt that made that version; attempt numbers grow through all lives of a job, so they tell which
            of two checkpoints is newer.
        inner_step: the job's committed inner step.
        replicas: replica id -> the file that describes its part.
        committed: per fragment, the file of the newest version in this checkpoint.
        files: name -> size and digest, of all files except the manifest.
    """

    version: int
    attempt: int
    inner_step: int
    replicas: Mapping[str, str]
    committed: tuple[str, ...]
    files: Mapping[str, File]

    def text(self) -> str:
        """Returns the manifest as JSON."""
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps(data | {name: dict(sorted(data[name].items())) for name in ("replicas", "files")}, indent=1)


def label(version: int, attempt: int) -> str:
    """Returns the folder name of that attempt's checkpoint."""
    return f"v{version:08d}-{attempt}"


def order(name: str) -> tuple[int, int] | None:
    """Returns the sort key of a folder name by age, ``(attempt, version)``; None if it is not a checkpoint's name."""
    found = _LABEL.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else None


def open_regular(path: Path) -> BinaryIO:
    """Opens a file to read. A pipe, which would be waited for without end, or a device is a `BadCheckpoint`."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadCheckpoint(path, "is no regular file")
    return os.fdopen(handle, "rb")


def read_json(path: Path, max_bytes: int) -> Any:
    """Returns the JSON value in a file.

    Raises:
        BadCheckpoint: it cannot be read, is too large, or is not JSON.
    """
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
    """Reads the manifest in a file.

    Raises:
        BadCheckpoint: it is not a manifest; the message says what is wrong.
    """
    data = read_json(path, _MAX_BYTES)
    try:
        return _manifest(data)
    except ValueError as wrong:
        raise BadCheckpoint(path, str(wrong)) from None


def _manifest(data: Any) -> Manifest:
    _keys("the manifest", data, {"format", "version", "attempt", "inner_step", "replicas", "committed", "files"})
    if type(data["format"]) is not int or data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r:.20}; this ftopt reads format {FORMAT}")
    files = _mapping("files", data["files"])
    for name, entry in files.items():
        _name("files", name)
        _keys(f"files[{name}]", entry, {"bytes", "sha256"})
        _number(f"files[{name}].bytes", entry["bytes"])
        if not (isinstance(entry["sha256"], str) and _SHA.fullmatch(entry["sha256"])):
            raise ValueError(f"files[{name}].sha256 is not a SHA-256")
    replicas = _mapping("replicas", data["replicas"])
    committed = data["committed"]
    if not isinstance(committed, list) or not committed or not replicas:
        raise ValueError("committed and replicas must each name at least one file")
    for name in [*replicas.values(), *committed]:
        _name("a file", name)
        if name not in files:
            raise ValueError(f"{name!r:.80} is not among the files")
    return Manifest(
        version=_number("version", data["version"]),
        attempt=_number("attempt", data["attempt"]),
        inner_step=_number("inner_step", data["inner_step"]),
        replicas=replicas,
        committed=tuple(committed),
        files={name: File(entry["bytes"], entry["sha256"]) for name, entry in files.items()},
    )


def _keys(what: str, data: Any, wanted: set[str]) -> None:
    keys = _mapping(what, data).keys()
    if wrong := sorted(wanted ^ set(keys)):
        raise ValueError(f"{what}: {'unknown' if wrong[0] in keys else 'missing'} field {wrong[0]!r:.80}")


def _mapping(what: str, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what} must be an object, got {type(data).__name__}")
    return data


def _number(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ValueError(f"{what} must be an integer from 0 to 2^53 - 1, got {value!r:.40}")
    return value


def _name(what: str, name: Any) -> None:
    if not (isinstance(name, str) and _FILE.fullmatch(name)) or name == NAME:
        raise ValueError(f"{what}: {name!r:.80} is not the name of a file in this folder")
