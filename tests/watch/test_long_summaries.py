"""Figures that are folded line by line: those of a long run are the same as if all lines had been there at the end."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from ftopt.watch import decisions, history, samples
from ftopt.watch.ranges import Numbers, without
from ftopt.watch.spread import Spread
from ftopt.watch.summary import summarize

Record = dict[str, Any]
_SETTINGS = {"samples": 100, "batch_size": 4, "drop_last": False}


class Told:
    """Events of a random job: outer steps, replicas that leave, die and come, a coordinator that tells decisions twice,
    late or not at all, and versions that it goes back to."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.events: list[Record] = []
        self.versions = [0] * self.chance.choice((1, 2))
        self.lives = {"a": 1, "b": 1, "c": 1}
        self.there = set(self.lives)
        self.taken: dict[tuple[str, int], int] = {}
        self.units: dict[int, list[tuple[int, int]]] = {}
        self.unit = 0
        self.begin("start")
        for name in self.lives:
            self.tell("join", name, 1)
        for _ in range(self.chance.randrange(10, 60)):
            self.chance.choices((self.decide, self.change, self.go_back), (7, 2, 1))[0]()
        for name in sorted(self.there):
            data = {"reason": "done", "pending_steps": self.chance.randrange(3), "anchor_digest": "x"}
            self.tell("end", name, self.lives[name], data=data)

    def tell(self, event: str, replica: str = "coordinator", incarnation: int = 0, **more: Any) -> None:
        at = {"t_s": float(len(self.events)), "event": event, "replica": replica, "incarnation": incarnation}
        self.events.append(at | more)

    def begin(self, event: str, **more: Any) -> None:
        done = sorted(each for ranges in self.units.values() for each in ranges if each[0] < each[1])
        data = {"versions": [*self.versions], "samples": _SETTINGS, "done": [[*each] for each in done]}
        self.tell(event, version=self.versions[0], inner_step=self.versions[0], data=data | more)

    def decide(self) -> None:
        fragment = self.chance.randrange(len(self.versions))
        self.versions[fragment] += 1
        version, members, ranges = self.versions[fragment], [], {}
        for name in sorted(self.there):
            who, steps = (name, self.lives[name]), self.chance.randrange(5)
            self.taken[who] = self.taken.get(who, 0) + steps
            members.append([*who, steps, self.taken[who], float(steps), self.chance.random() < 0.95])
            ranges[name] = [[self.unit, self.unit + steps]]
            self.unit += steps if not fragment else 0
        data = {"members": members, "chain": str(len(self.events)), "inner_step": version}
        at: Record = {"fragment": fragment, "version": version, "inner_step": version}
        if not fragment:
            self.units[version] = [(a, b) for [[a, b]] in ranges.values()]
            data |= {"ranges": ranges, "done_to": self.unit}
        for _ in range(self.chance.choices((1, 2, 0), (8, 1, 1))[0]):
            self.tell("decide", **at, data=data)
        if self.chance.random() < 0.1:
            self.begin("recover", decided=[at | data])

    def change(self) -> None:
        name = self.chance.choice(sorted(self.lives))
        if name in self.there:
            self.there.discard(name)
            self.tell(self.chance.choice(("leave", "death")), name, self.lives[name])
        else:
            self.there.add(name)
            self.lives[name] += 1
            self.tell("join", name, self.lives[name])

    def go_back(self) -> None:
        self.tell("rollback", fragment=0, version=self.versions[0])
        self.versions = [max(0, version - self.chance.choice((0, 1, 3, 20))) for version in self.versions]
        self.units = {version: ranges for version, ranges in self.units.items() if version <= self.versions[0]}
        self.begin(self.chance.choice(("start", "recover")))

    def summary(self) -> Record:
        steps: dict[str, list[Record]] = {name: [] for name in self.lives}
        for (name, incarnation), count in self.taken.items():
            steps[name] += [{"incarnation": incarnation}] * count
        return summarize(self.events, steps)


@pytest.mark.parametrize("window", [1, 4])
def test_decisions_that_are_counted_early_are_counted_right(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        told = Told(seed)
        whole = told.summary()
        with monkeypatch.context() as patch:
            for module in (history, decisions, samples):
                patch.setattr(module, "WINDOW", window)
            assert told.summary() == whole, f"seed {seed}"


def test_a_job_that_goes_back_far_without_a_word_is_another_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(version: int, steps: int, chain: str) -> Record:
        data = {"members": [["a", 1, steps, steps * version, 1.0, True]], "chain": chain}
        at = {"t_s": 1.0, "event": "decide", "replica": "coordinator", "incarnation": 0}
        return at | {"version": version, "inner_step": version, "data": data}

    for module in (history, decisions):
        monkeypatch.setattr(module, "WINDOW", 3)
    events = [*(decide(version, 1, "x") for version in range(1, 21)), *(decide(v, 1, "y") for v in range(5, 9))]
    got = summarize(events, {"a": [{"incarnation": 1}] * 24})
    assert got["chain_conflicts"] == [5]
    assert (got["outer_steps"], got["inner_steps_committed"], got["inner_step"]) == (8, 8, 8)


@pytest.mark.parametrize("count", [1, 2, 999, 10_000, 10_001, 40_000])
def test_a_spread_is_exact_of_an_ordinary_run_and_right_to_a_thousandth_of_a_long_one(count: int) -> None:
    chance = random.Random(count)
    values = [chance.expovariate(10) for _ in range(count)]
    parts = Spread(), Spread()
    for value in values:
        parts[chance.random() < 0.5].add(value)
    parts[0].update(parts[1])
    median, p99, most = parts[0].of()
    exact = statistics.median(values), sorted(values)[math.ceil(0.99 * count) - 1], max(values)
    assert (median, p99, most) == pytest.approx(exact, rel=0.001 if count > 10_000 else 1e-12)
    assert (most, parts[0].least, parts[0].count) == (max(values), min(values), count)
    assert parts[0].total == pytest.approx(sum(values))


def test_numbers_are_ranges() -> None:
    numbers, chance = Numbers(), random.Random(0)
    added = [chance.randrange(200) for _ in range(300)]
    for number in added:
        numbers.add(number)
    assert [x for start, stop in numbers for x in range(start, stop)] == sorted({*added})
    assert all(stop < start for (_, stop), (start, _) in zip([*numbers], [*numbers][1:], strict=False))
    assert without([(0, 10)], [(2, 4), (9, 12)]) == [(0, 2), (4, 9)]
