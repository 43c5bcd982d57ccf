"""Operations on a file system, one per method, so that tests can crash at any of them.

After a crash or a power loss a file system may hold any prefix of a file that was not synced, and any subset of the
changes to a folder that was not synced. So a file appears under its name only when its bytes are safe (write, fsync,
rename), and a file that names it is written only when its folder entry is safe (fsync of the folder).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ftopt.common.paths import new_file


class Disk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder unless it exists; its parent must exist."""
        path.mkdir(exist_ok=True)

    def write(self, path: Path, chunks: Iterable[memoryview | bytes]) -> None:
        """Writes a new file and syncs it. After an OSError, the content of ``path`` must not be trusted."""
        handle = new_file(path)
        try:
            for chunk in chunks:
                left = memoryview(chunk)
                while left:
                    left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Renames a file, replacing the target if it exists."""
        source.replace(target)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def claim(self, path: Path) -> bool:
        """Makes an empty file; returns False if it exists. Exactly one claimant gets True."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        except FileExistsError:
            return False
        return True

    def remove(self, path: Path) -> None:
        """Removes a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()


def make_folders(disk: Disk, path: Path) -> None:
    """Makes a folder and its parents, each of them durable."""
    for each in [*reversed(path.parents), path]:
        if not each.is_dir():
            disk.make_folder(each)
            disk.sync_folder(each.parent)


def store(disk: Disk, path: Path, chunks: Iterable[memoryview | bytes]) -> tuple[int, str]:
    """Writes a file atomically under its name. Its entry is durable once the folder is synced.

    Returns:
        Its size in bytes, and its SHA-256 (hex).
    """
    sha, size = hashlib.sha256(), 0

    def passing() -> Iterable[memoryview | bytes]:
        nonlocal size
        for chunk in chunks:
            sha.update(chunk)
            size += len(chunk)
            yield chunk

    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.draft")
    try:
        disk.write(draft, passing())
        disk.rename(draft, path)
    except OSError as error:
        with suppress(OSError):
            disk.remove(draft)
        error.filename = str(path)  # a failed write names no file
        raise
    return size, sha.hexdigest()
