"""Which replica trains on which samples: the interface for rounds and machine, and that of a job without a ledger.

A job's samples are assigned in one of three ways: not at all (`Assignment` itself), by leases of units (`Grants`), or
by shares of a global batch (`BatchShares`). They are counted in fragment 0; the rounds of all other fragments have an
`Assignment`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import CoordinatorEffect, Effects, Emit
from ftopt.sync.protocol.coordinator.roster.listener import Listener
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt
from ftopt.sync.protocol.intervals import Ranges, low_water
from ftopt.sync.protocol.ledger.ledger import Ledger
from ftopt.sync.protocol.samples import Samples


@dataclass(frozen=True, slots=True)
class CountedUnits:
    """DONE: all units ``done`` after a commit, the effects that follow, and ``data`` for its event."""

    done: Ranges = ()
    effects: Sequence[CoordinatorEffect] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claims:
    """What the journal and the replicas know of samples when a job starts or goes on.

    ``unheard``: incarnations whose units are unknown. ``cursor``: no unit from here on was granted (CURSOR).
    ``shares``: the last plan and share that each holder of the version has received (RESTART).
    """

    unheard: Sequence[m.IncarnationId]
    cursor: int
    shares: Mapping[m.IncarnationId, tuple[int, Ranges]]


class Assignment(Listener):
    """The samples of a job without a ledger: nothing is assigned or counted."""

    samples: Samples | None = None
    ledger: Ledger | None = None
    recheck_s = math.inf
    """Seconds after which to look at a round again, because time alone changes which members can take part; inf: it
    does not."""
    whole_batch = False
    """Whether an attempt is a whole global batch: it needs all its members, whatever their norms or weights, and a
    member without a share has nothing to train on."""

    @property
    def ended(self) -> bool:
        """Whether all samples are done."""
        return self.ledger is not None and self.ledger.ended

    # ------------------------------------------------------------ members

    def open(self, claims: Claims, at: m.Position, done: Ranges) -> Effects:
        """The job starts, or goes on, from ``at``, which contains the units ``done``."""
        return []

    def expect(self, incarnation_id: m.IncarnationId) -> None:
        """The units of an incarnation on the roster are unknown."""

    def away(self, member: Member) -> Effects:
        if member.resumed:  # another process may resume as it, from a newer checkpoint with more units
            self.expect(member.incarnation_id)
        return []

    def promoted(self, member: Member) -> Effects:
        self.ask(member, member.wants)
        return []

    def arrived(self, member: Member) -> None:
        """A member has fetched a state."""

    def ask(self, member: Member, units: int) -> None:
        """A member asks for ``units`` more."""

    def forget(self, replica: str) -> None:
        """A replica takes no part for now."""

    def adoptable(self, incarnation_id: m.IncarnationId) -> Ranges | None:
        """ADOPT: the units that a newcomer can take over; None: it must not take over anything."""
        return None

    def waits(self) -> Mapping[m.IncarnationId, float]:
        """TAIL: incarnation -> since when some replica has nothing to train on but units that these hold."""
        return {}

    def gave_up(self, replica: str) -> None:
        """TAIL: a replica did nothing with the last units, and was declared gone."""

    def times_given_up(self, replica: str) -> int:
        """TAIL: how often that has happened since a unit of the replica was last counted."""
        return 0

    # ------------------------------------------------------------ rounds

    def expects(self, member: Member) -> bool:
        """Whether a connected member can take part before it holds the version."""
        return False

    def assign(
        self, at: m.Position, proposals: dict[str, m.Contribution], able: Callable[[], list[Member]]
    ) -> tuple[bool, Effects]:
        """PLAN: assigns the batch after ``at`` to members that are ``able`` to take part; no attempt is under way.

        Returns whether there is a new plan, and the effects. Proposals that do not fit a new plan are dropped.
        """
        return False, []

    def fits(self, incarnation_id: m.IncarnationId, contribution: m.Contribution) -> bool:
        """COVER: whether a proposal counts."""
        return True

    def missing(self, proposals: Mapping[str, m.Contribution]) -> list[str]:
        """Replicas whose proposals an attempt still needs."""
        return []

    def covers(self, contributions: Mapping[m.IncarnationId, m.Contribution]) -> bool:
        """COVER: whether an attempt may form from these contributions."""
        return True

    def counts_without_weight(self, contributions: Mapping[str, m.Contribution]) -> bool:
        """Whether contributions make a version although none has any weight."""
        return self.whole_batch

    def begin(self, attempt: Attempt) -> None:
        """An attempt begins: sets the units that it uses."""

    def abort(self) -> None:
        """The attempt under way was aborted."""

    def commit(self, attempt: Attempt) -> CountedUnits:
        return CountedUnits()

    def step(self, now: float) -> Effects:
        """Does everything that has become due; called after all rounds' steps."""
        return []


def count_units(samples: Samples, attempt: Attempt, before: int, done: Ranges) -> CountedUnits:
    """What a commit changes in samples. ``before``: the end of the units done from 0 on before; ``done``: all now."""
    after, per_epoch = low_water(done), samples.units_per_epoch
    done_now, epochs = range(before // per_epoch, after // per_epoch), {"epochs": samples.epochs}
    effects = [Emit("epoch_done", data={"epoch": epoch} | epochs) for epoch in done_now]
    if before < after == samples.units:
        effects.append(Emit("data_ended", data={"units": after} | epochs))
    ranges = {replica: list(c.ranges) for replica, c in attempt.contributions.items() if c.ranges}
    return CountedUnits(done, effects, {"ranges": ranges, "done_to": after})
