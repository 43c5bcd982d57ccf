"""An attempt, its number, and its outcome."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Decided
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster
from ftopt.sync.protocol.intervals import Ranges

_Ids = tuple[m.IncarnationId, ...]


class AttemptNumbers:
    """Attempt numbers, unique in the job. Those of an epoch begin in its own million or above, at ``offset``: the
    microsecond of the coordinator's start, which differs between jobs that begin in one second.

    Args:
        decided: numbers of attempts of former coordinators that were decided. Those of their undecided attempts are
            less than a million above, and are not given again even if the clock was set back.

    Attributes:
        last: the last number given, or the one before the first.
    """

    def __init__(self, epoch: int, decided: Iterable[int] = (), *, offset: int = 0) -> None:
        self.last, self._offset = max((number + 1_000_000 for number in decided), default=0), offset
        self.restart(epoch)

    def restart(self, epoch: int) -> None:
        """Begins an epoch. If the last one used more than its million, the next one must not repeat its numbers."""
        self.last = max(self.last, epoch * 1_000_000 + self._offset)

    def next(self) -> int:
        self.last += 1
        return self.last


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    digest: str  # of the version to commit


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str  # for the abort


@dataclass(frozen=True, slots=True)
class Disagreement:
    """All have prepared, with different digests. ``majority``: the digest of more than half of them, "" if none."""

    majority: str


@dataclass
class Attempt:
    """One try of a round by a fixed set of members, ranked by id.

    ``lost``: members whose connection has ended since; those that had prepared still count. ``drop``: gone incarnations
    whose COUNT entries the commit removes. ``advance``: inner steps that it adds to the committed inner step.
    ``reported_s``: when the last member prepared. ``ranges``: all units that its contributions have used. ``plan``: the
    plan that they are shares of, 0 without a global batch. ``late``: how often each member had been too late when the
    attempt began, so that a hung reducer counts once for all fragments under way.
    """

    attempt: int
    version: int
    members: tuple[m.IncarnationId, ...]
    contributions: dict[str, m.Contribution]
    drop: tuple[m.IncarnationId, ...]
    advance: int
    started_s: float
    reported_s: float = -math.inf
    prepared: dict[str, m.Prepared] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    ranges: Ranges = ()
    plan: int = 0
    late: dict[str, int] = field(default_factory=dict)
    _change: tuple[_Ids | None, _Ids, _Ids] = (None, (), ())

    def verdict(self) -> RoundOutcome | Failure | Disagreement | None:
        """Step 5. None: wait for the members that have not prepared yet."""
        if missing := [x for x in self.lost if x not in self.prepared]:
            return Failure(f"{min(missing)} was lost before it had prepared")
        if len(self.prepared) < len(self.members):
            return None
        if not self.alive():
            return Failure("all members were lost")
        digest, count = Counter(x.digest for x in self.prepared.values()).most_common(1)[0]
        if count == len(self.members):
            return RoundOutcome(digest)
        return Disagreement(digest if 2 * count > len(self.members) else "")

    @cached_property
    def incarnation_ids(self) -> frozenset[m.IncarnationId]:
        return frozenset(self.members)

    @cached_property
    def _weight(self) -> tuple[float, int]:
        """The sum of the weights above 0, and their number."""
        weights = [c.weight for c in self.contributions.values() if c.weight > 0]
        return math.fsum(weights), len(weights)

    def _since(self, before: _Ids) -> tuple[_Ids, _Ids]:
        """Members added and removed since ``before``. Nearly all members know the same list."""
        if before is not self._change[0]:
            known, ids = set(before), self.incarnation_ids
            self._change = (before, tuple(sorted(ids - known)), tuple(sorted(known - ids)))
        return self._change[1:]

    def invitation(self, fragment: int, group: int, rank: int, before: _Ids, *, last_step: int) -> m.Quorum:
        """The message to the member of ``rank``. ``before``: the last member list that it has received; ``last_step``:
        names its contribution."""
        (total_weight, contributors), (joined, left) = self._weight, self._since(before)
        return m.Quorum(
            fragment=fragment,
            version=self.version,
            attempt=self.attempt,
            group=group,
            rank=rank,
            size=len(self.members),
            last_step=last_step,
            total_weight=total_weight,
            contributors=contributors,
            advance=self.advance,
            joined=joined,
            left=left,
            drop=self.drop,
            ranges=self.ranges,
            plan=self.plan,
        )

    def decided(self, at: m.Position, digest: str, inner_step: int, done: Ranges) -> Decided:
        """Step 5: the decision that commits on ``at``; ``inner_step``: of ``at``."""
        rows = ((x, self.contributions[x[0]]) for x in self.members)
        return Decided(
            fragment=at.fragment,
            version=self.version,
            attempt=self.attempt,
            digest=digest,
            chain=m.next_chain(at.chain, at.fragment, self.version, digest),
            inner_step=inner_step + self.advance,
            members=tuple((*x, c.steps, c.last_step, c.weight, c.finite) for x, c in rows),
            done=done,
        )

    def silent(self, roster: Roster) -> list[Member]:
        """Members that have not prepared, on the connection on which they were invited."""
        members = roster.present(x for x in self.members if x[0] not in self.prepared and x[0] not in self.lost)
        return [x for x in members if x.conn is not None]

    def overdue_s(self, roster: Roster, patience_s: float, usual_s: float) -> float:
        """When silent members count as hung: after the last report, as long again as that took, plus ``patience_s``.

        Before any member has prepared: ``usual_s`` plus ``patience_s`` after the start. The patience doubles for each
        time that one of them was too late before.
        """
        since_s, took_s = self.started_s, usual_s
        if self.prepared:
            since_s, took_s = self.reported_s, self.reported_s - self.started_s
        late = max((self.late.get(x.replica, 0) for x in self.silent(roster)), default=0)
        return since_s + (took_s + patience_s) * 2.0 ** min(late, 10)

    def alive(self) -> list[str]:
        """Connected members, by rank."""
        return [replica for replica, _ in self.members if replica not in self.lost]
