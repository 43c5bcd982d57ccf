"""`ReplicaGroup`: all of the outer-sync layer that ``ftopt.optimizer`` uses. `Host`: what the layer needs of it.

The optimizer calls a group from the training thread; the group calls the host from its own threads, which never touch
the model's parameters: the training thread applies a result at a step boundary. Tensors stay with the host. Versions,
chain, ``counted`` and the committed ``inner_step`` are the protocol's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ftopt.events import EmitEvent
from ftopt.sync.island import Island as Island
from ftopt.sync.island import RankLost as RankLost
from ftopt.sync.island import Shards as Shards
from ftopt.sync.island_protocol import Change as Change
from ftopt.sync.island_protocol import Deferred as Deferred
from ftopt.sync.island_protocol import Done as Done
from ftopt.sync.island_protocol import Leader as Leader
from ftopt.sync.island_protocol import Outcome as Outcome
from ftopt.sync.island_protocol import OutOfStep as OutOfStep
from ftopt.sync.island_protocol import Rank as Rank
from ftopt.sync.island_protocol import Stop as Stop
from ftopt.sync.island_protocol import Work as Work
from ftopt.sync.protocol.intervals import Ranges as Ranges
from ftopt.sync.protocol.intervals import union as union
from ftopt.sync.protocol.messages import OWN as OWN
from ftopt.sync.protocol.messages import Contribution as Contribution
from ftopt.sync.protocol.messages import End as End
from ftopt.sync.protocol.messages import JobStopped as JobStopped
from ftopt.sync.protocol.messages import Means as Means
from ftopt.sync.protocol.messages import Position as Position
from ftopt.sync.protocol.messages import Reading as Reading
from ftopt.sync.protocol.messages import Record as Record
from ftopt.sync.protocol.messages import excluded as excluded
from ftopt.sync.protocol.policy import FaultPolicy as FaultPolicy
from ftopt.sync.protocol.replica.resumed import Held as Held
from ftopt.sync.protocol.samples import Samples as Samples
from ftopt.sync.rank_links import RankLinks as RankLinks
from ftopt.sync.replica.global_batch import GlobalBatch as GlobalBatch
from ftopt.sync.replica.replica_copy import AdoptedWork as AdoptedWork
from ftopt.sync.replica.units import Units as Units
from ftopt.transport.interface import Busy as Busy
from ftopt.transport.interface import Carry as Carry
from ftopt.transport.interface import Collective as Collective
from ftopt.transport.interface import Owed as Owed
from ftopt.transport.interface import Summed as Summed
from ftopt.transport.lanes import slices as slices


@dataclass(frozen=True, slots=True)
class AttemptView:
    """One attempt of a round, as a host sees it (step 3).

    Args:
        fragment: the fragment.
        version: the version that it makes.
        attempt: its number, unique in the job.
        rank: this replica's place among the members, which are ranked by id.
        size: number of members.
        weight: this replica's weight.
        total_weight: sum of all members' weights, > 0. A member's share in the mean is ``weight / total_weight``.
        contributors: number of members of positive weight. If 1 and ``weight > 0``, this replica's payload is the
            result.
        inner_step: the fragment's committed inner step before it; fragment 0's is the job's.
    """

    fragment: int
    version: int
    attempt: int
    rank: int
    size: int
    weight: float
    total_weight: float
    contributors: int
    inner_step: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """The position of a fragment's committed state, as the replica that ``counted_step`` belongs to sees it.

    Args:
        fragment: the fragment.
        version: committed outer steps of the fragment.
        inner_step: the job's committed inner step.
        counted_step: COUNT: this incarnation's last inner step that is in the committed state (0: none).
        record: the protocol's part of the committed state; None in a job without a coordinator (tests).
    """

    fragment: int
    version: int
    inner_step: int
    counted_step: int
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a reduction, as members compare it.

    Args:
        digest: hex, of the result and of the scrubbed part of the committed state.
        live: digest of the live model and inner state, in versions that compare them; else "".
        peak: the largest absolute value of the compared result, where it was looked for; breaks a tie.
        metrics: reported in the event ``prepare``; not compared.
    """

    digest: str
    live: str = ""
    peak: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Damaged(Exception):
    """A host's own committed state has changed in memory: the host takes part again once it has fetched the state."""


