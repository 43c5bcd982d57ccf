"""Messages of a replica to its coordinator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from ftopt.sync.protocol import limits
from ftopt.sync.protocol.limits import (
    Done,
    FragmentIndex,
    Loss,
    Name,
    Number,
    ShortText,
    Step,
    UnitRanges,
    Wants,
    Word,
    at_most,
    within,
)
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.protocol.values import (
    NONE_FORGOTTEN,
    Contribution,
    Counts,
    Horizon,
    IncarnationId,
    Position,
    PreparedAttempt,
)

_Setting = Annotated[int | float | str | None, at_most(limits.MAX_TEXT)]
_Reading = Annotated[float, within(limits.MAX_READING, -limits.MAX_READING)]
_Key = Annotated[str, at_most(limits.MAX_KEY)]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of each connection: everything the sender is, holds and knows.

    ``incarnation`` 0: a newcomer. ``inner_step``: the committed one of its state. With a ledger (``samples``):
    ``claim`` is all units that the sender holds and has not seen committed (TOTAL), ``done`` belongs to the state of
    fragment 0, ``cursor`` is the highest that it has received, ``wants`` the number of units that it wants to hold.
    With a global batch: ``units`` is the sender's share of the plan ``plan`` for the next version. ``adopted_by``: of a
    sender that resumes from a checkpoint: replica that does not come back -> replica that takes over its pending units
    (ADOPT). ``arithmetic``: digest of what its machine computes in a probe, where replicas should stay equal; ""
    elsewhere. ``checkpoint``: of a sender without a state, fragment 0's position that it can restore; the chain is ""
    if it cannot be read. ``resumed``: its incarnation, if any, and ``gone`` are from a checkpoint, and it has not been
    let in yet. ``standby``: it is a spare that was not promoted as far as it knows (SPARE). ``unplaced``: its state is
    from a checkpoint, and it begins to train when it knows the job's position in each fragment. ``replaces``: its
    launcher knows that the former process under its id has ended. ``horizon``: the last one told; goes with ``roster``.
    """

    protocol: int
    job: Name
    replica: Name
    incarnation: Step
    rank: int
    size: Annotated[int, within(limits.MAX_RANKS, 1)]
    epoch: Annotated[int, within(limits.MAX_EPOCH)]
    address: Word
    initial: Word
    fragments: Annotated[int, within(limits.MAX_FRAGMENTS, 1)]
    lines: Annotated[dict[Word, ShortText], at_most(limits.MAX_LINES)]
    settings: Annotated[dict[Word, _Setting], at_most(limits.MAX_LINES)]
    positions: Annotated[tuple[Position, ...], limits.once_a_fragment]
    contributions: Annotated[tuple[Contribution, ...], limits.once_a_fragment]
    prepared: Annotated[tuple[PreparedAttempt, ...], limits.once_a_fragment]
    roster: Annotated[tuple[IncarnationId, ...], at_most(limits.MAX_REPLICAS)]
    gone: Annotated[tuple[IncarnationId, ...], at_most(limits.MAX_GONE)]
    inner_step: Step
    samples: Samples | None = None
    claim: UnitRanges = ()
    done: Done = ()
    cursor: Annotated[int, within(limits.MAX_UNIT)] = 0
    wants: Wants = 0
    plan: Number = 0
    units: UnitRanges = ()
    checkpoint: Position | None = None
    adopted_by: Annotated[tuple[tuple[Name, Name], ...], at_most(limits.MAX_REPLICAS)] = ()
    arithmetic: Word = ""
    resumed: bool = False
    standby: bool = False
    unplaced: bool = False
    replaces: bool = False
    horizon: Horizon = NONE_FORGOTTEN

    @property
    def was_let_in(self) -> bool:
        """Whether this process has been a member."""
        return self.incarnation > 0 and not self.resumed


