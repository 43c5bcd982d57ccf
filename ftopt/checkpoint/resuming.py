"""Resuming a replica: from its own part of a checkpoint, the parts of missing replicas, and the newest state.

The loop's objects are restored when the loop includes them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftopt.checkpoint.manifest import BadCheckpoint
from ftopt.checkpoint.part import SavedVersion
from ftopt.checkpoint.reader import Checkpoint, find, of_other_jobs, sound, start_of, whole, with_offer
from ftopt.errors import UserError
from ftopt.optimizer.core import Core
from ftopt.optimizer.saved.capture import CommittedVersion, SavedReplica
from ftopt.optimizer.saved.loop import Loop, SavedLoop, Stateful
from ftopt.optimizer.saved.restore import Resume, newcomer
from ftopt.step.inner_state import restore_groups
from ftopt.sync.group import Held, Position
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.resumed import another_life, apart, given_up, known_to, returning
from ftopt.sync.protocol.wire import from_plain

_log = logging.getLogger(__name__)
_Make = Callable[[Checkpoint], tuple[Resume, Mapping[str, Any]]]
"""Makes the `Resume` of a replica from a checkpoint, and its own part of the checkpoint."""


class Resuming:
    """Reads a replica's `Resume` from a checkpoint, and restores its loop. See
    `ftopt.optimizer.saved.restore.Fallback`. ``folder``: of the job's checkpoints."""

    def __init__(self, folder: Path, core: Core, loop: Loop) -> None:
        self.folder = folder
        self._joining, self._inner, self._loop = core.joining, core.inner, loop
        self._replica, self._place = "" if core.group is None else core.group.replica, core.saving.place
        self._resumed: SavedReplica | None = None  # until its loop is restored
        self._resumed_from, self._was_there = folder, False
        """The checkpoint; whether this replica is in it."""
        self._saved_loop = SavedLoop()

    def resume(self, path: Path | None, replicas: Sequence[str] | None) -> Path | None:
        """See `Checkpoints.resume`. Returns the checkpoint."""
        if path is None and not whole(self.folder):
            return None
        mine = self._replica
        make = lambda checkpoint: _resume_of(checkpoint, mine, replicas)  # noqa: E731
        if path is None:
            checkpoint, resume = self._read_newest(make)
        else:
            checkpoint = find(path)
            resume = self._read(checkpoint, make)
        self._joining.go_on_from(resume)
        if path is None:  # else the caller knows it
            others = of_other_jobs(self.folder, start_of(checkpoint.path))
            also = f"; the folder also holds those of another job, the newest {others[-1]}" if others else ""
            text = (
                "replica %s: resuming from %s: version %d%s; if other replicas still train, the model comes from them"
            )
            _log.warning(text, mine, checkpoint.path, checkpoint.manifest.version, also)
        return checkpoint.path

    def newest(self) -> Position | None:
        if not (there := whole(self.folder)):
            return None
        try:
            return from_plain(m.Record, dict(sound(there[-1]).record)).position
        except (UserError, KeyError, m.MessageError):
            return Position(0, 0, "")

    def go_on(self, incarnation: int) -> Resume:
        incarnation_id = self._replica, incarnation
        checkpoint, resume = self._read_newest(lambda found: _as_another_life(found, incarnation_id))
        if not self._place[0]:
            text = "%s: no connected replica holds the job's state; resuming from %s"
            _log.warning(text, self._replica, checkpoint.path)
        return resume

    def _read_newest(self, make: _Make) -> tuple[Checkpoint, Resume]:
        """Retries, since replicas that train on may remove the checkpoint being read when newer ones are complete."""
        while True:
            before = whole(self.folder)
            try:
                checkpoint = sound(before[-1]) if before else find(self.folder)
                return checkpoint, self._read(checkpoint, make)
            except BadCheckpoint:
                there = whole(self.folder)
                if not there or before[-1:] == [] or before[-1] in there:
                    raise

    def _read(self, checkpoint: Checkpoint, make: _Make) -> Resume:
        try:
            resume, own = make(checkpoint)
        except BadCheckpoint as bad:
            raise with_offer(bad, checkpoint.path) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = f"holds no replicas ({type(error).__name__}: {error})"
            raise with_offer(BadCheckpoint(checkpoint.path, reason), checkpoint.path) from error
        self._resumed, self._resumed_from = resume.saved, checkpoint.path
        self._saved_loop = SavedLoop(own["loops"]) if own else SavedLoop()
        self._was_there = bool(own)
        rank, size = self._place
        try:
            self._loop.restore_extra(self._saved_loop, rank, size)
        except LookupError as error:
            _log.warning(
                "replica %s: %s %s: the modules keep their extra state as it is",
                self._replica, checkpoint.path, error.args[0],
            )  # fmt: skip
        return resume

    def restore_loop(self, state: Mapping[str, Stateful]) -> None:
        """Restores the included objects from the checkpoint at the first call after a resume."""
        if (resumed := self._resumed) is None:
            return
        saved, replica, (rank, size) = self._saved_loop, self._replica, self._place
        there = saved.names()
        if state and not there:
            why = "had included nothing" if self._was_there else "was not there"
            _log.log(
                logging.WARNING if self._was_there else logging.INFO,
                "replica %s: %s has no state of this replica's loop to restore (%s): it %s; optimizer.start_step says "
                "where the job is",
                replica, self._resumed_from, ", ".join(state), why,
            )  # fmt: skip
        for name in state if there else ():
            if name not in there:
                raise BadCheckpoint(self._resumed_from, f"holds no state of {name!r}; it holds {', '.join(there)}")
            try:
                self._loop.restore(name, saved.of(name, rank, size))
            except LookupError as error:
                advice = f"start replica {replica} with as many ranks as it had, or leave {name!r} out of include()"
                raise BadCheckpoint(self._resumed_from, f"{error.args[0]}; {advice}") from None
        if resumed.own["inner"] is not None and saved.states[0]:
            restore_groups(self._inner, resumed.own["inner"])
        if not self._loop.restore_generators(saved, rank, size) and rank == 0:
            _log.warning(
                "replica %s has %d ranks, and had %d in the checkpoint: only rank 0's random number generators go on "
                "from there; seed the others' as at the start",
                replica, size, len(saved.states),
            )  # fmt: skip
        self._resumed, self._saved_loop = None, SavedLoop()


