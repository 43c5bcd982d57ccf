"""The base of features that follow changes of members. `Members` calls its listeners in a fixed order."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.policy import FaultPolicy


class Listener:
    """A feature that follows changes of members. Methods return effects; a feature overrides those that it needs."""

    def define(self, policy: FaultPolicy) -> None:
        """The first replica has defined the job. Also called when all have left and the next one defines it again."""

    def welcoming(self, member: Member, hello: m.Hello) -> Effects:
        """A member of the roster connects, and its welcome is not sent yet: for entries to be journalled first."""
        return []

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        """A member has been sent its welcome, and its position in each fragment."""
        return []

    def promoted(self, member: Member) -> Effects:
        """A spare trains from now on."""
        return []

    def away(self, member: Member) -> Effects:
        """A member's connection is lost, or silent. It stays on the roster (STICKY)."""
        return []

    def left(self, now: float, member: Member) -> Effects:
        """A member has said goodbye, and nobody needs its state. It is gone next."""
        return []

    def given_up(self, member: Member, why: str) -> None:
        """A member is gone next, for a reason of the job's. ``why``: the reason, for users."""

    def superseded(self, hello: m.Hello) -> Effects:
        """A newcomer takes, with ``hello``, the place of the member of its id, which is gone next."""
        return []

    def gone(self, incarnation_id: m.IncarnationId, member: Member | None, adopter: m.IncarnationId | None) -> Effects:
        """An incarnation is evicted. ``member``: its member; None: it was not on the roster. ADOPT: ``adopter``
        has its units; None: nobody has."""
        return []
