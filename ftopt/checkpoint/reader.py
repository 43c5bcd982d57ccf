"""Finds complete checkpoints, verifies them file by file, and reads replicas' parts.

There is no silent fallback: if the newest complete checkpoint is damaged, the error says so and names the previous
sound one, for the user to choose. Incomplete checkpoints are ignored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ftopt.checkpoint.manifest import NAME, BadCheckpoint, Manifest, label, open_regular, order, read_manifest
from ftopt.checkpoint.part import SavedVersion, read_note, start_in
from ftopt.errors import UserError

OF_A_RUN = "checkpoint"
"""The folder of checkpoints in a run's folder."""


class Checkpoint:
    """The complete checkpoint in the folder ``path``. No file is trusted before `verify` has compared it with the
    manifest.

    Raises:
        BadCheckpoint: there is no manifest, or it is invalid, or of another version or attempt than the folder's name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path / NAME)
        name = label(self.manifest.version, self.manifest.attempt)
        if order(path.name) not in (None, order(name)):
            raise BadCheckpoint(path, f"was renamed: by its manifest it is {name}; name it so, or move it away")
        self.replicas = sorted(self.manifest.replicas)  # ids of the replicas whose parts it holds
        self._files: dict[str, dict[str, Any]] = {}

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compares files with the manifest. Default: all of them. BadCheckpoint: a file is missing or has changed; the
        message says which."""
        for name in self.manifest.files if names is None else names:
            path, file = self.path / name, self.manifest.files[name]
            try:
                if (size := path.stat().st_size) != file.bytes:
                    raise BadCheckpoint(path, f"has {size} bytes; {file.bytes} were written")
                with open_regular(path) as stream:
                    sha = hashlib.file_digest(stream, "sha256")
            except OSError as error:
                raise BadCheckpoint(path, f"cannot be read: {error.strerror}") from None
            if sha.hexdigest() != file.sha256:
                raise BadCheckpoint(path, "was changed since it was written: its SHA-256 is not the manifest's")

    @cached_property
    def notes(self) -> dict[str, dict[str, Any]]:
        """Replica -> the description of its part."""
        self.verify(self.manifest.replicas.values())
        found = {replica: read_note(self.path / name) for replica, name in sorted(self.manifest.replicas.items())}
        for replica, note in found.items():
            if note["replica"] != replica:
                raise BadCheckpoint(self.path / NAME, f"names {note['replica']!r:.40}'s part as {replica!r:.40}'s")
            for version in note["committed"]:
                if version["name"] not in self.manifest.files:
                    raise BadCheckpoint(self.path / NAME, f"lacks {version['name']!r:.80}")
        return found

    @cached_property
    def newest(self) -> tuple[SavedVersion, ...]:
        """The newest version of each fragment."""
        return tuple(self._version(version) for version in self._newest)

    @property
    def record(self) -> Mapping[str, Any]:
        """The record of fragment 0's newest version, read without tensors."""
        found: Mapping[str, Any] = self._newest[0]["record"]
        return found

    @property
    def _newest(self) -> list[dict[str, Any]]:
        notes = self.notes.values()
        known = {version["name"]: version for note in notes for version in note["committed"]}
        for name in self.manifest.committed:
            if name not in known:
                raise BadCheckpoint(self.path / NAME, f"names {name!r:.80} as committed, which no replica has")
        return [known[name] for name in self.manifest.committed]

    def committed(self, replica: str) -> tuple[SavedVersion, ...]:
        """The version of each fragment that a replica's parameters are based on."""
        return tuple(self._version(version) for version in self.notes[replica]["committed"])

    def own(self, replica: str, *, only: Sequence[str] = ()) -> Any:
        """Returns the state that only this replica had: all of it, or only the named values, without its loop."""
        from ftopt.common.tree import unflatten  # here: it imports torch

        note, name = self.notes[replica], self.manifest.replicas[replica]
        tensors = self.tensors(name.removesuffix(".json") + ".safetensors")
        try:
            own = {"replica": {name: note["own"]["replica"][name] for name in only}} if only else note["own"]
            return unflatten(own, tensors)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadCheckpoint(self.path / name, f"does not describe a replica's own values: {error}") from None

    def tensors(self, name: str) -> dict[str, Any]:
        """Returns the tensors of a file, verified and copied."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        if name not in self.manifest.files:
            raise BadCheckpoint(self.path / NAME, f"lacks {name!r:.80}")
        self.verify([name])
        try:
            return {key: tensor.clone() for key, tensor in load_file(self.path / name).items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise BadCheckpoint(self.path / name, f"is not a safetensors file: {error}") from None

    def _version(self, version: dict[str, Any]) -> SavedVersion:
        if (name := version["name"]) not in self._files:
            self._files[name] = self.tensors(name)
        return SavedVersion(version["record"], version["digest"], self._files[name])


def whole(folder: Path) -> list[Path]:
    """Returns the complete checkpoints in a folder, the newest last."""
    try:
        found = [(age, path) for path in folder.iterdir() if (age := order(path.name)) is not None]
    except OSError:
        return []
    return [path for _, path in sorted(found) if os.path.exists(path / NAME)]  # noqa: PTH110 (Path.exists may raise)


def start_of(path: Path) -> str | None:
    """The start of the job that a complete checkpoint is of (see `start_in`). None: it cannot be read."""
    with suppress(BadCheckpoint, OSError, LookupError, TypeError, AttributeError):
        return _start_of(path, (path / NAME).stat().st_mtime_ns)
    return None


@lru_cache(maxsize=4096)
def _start_of(path: Path, _written_ns: int) -> str:
    """A complete checkpoint does not change, so each is read once; a failure is not kept."""
    note = read_note(path / min(read_manifest(path / NAME).replicas.items())[1])
    return start_in(note["committed"][0]["record"])


def of_other_jobs(folder: Path, start: str | None) -> list[Path]:
    """Returns the complete checkpoints in a folder that are of another job, or of another start of the job, than
    ``start`` (see `start_of`); the newest last. None if ``start`` is not known; unreadable ones are left out."""
    return [path for path in whole(folder) if start_of(path) not in (None, start)] if start is not None else []


def newest_in(folders: Iterable[Path]) -> Path | None:
    """Returns the newest complete checkpoint in any of the folders; None: there is none."""
    there = [path for folder in folders for path in whole(folder)]
    return max(there, key=lambda path: order(path.name) or (0, 0), default=None)


def find(path: Path) -> Checkpoint:
    """Returns the checkpoint at ``path``, or the newest complete one in that folder, or in a run's folder. UserError:
    there is none. BadCheckpoint: it is damaged; the message names the previous sound one, if any."""
    if order(path.name) is None and not (path / NAME).exists():
        there = whole(path) or whole(path / OF_A_RUN)
        if not path.exists():
            raise UserError(f"{path} does not exist; give a run's folder, a folder of checkpoints, or one of them")
        if not there:
            elsewhere = "; its recipe.yaml says where its checkpoints are (checkpoint.dir)"
            raise UserError(
                f"{path} holds no complete checkpoint{elsewhere if (path / 'recipe.yaml').exists() else ''}; give a "
                f"run's folder, a folder of checkpoints, or one of them (a folder v<version>-<attempt> with a {NAME})"
            )
        if others := of_other_jobs(there[-1].parent, start_of(there[-1])):
            raise UserError(
                f"{there[-1].parent} holds checkpoints of several jobs, the newest {others[-1]} and {there[-1]}; "
                "give the one that you mean"
            )
        path = there[-1]
    return sound(path)


def sound(path: Path) -> Checkpoint:
    """Returns the complete checkpoint ``path``; raises as `find` does."""
    try:
        found = Checkpoint(path)
        found.notes  # noqa: B018
        return found
    except BadCheckpoint as bad:
        raise with_offer(bad, path) from None


def verified(path: Path) -> Checkpoint:
    """Like `find`, but compares every file with the manifest."""
    found = find(path)
    try:
        found.verify()
    except BadCheckpoint as bad:
        raise with_offer(bad, found.path) from None
    return found


def with_offer(bad: BadCheckpoint, path: Path) -> BadCheckpoint:
    """Returns the same error, which now also names the newest sound checkpoint older than ``path``, if any."""
    age = order(path.name)
    older = [other for other in whole(path.parent) if age is not None and (order(other.name) or (0, 0)) < age]
    for other in reversed(older):
        with suppress(BadCheckpoint):
            Checkpoint(other).verify()
            return BadCheckpoint(bad.path, f"{bad.reason}; the previous one is sound: use {other}")
    return BadCheckpoint(bad.path, f"{bad.reason}; there is no older sound one; use another folder, or start anew")
