"""A table whose replicas compute the gradients of a global batch together, by hand or at random."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.members.batch_shares import BatchShares
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.ledger.plans import Portion
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.samples import Samples
from tests.sync.protocol.table import Seat, Table

SAMPLES = Samples(samples=1000, batch_size=1, global_batch=6)


def batch(samples: Samples, version: int) -> Ranges:
    """The units of the batch that makes ``version``, 1 for the first."""
    assert samples.global_batch is not None
    return samples.batch_from((version - 1) * (samples.global_batch // samples.batch_size))


class Worker:
    """A replica at the table: its machine's seat, and the training thread's sum of gradients as a list of units."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.portion = Portion()
        self.sum: list[int] = []
        self.frozen: dict[int, list[int]] = {}
        """What each reduction that was started would add up, by attempt."""
        self.computed = 0
        self._dropped = 0
        self._computing: tuple[int, Ranges] | None = None

    @property
    def name(self) -> str:
        return self.seat.name

    @property
    def frozen_now(self) -> m.Contribution | None:
        return self.seat.machine.fragments[0].contribution

    def take(self) -> None:
        """What has arrived; the plans in it reach the training thread, reductions begin with what is frozen."""
        self.seat.take()
        for effect in [x for x in self.seat.asked if isinstance(x, m.Plan | r.Reset)]:
            self.seat.asked.remove(effect)
            if isinstance(effect, m.Plan):
                self.portion.assign(effect.version, effect.plan, effect.units)
            else:
                self.portion.drop()
        for start in [x for x in self.seat.asked if isinstance(x, r.StartReduce)]:
            self.frozen.setdefault(start.quorum.attempt, list(self.sum))

    def begin(self) -> None:
        """A unit's gradients are being computed."""
        units = self.portion.next()
        self._computing = (self.portion.version, units) if units else None

    def end(self) -> None:
        """They are there."""
        if self._computing is not None:
            (version, units), self._computing = self._computing, None
            self.computed += 1
            mine = self.portion.add(version, units)
            self._empty()
            if mine:
                self.sum.append(units[0][0])

    def offer(self) -> None:
        """Offers the sum if the share is done and nothing is outstanding."""
        record, p = self.seat.machine.fragments[0].record, self.portion
        self._empty()
        if record is None or self.frozen_now is not None or p.version != record.version + 1 or p.kept != p.units:
            return
        last = self.seat.machine.counted_step(record) + 1
        c = m.Contribution(0, record.version, 1, last, float(len(self.sum)), ranges=p.kept, plan=p.plan)
        self.seat.do(self.seat.machine.propose(c))

    def work(self) -> None:
        """Computes its whole share, and offers it."""
        self.take()
        while self.portion.next():
            self.begin()
            self.end()
        self.offer()

    def reduce(self) -> bool:
        """Reduces what it has been asked to last; False when nothing."""
        self.take()
        starts = [x for x in self.seat.asked if isinstance(x, r.StartReduce)]
        rounds = self.seat.table.coordinator.rounds
        attempt = rounds[0].attempt if rounds else None
        if not starts or attempt is None or attempt.attempt != starts[-1].quorum.attempt:
            return False
        self.seat.reduce()
        return True

    def _empty(self) -> None:
        if self._dropped != self.portion.dropped:
            self._dropped, self.sum = self.portion.dropped, []


