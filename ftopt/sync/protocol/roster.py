"""Who is known, who is connected, and what each replica holds. STICKY: suspicion never shrinks the roster, only *gone*."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftopt.sync.protocol import messages as m


@dataclass
class Member:
    """A known replica: its current incarnation, which is not gone.

    ``conn`` is None while it is away, since ``lost_s``. ``held``: the position it has per fragment, as last known; a
    member that is away may have moved on to what it had prepared.
    """

    replica: str
    incarnation: int
    conn: int | None = None
    address: str = ""
    initial: str = ""
    state: str = "starting"
    inner_step: int = 0
    step_s: float = 0.0
    heard_s: float = 0.0
    lost_s: float = 0.0
    leaving: bool = False
    stalled_at: int | None = None
    """Its inner step when it let a call-in pass; it counts as hung until that moves on."""
    held: dict[int, m.Position] = field(default_factory=dict)
    newcomer: set[int] = field(default_factory=set)
    """Fragments in whose next round it is called in at the first proposal: it joined or came back late."""
    catching_up: set[int] = field(default_factory=set)
    """Fragments that moved on while it fetched them: the next quorum waits for it, up to the grace."""
    told: dict[int, tuple[m.Mark, ...]] = field(default_factory=dict)
    """The last member list sent on this connection, per fragment."""

    @property
    def mark(self) -> m.Mark:
        return (self.replica, self.incarnation)

    @property
    def stalled(self) -> bool:
        return self.stalled_at is not None

    def patience_s(self) -> float:
        """How long a call-in waits for it: two of its usual steps, half a second at least."""
        return max(0.5, 2 * self.step_s)


class Roster:
    """All members by replica id, and the gone marks."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.gone: dict[str, int] = {}

    def by_conn(self, conn: int) -> Member | None:
        return next((x for x in self.members.values() if x.conn == conn), None)

    def connected(self) -> list[Member]:
        """Connected members, by id."""
        return [x for _, x in sorted(self.members.items()) if x.conn is not None]

    def marks(self) -> tuple[m.Mark, ...]:
        return tuple(sorted(x.mark for x in self.members.values()))

    def gone_marks(self) -> tuple[m.Mark, ...]:
        return tuple(sorted(self.gone.items()))

    def is_gone(self, mark: m.Mark) -> bool:
        return m.is_gone(mark, self.gone)

    def know(self, replica: str, incarnation: int) -> Member | None:
        """Puts an incarnation on the roster; returns its member, or None when it is gone or superseded."""
        if self.is_gone((replica, incarnation)):
            return None
        member = self.members.get(replica)
        if member is None or member.incarnation < incarnation:
            if member is not None:
                self.gone[replica] = member.incarnation
            member = self.members[replica] = Member(replica, incarnation)
        return member if member.incarnation == incarnation else None

    def next_incarnation(self, replica: str) -> int:
        member = self.members.get(replica)
        return max(member.incarnation if member else 0, self.gone.get(replica, 0)) + 1

    def forget(self, mark: m.Mark) -> None:
        """Marks an incarnation as gone: irrevocable."""
        replica, incarnation = mark
        self.gone[replica] = max(incarnation, self.gone.get(replica, 0))
        member = self.members.get(replica)
        if member is not None and self.is_gone(member.mark):
            del self.members[replica]

    def sources(self, at: m.Position, *, but: str, limit: int = 4) -> tuple[str, ...]:
        """Addresses of connected members that hold ``at`` (SOURCE; I5)."""
        return tuple(
            x.address
            for x in self.connected()
            if x.replica != but and x.held.get(at.fragment) == at and x.address
        )[:limit]
