"""HORIZON: gone incarnations are forgotten, since pods and processes with new ids would make their list endless.

A gone incarnation holds a version of fragment 0 no newer than the newest one when it went. A replica that joins later
holds a newer one, and has a later life than any of the gone. So the *horizon*, a version and a life, stands for all
forgotten incarnations: one before both, and not on the roster, is gone. A replica keeps the horizon with its roster,
and reports both to a coordinator without memory.
"""

from __future__ import annotations

from collections.abc import Callable

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Forgotten, JournalState

KEPT = 1024
"""Number of gone incarnations that are always remembered: 40 KiB in a hello."""


class MovingHorizon:
    """The present horizon, and the roster that goes with it.

    Args:
        kept: number of gone incarnations that are remembered, a quarter more at most.
        is_member: whether an incarnation is on the coordinator's roster.
    """

    def __init__(self, kept: int, is_member: Callable[[m.IncarnationId], bool]) -> None:
        self._kept, self._is_member = kept, is_member
        self._at = m.Horizon()
        self._given = 0
        """The latest life of a forgotten incarnation known from a checkpoint."""
        self._fallen_to = 0
        """The horizon's version, or an earlier one to which the job went back: for a replica that resumes."""
        self._epoch = 0
        """The epoch in which the horizon was last set, as far as is known."""
        self._went_at: dict[str, int] = {}
        """Gone replica -> the newest version of fragment 0 when it went."""
        self._chain = ""
        """The chain of a version of fragment 0: versions of another start of the job are not comparable."""
        self._known: frozenset[m.IncarnationId] | None = None
        """The roster that goes with the horizon, from the journal or a member; None: the coordinator's own."""
        self._looked_at: tuple[int, int] | None = None
        self.learned = False
        """Whether the horizon came from a member, and is not in the journal."""

    @property
    def told(self) -> m.Horizon:
        """The horizon that replicas learn, with a complete roster."""
        return m.Horizon(self._at.version, self.life)

    @property
    def life(self) -> int:
        """The latest life of any forgotten incarnation; new incarnations have later ones."""
        return max(self._at.life, self._given)

    def remember(self, saved: JournalState) -> None:
        """Takes over the journal's horizon; called before any other method."""
        self._at, self._fallen_to, self._epoch = saved.horizon, saved.horizon.version, saved.epoch
        self._chain = next((d.chain for d in reversed(saved.decided) if not d.fragment), "")
        self._known = frozenset(saved.roster)

    def note(self, replica: str, version: int) -> None:
        """Notes that an incarnation of a replica goes; ``version``: fragment 0's newest."""
        self._went_at[replica] = version

    def open(self, version: int) -> None:
        """Notes that the job goes on from ``version``, which may be an earlier one. Incarnations that went during
        startup may hold it."""
        self._went_at = {replica: max(at, version) for replica, at in self._went_at.items()}
        self._fallen_to = min(self._fallen_to, max(version, 0))

    def learn_life(self, hello: m.Hello) -> None:
        """Learns the life in a hello, perhaps from a checkpoint, so that no forgotten number is assigned again."""
        self._given = max(self._given, hello.horizon.life)

    def learn(self, hello: m.Hello) -> bool:
        """Takes over a returning member's horizon if it is later than this coordinator's, which has lost its memory;
        returns whether it is. Within an epoch it moves on; a rollback, after which versions are lower, begins a new
        epoch."""
        at = _position(hello)
        if at is None or not hello.horizon.life or _age(hello.epoch, hello.horizon) <= self._age:
            return False
        self._at, self._fallen_to, self._epoch = hello.horizon, hello.horizon.version, hello.epoch
        self._chain, self.learned = at.chain, True
        self._known = frozenset({*hello.roster, (hello.replica, hello.incarnation)})
        return True

    def knows_less(self, hello: m.Hello) -> bool:
        """Whether a hello may name forgotten incarnations as members, or as gone."""
        return _age(hello.epoch, hello.horizon) < self._age

    @property
    def _age(self) -> tuple[int, int, int]:
        return _age(self._epoch, self._at) if self._at.life else (0, 0, 0)

    def may_cover(self, incarnation_id: m.IncarnationId) -> bool:
        """Whether an incarnation may be forgotten: its life is not later, and it is not on the horizon's roster."""
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
        """Removes the incarnations that went first from ``gone``; None: there are few, or none may be forgotten yet.

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
        # A forgotten incarnation may hold one version more, if it alone was told of it and was not heard since.
        version = max(self._at.version, at.version + 1)
        self._at = m.Horizon(version, max(self.life, *(gone.pop(x) for x in old)))
        self._fallen_to, self._epoch = at.version, epoch
        self._chain, self._known, self.learned = at.chain, None, False
        return Forgotten(self._at, tuple(sorted(old)))


def _age(epoch: int, horizon: m.Horizon) -> tuple[int, int, int]:
    """The order of horizons. After a rollback the version does not change for a while, and the life moves on."""
    return epoch, horizon.version, horizon.life


def _position(hello: m.Hello) -> m.Position | None:
    return next((x for x in hello.positions if not x.fragment), None)