@dataclass(frozen=True, slots=True)
class Propose:
    """A proposal. ``now``: its trigger wants the round at once, so the others are called in. ``wants``: number of units
    to hold after the commit."""

    contribution: Contribution
    now: bool = False
    wants: Wants = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The sender holds all that applying needs. ``digest``: the agreed one. ``live``: the digest of its model and inner
    state, if this version compares them, else "". ``peak``: the largest absolute value of what is compared, for a tie;
    0 if none was looked for."""

    fragment: FragmentIndex
    attempt: Number
    digest: Word
    live: Word = ""
    peak: Annotated[float, within(math.inf)] = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The reduction of an attempt failed here, or ended after its attempt: the sender's reducer is free.

    ``peer``: the member that could not be reached, "" when unknown. ``cause``: ``values`` if the result is implausible;
    ``state`` if the sender's state is damaged, so that it fetches the state again; else "".
    """

    fragment: FragmentIndex
    attempt: Number
    reason: ShortText
    peer: Annotated[str, at_most(limits.MAX_NAME)]
    cause: Word = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The few numbers that a trigger needs of one fragment, from a replica that holds ``version``."""

    fragment: FragmentIndex
    version: Step
    values: Annotated[tuple[_Reading, ...], at_most(limits.MAX_VALUES)]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The heartbeat. ``readings``: at most one per fragment; each is answered by `Means`. ``left``: with a global
    batch, the number of units of the sender's share of ``plan`` not computed yet. ``loss``: the mean over its last
    steps, a word when it is not finite; None when unknown. ``counts``: of its life so far; None: unchanged."""

    state: Word
    inner_step: Step
    step_s: Annotated[float, within(limits.MAX_STEP_S)]
    readings: Annotated[tuple[Reading, ...], limits.once_a_fragment] = ()
    plan: Number = 0
    left: Wants = 0
    loss: Loss = None
    counts: Counts | None = None


@dataclass(frozen=True, slots=True)
class Holds:
    """A fetch is complete: the sender now holds this state."""

    position: Position


@dataclass(frozen=True, slots=True)
class Lacks:
    """A fetch failed at every named source; asks for others."""

    fragment: FragmentIndex


@dataclass(frozen=True, slots=True)
class Ask:
    """The sender will soon have used all its units, and wants ``units`` more. Answered by `Grant`."""

    units: Wants


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy of the sender between two inner steps can be fetched from it, the ``serial``-th of its life.

    ``versions``: of the committed state that it was based on, one per fragment.
    """

    serial: Number
    versions: Annotated[tuple[Step, ...], at_most(limits.MAX_FRAGMENTS)]


@dataclass(frozen=True, slots=True)
class Keeps:
    """The sender has fetched the ``serial``-th copy of ``incarnation_id``, and keeps it. Answers `Keep`."""

    incarnation_id: IncarnationId
    serial: Number


@dataclass(frozen=True, slots=True)
class KeepFailed:
    """The sender could not fetch that copy, or it was damaged; it keeps the one before, if any. Answers `Keep`."""

    incarnation_id: IncarnationId
    serial: Number
    reason: ShortText


@dataclass(frozen=True, slots=True)
class Finished:
    """The sender has come to the end of its training: its leaving is no loss (LOSS), and a job whose replicas have left
    after this has ended (END)."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """``replica`` wants the loops of all replicas to end. Each replica that knows repeats it on each connection."""

    reason: ShortText
    replica: Name


@dataclass(frozen=True, slots=True)
class AtEnd:
    """The sender's loop has ended, and it has contributed its steps: it waits, ``wait_s`` at most, for `End`.

    ``inner_step``: the job's inner step at which its loop has ended. ``but``: replicas that it does not wait for, since
    their loops are on the sender's own thread.
    """

    inner_step: Step
    wait_s: Annotated[float, within(limits.MAX_OVERLAP_S)]
    but: Annotated[tuple[Name, ...], at_most(limits.MAX_REPLICAS)] = ()


@dataclass(frozen=True, slots=True)
class Leaving:
    """The sender proposes its remaining steps, then leaves."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The sender leaves in good order. ``early``: its part of the job is not done, so a spare takes its place (SPARE).
    ``reason``: the error that has ended its loop, if any."""

    early: bool = False
    reason: ShortText = ""


@dataclass(frozen=True, slots=True)
class StoreSet:
    """Sets a rendezvous key of a process group; ``value`` is base64."""

    key: _Key
    value: Annotated[str, at_most(limits.MAX_VALUE), limits.base64]


@dataclass(frozen=True, slots=True)
class StoreGet:
    """Asks for a rendezvous key; answered by `StoreValue` once it is set."""

    key: _Key


FromReplica = (
    Hello | Propose | Prepared | Failed | Heartbeat | Holds | Lacks | Ask | Copied | Keeps | KeepFailed | Finished
    | StopJob | AtEnd | Leaving | Bye | StoreSet | StoreGet
)  # fmt: skip
