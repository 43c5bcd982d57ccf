"""What a message costs the coordinator's machine does not grow with the job: instructions are counted, no time is
measured.

The bytecode of all that the machine does is counted, per message that comes in; each one that goes out may take `SENT`
on top, since some go to all members. What one instruction does in C (an insertion into a sorted list) counts as one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from tests.sync.protocol.table import SETTINGS

FEW, MANY = 20, 160
GROWTH = 1.3
"""So much more may a message of a job with eight times the replicas take: logarithms, and what is done once a round."""
SENT = 30


class Job:
    """A coordinator's machine, the messages of its replicas made by hand, and what all of that has cost."""

    def __init__(self, replicas: int, saved: e.JournalState | None = None, **settings: Any) -> None:
        self.machine = Coordinator("j", saved=saved, now=100.0, life=2 if saved else 1)
        self.names = [f"r{number:04}" for number in range(replicas)]
        self.conns = {name: number for number, name in enumerate(self.names, 1)}
        self.settings = SETTINGS | {"start_replicas": replicas} | settings
        self.now, self.instructions, self.messages, self.sent_in_all = 100.0, 0, 0, 0
        self.sent: dict[int, list[m.FromCoordinator]] = {}
        self.journal: list[e.Journalled] = []
        self.order = random.Random(replicas)
        self.counts = True

    def begin(self) -> Job:
        """All are there, and nothing is counted so far."""
        self.counts = False  # it would take most of the test's time
        for name in self.names:
            self.hello(name)
        assert self.machine.running
        return self.anew()

    def anew(self) -> Job:
        """Counts from here on."""
        self.counts = True
        self.instructions = self.messages = self.sent_in_all = 0
        return self

    def shuffled(self) -> list[str]:
        return self.order.sample(self.names, len(self.names))

    def hello(self, name: str, **held: Any) -> None:
        self.say(name, hello(name, settings=self.settings, **held))

    def say(self, name: str, message: m.FromReplica) -> None:
        self.do(lambda: self.machine.receive(self.now, self.conns[name], message))

    def lose(self, name: str) -> None:
        self.do(lambda: self.machine.lost(self.now, self.conns[name]))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.do(lambda: self.machine.tick(self.now))

    def do(self, act: Callable[[], e.Effects]) -> None:
        """As a server does it: after a look it asks when the next one is due."""
        looks = self.machine.looks
        counter = Counter()
        with counter if self.counts else nullcontext():
            effects = act()
            if self.machine.looks != looks:
                self.machine.deadline_s()
        self.instructions += counter.count
        self.messages += 1
        for effect in effects:
            if isinstance(effect, e.SendTo):
                self.sent_in_all += 1
                self.sent.setdefault(effect.conn, []).append(effect.message)
            elif isinstance(effect, e.Journalled):
                self.journal.append(effect)

    def got(self, name: str, kind: type[m.Quorum]) -> m.Quorum:
        return [x for x in self.sent[self.conns[name]] if isinstance(x, kind)][-1]

    def propose(self, names: Iterable[str], **adapts: float) -> None:
        version = self.machine.rounds[0].at.version
        for name in names:
            self.say(name, m.Propose(m.Contribution(0, version, 10, 10 * (version + 1), 10.0, **adapts)))

    def prepare(self, names: Iterable[str]) -> None:
        for name in names:
            self.say(name, m.Prepared(0, self.got(name, m.Quorum).attempt, "sum"))

    @property
    def position(self) -> m.Position:
        return self.machine.rounds[0].at

    @property
    def cost(self) -> float:
        """Instructions per message that came in."""
        return (self.instructions - SENT * self.sent_in_all) / self.messages


class Counter:
    """Counts the bytecode instructions that this thread executes."""

    count = 0

    def __enter__(self) -> Counter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


def hello(name: str, *, settings: dict[str, Any], incarnation: int = 0, **held: Any) -> m.Hello:
    empty: dict[str, Any] = {"positions": (), "contributions": (), "prepared": (), "roster": (), "gone": ()}
    return m.Hello(
        protocol=m.PROTOCOL, job="j", replica=name, incarnation=incarnation, rank=0, size=1, address=name, fragments=1,
        lines={"model": "m"}, settings=settings, **{"epoch": 0, "initial": "init", "inner_step": 0} | empty | held,
    )  # fmt: skip