class Implausible(Exception):
    """A result is not finite, or far out of line: the attempt fails, and the next one uses the same contributions."""


class Foreign(ValueError):
    """A checkpoint is sound, but of another job; the message says what differs."""


def bits(values: Sequence[float]) -> list[int]:
    """Returns fp64 values as a row of int64, to be exchanged exactly."""
    return list(struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values)))


def floats(row: Sequence[int]) -> tuple[float, ...]:
    """The reverse of `bits`."""
    return struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}q", *row))


class Host(Protocol):
    """What a group needs of the optimizer."""

    def standing(self) -> tuple[int, float]:
        """The inner step that the training thread has reached, which changes only while that thread runs, and the
        seconds per step (a moving average). Any thread."""

    def counted(self) -> tuple[int, int, int, int]:
        """The inner steps of this life, how many of them are pending (in no committed state of fragment 0, and not
        dropped), the tokens in them, and the inner step at which the loop ends (0: not known). Any thread."""

    def reduce(self, attempt: AttemptView, collective: Collective) -> Reduced:
        """Steps 3 and 4, on the reducer thread: reduces the frozen contribution, computes and keeps the result.

        Each member has begun to `Collective.tell` the last step of its contribution and its weight (as `bits`).
        Called again for a retry, with the same contribution. Raises what ``collective`` raises, and `Damaged`.
        """

    def commit(self, attempt: AttemptView, committed: Committed) -> None:
        """Step 6, on the network thread: the result of `reduce` for ``attempt`` becomes the committed state. O(1)."""

    def discard(self, fragment: int) -> None:
        """The last attempt of ``fragment`` ended without a commit: its result may be dropped, the contribution not."""

    def exclude(self, fragment: int, reason: str, *, void: bool) -> None:
        """The round has been decided without this replica's contribution, which was out of line. Called before
        `commit`. ``void``: no contribution was in line."""

    def state(self, fragment: int) -> tuple[str, dict[str, Tensor]]:
        """The committed state for a peer that fetches: digest and tensors, immutable from then on. Network thread.
        Raises LookupError if it cannot be served, `Busy` if it cannot be before the training thread is within a call of
        its optimizer."""

    def awaited(self, fragment: int) -> AbstractContextManager[None]:
        """Around repeated calls of `state` that are `Busy`: meanwhile the training thread's next call of the optimizer
        waits for them, a second at most."""

    def begin(self, committed: Committed, *, reset: bool) -> None:
        """Cold start: commits the held state, which had another version before, as this one. Network thread.
        ``reset``: as in `install`."""

    def install(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], *, reset: bool) -> None:
        """Makes a fetched state the committed one. On a worker thread, one call at a time.

        ``tensors`` are the host's from now on. ``reset``: this replica was declared gone; its pending steps are
        dropped when the state is applied.

        Raises:
            ValueError: ``tensors`` do not match ``digest`` or the model; nothing is changed.
        """


@dataclass(frozen=True)
class Fingerprint:
    """What must agree among the replicas of a job: a refusal names the line that differs.

    Args:
        lines: name -> value, e.g. ``{"model": "28 tensors, 135,424 parameters, 9f3c..", "method.sync_every": "50"}``.
            Those whose names begin with `OWN` may differ, which is logged once.
        initial: digest of the initial committed state (version 0); replicas with an equal one need no fetch.
        fragments: number of fragments.
        period: inner steps from one outer step of fragment 0 to the next, at most; None: not known. Need not agree.
        arithmetic: digest of what this machine computes in a probe, where replicas should stay equal. Need not agree:
            a replica with another one logs it, and is made equal again now and then.
        start_step: the job's inner step at version 0, if this replica brings it.
    """

    lines: Mapping[str, str]
    initial: str
    fragments: int = 1
    period: int | None = None
    arithmetic: str = ""
    start_step: int = 0


