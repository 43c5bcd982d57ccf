"""The effects that the replica machine asks of its shell, in order."""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges

COUNTED_ELSEWHERE = (
    "the job has counted steps of this replica that this process has not taken: it goes on from the job's state, which "
    "contains them (usual after a kill: the former process went on after the checkpoint that this one resumes from; "
    "otherwise another process has the same id)"
)
COUNTED_AND_GONE = "the job goes on without steps of this replica that were counted: nobody holds that state any more"
"""Reasons of `Reset`."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the coordinator."""

    message: m.FromReplica


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Reduce ``contribution`` among ``members``; answer with `Replica.reduced` or `Replica.reduce_failed`."""

    quorum: m.Quorum
    members: tuple[m.IncarnationId, ...]
    contribution: m.Contribution


@dataclass(frozen=True, slots=True)
class StopReduce:
    """Stop reducing, since the attempt is over; its result may be dropped."""

    fragment: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """Commit: the result prepared in ``attempt`` is now the committed state, with ``record``."""

    attempt: int
    record: m.Record


@dataclass(frozen=True, slots=True)
class Excluded:
    """A round has been decided without this replica's contribution, which was out of line: its steps stay pending.
    ``void``: nobody's contribution was in line."""

    fragment: int
    version: int
    reason: str
    void: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the state at ``position`` from one of ``sources``, or `FragmentState.wanted` if that has changed.

    One fetch at a time per fragment. Ask `Replica.install` before installing the state, and answer with
    `Replica.fetched`; if it is refused or no source has it, with `Replica.fetch_failed`.
    """

    position: m.Position
    sources: tuple[str, ...]
    heal: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """Cold start: this replica's state is committed as ``record``. ``reset``: pending work on it is void. ``again``: it
    was committed as another version before."""

    record: m.Record
    reset: bool
    again: bool


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint:
    """Restore the newest checkpoint, pass it to `Replica.restore`, and connect again."""


@dataclass(frozen=True, slots=True)
class Settled:
    """All units in the held committed state; ``own``: those of this replica's last counted contribution."""

    done: Ranges
    own: Ranges


@dataclass(frozen=True, slots=True)
class Reset:
    """This incarnation is gone, and pending work is void. Hang up, and connect again as a newcomer."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The coordinator refuses this replica for good; the user must act."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop the connection and try again later (EPOCH: the coordinator is of an earlier epoch)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A text for the user, about a wait."""

    text: str


ReplicaEffect = (
    Send | StartReduce | StopReduce | CommitPrepared | Excluded | Fetch | Begin | RestoreCheckpoint | Settled | Reset
    | GiveUp | Disconnect | Notice | m.Speed | m.Grant | m.Plan | m.Keep | m.Kept | m.Inherit | m.JobFailed
    | m.Promote | m.JobStopped | m.End | m.Over
)  # fmt: skip
"""The effects, including messages that are passed on. `m.Speed`: log it. `m.Grant`: units to use. `m.Plan`: this
replica's share of the newest plan. `m.Keep`: fetch this copy, keep it, answer with `m.Keeps` or `m.KeepFailed`.
`m.Kept`: the outcome for this replica's own copy. `m.Inherit`: adopt the predecessor's units, to be used first, and its
copy, from which its work is redone. `m.JobFailed`: the job has ended (LOSS). `m.Promote`: begin to train.
`m.JobStopped`: the loop is to end. `m.End`: wait no longer for others' end. `m.Over`: this replica is not needed."""
