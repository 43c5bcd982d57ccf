"""The production protocol on traces so small that the goodput is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.comparison import Ours, sweep
from benchmarks.simulate.fleet import Node
from benchmarks.simulate.many_machines import SharedReplica
from benchmarks.simulate.modelled_reduction import Group
from benchmarks.simulate.tally import Outcome
from benchmarks.simulate.traces import ADD, REMOVE, Change, Trace, poisson
from benchmarks.simulate.world import World
from ftopt.errors import UserError
from ftopt.sync.protocol.replica.machine import Replica

MODEL = Model(step_s=1.0, spread=0.0, sync_every=10, parameters=1e3, start_s=0.0, delay=1)
"""A message takes a millisecond, and so do the start of a job and a round: n seconds are n - 1 whole steps."""


def three(gone_s: float | None = 25.5, end_s: float = 40.0) -> Trace:
    """Three machines, one of which is taken away."""
    changes = [Change(0.0, ADD, name) for name in "abc"]
    changes += [Change(gone_s, REMOVE, "c")] if gone_s is not None else []
    return Trace("three", tuple(changes), end_s)


def outcome_of(trace: Trace, model: Model) -> Outcome:
    world = World(trace, model)
    for _ in world.run():
        pass
    return world.tally.result(end_s=trace.end_s, batch=model.batch)


def test_without_failures_every_whole_step_is_in_the_model() -> None:
    found = outcome_of(three(gone_s=None), MODEL)
    assert found.capacity == pytest.approx(3 * 40)
    assert found.samples == found.computed == 3 * 39
    assert found.twice == 0
    assert found.rounds == 4  # after 10, 20 and 30 steps, and at the end
    assert found.participation == 1


@pytest.mark.parametrize("delay", [0, 1])
def test_a_machine_that_is_taken_away_loses_the_steps_since_its_last_round_alone(delay: int) -> None:
    found = outcome_of(three(), replace(MODEL, delay=delay))
    assert found.capacity == pytest.approx(40 + 40 + 25.5)
    assert found.samples == 39 + 39 + 20
    assert found.computed - found.samples == found.twice == 25 - 20
    assert found.kept == 1
    assert found.goodput == pytest.approx(98 / 105.5)


def test_with_a_notice_and_a_round_for_it_nothing_is_lost() -> None:
    found = outcome_of(three(), replace(MODEL, notice_s=10.0, hand_in_s=4.0, hand_in="sync"))
    assert found.samples == 39 + 39 + 21  # it stops after 21.5 s
    assert found.twice == 0
    assert found.rounds == 5


def test_with_a_notice_alone_a_leaver_finds_no_round() -> None:
    found = outcome_of(three(), replace(MODEL, notice_s=10.0, hand_in_s=4.0, hand_in="leave"))
    assert found.samples == 39 + 39 + 20
    assert found.twice == 1


def test_a_machine_that_comes_later_fetches_and_takes_part() -> None:
    trace = Trace("later", (Change(0.0, ADD, "a"), Change(0.0, ADD, "b"), Change(12.2, ADD, "c")), 40.0)
    found = outcome_of(trace, MODEL)
    assert found.samples == 39 + 39 + 27
    assert found.twice == 0


def test_blocking_rounds_stand_still_for_as_long_as_a_reduction_takes() -> None:
    slow = replace(MODEL, delay=0, parameters=1e6, link_bytes_s=8 * 4e6 / 6, latency_s=1e-4)
    found = outcome_of(three(gone_s=None, end_s=100.0), slow)
    assert slow.reduce_s(3) == pytest.approx(1.0, abs=0.01)
    assert found.stall == pytest.approx(9 / 100, abs=0.01)  # 9 rounds of 11 s
    assert found.samples == 3 * 90


def test_a_fleet_with_many_failures_counts_no_step_twice_and_loses_none_of_survivors() -> None:
    trace = poisson(12, mtbf_s=20, hours=0.1, back_s=10, together=2, seed=5)
    model = replace(MODEL, spread=0.05, start_s=3.0, slow_every_s=300.0, slow_for_s=60.0, latency_s=0.01)
    for delay, fragments in ((0, 1), (2, 1), (2, 3)):
        found = outcome_of(trace, replace(model, delay=delay, fragments=fragments))
        assert 0.5 < found.goodput < 1
        assert found.kept > 0.99
        assert found.samples + found.twice == pytest.approx(found.computed)


def test_what_replicas_share_is_what_each_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = poisson(6, mtbf_s=30, hours=0.1, back_s=10, seed=2)
    shared = outcome_of(trace, replace(MODEL, spread=0.05))

    def each(self: Any) -> None:
        if len(self._inside) < len(self._members):
            return
        inside, self._inside = list[Node](self._inside.values()), {}
        rows = [[self._rows[name]] for name in self._members]
        for node in inside:
            node.act(node.machine.reduced(self._fragment, self._attempt, "sum", rows))

    monkeypatch.setattr(Group, "_end", each)
    for name in ("hello", "_learn", "_quorum"):
        monkeypatch.setattr(SharedReplica, name, getattr(Replica, name))
    assert outcome_of(trace, replace(MODEL, spread=0.05)) == shared


def test_a_sweep_says_where_keeping_steps_pays() -> None:
    cells = list(
        sweep(
            replace(MODEL, dead_after_s=6.0),
            lambda mtbf_s: poisson(6, mtbf_s=mtbf_s, hours=0.2, back_s=20),
            periods=[10, 100],
            mtbfs_s=[60.0, 1e6],
        )
    )
    assert [(x.sync_every, x.mtbf_s) for x in cells] == [(10, 60.0), (100, 60.0), (10, 1e6), (100, 1e6)]
    assert cells[1].pays
    assert not cells[2].pays


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    trace = poisson(4, mtbf_s=1e6, hours=0.1, back_s=20)
    Ours("x", "", MODEL).run(trace, 0, lambda name, share: told.append((name, share)))
    assert {name for name, _ in told} == {"x"}
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 1


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("step_s", 0.0, "--step-s=0.0; must be"),
        ("link_bytes_s", -1.0, "--gbit-s=-8e-09; must be"),
        ("delay", 10, "--delay=10 with --sync-every=10; must be"),
        ("hand_in", "later", "hand_in='later'; allowed"),
        ("spread", 1.0, "--spread=1.0; must be"),
        ("fragments", 0, "fragments=0; must be"),
        ("fragments", 10**8, "fragments=100000000; must be"),
    ],
)
def test_a_wrong_assumption_is_told_as_the_option_that_gives_it(name: str, value: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        replace(MODEL, **{name: value})


def test_a_removal_without_a_notice_takes_the_steps_since_the_last_round_with_it() -> None:
    trace = three()
    trace = replace(trace, changes=tuple(replace(x, told=False) for x in trace.changes))
    found = outcome_of(trace, replace(MODEL, notice_s=10.0, hand_in_s=4.0, hand_in="sync"))
    assert found == outcome_of(three(), MODEL)


def test_who_dies_in_a_round_is_missed_at_once_if_its_connections_break() -> None:
    """It dies half a second after the quorum, in a reduction of a second; in silence that takes 3 s to be noticed."""
    slow = replace(MODEL, delay=0, parameters=1e6, link_bytes_s=8 * 4e6 / 6, dead_after_s=6.0)
    silent = outcome_of(three(gone_s=10.5), slow)
    broken = outcome_of(three(gone_s=10.5), replace(slow, silent=False))
    assert silent.aborted == broken.aborted == 1
    assert silent.stall is not None and broken.stall is not None
    machine_s = three(gone_s=10.5).machine_seconds()
    assert (silent.stall - broken.stall) * machine_s == pytest.approx(2 * (3.0 - 0.5), abs=0.1)
