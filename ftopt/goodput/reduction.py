"""A modelled process group: the members of one attempt exchange their payloads, in a time that the model knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftopt.sync.protocol.replica.effects import StartReduce

if TYPE_CHECKING:
    from ftopt.goodput.replica import SimReplica
    from ftopt.goodput.world import World


class Group:
    """One attempt. It ends for all when all members have joined and live; a dead one breaks it by the time-out."""

    def __init__(self, world: World, start: StartReduce) -> None:
        self._world = world
        self._fragment, self._attempt = start.quorum.fragment, start.quorum.attempt
        self._members = [name for name, _ in start.members]
        self._inside: dict[str, SimReplica] = {}
        self._rows: dict[str, int] = {}

    def join(self, replica: SimReplica, start: StartReduce) -> None:
        """A member begins to reduce."""
        self._inside[replica.name] = replica
        self._rows[replica.name] = start.contribution.last_step
        if len(self._rows) == len(self._members):
            self._world.at(self._world.model.reduce_s(len(self._members)), self._end)
            self._world.groups.pop(self._attempt, None)
        if len(self._rows) == 1:
            self._world.at(self._world.model.dead_after_s, self._missing)

    def leave(self, replica: SimReplica, *, dead: bool = False) -> None:
        """A member has died, or stops: the others notice a dead one when it has sent nothing for ``dead_after_s``."""
        if self._inside.pop(replica.name, None) is not None:
            delay_s = self._world.model.dead_after_s if dead else self._world.model.latency_s
            self._world.at(delay_s, self._fail, replica.name)

    def _missing(self) -> None:
        """Time is up for those who have not joined: they have died meanwhile."""
        if len(self._rows) < len(self._members):
            self._fail(next(name for name in self._members if name not in self._rows))

    def _fail(self, peer: str) -> None:
        inside, self._inside = list(self._inside.values()), {}
        for replica in inside:
            failed = replica.machine.reduce_failed(self._fragment, self._attempt, reason="modelled", peer=peer)
            replica.act(failed)

    def _end(self) -> None:
        if len(self._inside) < len(self._members):
            return
        inside, self._inside = list(self._inside.values()), {}
        rows = [[self._rows[name]] for name in self._members]
        first, *others = inside
        made = first.machine.reduced(self._fragment, self._attempt, "sum", rows)
        prepared = first.machine.fragments[self._fragment].prepared
        first.act(made)
        for replica in others:
            if prepared is not None:
                replica.act(replica.machine.prepared_alike(self._fragment, self._attempt, prepared))
            else:
                replica.act(replica.machine.reduced(self._fragment, self._attempt, "sum", rows))
