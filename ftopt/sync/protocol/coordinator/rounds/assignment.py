"""Which replica trains on which samples: what rounds and machine ask, and the answers of a job without a ledger.

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
    """DONE: all units that are ``done`` after a commit, what follows from it, and ``data`` for its event."""

    done: Ranges = ()
    effects: Sequence[CoordinatorEffect] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Claims:
    """What the journal and the replicas say of samples when a job starts or goes on.

    ``unheard``: incarnations of which nobody knows what they hold. ``cursor``: no unit from here on was granted
    (CURSOR). ``shares``: plan and share of each holder of the version, as it has received them last (RESTART).
    """

    unheard: Sequence[m.IncarnationId]
    cursor: int
    shares: Mapping[m.IncarnationId, tuple[int, Ranges]]


class Assignment(Listener):
    """The samples of a job without a ledger: nothing is assigned or counted."""

    samples: Samples | None = None
    ledger: Ledger | None = None
    recheck_s = math.inf
    """Seconds after which a round is looked at again, since time alone changes which members can take part; inf: it
    does not."""
    whole_batch = False
    """Whether an attempt is a whole global batch: it needs all its members, whatever their norms or weights, and there
    is nothing to train on without a share."""

    @property
    def ended(self) -> bool:
        """Whether all samples are done."""
        return self.ledger is not None and self.ledger.ended

    # ------------------------------------------------------------ members

    def open(self, claims: Claims, at: m.Position, done: Ranges) -> Effects:
        """The job starts, or goes on, from ``at``, which has the units ``done`` in it."""
        return []

    def expect(self, incarnation_id: m.IncarnationId) -> None:
        """It is not known what an incarnation that is on the roster holds."""

    def away(self, member: Member) -> Effects:
        if member.resumed:  # another process may resume as it, from a newer checkpoint, which holds more
            self.expect(member.incarnation_id)
        return []

    def promoted(self, member: Member) -> Effects:
        self.ask(member, member.wants)
        return []

    def arrived(self, member: Member) -> None:
        """A member has fetched a state."""

    def ask(self, member: Member, units: int) -> None:
        """A member asks for so many units more."""

    def forget(self, replica: str) -> None:
        """A replica takes no part for now."""

    def adoptable(self, incarnation_id: m.IncarnationId) -> Ranges | None:
        """ADOPT: units that a newcomer can take over; None: it must not take over anything."""
        return None

    def waits(self) -> Mapping[m.IncarnationId, float]:
        """TAIL: since when a replica has nothing to train on but what these hold."""
        return {}

    def gave_up(self, replica: str) -> None:
        """TAIL: a replica did nothing with the last units, and was declared gone."""

    def times_given_up(self, replica: str) -> int:
        """TAIL: how often it was, since any of its units was counted."""
        return 0

    # ------------------------------------------------------------ rounds

    def assign(
        self, at: m.Position, proposals: dict[str, m.Contribution], able: Callable[[], list[Member]]
    ) -> tuple[bool, Effects]:
        """PLAN: assigns what follows ``at`` to those who are ``able`` to take part; no attempt is under way.

        Returns whether there is a new plan, and what is to be sent. Proposals that do not fit a new plan are dropped.
        """
        return False, []

    def fits(self, incarnation_id: m.IncarnationId, contribution: m.Contribution) -> bool:
        """COVER: whether a proposal counts."""
        return True

    def missing(self, proposals: Mapping[str, m.Contribution]) -> list[str]:
        """Replicas without whose proposal no attempt can form."""
        return []

    def covers(self, contributions: Mapping[m.IncarnationId, m.Contribution]) -> bool:
        """COVER: whether an attempt may form from these."""
        return True

    def counts_without_weight(self, contributions: Mapping[str, m.Contribution]) -> bool:
        """Whether contributions make a version of which none has any weight."""
        return self.whole_batch

    def begin(self, attempt: Attempt) -> None:
        """An attempt begins: sets the units that it uses."""

    def abort(self) -> None:
        """The attempt under way was aborted."""

    def commit(self, attempt: Attempt) -> CountedUnits:
        return CountedUnits()

    def step(self, now: float) -> Effects:
        """Everything that has become due, once all rounds have made their step."""
        return []


def count_units(samples: Samples, attempt: Attempt, before: int, done: Ranges) -> CountedUnits:
    """What a commit says of samples. ``before``: units from 0 on that had been done, ``done``: all that are now."""
    after, per_epoch = low_water(done), samples.units_per_epoch
    done_now, epochs = range(before // per_epoch, after // per_epoch), {"epochs": samples.epochs}
    effects = [Emit("epoch_done", data={"epoch": epoch} | epochs) for epoch in done_now]
    if before < after == samples.units:
        effects.append(Emit("data_ended", data={"units": after} | epochs))
    ranges = {replica: list(c.ranges) for replica, c in attempt.contributions.items() if c.ranges}
    return CountedUnits(done, effects, {"ranges": ranges, "done_to": after})
