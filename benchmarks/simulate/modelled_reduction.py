"""A modelled process group: the members of one attempt exchange their payloads, in a time given by the model."""

from __future__ import annotations

from benchmarks.simulate.fleet import Fleet, Node
from ftopt.sync.protocol.replica.effects import StartReduce


class Group:
    """One attempt. It ends for all when all members have joined and live; a dead one breaks it after the time-out."""

    def __init__(self, fleet: Fleet, start: StartReduce) -> None:
        self._fleet = fleet
        self._fragment, self._attempt = start.quorum.fragment, start.quorum.attempt
        self._members = [name for name, _ in start.members]
        self._inside: dict[str, Node] = {}
        self._rows: dict[str, int] = {}

    def join(self, node: Node, start: StartReduce) -> bool:
        """A member begins to reduce. Returns whether all members have."""
        self._inside[node.name] = node
        self._rows[node.name] = start.contribution.last_step
        if len(self._rows) == len(self._members):
            self._fleet.at(self._fleet.model.reduce_s(len(self._members)), self._end)
        if len(self._rows) == 1:
            self._fleet.at(self._fleet.model.dead_after_s, self._missing)
        return len(self._rows) == len(self._members)

    def leave(self, node: Node, *, dead: bool = False) -> None:
        """A member has died, or stops. If it died silently, the others notice when it has sent nothing for
        ``dead_after_s``."""
        if self._inside.pop(node.name, None) is not None:
            model = self._fleet.model
            delay_s = model.dead_after_s if dead and model.silent else model.latency_s
            self._fleet.at(delay_s, self._fail, node.name)

    def _missing(self) -> None:
        """Time is up for members that have not joined: they have died."""
        if len(self._rows) < len(self._members):
            self._fail(next(name for name in self._members if name not in self._rows))

    def _fail(self, peer: str) -> None:
        inside, self._inside = list(self._inside.values()), {}
        for node in inside:
            failed = node.machine.reduce_failed(self._fragment, self._attempt, reason="modelled", peer=peer)
            node.act(failed)

    def _end(self) -> None:
        if len(self._inside) < len(self._members):
            return
        inside, self._inside = list(self._inside.values()), {}
        rows = [[self._rows[name]] for name in self._members]
        first, *others = inside
        made = first.machine.reduced(self._fragment, self._attempt, "sum", rows)
        prepared = first.machine.fragments[self._fragment].prepared
        first.act(made)
        for node in others:
            if prepared is not None:
                node.act(node.machine.prepared_alike(self._fragment, self._attempt, prepared))
            else:
                node.act(node.machine.reduced(self._fragment, self._attempt, "sum", rows))


class Groups:
    """All groups that are still waiting for members, by attempt."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._gathering: dict[int, Group] = {}

    def join(self, node: Node, start: StartReduce) -> Group:
        """A member begins to reduce; the first one creates the group."""
        attempt = start.quorum.attempt
        group = self._gathering.get(attempt)
        if group is None:
            group = self._gathering[attempt] = Group(self._fleet, start)
        if group.join(node, start):
            self._gathering.pop(attempt, None)
        return group
