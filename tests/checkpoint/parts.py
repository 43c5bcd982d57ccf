"""Parts of checkpoints without any training, and disks that fail."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ftopt.checkpoint.disk import Disk
from ftopt.checkpoint.part import Part, SavedVersion
from ftopt.checkpoint.writer import Writer


def part(
    replica: str = "r0",
    *,
    version: int = 5,
    members: int = 1,
    attempt: int | None = None,
    fragments: int = 1,
    counted: tuple[tuple[str, int, int], ...] = (),
    offered: int | None = None,
    own: Any = None,
    shapes: Mapping[str, Iterable[int]] | None = None,
    chain: str = "0" * 32,
) -> Part:
    """One whose tensors tell the version. ``shapes``: of the parameters that it names as its model's. ``chain``: its
    first 8 digits say of which job."""
    places = {name: {"in": 0, "shape": list(shape)} for name, shape in (shapes or {}).items()}
    committed = tuple(
        SavedVersion(
            {"fragment": f, "version": version, "chain": chain, "counted": [list(entry) for entry in counted]},
            digest=f"digest of {version}",
            tensors={"anchor": torch.full((100,), float(version)), "outer.momentum": torch.arange(100.0) + f},
        )
        for f in range(fragments)
    )
    return Part(
        replica=replica,
        incarnation=1,
        attempt=1000 + version if attempt is None else attempt,
        version=version,
        members=members,
        inner_step=10 * version,
        committed=committed,
        offered=(offered,) * fragments,
        membership={"epoch": 1, "gone": {}, "ledger": ""},
        lines={"model": "a model"},
        own=own if own is not None else {"of": replica, "moments": torch.full((50,), float(version))},
        model={"tensors": places, "tied": {}},
    )


class Told:
    """Collects what a writer tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, name: str, data: Mapping[str, Any]) -> None:
        self.events.append((name, data))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]

    def reasons(self) -> list[str]:
        return [str(data["reason"]) for name, data in self.events if name == "checkpoint_failed"]


def writer(folder: Path, *, keep: int = 2, disk: Disk | None = None) -> tuple[Writer, Told]:
    told = Told()
    return Writer(folder, keep=keep, emit=told, disk=disk), told


class FullDisk(Disk):
    """Has room for so many bytes, then for none."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> None:
        def within() -> Iterator[memoryview | bytes]:
            for chunk in chunks:
                self.room -= len(chunk)
                if self.room < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                yield chunk

        super().write(path, within())


Folder = dict[str, "Folder | bytes"]


class Recorded(Disk):
    """Writes down what is done below ``root``, to say what may be left of it after a crash at any moment.

    Two images are kept: what the kernel knows, which is there after a kill, and what has been synced, which alone is
    certain after a loss of power. In between each folder entry may be in its old or new state by itself.
    """

    def __init__(self, root: Path, *, without: str = "") -> None:
        self.root = root
        self.without = without
        self.images: list[tuple[Folder, Folder]] = []
        self._seen: Folder = {}
        self._safe: Folder = {}
        self._marks: list[int] = []

    def _at(self, path: Path) -> tuple[Folder, Folder | None, str]:
        """The folder of ``path`` in both images, and its name there."""
        seen: Folder = self._seen
        safe: Folder | None = self._safe
        for name in path.relative_to(self.root).parts[:-1]:
            inner = seen[name]
            assert isinstance(inner, dict)
            below = safe.get(name) if safe is not None else None
            seen, safe = inner, below if isinstance(below, dict) else None
        return seen, safe, path.name

    def _done(self) -> None:
        self.images.append((_copy(self._seen), _copy(self._safe)))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        seen, _, name = self._at(path)
        seen.setdefault(name, {})
        self._done()

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> None:
        super().write(path, chunks)
        content = path.read_bytes()
        seen, _, name = self._at(path)
        for length in (len(content) // 2, len(content)):
            seen[name] = content[:length]
            self._done()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        seen, _, name = self._at(source)
        seen[target.name] = seen.pop(name)
        self._done()

    def sync_folder(self, path: Path) -> None:
        if self.without == "sync_folder":
            return None
        if path == self.root:
            seen, safe = self._seen, self._safe
        else:
            outer, outer_safe, name = self._at(path)
            inner = outer[name]
            assert isinstance(inner, dict)
            below = outer_safe.get(name) if outer_safe is not None else None
            if not isinstance(below, dict):
                return self._done()  # the folder itself may vanish
            seen, safe = inner, below
        for name in [*safe]:
            if name not in seen:
                del safe[name]
        for name, entry in seen.items():
            safe[name] = safe.get(name, {}) if isinstance(entry, dict) else entry
        return self._done()

    def claim(self, path: Path) -> bool:
        claimed = super().claim(path)
        if claimed:
            seen, _, name = self._at(path)
            seen[name] = b""
            self._done()
        return claimed

    def remove(self, path: Path) -> None:
        super().remove(path)
        seen, _, name = self._at(path)
        seen.pop(name, None)
        self._done()

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        seen, _, name = self._at(path)
        seen.pop(name, None)
        self._done()


def _copy(folder: Folder) -> Folder:
    return {name: _copy(entry) if isinstance(entry, dict) else entry for name, entry in folder.items()}


def mixture(seen: Folder, safe: Folder, chance: random.Random) -> Folder:
    """What a disk may hold after a loss of power: of each entry the old or the new state."""
    found: Folder = {}
    for name in sorted(seen.keys() | safe.keys()):
        new, old = seen.get(name), safe.get(name)
        if isinstance(new, dict) and isinstance(old, dict):
            found[name] = mixture(new, old, chance)
            continue
        entry = chance.choice([new, old])
        if isinstance(entry, dict):
            entry = mixture(entry, {}, chance) if entry is new else _copy(entry)
        if entry is not None:
            found[name] = entry
    return found


def put(image: Folder, path: Path) -> None:
    """Makes an image real."""
    path.mkdir()
    for name, entry in image.items():
        if isinstance(entry, dict):
            put(entry, path / name)
        else:
            (path / name).write_bytes(entry)
