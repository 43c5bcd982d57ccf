"""The ranks of an island under random schedules, around the production machines; and with planted bugs.

The network between the ranks is a queue for each direction of each pair, which keeps its order and any delay. Rank 0's
job (quorums, aborts, decisions, a lost coordinator, fetches) and each rank's training loop are made by chance. After
each event the invariants are checked; a planted bug must break one of them on some seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from ftopt.sync.island_protocol import Change, Deferred, Done, Leader, Outcome, OutOfStep, Rank, Stop, Work

SEEDS = range(150)
EVENTS = 400


class Broken(AssertionError):
    """An invariant does not hold."""


class Slice:
    """One rank: its machine, its training loop, and what it has made."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.machine = Rank(2)
        self.boundary = 0  # boundaries that its training loop has come through
        self.seen: list[tuple[int, ...]] = []  # versions at each of them
        self.words: deque[int] = deque()  # rank 0's, heard and not taken yet
        self.part: Work | None = None
        self.stopped: set[int] = set()
        self.todo: deque[Work] = deque()
        self.dead = False


class Walk:
    """One random history. ``bugs``: names of those that are planted."""

    def __init__(self, seed: int, bugs: frozenset[str] = frozenset()) -> None:
        self.chance, self.bugs = random.Random(seed), bugs
        self.size = self.chance.choice([1, 2, 3, 4])
        self.leader = Leader(self.size)
        self.ranks = [Slice(number) for number in range(self.size)]
        self.down: list[deque[Any]] = [deque() for _ in range(self.size)]  # rank 0 -> rank
        self.up: list[deque[Outcome]] = [deque() for _ in range(self.size)]
        self.words: list[int] = []  # that rank 0 has said
        self.attempts: dict[int, Work] = {}  # of each fragment: what the job waits for
        self.prepared: dict[int, tuple[Work, str]] = {}
        self.proposed: set[int] = set()
        self.void_works: set[int] = set()
        self.lanes: dict[tuple[int, int], set[int]] = {}  # attempt's group and lane -> versions that met there
        self.served = self.committed = self.installed = self.failures = self.deferred = 0
        self.over = ""

    # What happens.

    def step(self) -> None:
        events: list[Callable[[], None]] = [
            self.deliver, self.deliver, self.deliver, self.works, self.works, self.train, self.train, self.job,
            self.serve,
        ]  # fmt: skip
        if self.chance.random() < 0.003:
            events = [self.die]
        try:
            self.chance.choice(events)()
        except OutOfStep as error:
            if not self.bugs:
                raise Broken(f"out of step without a bug: {error}") from error
            self.over = str(error)
        self.check()

    def deliver(self) -> None:
        """A message arrives, in either direction."""
        full = [q for q in (*self.down, *self.up) if q]
        if not full:
            return
        queue = self.chance.choice(full)
        what = queue.popleft()
        if isinstance(what, Outcome):
            self.ended(what)
            return
        rank = self.ranks[next(n for n, q in enumerate(self.down) if q is queue)]
        if isinstance(what, Work):
            rank.todo.append(what)
        elif isinstance(what, Change):
            rank.machine.hear(what)
        elif isinstance(what, Stop):
            rank.stopped.add(what.number)
        else:
            rank.words.append(what)

    def tell(self, what: Any) -> None:
        for rank in range(1, self.size):
            self.down[rank].append(what)

    def works(self) -> None:
        """A rank begins its part of a work, or ends it."""
        rank = self.chance.choice(self.ranks)
        if rank.dead:
            return
        if rank.part is None:
            if rank.todo:
                rank.part = rank.todo.popleft()
                try:
                    rank.machine.begin(rank.part)
                except Deferred:
                    rank.stopped.add(rank.part.number)
                    self.deferred += 1
                    return
                if rank.part.kind == "reduce":
                    group = 0 if "one group for all attempts" in self.bugs else rank.part.number
                    version = rank.part.version
                    self.lanes.setdefault((rank.part.fragment, group), set()).add(version)
            return
        work, rank.part = rank.part, None
        if work.number in rank.stopped or self.chance.random() < 0.1:
            outcome = Outcome(work.number, rank.number, failure="ConnectionError")
        else:
            rank.machine.holds(work)
            outcome = Outcome(work.number, rank.number, digest=f"{work.fragment}.{work.version}")
        if rank.number:
            self.up[rank.number].append(outcome)
        else:
            self.ended(outcome)

    def ended(self, outcome: Outcome) -> None:
        for effect in self.leader.heard(outcome):
            if isinstance(effect, Stop):
                self.tell(effect)
                self.ranks[0].stopped.add(effect.number)
            else:
                self.done(effect)

    def done(self, done: Done) -> None:
        work = next(w for w in self.attempts.values() if w.number == done.number)
        if done.failed is not None or done.number in self.void_works:  # what is void is not committed any more
            self.failures += 1
            del self.attempts[work.fragment]
        elif work.kind == "install":
            del self.attempts[work.fragment]
            self.change(work.fragment, "install", work)
            self.proposed.discard(work.fragment)
            self.installed += 1
        else:
            self.prepared[work.fragment] = work, done.digest

    def change(self, fragment: int, kind: Any, work: Work) -> None:
        self.happens(self.leader.change(fragment, kind, version=work.version, work=work.number))

    def happens(self, change: Change) -> None:
        self.ranks[0].machine.hear(change)
        self.tell(change)

    def void(self, fragment: int) -> None:
        """The job has taken nothing of the contributions, whatever the ranks are at: a rank may not have begun."""
        if (work := self.attempts.get(fragment)) is not None and work.kind == "reduce":
            self.leader.discard(fragment)
            for rank in self.ranks:
                rank.machine.discard(fragment)
            if self.prepared.pop(fragment, None) is not None:
                del self.attempts[fragment]
            else:
                self.stop(fragment)
                self.void_works.add(work.number)
        self.proposed.discard(fragment)
        self.happens(self.leader.change(fragment, "exclude"))

    def stop(self, fragment: int) -> None:
        number = self.attempts[fragment].number
        self.tell(Stop(number))
        self.ranks[0].stopped.add(number)

    def job(self) -> None:
        """Rank 0's member of the job: a quorum, a decision, an abort, a lost coordinator, a fetch."""
        fragment = self.chance.randrange(2)
        if not self.bugs and self.chance.random() < 0.03:
            self.void(fragment)
            return
        version = self.ranks[0].machine.versions[fragment] + 1
        prepared = self.prepared.get(fragment)
        if "commit with a rank unprepared" in self.bugs and fragment in self.attempts and prepared is None:
            work = self.attempts[fragment]
            self.leader._done[fragment, work.kind] = work
            if work.kind == "reduce":
                prepared = work, ""
        if prepared is not None and self.chance.random() < 0.7:  # decided: commit, or abort
            work, _ = prepared
            self.prepared.pop(fragment, None)
            self.attempts.pop(fragment, None)
            if self.chance.random() < 0.8 and work.version == version:
                self.change(fragment, "commit", work)
                self.proposed.discard(fragment)
                self.committed += 1
            else:
                self.leader.discard(fragment)
                for rank in self.ranks:
                    rank.machine.discard(fragment)
            return
        if fragment in self.attempts:  # an abort under way, or a coordinator that is lost: the attempt is stopped
            if self.chance.random() < 0.2 and fragment not in self.prepared:
                self.stop(fragment)
            return
        kind = "install" if self.chance.random() < 0.2 else "reduce"
        if kind == "reduce" and fragment not in self.proposed:
            return
        ahead = self.leader.changes - (self.words[-1] if self.words else 0) if kind == "install" else 0
        try:
            work = self.leader.begin(fragment, version + (2 if ahead or kind == "install" else 0), kind)  # type: ignore[arg-type]
        except Deferred:
            return
        self.attempts[fragment] = work
        self.ranks[0].todo.append(work)
        self.tell(work)

    def train(self) -> None:
        """A training loop comes to its next boundary; rank 0's says the word."""
        rank = self.chance.choice(self.ranks)
        if rank.dead:
            return
        if rank.number == 0:
            word = self.leader.changes
            if any(other.boundary < rank.boundary for other in self.ranks):
                return  # the step's own collective calls
            self.words.append(word)
            self.tell(word)
            rank.words.append(word)
        if not rank.words:
            return
        word = rank.words[0]
        if "each rank takes what it has" in self.bugs:
            word = rank.machine._heard
        if not rank.machine.has(word):
            return  # it waits
        rank.words.popleft()
        rank.machine.take(word)
        if rank.number == 0:
            self.leader.taken(word)
        rank.boundary += 1
        rank.seen.append(tuple(rank.machine.versions))
        if all(each.boundary == rank.boundary for each in self.ranks):  # all have frozen what is proposed
            # What is based on a version that the job has left behind is dropped by rank 0's member of the job.
            self.proposed |= {f for f in range(2) if self.chance.random() < 0.5 and not self.leader.deferred(f)}

    def serve(self) -> None:
        """A peer fetches the state of a fragment: pieces of all ranks."""
        fragment = self.chance.randrange(2)
        if self.leader.deferred(fragment) and "serves while a change is deferred" not in self.bugs:
            return
        held = {rank.machine.versions[fragment] for rank in self.ranks}
        claimed = self.ranks[0].machine.versions[fragment]
        if "serves while a change is deferred" in self.bugs:
            if len(held) > 1:
                raise Broken("a state is served of which ranks have different versions")
            return
        if held != {claimed}:
            return  # a piece has another digest: refused
        self.served += 1

    def die(self) -> None:
        """A rank dies: the island ends."""
        self.chance.choice(self.ranks).dead = True
        self.over = "a rank has died"

    # What must hold.

    def check(self) -> None:
        for at in range(min(rank.boundary for rank in self.ranks)):
            if len({rank.seen[at] for rank in self.ranks}) > 1:
                raise Broken(f"boundary {at}: {[rank.seen[at] for rank in self.ranks]}")
        for (fragment, group), versions in self.lanes.items():
            if len(versions) > 1:
                raise Broken(f"lanes of fragment {fragment}, group {group}, mix versions {versions}")


def walk(seed: int, *bugs: str) -> Walk:
    """A history to its end."""
    found = Walk(seed, frozenset(bugs))
    for _ in range(EVENTS):
        found.step()
        if found.over:
            break
    return found


def test_all_ranks_apply_the_same_versions_in_the_same_steps() -> None:
    walks = [walk(seed) for seed in SEEDS]
    assert sum(each.committed for each in walks) > 200
    assert sum(each.installed for each in walks) > 100
    assert sum(each.failures for each in walks) > 100
    assert sum(each.deferred for each in walks) > 10
    assert sum(each.served for each in walks) > 1000
    assert any(each.over for each in walks)


@pytest.mark.parametrize(
    "bug",
    [
        "commit with a rank unprepared",
        "each rank takes what it has",
        "one group for all attempts",
        "serves while a change is deferred",
    ],
)
def test_a_planted_bug_is_found(bug: str) -> None:
    for seed in SEEDS:
        try:
            if (over := walk(seed, bug).over) and "died" not in over:
                return
        except Broken:
            return
    pytest.fail(f"{bug}: no history shows it")
