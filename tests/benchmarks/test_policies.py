"""Models of other systems against what is known: closed forms, and traces counted by hand."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.comparison import compare
from benchmarks.simulate.picture import draw
from benchmarks.simulate.policies import Discard, Synchronous, efficiency, others, young_daly
from benchmarks.simulate.published import MODELS, ratios
from benchmarks.simulate.traces import ADD, REMOVE, Change, Trace, poisson

MODEL = Model(step_s=1.0, spread=0.0, sync_every=10, parameters=1e-12, start_s=0.0, latency_s=0.0)
"""The network costs nothing."""
THREE = Trace("three", (*(Change(0.0, ADD, x) for x in "abc"), Change(26.0, REMOVE, "c"), Change(27.0, ADD, "d")), 60.0)


def test_the_interval_of_young_and_daly() -> None:
    assert young_daly(8.0, 3600.0) == pytest.approx(240.0)


def test_checkpoint_and_restart_comes_to_what_young_and_daly_say() -> None:
    """Lost: C / tau for checkpoints, tau / 2M of work, R / M for restarts; all small."""
    saves_s, gap_s, restart_s = 5.0, 3600.0, 20.0
    trace = poisson(50, mtbf_s=gap_s, hours=600, back_s=0.001, seed=4)
    policy = Synchronous(name="", assumes="", pause_s=restart_s, checkpoint_s=saves_s, join_s=0.0)
    found = policy.run(trace, MODEL)
    tau_s = young_daly(saves_s, gap_s)
    assert 1 - found.goodput == pytest.approx(saves_s / tau_s + tau_s / (2 * gap_s) + restart_s / gap_s, rel=0.1)
    worse = [
        Synchronous(name="", assumes="", pause_s=restart_s, checkpoint_s=saves_s, join_s=0.0, interval_s=factor * tau_s)
        for factor in (0.4, 2.5)
    ]
    assert all(x.run(trace, MODEL).goodput < found.goodput for x in worse)


def test_a_layer_that_discards_loses_the_phase_of_all() -> None:
    """Phases of 10 s: the third one fails, then all stand still for 5 s; ``d`` takes part from the next one on."""
    found = Discard(any_failure=True).run(THREE, MODEL)
    assert found.samples == 3 * 20 + 3 * 25  # of 60 s: 20, 10 lost, 5 of time-out, 25
    assert (found.rounds, found.aborted) == (6, 1)
    assert found.twice == 2 * 10 + 6 + 3  # survivors', the dead one's, the joiner's before its first sync
    assert found.kept == pytest.approx(135 / (135 + 23))


def test_a_failure_long_before_the_sync_costs_torchft_nothing_but_the_dead_ones_steps() -> None:
    found = Discard(any_failure=False).run(THREE, MODEL)
    assert found.samples == 135  # 26 s is within the 5 s before the sync at 30 s
    early = Trace("early", (*(Change(0.0, ADD, x) for x in "abc"), Change(24.0, REMOVE, "c")), 60.0)
    assert Discard(any_failure=False).run(early, MODEL).samples == 3 * 20 + 2 * 40


def test_reused_gradients_save_the_steps_of_survivors() -> None:
    by_name = {x.name: x.run(THREE, MODEL) for x in others(MODEL)}
    plain, reused = by_name["synchronous data-parallel"], by_name["synchronous, gradients reused"]
    assert reused.samples - plain.samples == pytest.approx(0.5 * 2)
    assert plain.capacity == 60 + 60 + 26 + 33


def test_gradients_that_take_longer_than_the_backward_pass_slow_every_step() -> None:
    assert efficiency(MODEL, 16) == 1
    slow = Model(parameters=1e9, link_bytes_s=1e9, latency_s=0.0)
    assert efficiency(slow, 2) == pytest.approx(1 / (1 / 3 + 4.0))


def test_every_published_system_has_a_model() -> None:
    assert set(MODELS.values()) <= {x.name for x in others(MODEL)}
    table = {(system, trained, every_s): ratio for system, trained, every_s, ratio in ratios()}
    assert table["ReCycle", "GPT-3 6.7B", 1800.0] == pytest.approx(3.53 / 5.33)
    assert table["Varuna", "BERT-Large", 600.0] == pytest.approx(168.2 / 259.6)


def test_the_picture_is_an_svg_with_a_line_for_each_policy() -> None:
    rows = list(compare(THREE, MODEL, []))
    root = ElementTree.fromstring(draw(THREE, rows, step_s=1.0, batch=1))
    titles = [x.text for x in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == 2 * [row.policy for row in rows]  # the lines, and the legend's
    assert all(0 <= row.outcome.goodput <= 1 and not math.isnan(row.outcome.goodput) for row in rows)