def _resume_of(checkpoint: Checkpoint, mine: str, replicas: Sequence[str] | None) -> tuple[Resume, Mapping[str, Any]]:
    """Returns the `Resume` of replica ``mine`` when ``replicas`` are present, and its loop's state."""
    newest = tuple(_version(checkpoint, version) for version in checkpoint.newest)
    there = [_held(checkpoint, replica) for replica in checkpoint.replicas]
    records = [version.record for version in newest]
    present = {mine, *(checkpoint.replicas if replicas is None else replicas)}
    if replicas is None and checkpoint.replicas == [mine]:
        present |= apart(there, records).keys()
    back = known_to(mine, returning(there, present, records), there, records)
    missing = [replica for replica, adopter in sorted(back.adopted_by.items()) if adopter == mine]
    void = given_up(there)
    lives = {held.replica: held for held in there if held.incarnation_id not in void}
    held = dataclasses.replace(
        lives.get(mine, Held(mine, 0, 0, samples=there[0].samples)),
        incarnation=back.incarnation_ids[mine], epoch=back.epoch, gone=back.gone, roster=back.incarnation_ids,
        adopted_by=back.adopted_by, cursor=back.cursor, queue=back.queues.get(mine, ()),
        forgotten=back.forgotten,
    )  # fmt: skip
    own = {replica: checkpoint.own(replica) for replica in {*missing, mine if mine in lives else there[0].replica}}
    saved = {
        life.replica: _saved(checkpoint, held if life.replica == mine else life, own[life.replica]["replica"])
        for life in there
        if life.replica in own
    }
    me = saved[mine] if mine in lives else newcomer(held, newest, saved[there[0].replica])
    resume = _resume(checkpoint, me, tuple(saved[replica] for replica in missing), newest)
    return resume, own[mine] if mine in lives else {}


def _as_another_life(checkpoint: Checkpoint, incarnation_id: m.IncarnationId) -> tuple[Resume, Mapping[str, Any]]:
    """Returns the `Resume` of a replica whose former incarnation is gone, and that incarnation's loop state. It starts
    from the newest versions, with the inner state and the pending work of the former incarnation."""
    newest = tuple(_version(checkpoint, version) for version in checkpoint.newest)
    there = [_held(checkpoint, replica) for replica in checkpoint.replicas]
    held = another_life(incarnation_id, there, [version.record for version in newest])
    mine = held.replica
    was = mine if mine in checkpoint.replicas else checkpoint.replicas[0]
    own, life = checkpoint.own(was), _held(checkpoint, was)
    former = _saved(checkpoint, life, own["replica"])
    me = newcomer(held, newest, former)
    if was != mine:
        return _resume(checkpoint, me, (), newest), {}
    me = dataclasses.replace(me, own=me.own | {name: former.own[name] for name in ("inner", "buffers", "model")})
    adopted = () if life.incarnation_id in given_up(there) else (former,)
    return _resume(checkpoint, me, adopted, newest), own


def _resume(
    checkpoint: Checkpoint, me: SavedReplica, adopted: tuple[SavedReplica, ...], newest: tuple[CommittedVersion, ...]
) -> Resume:
    lines = checkpoint.notes[checkpoint.replicas[0]]["lines"]

    def damaged(reason: str) -> BadCheckpoint:
        return with_offer(BadCheckpoint(checkpoint.path, reason), checkpoint.path)

    def foreign(reason: str) -> BadCheckpoint:
        advice = "resume it with the settings it was written with, or start a new job in another folder"
        return BadCheckpoint(checkpoint.path, f"{reason}; {advice}")

    return Resume(me, adopted, newest, lines, f"checkpoint {checkpoint.path}", damaged, foreign)


def _held(checkpoint: Checkpoint, replica: str) -> Held:
    try:
        return from_plain(Held, checkpoint.notes[replica]["membership"])
    except m.MessageError as error:
        raise BadCheckpoint(checkpoint.path, f"holds no valid membership of {replica}: {error}") from None


def _saved(checkpoint: Checkpoint, held: Held, own: dict[str, Any]) -> SavedReplica:
    committed = tuple(_version(checkpoint, version) for version in checkpoint.committed(held.replica))
    try:
        under_way = [part["snapshot"] for part in own["fragments"] if part["snapshot"] is not None]
        contributions = tuple(m.Contribution(**snapshot["contribution"]) for snapshot in under_way)
    except (KeyError, TypeError) as error:
        raise BadCheckpoint(checkpoint.path, f"holds no valid contribution of {held.replica}: {error!r}") from None
    records = tuple(version.record for version in committed)
    return SavedReplica(dataclasses.replace(held, records=records, contributions=contributions), committed, own)


def _version(checkpoint: Checkpoint, version: SavedVersion) -> CommittedVersion:
    try:
        return CommittedVersion(from_plain(m.Record, dict(version.record)), version.digest, version.tensors)
    except m.MessageError as error:
        raise BadCheckpoint(checkpoint.path, f"holds an invalid record: {error}") from None
