"""What one replica contributes to a checkpoint, and its description in JSON, the *note*."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ftopt.checkpoint.manifest import BadCheckpoint, File, label, read_json

if TYPE_CHECKING:
    from torch import Tensor

FIXED = "fixed.safetensors"
_NOTE_MAX_BYTES = 1 << 30
_LONG = 150


@dataclass(frozen=True)
class SavedVersion:
    """One version of one fragment's committed state, as a checkpoint holds it.

    Args:
        record: the protocol's part of it, as JSON; has at least ``fragment``, ``version`` and ``counted``.
        digest: the protocol's digest of the tensors.
        tensors: the tensors; they never change.
    """

    record: Mapping[str, Any]
    digest: str
    tensors: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        """The name of its file, the same whichever replica writes it."""
        return f"committed-{self.record['fragment']}-v{self.record['version']}.safetensors"


@dataclass(frozen=True)
class Part:
    """One replica's part of a checkpoint.

    Args:
        attempt, version: fragment 0's outer step at which the checkpoint is taken.
        members: members of that attempt: a checkpoint with this many parts is complete.
        committed: per fragment, the version that this replica's parameters are based on.
        offered: per fragment, the last step of the contribution under way; None if there is none.
        membership: the replica's membership, for the protocol, as JSON.
        lines: the settings that all replicas must agree on.
        own: state that only this replica has: plain values and tensors.
        model: names and places of the model's tensors, for the export, as JSON.
        fixed: the model's tensors that do not train; written once.
    """

    replica: str
    incarnation: int
    attempt: int
    version: int
    members: int
    inner_step: int
    committed: tuple[SavedVersion, ...]
    offered: tuple[int | None, ...]
    membership: Mapping[str, Any]
    lines: Mapping[str, str]
    own: Mapping[str, Any]
    model: Mapping[str, Any]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The checkpoint's folder name."""
        return label(self.version, self.attempt)

    @property
    def start(self) -> str:
        """The start of the job (see `start_in`)."""
        return start_in(self.committed[0].record)

    @property
    def stem(self) -> str:
        """The common prefix of this replica's file names."""
        return stem_of(self.replica)


def stem_of(replica: str) -> str:
    """Returns the common prefix of a replica's file names."""
    name = quote(replica, safe="")
    if len(name) > _LONG:
        name = f"{name[:_LONG]}~{hashlib.sha256(replica.encode()).hexdigest()[:12]}"
    return f"replica-{name}"


def start_in(record: Mapping[str, Any]) -> str:
    """The start of the job that a record is of: the first 8 digits of its chain, which all later versions keep."""
    return str(record.get("chain", ""))[:8]


def note_of(part: Part, files: Mapping[str, File], own: Any) -> str:
    """Returns the note's text; ``files`` are the files that this replica has written."""
    names = ("replica", "incarnation", "attempt", "version", "members", "inner_step", "offered", "membership", "lines")
    note = {name: getattr(part, name) for name in names} | {"own": own, "model": part.model}
    note["committed"] = [{"name": c.name, "record": c.record, "digest": c.digest} for c in part.committed]
    note["files"] = {name: [f.bytes, f.sha256] for name, f in files.items()}
    return json.dumps(note, separators=(",", ":"), allow_nan=False)


def file_bytes(tensors: Mapping[str, Tensor], **meta: str) -> Iterator[memoryview]:
    """Yields a safetensors file's bytes in pieces, without a copy of tensors that are contiguous on the CPU."""
    from ftopt.transport.snapshot import StateImage  # here: it imports torch, which `ftopt run` does not need

    snapshot = StateImage({"format": "pt", **meta}, tensors)
    return snapshot.chunks(0, snapshot.size)


def read_note(path: Path) -> dict[str, Any]:
    """Reads a note and checks the fields that decide whether a checkpoint is complete. BadCheckpoint: it is not a
    note."""
    note = read_json(path, _NOTE_MAX_BYTES)
    try:
        _need(isinstance(note["replica"], str) and isinstance(note["lines"], dict), "replica or lines")
        for key in ("incarnation", "attempt", "version", "members", "inner_step"):
            _need(type(note[key]) is int, key)
        _need(len(note["committed"]) == len(note["offered"]) > 0, "committed")
        for index, (version, offered) in enumerate(zip(note["committed"], note["offered"], strict=True)):
            record = version["record"]
            _need(isinstance(version["name"], str) and isinstance(version["digest"], str), "a committed file")
            _need(record["fragment"] == index and type(record["version"]) is int, "a record")
            _need(all(len(entry) == 3 and type(entry[2]) is int for entry in record["counted"]), "counted")
            _need(offered is None or type(offered) is int, "offered")
        _need({"membership", "own", "model"} <= note.keys(), "membership, own or model")
        _need(all(type(size) is int and isinstance(sha, str) for size, sha in note["files"].values()), "files")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(path, f"does not describe a replica's part ({type(error).__name__}: {error})") from None
    return dict(note)


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)
