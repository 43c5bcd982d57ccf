"""HORIZON: gone incarnations are forgotten, so that a job may use ids without end: pods and processes have new ones.

A gone incarnation holds a version of fragment 0 that is no newer than the newest one when it went, and whoever joins
later holds a newer one, in a later life than any of theirs. So a version and a life, the horizon, stand for all that
are forgotten: who is before both, and not on the roster, is gone. A replica keeps the horizon with its roster, and says
both to a coordinator without memory.
"""

from __future__ import annotations

from collections.abc import Callable

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Forgotten, JournalState

KEPT = 1024
"""Gone incarnations that are remembered in any case: 40 KiB in a hello."""


class MovingHorizon:
    """Where it is, and who is on the roster that goes with it.

    Args:
        kept: so many gone incarnations are remembered, a quarter more at most.
        is_member: whether an incarnation is on the coordinator's roster.
    """

    def __init__(self, kept: int, is_member: Callable[[m.IncarnationId], bool]) -> None:
        self._kept, self._is_member = kept, is_member
        self._at = m.Horizon()
        self._given = 0
        """The latest life of a forgotten incarnation of which a checkpoint tells."""
        self._fallen_to = 0
        """The same version, or an earlier one to which the job has gone back: for who resumes from a checkpoint."""
        self._epoch = 0
        """Of the coordinator that has set it last, as far as is known."""
        self._went_at: dict[str, int] = {}
        """Gone replica -> the newest version of fragment 0 when it went."""
        self._chain = ""
        """Of some version of fragment 0: another start of the job has other versions."""
        self._known: frozenset[m.IncarnationId] | None = None
        """The roster that goes with it, as the journal or a member has it; None: the coordinator's own."""
        self._looked_at: tuple[int, int] | None = None
        self.learned = False
        """Whether a member has told of it, and it is not in the journal."""

    @property
    def told(self) -> m.Horizon:
        """What replicas are told: a roster goes with it that is complete."""
        return m.Horizon(self._at.version, self.life)

    @property
    def life(self) -> int:
        """No forgotten incarnation is of a later life: a new one of any replica is."""
        return max(self._at.life, self._given)

    def remember(self, saved: JournalState) -> None:
        """Before any other method: as the journal has it."""
        self._at, self._fallen_to, self._epoch = saved.horizon, saved.horizon.version, saved.epoch
        self._chain = next((d.chain for d in reversed(saved.decided) if not d.fragment), "")
        self._known = frozenset(saved.roster)

    def note(self, replica: str, version: int) -> None:
        """An incarnation of that replica goes; ``version``: the newest of fragment 0."""
        self._went_at[replica] = version

    def open(self, version: int) -> None:
        """The job goes on from that version, which may be an earlier one; who has gone while it started up may hold
        it."""
        self._went_at = {replica: max(at, version) for replica, at in self._went_at.items()}
        self._fallen_to = min(self._fallen_to, max(version, 0))

    def learn_life(self, hello: m.Hello) -> None:
        """No number is given that a forgotten incarnation had, of which a checkpoint may tell, too."""
        self._given = max(self._given, hello.horizon.life)

    def learn(self, hello: m.Hello) -> bool:
        """Whether a member that comes back knows of a later one than a coordinator that has lost its memory. Within an
        epoch it moves on; a rollback, which may take the version back, begins a new one."""
        at = _position(hello)
        if at is None or not hello.horizon.life or (hello.epoch, hello.horizon.version) <= self._age:
            return False
        self._at, self._fallen_to, self._epoch = hello.horizon, hello.horizon.version, hello.epoch
        self._chain, self.learned = at.chain, True
        self._known = frozenset({*hello.roster, (hello.replica, hello.incarnation)})
        return True

    def knows_less(self, hello: m.Hello) -> bool:
        """Whether who says hello may name incarnations as members, or as gone, that are forgotten."""
        return (hello.epoch, hello.horizon.version) < self._age

    @property
    def _age(self) -> tuple[int, int]:
        """By which the later one of two is told."""
        return (self._epoch, self._at.version) if self._at.life else (0, 0)

    def may_cover(self, incarnation_id: m.IncarnationId) -> bool:
        """Whether an incarnation may be forgotten: it is of no later life, and not on the roster that goes with it."""
        if not 0 < incarnation_id[1] <= self._at.life:
            return False
        return not (self._is_member(incarnation_id) if self._known is None else incarnation_id in self._known)

    def covers(self, hello: m.Hello) -> bool:
        """Whether a hello is of an incarnation that is gone and forgotten."""
        at, incarnation_id = _position(hello), (hello.replica, hello.incarnation)
        if not self.may_cover(incarnation_id):
            return False
        if at is None:
            return not self._is_member(incarnation_id)
        before = self._fallen_to if hello.resumed else self._at.version
        return at.version < before and m.same_start(at.chain, self._chain)

    def move(
        self, at: m.Position, gone: dict[str, int], undropped: Callable[[str], bool], *, epoch: int
    ) -> Forgotten | None:
        """Takes those that went first out of ``gone``; None: there are not so many, or none may be forgotten yet.

        Args:
            at: the newest version of fragment 0.
            gone: replica -> newest gone incarnation, in the order in which they went.
            undropped: whether a commit is still to drop the COUNT entry of a replica.
            epoch: the coordinator's.
        """
        count = len(gone)
        if count <= self._kept + self._kept // 4 or self._looked_at == (count, at.version):
            return None
        self._looked_at = count, at.version
        too_many = count > limits.MAX_GONE // 2  # without a commit in all that time
        oldest = list(gone)[: count - self._kept]
        old = [x for x in oldest if too_many or (self._went_at.get(x, 0) < at.version and not undropped(x))]
        if not old:
            return None
        for replica in old:
            self._went_at.pop(replica, None)
        # One that no coordinator with this memory has heard may hold one version more, which it alone was told of.
        version = max(self._at.version, at.version + 1)
        self._at = m.Horizon(version, max(self.life, *(gone.pop(x) for x in old)))
        self._fallen_to, self._epoch = at.version, epoch
        self._chain, self._known, self.learned = at.chain, None, False
        return Forgotten(self._at, tuple(sorted(old)))


def _position(hello: m.Hello) -> m.Position | None:
    return next((x for x in hello.positions if not x.fragment), None)
