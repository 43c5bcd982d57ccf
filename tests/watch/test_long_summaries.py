"""Figures that are folded line by line: those of a long run are the same as if all lines had been there at the end."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from ftopt.common.spread import Spread
from ftopt.watch import decisions
from ftopt.watch.summary import summarize
from ftopt.watch.versions import Numbers, Versions, without

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


def standing(events: list[Record]) -> dict[int, dict[int, Record]]:
    """Fragment -> version -> its decision, as all lines at once tell it: the last word counts."""
    found: dict[int, dict[int, Record]] = {0: {}}
    back = False
    for event in events:
        data = event.get("data", {})
        back = back or event["event"] == "rollback"
        if event["event"] in ("start", "recover"):
            for fragment, last in enumerate(data["versions"] if back else ()):
                known = found.setdefault(fragment, {})
                found[fragment] = {version: x for version, x in known.items() if version <= last}
            back = False
        told = [event | data] if event["event"] == "decide" else data.get("decided", [])
        for each in told:
            found.setdefault(each["fragment"], {})[each["version"]] = each
    return found


def test_the_decisions_of_random_jobs_are_counted_as_if_all_lines_were_there_at_the_end() -> None:
    for seed in range(150):
        told = Told(seed)
        got, decided = told.summary(), standing(told.events)
        first = [decided[0][version] for version in sorted(decided[0])]
        assert got["outer_steps"] == sum(map(len, decided.values())), f"seed {seed}"
        assert got["inner_step"] == (first[-1]["inner_step"] if first else 0), f"seed {seed}"
        members = [member for each in first for member in each["members"]]
        assert got["inner_steps_committed"] == sum(x[2] for x in members if x[-1]), f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_of_versions_are_those_of_a_dictionary(seed: int) -> None:
    chance, versions, known = random.Random(seed), Versions("iq"), dict[int, list[tuple[int, ...]]]()
    for _ in range(200):
        version = chance.randrange(40)
        if chance.random() < 0.1:
            gone = [row for v in sorted(known) if v > version for row in known.pop(v)]
            assert versions.go_back(version) == gone
            continue
        rows = [(version, chance.randrange(9)) for _ in range(chance.randrange(4))]
        assert versions.put(version, rows) == known.get(version, [])
        known[version] = rows
        assert [*versions.numbers] == sorted(known)
        assert [*versions.rows()] == [row for v in sorted(known) for row in known[v]]


def test_a_job_that_goes_back_far_without_a_word_is_another_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(version: int, steps: int, chain: str) -> Record:
        data = {"members": [["a", 1, steps, steps * version, 1.0, True]], "chain": chain}
        at = {"t_s": 1.0, "event": "decide", "replica": "coordinator", "incarnation": 0}
        return at | {"version": version, "inner_step": version, "data": data}

    monkeypatch.setattr(decisions, "WINDOW", 3)
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
