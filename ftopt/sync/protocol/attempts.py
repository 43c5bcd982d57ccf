"""One attempt, its number, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ftopt.sync.protocol import messages as m


class Numbers:
    """Attempt numbers, unique in the job: each epoch has a million of its own."""

    def __init__(self, epoch: int) -> None:
        self.restart(epoch)

    def restart(self, epoch: int) -> None:
        self._next = epoch * 1_000_000

    def next(self) -> int:
        self._next += 1
        return self._next


@dataclass(frozen=True, slots=True)
class Agreed:
    """Commit: ``digest`` is the version's."""

    digest: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Abort."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disagreement:
    """All have prepared, with different digests. ``majority``: more than half of the members' digest, "" if none."""

    majority: str


@dataclass
class Attempt:
    """One try of a round by a fixed set of members, ranked by id.

    ``lost``: members whose connection has ended since; one that had prepared still counts. ``drop``: gone marks whose
    COUNT entries the commit removes. ``advance``: inner steps that it adds to the committed inner step.
    """

    attempt: int
    version: int
    members: tuple[m.Mark, ...]
    contributions: dict[str, m.Contribution]
    drop: tuple[m.Mark, ...]
    advance: int
    prepared: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def verdict(self) -> Agreed | Failure | Disagreement | None:
        """Step 5. None: wait for the members that have not prepared yet."""
        if missing := sorted(self.lost - self.prepared.keys()):
            return Failure(f"{missing[0]} was lost before it had prepared")
        if len(self.prepared) < len(self.members):
            return None
        if not self.alive():
            return Failure("all members were lost")
        digest, count = Counter(self.prepared.values()).most_common(1)[0]
        if count == len(self.members):
            return Agreed(digest)
        return Disagreement(digest if 2 * count > len(self.members) else "")

    def alive(self) -> list[str]:
        """Members that are connected, by rank."""
        return [replica for replica, _ in self.members if replica not in self.lost]
