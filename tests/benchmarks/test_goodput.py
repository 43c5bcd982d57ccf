"""The goodput benchmark: its schedules, and how it counts what was recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.goodput import account, tables
from benchmarks.goodput.account import Account
from benchmarks.goodput.predicted import Measured, checkpoint_every, latency, model, predict
from benchmarks.goodput.schedule import KILL, START, WARN, Setting, deeds, present, quiet, schedule
from benchmarks.goodput.thirty import COMMITTED, STEPS, setting
from benchmarks.simulate.traces import ADD, REMOVE, Change, Trace

SETTING = Setting(machines=4, seconds=60.0, gap_s=3.0)
TWO = Trace("two", (Change(0.0, ADD, "r0"), Change(0.0, ADD, "r1"), Change(10.0, REMOVE, "r1")), 20.0)


def test_a_schedule_is_told_by_its_seed_and_spares_half_of_the_machines() -> None:
    trace = schedule(SETTING, 7)
    assert trace == schedule(SETTING, 7) != schedule(SETTING, 8)
    assert min(size for _, size in trace.sizes()) == 2
    assert all(at_s > SETTING.start_s for at_s, _ in trace.removals())
    told = [x.told for seed in range(20) for x in schedule(SETTING, seed).stays() if x.removed]
    assert sum(told) / len(told) == pytest.approx(SETTING.told, abs=0.1)


def test_deeds_start_warn_and_kill_in_the_order_of_time() -> None:
    changes = (Change(0.0, ADD, "a"), Change(5.0, REMOVE, "a"), Change(5.5, ADD, "a"), Change(6.0, REMOVE, "a"))
    trace = Trace("t", (*changes, Change(8.0, ADD, "b"), Change(12.0, REMOVE, "b", told=False)), 20.0)
    found = [(x.at_s, x.what, x.node) for x in deeds(trace, start_s=1.0, notice_s=2.0)]
    assert found == [(1.0, START, "a"), (3.0, WARN, "a"), (5.0, KILL, "a"), (9.0, START, "b"), (12.0, KILL, "b")]
    assert [present(trace, at_s) for at_s in (0.0, 5.2, 9.0, 12.0)] == [1, 0, 1, 0]


def test_the_samples_of_ftopt_are_those_of_decisions() -> None:
    def decide(version: int, *members: list[Any]) -> dict[str, Any]:
        return {"t_s": 1.0, "event": "decide", "replica": "coordinator", "incarnation": 0, "version": version,
                "inner_step": 10 * version, "data": {"members": list(members), "chain": f"{version}"}}  # fmt: skip

    events: list[dict[str, Any]] = [
        decide(1, ["r0", 1, 10, 10, 10.0, True], ["r1", 1, 8, 8, 8.0, True]),
        {"t_s": 1.0, "event": "death", "replica": "r1", "incarnation": 1},
        {"t_s": 1.0, "event": "abort", "replica": "coordinator", "incarnation": 0},
        {"t_s": 1.5, "event": "stall", "replica": "r0", "incarnation": 1, "data": {"stall_s": 3.0}},
        decide(2, ["r0", 1, 5, 15, 5.0, True]),
        {"t_s": 2.0, "event": "end", "replica": "r0", "incarnation": 1, "data": {"reason": "done", "pending_steps": 0}},
    ]
    lines = {"r0": [{"incarnation": 1, "local_step": n} for n in range(15)]}
    lines["r1"] = [{"incarnation": 1, "local_step": n} for n in range(9)]
    found = account.ours(events, lines, TWO, 1.0)
    assert found == Account(goodput=23 / 30, committed=2 / 3, stall=0.1, attempts=3, lost=1, others=0)


def test_what_came_after_the_checkpoint_is_done_again_and_counts_for_machines_that_were_there() -> None:
    starts = [
        {"t_s": 1.0, "event": "begin", "rank": 0},
        {"t_s": 2.0, "event": "train", "rank": 0, "step": 0},
        {"t_s": 10.5, "event": "train", "rank": 0, "step": 4},
    ]
    steps = [{"t_s": 3.0 + n, "step": n + 1} for n in range(6)] + [{"t_s": 11.0 + n, "step": n + 5} for n in range(4)]
    found = account.restarting(steps, starts, TWO, began_s=0.0, start_s=1.0, step_s=1.0)
    assert found.goodput == pytest.approx((4 * 2 + 4) / 30)
    assert found.others == 2 * 2
    assert account.median_gap(steps) == 1.0
    assert account.pauses_of(starts, [4.0, 9.0, 12.0]) == [1.5]


def test_an_inner_step_is_measured_without_the_rounds() -> None:
    lines = []
    at_s = 0.0
    for step in range(1, 41):
        lines.append({"t_s": at_s, "incarnation": 1, "local_step": step})
        at_s += 5.0 if step % 10 == 0 else 0.1
    stalls = [{"event": "stall", "replica": "r0", "t_s": x["t_s"] + 4.9} for x in lines if x["local_step"] % 10 == 0]
    step_s, spread = account.step_of({"r0": lines}, stalls)
    assert step_s == pytest.approx(0.1)
    assert spread == 0.0


def test_starts_are_from_the_process_to_its_join_without_the_first() -> None:
    events = [{"event": "join", "replica": "r0", "t_s": at_s} for at_s in (1.0, 12.5)]
    assert account.starts_of(events, {"r0": [0.5, 12.0, 20.0]}) == [0.5]


def test_the_simulation_takes_the_latency_with_which_its_rounds_take_as_long() -> None:
    measured = Measured(step_s=0.1, spread=0.0, start_s=0.2, stall_s=0.02)
    calm = replace(SETTING, seconds=20.0)
    latency_s = latency(calm, measured, quiet(calm))
    assert 1e-4 < latency_s < 0.01
    assumed = model(SETTING, measured, delay=0, latency_s=latency_s)
    assert assumed.start_s == pytest.approx(SETTING.start_s + 0.2)
    assert not assumed.silent
    found = predict(SETTING, measured, schedule(SETTING, 1), latency_s=latency_s, seed=1, ddp_step_s=0.11, pause_s=2.0)
    assert set(found) == {"ftopt, blocking", "ftopt, delay 5", "checkpoint and restart", "torchft"}
    assert all(0.2 < x.goodput < 1 for x in found.values())
    assert found["ftopt, blocking"].goodput > found["checkpoint and restart"].goodput
    assert checkpoint_every(SETTING) == round(math.sqrt(2 * 0.1 * 3.0) / 0.1)


def test_tables_show_the_spread_of_shares_and_the_sum_of_counts() -> None:
    real = [{"x": Account(goodput=0.9, committed=1.0, stall=None, attempts=10, lost=3, others=0)}]
    real.append({"x": Account(goodput=0.8, committed=0.9, stall=None, attempts=20, lost=4, others=0)})
    found = [{"x": replace(a["x"], goodput=a["x"].goodput + 0.02, stall=0.0)} for a in real]
    lines = tables.summary(real, found)
    assert "| x | goodput | 85.0% (80.0% to 90.0%) | 87.0% (82.0% to 92.0%) | +2.0% (+2.0% to +2.0%) |" in lines
    assert "| x | attempts | 30 | 30 | +0 |" in lines
    assert not any("stall" in line for line in lines)
    assert tables.odd({"x": {}}) == "odd: nothing"


def test_thirty_replicas_have_the_published_ratio_of_failures_to_rounds() -> None:
    at = setting(60.0)
    assert at.step_s * at.sync_every == pytest.approx(60.0 / (STEPS / 1100) / 10, rel=0.06)
    assert pytest.approx(0.823, abs=0.001) == COMMITTED / STEPS
