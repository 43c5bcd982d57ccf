"""A modelled process group: the members of one attempt meet, exchange payloads, and each computes the result.

It ends for all when every member is there, lives, runs and reaches every other one for the whole duration. A member
that dies or stops breaks it for the others at once; a frozen one, one whose reducer hangs, or a cut between two, by the
time-out: a member that cannot reach a peer names it, and one that reaches all complains `WORD_S` later.

A *broken* member's reductions always fail: it says so itself ("itself", also alone), it blames a peer that is well
("blames"), or nothing ever moves while it is there, and nobody knows why ("mute").
"""

from __future__ import annotations

from ftopt.sync.protocol.replica.effects import StartReduce
from tests.simulation.host import Payload, reduce
from tests.simulation.world import Process, World

WORD_S = 1.5


class SimReduction:
    """One attempt's group."""

    def __init__(self, world: World, start: StartReduce) -> None:
        self.world = world
        self.fragment = start.quorum.fragment
        self.attempt = start.quorum.attempt
        self.members = start.members
        self.inside: dict[str, Process] = {}
        self.payloads: dict[str, Payload] = {}
        self.exchanged = False
        self.deaf: dict[str, str] = {}
        """Members that miss the last piece of the result, and the peer that it should come from; the others have it."""

    def join(self, process: Process, payload: Payload) -> None:
        self.inside[process.name] = process
        self.payloads[process.name] = payload
        timeout_s = self.world.knobs.dead_after_s + self.world.knobs.reduce_s
        process.on_reducer(timeout_s, self._time_out, process)
        if process.broken in ("itself", "blames"):
            self.world.coverage["a member that always fails"] += 1
            peers = [name for name, _ in self.members if name != process.name]
            peer = peers[0] if peers and process.broken == "blames" else ""
            process.on_reducer(self.world.delay(), self._fail, process, peer)
        if len(self.payloads) == len(self.members):
            self.world.at(self.world.between(0.2, 1.0) * self.world.knobs.reduce_s, self._exchange)

    def leave(self, name: str) -> bool:
        """A member stops or is dead: before the exchange the others fail at once. Returns whether it was inside."""
        if self.inside.pop(name, None) is None:
            return False
        for other in [] if self.exchanged else list(self.inside.values()):
            other.on_reducer(self.world.delay(), self._fail, other, name)
        return True

    def _exchange(self) -> None:
        if self.exchanged or len(self.inside) < len(self.members):
            return
        cuts = [pair for pair in self.world.cuts if pair <= self.inside.keys()]
        if cuts and all(self.world.cuts[pair] for pair in cuts) and self.world.chance(0.3):
            self.world.coverage["a result that one member misses"] += 1
            for pair in cuts:
                deaf = self.world.cuts[pair]
                self.deaf[deaf] = min(pair - {deaf})
        elif cuts or any(process.motionless or self._mute(process) for process in self.inside.values()):
            self.world.at(0.5, self._exchange)
            return
        self.exchanged = True
        for process in [x for x in self.inside.values() if x.name not in self.deaf]:
            process.on_reducer(self.world.between(0.0, 0.5) * self.world.knobs.reduce_s, self._result, process)

    def _mute(self, process: Process) -> bool:
        return process.broken == "mute" and len(self.members) > 1

    def _result(self, process: Process) -> None:
        if process.name not in self.inside:
            return
        del self.inside[process.name]
        shard = process.shards[self.fragment]
        taint = f"flip {process.name} {self.attempt}" if self.world.chance(self.world.knobs.corrupt) else ""
        ordered = [self.payloads[name] for name, _ in self.members]
        result = reduce(shard.content, ordered, taint=taint)
        shard.results = (self.attempt, result)
        rows = [[p.contribution.last_step] for p in ordered]
        process.act(process.machine.reduced(self.fragment, self.attempt, result.digest, rows))

    def _time_out(self, process: Process) -> None:
        members = {name for name, _ in self.members}  # also those that have the result
        cut = [min(c - {process.name}) for c in self.world.cuts if process.name in c and c <= members]
        if cut:
            self._late(process, min(cut))
        else:
            process.on_reducer(WORD_S, self._late, process, "")

    def _late(self, process: Process, peer: str) -> None:
        if not self.exchanged or process.name in self.deaf:
            self._fail(process, self.deaf.get(process.name, peer))

    def _fail(self, process: Process, peer: str) -> None:
        if self.leave(process.name):
            failed = process.machine.reduce_failed(self.fragment, self.attempt, reason="modelled", peer=peer)
            process.act(failed)