def starts(count: int) -> Job:
    job = Job(count)
    for name in job.shuffled():
        job.hello(name)
    assert job.machine.running
    return job


def round_of_all(count: int) -> Job:
    job = Job(count).begin()
    job.propose(job.shuffled())
    job.prepare(job.shuffled())
    assert job.position.version == 1
    return job


def round_with_adaptive_grace(count: int) -> Job:
    job = Job(count).begin()
    job.propose(job.shuffled(), overlap_s=1.0, grace=1.0)
    job.prepare(job.shuffled())
    assert job.position.version == 1
    return job


def round_whose_grace_is_over(count: int) -> Job:
    job = Job(count).begin()
    job.counts = False
    for name in job.names:
        job.say(name, m.Heartbeat("training", 5, 100.0))
    job.anew()
    order = job.shuffled()
    job.propose(order[:1])
    job.tick(2.5)  # all are called in
    job.propose(order[1:])
    job.prepare(order)
    assert job.position.version == 1
    return job


def heartbeats(count: int) -> Job:
    job = Job(count).begin()
    for step in range(3):
        job.now += 0.5
        for name in job.shuffled():
            job.say(name, m.Heartbeat("training", step, 0.1))
    return job


def recovers(count: int, *, journal: bool) -> Job:
    """The coordinator has been started again, and all come back."""
    before = Job(count).begin()
    roster = before.machine.roster.incarnation_ids()
    job = Job(count, saved=e.replay(before.journal) if journal else None)
    for name in job.shuffled():
        known = roster if name == job.names[0] else ()
        job.hello(
            name, incarnation=1, positions=(before.position,), roster=known, initial="", epoch=before.machine.epoch
        )
    job.tick(40.0)
    assert job.machine.running
    return job


def restarted_with_the_coordinator(count: int) -> Job:
    """Newcomers under the ids of members that were not heard since."""
    before = Job(count).begin()
    job = Job(count, saved=e.replay(before.journal))
    for name in job.shuffled():
        job.hello(name)
    return job


def leave(count: int) -> Job:
    job = Job(count).begin()
    for name in job.shuffled():
        job.say(name, m.Leaving())
    return job


def are_lost_and_come_back(count: int) -> Job:
    job = Job(count).begin()
    ids, at = {x.replica: x.incarnation for x in job.machine.roster.connected()}, job.position
    half = job.shuffled()[::2]
    for name in half:
        job.lose(name)
    for name in half:
        job.conns[name] += 10 * count
        job.hello(name, incarnation=ids[name], positions=(at,), initial="")
    assert len(job.machine.roster.connected()) == count
    return job


def fetch(count: int) -> Job:
    """To a running job of one all the others have come, each of which was told to all before it, and have fetched."""
    job = Job(count, start_replicas=1)
    job.counts = False
    first, *others = job.shuffled()
    job.hello(first)
    for name in others:
        job.hello(name, initial="other")
    job.anew()
    for name in others:
        job.say(name, m.Holds(job.position))
    return job


CASES: dict[str, Callable[[int], Job]] = {
    "a start": starts,
    "a round": round_of_all,
    "a round with an adaptive grace": round_with_adaptive_grace,
    "a round whose grace is over": round_whose_grace_is_over,
    "heartbeats": heartbeats,
    "a recovery with the journal": lambda count: recovers(count, journal=True),
    "a recovery without one": lambda count: recovers(count, journal=False),
    "all started again, the coordinator too": restarted_with_the_coordinator,
    "leavers": leave,
    "lost and back": are_lost_and_come_back,
    "joiners that have fetched": fetch,
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_what_a_message_costs_does_not_grow_with_the_job(case: str) -> None:
    few, many = CASES[case](FEW), CASES[case](MANY)
    told = f"{case}: {few.cost:.0f} instructions per message of {FEW}, {many.cost:.0f} of {MANY}"
    assert many.cost / few.cost < GROWTH, told
