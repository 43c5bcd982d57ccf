"""What a feature does when something happens to a member. `Members` calls its listeners in a fixed order."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.effects import Effects
from ftopt.sync.protocol.coordinator.roster.roster import Member
from ftopt.sync.protocol.settings import Sync


class Listener:
    """Each method returns the effects that follow; a feature overrides those that concern it."""

    def define(self, sync: Sync) -> None:
        """The first replica has defined the job. Also called when all have left and the next one defines it anew."""

    def welcoming(self, member: Member, hello: m.Hello) -> Effects:
        """A member of the roster connects; its welcome is not sent yet: for what must be journalled first."""
        return []

    def admitted(self, member: Member, hello: m.Hello) -> Effects:
        """It has been sent its welcome and where it stands in each fragment."""
        return []

    def promoted(self, member: Member) -> Effects:
        """A spare trains from now on."""
        return []

    def away(self, member: Member) -> Effects:
        """Its connection is lost, or silent. It stays on the roster (STICKY)."""
        return []

    def left(self, now: float, member: Member) -> Effects:
        """It has said goodbye and nobody needs what it holds. It is gone next."""
        return []

    def given_up(self, member: Member, why: str) -> None:
        """It is gone next, for a reason of the job's. ``why``: the reason, for users."""

    def superseded(self, hello: m.Hello) -> Effects:
        """A newcomer, whose ``hello`` it is, takes the place of the member of its id, which is gone next."""
        return []

    def gone(self, incarnation_id: m.IncarnationId, member: Member | None, adopter: m.IncarnationId | None) -> Effects:
        """An incarnation is gone for good. ``member``: it was this one; None: nobody on the roster. ADOPT: ``adopter``
        has what it held; None: nobody has."""
        return []
