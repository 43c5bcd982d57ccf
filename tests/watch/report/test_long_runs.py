"""Long runs: the report of one takes the memory of what it shows, and its figures are those of all lines."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftopt.common import spread
from ftopt.watch import decisions
from ftopt.watch.jsonl import Line
from ftopt.watch.report import fold, rounds, stream, timeline
from ftopt.watch.report.facts import Attempts, gather
from ftopt.watch.report.fold import Fold
from ftopt.watch.report.record import read
from ftopt.watch.report.stream import Events, in_order
from ftopt.watch.thin import Ends, Thinned
from tests.watch.report.recorded import record


class Job:
    """The events of a script's job of ``count`` outer steps, made anew for each reading."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Line]:
        chance = random.Random(0)
        of = {"job": "j", "incarnation": 0, "replica": "coordinator"}
        settings = {"samples": 100, "batch_size": 1, "drop_last": False}
        yield {**of, "t_s": 0.0, "event": "start", "version": 0, "data": {"done": [], "samples": settings}}
        for who in ("a", "b"):
            yield {"t_s": 0.1, "event": "join", "replica": who, "incarnation": 1}
        for n in range(1, self._count + 1):
            at = {"fragment": 0, "version": n, "attempt": n, "inner_step": n}
            counts = {"steps": n, "pending": 0, "dropped": {}, "waited_s": 0.1, "sent": 100 * n}
            members = [[who, 1, 1, n, 1.0, True] for who in ("a", "b")]
            ranges = {"a": [[2 * n - 2, 2 * n - 1]], "b": [[2 * n - 1, 2 * n]]}
            for who in ("a", "b"):
                own = {"replica": who, "incarnation": 1, **at}
                prepared = {"bytes": chance.randrange(1000), "seconds": 0.1, "wire_bytes": 100 * n}
                stalled = {"stall_s": chance.random() / 10}
                yield {**own, "t_s": n + 0.2, "event": "propose"}
                yield {**own, "t_s": n + 0.3, "event": "reduce"}
                yield {**own, "t_s": n + 0.4, "event": "prepare", "data": prepared}
                yield {**own, "t_s": n + 0.6, "event": "apply", "data": {"counted_step": n, "committed_step": n}}
                yield {**own, "t_s": n + 0.7, "event": "stall", "data": stalled}
            decided = {"members": members, "ranges": ranges, "chain": str(n), "done_to": 2 * n}
            yield {**of, **at, "t_s": n + 0.5, "event": "decide", "data": decided}
            if n % 3 == 0:
                yield {**of, **at, "t_s": n + 0.8, "event": "abort", "data": {"reason": f"of version {n}"}}
            yield {**of, "t_s": n + 0.8, "event": "losses", "data": {"losses": {"c": [1, n, 2.0]}}}
            yield {**of, "t_s": n + 0.9, "event": "counts", "data": {"counts": {"c": [1, counts]}}}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is many."""
    for module, names in {
        rounds: {"_OPEN": 10, "_CURVE": 25, "_MARKS": 10, "_DOTS": 25, "_LOSSES": 25},
        timeline: {"_UNCUT": 200, "_SPANS": 100},
        fold: {"_REASONS": 20},
        spread: {"_EXACT": 50, "_WIDTH": 0.2},
        decisions: {"WINDOW": 10},
        stream: {"_AHEAD": 10},
    }.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("ftopt.watch.report.facts._ATTEMPTS", 100)


def folded(count: int) -> tuple[Fold, float]:
    """Both readings, and the most memory that they took, in bytes."""
    job = Job(count)
    gc.collect()  # what other tests have left would be collected at any time
    tracemalloc.start()
    try:
        facts = gather(in_order(job), {})
        found = Fold(facts, {}, ["a", "b"], facts.last_s)
        for event in facts.lives.within(in_order(job)):
            found.add(event)
        found.close()
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("few")
def test_the_memory_of_a_report_does_not_grow_with_the_outer_steps() -> None:
    folded(5)  # what is made once for all
    (short, least), (long, most) = folded(80), folded(320)
    assert most < 1.6 * least
    for found, count in ((short, 80), (long, 320)):
        assert found.summary["outer_steps"] == found.rounds.shown.count == count
        assert found.summary["inner_steps_committed"] == found.summary["samples_committed"] == 2 * count
        assert found.aborted.count == found.summary["attempts_aborted"] == found.log.count - 2 == count // 3
        assert found.waits["a"].every.count == found.staleness.ages.total() / 2 == count
        assert {name: round(sum(lane.seconds.values()), 3) for name, lane in found.states.items()} == dict.fromkeys(
            ("a", "b"), count + 0.8
        )


def test_what_is_thinned_early_has_the_same_figures(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = record(tmp_path, rounds=60)
    whole = read(run.files.path, print).runs(None)[0]
    states = {name: lane.seconds for name, lane in whole.fold.states.items()}
    request.getfixturevalue("few")
    few = read(run.files.path, print).runs(None)[0]
    assert few.summary == whole.summary
    assert few.fold.rounds.shown.some() == whole.fold.rounds.shown.some()
    assert few.fold.rounds.total == whole.fold.rounds.total
    assert few.fold.log.some() == whole.fold.log.some()
    assert few.fold.staleness.ages == whole.fold.staleness.ages
    for name, lane in few.fold.states.items():
        assert lane.seconds == pytest.approx(states[name])


def test_what_is_appended_while_a_report_is_made_is_in_no_reading(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    events = Events(tmp_path, run.files.events, print)
    first = [*events]
    run.event("join", "late", 1)
    with run.files.events.open("a", encoding="utf-8") as file:
        file.write('{"t_s":1,"event":"jo')
    assert [*events] == first and not events.skipped


def test_lines_out_of_order_are_put_in_order_and_very_late_ones_come_late() -> None:
    events = [{"t_s": t_s, "n": n} for n, t_s in enumerate((1.0, 3.0, 2.0, 2.0, 5.0, 4.0, 0.0, 6.0))]
    assert [x["n"] for x in in_order(events)] == [6, 0, 2, 3, 1, 5, 4, 7]
    assert [x["n"] for x in in_order(events, ahead=2)] == [0, 2, 3, 1, 6, 5, 4, 7]


def test_of_very_many_rows_and_points_there_are_a_few() -> None:
    rows, greatest, attempts = Ends[int](4), Thinned[int](2, max), Attempts()
    for n in range(10):
        rows.add(n)
        greatest.add(n % 7)
    assert rows.some() == ([0, 1, 8, 9], " (the first 2 and the last 2 of 10)")
    assert (greatest.points, greatest.stride, greatest.count) == ([3, 6, 2], 4, 10)
    for number in range(100_000):
        attempts.tell(0, number, float(number))
    assert len(attempts) <= 20_000 and attempts[0, 16 * 1000] == 16_000.0