class Batches:
    """A job of such replicas. ``check``: every commit is its batch, each unit once.

    ``alike``: all begin with the same weights. Else the job begins with those of one, and the others fetch them.
    """

    def __init__(self, *names: str, samples: Samples = SAMPLES, alike: bool = True, **settings: float) -> None:
        self.samples = samples
        self.table = Table(samples=samples, **({"start_replicas": len(names), "heartbeat_s": 1.0} | settings))
        seats = self.table.start(*names) if alike else [Seat(self.table, name, initial=name) for name in names]
        for seat in () if alike else seats:
            seat.open()
        self.workers = {seat.name: Worker(seat) for seat in seats}
        self.checked = 0
        self.dead: list[Worker] = []
        for worker in self.workers.values():
            worker.take()

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    def join(self, name: str) -> Worker:
        """A newcomer, or the successor of one that is dead; it has fetched."""
        old = self.workers.get(name)
        seat = old.seat.die() if old is not None else Seat(self.table, name)
        self.workers[name] = worker = Worker(seat)
        seat.open()
        worker.take()
        return worker

    def fetch(self, worker: Worker) -> bool:
        """Does the fetch that its machine has asked for; False when there is none, or nobody to fetch from."""
        worker.take()
        wanted = [x for x in worker.seat.asked if isinstance(x, r.Fetch)]
        if not wanted:
            return False
        for x in self.workers.values():
            record = x.seat.machine.fragments[0].serves()
            if x is not worker and x.seat.conn is not None and record is not None:
                latest = worker.seat.machine.fragments[0].wanted
                if latest is not None and record.position == latest.position:
                    worker.seat.asked.remove(wanted[-1])
                    worker.seat.end_fetch(record)
                    worker.take()
                    return True
        worker.seat.asked.remove(wanted[-1])
        worker.seat.do(worker.seat.machine.fetch_failed(0))
        return False

    def work(self, names: Iterable[str]) -> None:
        """These do their shares."""
        for name in names:
            self[name].work()

    def reduce(self, names: Iterable[str]) -> None:
        """These take part in the attempt; then all hear what became of it."""
        for name in names:
            self[name].reduce()
        for worker in self.workers.values():
            if worker.seat.conn is not None:
                worker.take()
        self.check()

    def check(self) -> None:
        """Of each commit since the last call: what its members' sums were."""
        decided = self.table.events("decide")
        for tell in decided[self.checked :]:
            assert tell.version is not None and tell.attempt is not None
            sums = [x.frozen[tell.attempt] for x in self.everybody() if tell.attempt in x.frozen]
            added = Counter(unit for units in sums for unit in units)
            assert added == Counter(one_by_one(batch(self.samples, tell.version))), (tell.version, sums)
        self.checked = len(decided)

    def everybody(self) -> list[Worker]:
        """The dead too."""
        return [*self.workers.values(), *self.dead]

    @property
    def version(self) -> int:
        return self.table.version

    @property
    def shares(self) -> dict[str, Ranges]:
        """Of the newest plan, by name."""
        batch_shares = self.table.coordinator.assignment
        assert isinstance(batch_shares, BatchShares) and batch_shares.plan is not None
        return {incarnation_id[0]: units for incarnation_id, units in batch_shares.plan.shares.items()}


def one_by_one(ranges: Ranges) -> list[int]:
    return [x for start, stop in ranges for x in range(start, stop)]


def walk(seed: int, *, journal: bool, steps: int = 200) -> int:
    """Plays at random, then lets everybody work until batches are committed again; returns how many were.

    Raises:
        AssertionError: a commit is not its batch, or nothing is committed any more.
    """
    chance = random.Random(seed)
    job = Batches("a", "b", "c")
    table = job.table
    for _ in range(steps):
        worker = chance.choice(list(job.workers.values()))
        match chance.randrange(16):
            case 0 | 1 | 2:
                worker.take()
            case 3 | 4:
                worker.begin()
            case 5 | 6:
                worker.end()
            case 7 | 8:
                worker.end()
                worker.offer()
            case 9 | 10:
                worker.reduce()
            case 11:
                job.fetch(worker)
            case 12 if chance.random() < 0.3 and worker.seat.conn is not None:
                worker.seat.cut()
            case 13 if worker.seat.conn is None:
                worker.seat.open()
            case 14:
                match chance.randrange(12):
                    case 0:
                        job.dead.append(worker)
                        job.join(worker.name)
                    case 1 if journal or all(x.seat.conn is not None for x in job.workers.values()):
                        table.restart(journal=journal)
                    case 2:
                        table.wait(chance.choice([0.5, 3.5]))
            case 15:
                table.wait(0.1)
        job.check()
    before = job.version if table.coordinator.rounds else 0
    for _ in range(20):
        for worker in job.workers.values():
            if worker.seat.conn is None:
                worker.seat.open()
            worker.end()
            worker.work()
            job.fetch(worker)
        for worker in job.workers.values():
            worker.reduce()
            worker.take()
        table.tick(1.0)
        job.check()
    assert job.version > before + 3, f"from {before} to {job.version}"
    return job.version


def journalled(table: Table) -> list[e.Decided]:
    return [x for x in table.journal if isinstance(x, e.Decided)]
