"""Writes one replica's parts on a separate thread, and completes a checkpoint if it is the last one to finish.

There is no leader. All replicas write into one folder; the first replica to claim a committed file writes it, so the
work spreads by itself and no file is written twice. A replica writes its *note* after everything it has claimed. A
replica that then finds as many notes as the outer step had members checks that they fit together and writes the
manifest; two replicas that do so write the same one. If a replica dies before its note is written, the checkpoint stays
incomplete for good and the previous one remains valid; the survivors make the next one.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from ftopt.checkpoint.disk import Disk, make_folders, store
from ftopt.checkpoint.manifest import NAME, BadCheckpoint, File, Manifest, label, order, read_manifest
from ftopt.checkpoint.part import FIXED, Part, file_bytes, note_of, read_note
from ftopt.checkpoint.reader import of_other_jobs, start_of, whole
from ftopt.checkpoint.writing_process import Mark, WritingProcess
from ftopt.common.printable import printable
from ftopt.common.tree import flatten
from ftopt.errors import UserError, thread_failed

_log = logging.getLogger(__name__)
_CLAIM = ".claim"
OnMessage = Callable[[str, Mapping[str, Any]], None]
"""Emits an event by name and data. ``checkpoint``: a checkpoint is complete. ``checkpoint_failed``: why it will not
be."""


class Writer:
    """One replica's writer.

    Args:
        folder: the folder of the job's checkpoints, the same for all replicas.
        keep: number of complete checkpoints to keep.
        emit: called with each checkpoint's outcome, on the writer's thread.

    Attributes:
        folder: may change before the first part.
        mark: of this process, in that folder.
        lacks: the newest checkpoint without this replica's part, and the reason; None: the last one has it, or there
            was none. Valid once `wait` has returned True.
    """

    def __init__(
        self, folder: Path, *, keep: int, emit: OnMessage, replica: str = "", disk: Disk | None = None
    ) -> None:
        self.folder = folder
        self._replica, self.mark = replica, Mark(replica)
        self._keep = keep
        self._emit = emit
        self._disk = disk or Disk()
        self._parts: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._failures = 0  # since the last part that was written
        self.lacks: tuple[str, str] | None = None
        self._given_up: list[Path] = []  # checkpoints that lack this replica's part for good
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._others = False  # the log names another job

    def newest(self) -> str:
        """The newest checkpoint on disk, for a message."""
        there = whole(self.folder)
        if not there:
            return f"there is no complete checkpoint in {self.folder}"
        return f"the newest complete checkpoint is {there[-1]}"

    def name_other(self, other: WritingProcess | None) -> None:
        """Warns of another process that writes this replica's checkpoints."""
        if other is not None:
            _log.warning(
                "replica %s: process %d on %s also writes this replica's checkpoints of this job into %s, since %s: "
                "unless both have the same coordinator, which lets one of them wait, the job goes on twice, and each "
                "removes the other's checkpoints; end one of the two, or give it another folder",
                self._replica, other.pid, printable(other.host, 80), self.folder, printable(other.since, 40),
            )  # fmt: skip

    def name_other_jobs(self, start: str) -> None:
        """Warns once of another job's checkpoints in the folder: they stay, and each job removes only its own.
        ``start``: of this job, see `start_of`."""
        if not self._others and (others := of_other_jobs(self.folder, start)):
            self._others = True
            _log.warning(
                "replica %s: %s also holds checkpoints of another job, or of this one before it began anew, the newest "
                "%s; they stay, and this job adds its own; to go on from that one, end the job and resume it",
                self._replica, self.folder, others[-1],
            )  # fmt: skip

    def check(self) -> None:
        """Raises a FtoptError if the writer's thread has failed since the last call, with that error as its cause."""
        error, self._error = self._error, None
        if error is not None:
            raise thread_failed(self._replica, "the checkpoint thread", error)

    def idle(self, version: int, attempt: int) -> bool:
        """Whether a part can be written now. If the last one is still being written, reports that checkpoint as
        failed."""
        if self._idle.is_set():
            return True
        reason = "the previous one is still being written; checkpoints are too frequent for the disk"
        self._report_failed(label(version, attempt), reason)  # the final checkpoint waits, so it is saved nevertheless
        return False

    def begin(self, part: Part) -> None:
        """Starts to write a part; only while `idle`. Its tensors must not change until the writer is idle again."""
        self._idle.clear()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ftopt-checkpoint", daemon=True)
            self._thread.start()
        self._parts.put(part)

    def wait(self, timeout_s: float) -> bool:
        """Waits until the part is written or has failed; returns False on time-out."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Waits for the part being written, then ends the thread; a later part starts another one. Returns False on
        time-out."""
        done = self.wait(timeout_s)
        if self._thread is not None:
            self._parts.put(None)
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
        return done

    def write(self, part: Part) -> None:
        """Writes a part, and completes the checkpoint if it can, on the caller's thread. Errors that a disk or another
        replica can cause are reported; all others are raised, too."""
        folder = self.folder / part.label
        try:
            for path in self._given_up:  # they can never be complete, and take the space that this part needs
                _remove(self._disk, path)
            self._given_up = [*(path for path in self._given_up if path.exists()), folder]
            _write(self._disk, folder, part)
            self._given_up.pop()
            manifest = _complete(self._disk, folder, part)
            self._failures, self.lacks = 0, None
            if manifest is not None:
                _prune(self._disk, self.folder, self._keep, folder)
                size = sum(file.bytes for file in manifest.files.values())
                self._emit("checkpoint", {"path": str(folder), "bytes": size})
        except (OSError, UserError) as error:
            # A missing folder was removed when a newer checkpoint became complete.
            if not isinstance(error, FileNotFoundError) or folder.exists():
                self.failed(part.label, str(error))
        except BaseException as error:
            self.failed(part.label, repr(error))
            raise

    def _work(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                self.write(part)
                self.name_other(self.mark.leave(self.folder, part.start))
                self.name_other_jobs(part.start)  # another one may have begun at the same time
            except BaseException as error:
                _log.error("the checkpoint %s", part.label, exc_info=error)
                self._error = error
            del part
            self._idle.set()

    def failed(self, name: str, reason: str) -> None:
        """Reports the checkpoint of this `label` as one that lacks this replica's part."""
        self.lacks = name, reason
        self._report_failed(name, reason)

    def _report_failed(self, name: str, reason: str) -> None:
        self._emit("checkpoint_failed", {"path": str(self.folder / name), "reason": reason})
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:  # the first, second, fourth, ... in a row
            again = f" ({self._failures} have failed in a row)" if self._failures > 1 else ""
            _log.warning("no checkpoint %s%s: %s; training goes on, and %s", name, again, reason, self.newest())


def _write(disk: Disk, folder: Path, part: Part) -> None:
    """Writes this replica's files, the note last."""
    make_folders(disk, folder)
    tensors: dict[str, Tensor] = {}
    own = flatten(part.own, tensors)
    files: dict[str, File] = {}
    claims: list[Path] = []
    try:
        committed = [(c.name, c.tensors) for c in part.committed]
        turn = sum(part.stem.encode()) % len(committed)  # replicas begin with different files
        for name, what in [*committed[turn:], *committed[:turn], *([(FIXED, part.fixed)] if part.fixed else [])]:
            claim = folder / f".{name}{_CLAIM}"
            if disk.claim(claim):
                claims.append(claim)
                if (folder / name).exists():  # the checkpoint is complete: its claims are gone
                    continue
                files[name] = File(*store(disk, folder / name, file_bytes(what)))
        name = f"{part.stem}.safetensors"
        files[name] = File(*store(disk, folder / name, file_bytes(tensors)))
        disk.sync_folder(folder)
        store(disk, folder / f"{part.stem}.json", [note_of(part, files, own).encode()])
        disk.sync_folder(folder)
    except BaseException:
        for path in [*(folder / name for name in files), *claims]:
            with suppress(OSError):
                disk.remove(path)
        raise


def _complete(disk: Disk, folder: Path, part: Part) -> Manifest | None:
    """Completes the checkpoint if this was the last missing part."""
    paths = sorted(folder.glob("replica-*.json"))
    if len(paths) < part.members:
        return None
    notes = {path.name: read_note(path) for path in paths}
    if reason := _misfit(list(notes.values())):
        raise BadCheckpoint(folder, reason)
    files = {name: File(*entry) for note in notes.values() for name, entry in note["files"].items()}
    for path in paths:
        raw = path.read_bytes()
        files[path.name] = File(len(raw), hashlib.sha256(raw).hexdigest())
    newest = _newest_of(list(notes.values()))
    if missing := [entry["name"] for entry in newest if entry["name"] not in files]:
        raise BadCheckpoint(folder, f"{missing[0]} was claimed but not written")
    manifest = Manifest(
        version=part.version,
        attempt=part.attempt,
        inner_step=part.inner_step,
        replicas={note["replica"]: name for name, note in notes.items()},
        committed=tuple(entry["name"] for entry in newest),
        files=files,
    )
    store(disk, folder / NAME, [manifest.text().encode()])
    disk.sync_folder(folder)
    for claim in sorted(folder.glob(f".*{_CLAIM}")):
        with suppress(OSError):  # a claim that stays is harmless, and so is dying here
            disk.remove(claim)
    return manifest


def _counted(entry: dict[str, Any], note: dict[str, Any]) -> int:
    """Returns the last step of the note's replica that a committed version counts; 0 if it counts none."""
    life = [note["replica"], note["incarnation"]]
    return max((step for *incarnation_id, step in entry["record"]["counted"] if incarnation_id == life), default=0)


def _newest_of(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns, per fragment, the newest committed version that any replica's parameters are based on."""
    fragments = zip(*(note["committed"] for note in notes), strict=True)
    return [max(entries, key=lambda entry: int(entry["record"]["version"])) for entries in fragments]


def _misfit(notes: list[dict[str, Any]]) -> str:
    """Returns why the parts do not fit together, "" if they do.

    Replicas are saved at different steps. If the newest version counts steps of a replica (COUNT), that replica's part
    must contain them as counted, or hold their contribution.
    """
    newest = _newest_of(notes)
    for note in notes:
        for entry, version, offered in zip(newest, note["committed"], note["offered"], strict=True):
            counted, own = _counted(entry, note), _counted(version, note)
            if entry["record"]["version"] == version["record"]["version"] and entry["digest"] != version["digest"]:
                return f"fragment {entry['record']['fragment']}: parts of two histories of the same version"
            if counted not in (own, offered):
                return (
                    f"fragment {entry['record']['fragment']}: a part counts the steps of {note['replica']} up to "
                    f"{counted}, and its own part was taken before them"
                )
    return ""


def _prune(disk: Disk, folder: Path, keep: int, done: Path) -> None:
    """Removes all but ``done`` and the newest complete checkpoints of its start of the job, and older incomplete ones.
    After a rollback, the most advanced checkpoint stays until the job has passed it: replicas may have finished with
    it, and left. If the newest all hold one replica alone, such as one that ended after the others, the newest with
    several stays."""
    found = sorted((age, path) for path in folder.iterdir() if (age := order(path.name)) is not None)
    complete = [(age, path) for age, path in found if (path / NAME).exists() and start_of(path) == start_of(done)]
    own = {path for _, path in complete}
    others = [path for path in whole(folder) if path not in own]
    kept = {age for age, _ in complete[-keep:]} | {max((age for age, _ in complete), key=lambda age: (age[1], -age[0]))}
    if not any(_of_several(path) for _, path in complete[-keep:]):
        kept |= set(islice((age for age, path in reversed(complete[:-keep]) if _of_several(path)), 1))
    for age, path in found:
        ours = path in own or not others  # whose an incomplete one is, is not known
        if age < complete[-1][0] and age not in kept and ours and path != done:
            _remove(disk, path)
    disk.sync_folder(folder)


def _of_several(path: Path) -> bool:
    """Whether a complete checkpoint holds more than one replica."""
    try:
        return len(read_manifest(path / NAME).replicas) > 1
    except BadCheckpoint:
        return False


def _remove(disk: Disk, path: Path) -> None:
    """Removes a checkpoint, the manifest first: without it, the remaining files are not a checkpoint."""
    with suppress(OSError):  # another replica removes it or still writes to it; the next removal gets the rest
        disk.remove(path / NAME)
        disk.sync_folder(path)
        for file in list(path.iterdir()):
            disk.remove(file)
        disk.remove_folder(path)