class ReplicaGroup(Protocol):
    """One replica's membership in a job. Methods are for the training thread unless said otherwise."""

    replica: str
    policy: FaultPolicy
    standby: bool
    """Whether this replica was started as a spare."""
    tells_steps: bool
    """Whether a subscriber wants the events of every inner step (``inner``, ``stepped``); else they are not emitted."""
    tells_gradients: bool
    """Whether a subscriber wants outer gradients measured; else they are not."""
    units: Units | None
    """The units of the job's sample ledger that this replica is granted; None in a job without a ledger."""
    global_batch: GlobalBatch | None
    """This replica's share of a global batch, in place of `units`; None in a job without one."""
    island: Island | None
    """The ranks that this replica consists of; None: one process. Only rank 0's group has the other methods."""
    joins: Callable[[], object] | None
    """Makes this replica join its job, for a loader that is asked for a batch before; set by ``ftopt.wrap``."""
    shards: Shards | None
    """What an island's ranks use for their slices; None: one process."""

    @property
    def incarnation(self) -> int:
        """This process' life, given by the coordinator; 0 before `start`."""

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> Units:
        """Makes the job hand out ``samples``, one batch per unit; call it before `start`. Returns the units, of which
        an inner step uses ``accumulate``.

        Raises:
            ftopt.errors.UserError: it is too late, or the job hands out others.
        """

    def keep_global_batch(self, samples: Samples, *, at_once: int = 1) -> GlobalBatch:
        """Makes the job share out ``samples``, one ``global_batch`` per step; call it before `start`. ``at_once``:
        units of a micro-batch of this replica, at most. Raises as `keep_ledger`."""

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        """Connects and returns once this replica holds a committed state of every fragment (cold start or fetch).

        Raises:
            ftopt.errors.Refused: the coordinator refuses this replica; the message says why and what to do.
            ftopt.errors.Unreachable: no coordinator answers.
            ftopt.errors.JobOver: the job has ended, and this replica was a spare or comes too late.
        """

    def held(self) -> Held:
        """What a checkpoint keeps of this replica's membership, without records and contributions."""

    def resume(self, held: Held) -> None:
        """Before `start`: continues as the incarnation in a checkpoint, as if it had been away meanwhile.

        Raises:
            Foreign: the checkpoint's ledger counts other samples.
        """

    def fall_back(self, newest: Callable[[], Position | None], restore: Callable[[], Held]) -> None:
        """Before `start`: what to do when no replica holds the job's state any more (RESTORE).

        Args:
            newest: returns fragment 0's position in the newest checkpoint at hand; None: there is none. Any thread.
            restore: puts that checkpoint into the host and returns it, with what this replica adopts of a gone one.
                Called when the group's `incarnation` is known, on the thread in `start`, which raises its errors.
        """

    def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Mapping[str, Tensor]) -> None:
        """With ``recover: replay``: offers a copy of this replica at the start of its round, for a neighbour to keep.

        Args:
            versions: of the committed state that it is based on, one per fragment.
            text: plain values, JSON.
            tensors: unchanged until the next copy is offered.
        """

    def check_copies(self, check: Callable[[str, Mapping[str, Tensor]], None]) -> None:
        """Sets ``check``, which raises ValueError for a damaged copy, on a worker thread: it is not kept then."""

    @property
    def copy_settled(self) -> bool:
        """Whether a neighbour has fetched the newest copy, or failed to, so that a new copy interrupts no fetch. Cheap
        enough to call every step."""

    def adopted_work(self) -> AdoptedWork | None:
        """After `start`, once: the work that this replica adopts of its gone predecessor of the same id; None: none."""

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        """Step 1: offers a contribution. At most one per fragment is outstanding. ``now``: the others are called in."""

    def wait(self, fragment: int, *, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> bool:
        """Steps 2 to 5: blocks until the outstanding contribution of ``fragment`` is decided (True).

        Returns False when the replica is to train on meanwhile: it is cut off from the coordinator, or there are too
        few replicas. With ``timeout_s``, also after that time, or when an attempt fails. The contribution then stays
        outstanding and is decided later. Returns True when none is outstanding. Also returns as soon as ``until`` is
        true, which is asked at each change.
        Raises `Refused` when the job has refused this replica meanwhile.
        """

    def outstanding(self, fragment: int) -> bool:
        """Whether a contribution of ``fragment`` is not decided yet. Cheap enough to call every step."""

    def catch_up(self, *, timeout_s: float | None = None) -> bool:
        """Waits while a newer committed state is being fetched, ``timeout_s`` at most (None: ``dead_after_s``); True
        when none is."""

    def obstacle(self) -> str:
        """Why this replica's contributions cannot be decided now; "": they only wait for the others."""

    def members(self, fragment: int) -> frozenset[str]:
        """The members of the newest version that this replica took part in; empty before its first one."""

    def called_in(self, fragment: int) -> bool:
        """Whether the job waits for this replica's contribution now. Cheap enough to call every step."""

    def share(self, reading: Reading) -> None:
        """Shares the numbers that triggers need; heartbeats send them until the fragment's next version or reading."""

    def tell_loss(self, loss: float | Tensor) -> None:
        """Notes a step's loss, for the heartbeats. A tensor has no dimensions, and is read only when one is due."""

    def means(self, fragment: int) -> Means | None:
        """The means over the replicas' readings of the fragment's version; None: unknown. Cheap enough to call every
        step."""

    def report(self, state: str) -> None:
        """Sets what the training thread is doing from now on, which heartbeats report together with `Host.standing`.

        ``state`` is ``training``, ``waiting``, ``fetching``, ``leaving``, ``out_of_units`` (no units to train on:
        called in at the first proposal) or a state of the user's (``busy``, ``evaluating``, ...).
        """

    def check(self) -> None:
        """Raises the error that has ended this replica's membership: the job has refused it, a thread of its own has
        failed (the error's ``__cause__``), or the group was closed. Cheap enough to call every step."""

    def finish(self) -> None:
        """Reports that this replica has come to the end of its training. When all replicas have left, the job has
        ended, and is not started again (END). With ``policy.on_loss: fail`` its leaving is no loss, and the job's
        failure does not affect it any more."""

    def stop(self, reason: str) -> None:
        """Asks all replicas of the job, including this one, to end their loops."""

    @property
    def stopped(self) -> JobStopped | None:
        """Who has stopped the job, and why; None: nobody. Cheap enough to call every step."""

    def wait_for_end(
        self, inner_step: int, *, but: Sequence[str], timeout_s: float, until: Callable[[], bool]
    ) -> End | None:
        """END: this replica's loop has ended at the job's ``inner_step``, and it has nothing outstanding. Waits for the
        other replicas that come to their end, so that all leave with the newest version, which is fetched meanwhile.

        Args:
            but: replicas that are not waited for, since their loops are on this thread.
            timeout_s: seconds at most.
            until: whether to wait no longer; asked now and then.

        Returns:
            Which replicas end with the same state, and which do not. None: no coordinator has answered.
        """

    def leave(self, *, timeout_s: float, early: bool = False, reason: str = "") -> None:
        """Leaves in good order: waits at most ``timeout_s`` for an outstanding contribution, then says goodbye.

        ``early``: its part of the job is not done, so a spare takes its place. ``reason``: the error that ended its
        loop.
        """

    def close(self) -> None:
        """Ends threads and connections at once; idempotent. `ReplicaOptimizer.close` calls it, after leaving."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    @property
    def emit(self) -> EmitEvent:
        """Emits an event in this replica's name. Any thread."""
