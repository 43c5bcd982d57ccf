"""Rounds that are shared out by speed: the equation against a plain loop, settings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftopt.errors import UserError
from ftopt.methods import (
    PAFT,
    BySpeed,
    DecoupledDiLoCo,
    DiLoCo,
    LocalSGD,
    SlowMo,
    StreamingDiLoCo,
    SyncSGD,
)
from ftopt.methods.method import settings_of
from ftopt.methods.triggers import Measurement, MemberStats, RoundStats
from ftopt.triggers import AnyOf, Due, Every, Progress
from tests.reference import balanced

AT = Progress(fragment=0, steps=0, pending_steps=0, local_steps=0, inner_step=0)
SHARED = LocalSGD(pacing=BySpeed(round_steps=200))


def _round(method: LocalSGD, agreed: RoundStats, step_s: dict[int, float]) -> tuple[dict[int, int], RoundStats]:
    """Each replica's steps in a round, and what is agreed on after it."""
    steps = {m: method.timing.steps_until_due(replace(AT, agreed=agreed, pace=1 / s)) for m, s in step_s.items()}
    return steps, agreed.after([MemberStats(float(steps[m]), pace=1 / s) for m, s in step_s.items()])


def test_steps_go_by_speed_and_everyone_arrives_at_the_same_time() -> None:
    step_s = {0: 0.01, 1: 0.02, 2: 0.05, 3: 0.1}
    first, agreed = _round(SHARED, RoundStats(), step_s)
    assert first == dict.fromkeys(step_s, 20), "a tenth, before any speed is known"
    second, _ = _round(SHARED, agreed, step_s)
    assert second == {0: 111, 1: 56, 2: 22, 3: 11}
    assert sum(second.values()) == 200
    arrives = [second[m] * s for m, s in step_s.items()]
    assert max(arrives) - min(arrives) <= 0.1


@given(
    step_s=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=8),
    slower=st.lists(st.floats(0.5, 2.0), min_size=5, max_size=5),
    total=st.integers(1, 5000),
    dies=st.integers(1, 4),
)
def test_it_is_the_plain_loop(step_s: list[float], slower: list[float], total: int, dies: int) -> None:
    method = LocalSGD(pacing=BySpeed(round_steps=total))
    everybody = list(range(len(step_s)))
    there = [everybody if number < dies else everybody[: max(1, len(everybody) - 1)] for number in range(5)]

    def at(m: int, number: int) -> float:
        return step_s[m] * slower[(m + number) % 5]

    expected = balanced.rounds(there, at, total, -(-total // 10))
    agreed, last = RoundStats(), dict[int, float]()
    for number, members in enumerate(there):
        steps = {m: method.timing.steps_until_due(replace(AT, agreed=agreed, pace=last.get(m))) for m in members}
        for m, exact in expected[number].items():
            assert steps[m] == 1 if exact < 1 else abs(steps[m] - exact) <= 0.5 + 1e-9 * exact
        if number and there[number - 1] == members:
            assert abs(sum(steps.values()) - total) <= sum(0.5 if n > 1 else 1 for n in steps.values())
        last = {m: 1 / at(m, number) for m in members}
        agreed = agreed.after([MemberStats(float(n), pace=last[m]) for m, n in steps.items()])


def test_when_a_replica_is_gone_the_round_behind_the_next_outer_step_has_all_steps_again() -> None:
    speeds = {0: 0.01, 1: 0.02, 2: 0.02}
    _, agreed = _round(SHARED, RoundStats(), speeds)
    del speeds[2]
    short, agreed = _round(SHARED, agreed, speeds)
    assert short == {0: 100, 1: 50}
    whole, _ = _round(SHARED, agreed, speeds)
    assert whole == {0: 133, 1: 67}


def test_who_has_measured_nothing_takes_an_even_share() -> None:
    agreed = RoundStats(members=4.0, pace=100.0)
    assert SHARED.timing.steps_until_due(replace(AT, agreed=agreed)) == 50
    assert SHARED.timing.steps_until_due(replace(AT, agreed=RoundStats(members=4.0), pace=3.0)) == 50
    assert SHARED.timing.steps_until_due(replace(AT, agreed=agreed, pace=1e-9)) == 1, "never none"
    assert SHARED.timing.steps_until_due(replace(AT, agreed=agreed, pace=1e9)) == 200, "and never more than there are"


def test_without_a_number_the_mean_is_sync_every() -> None:
    method = DiLoCo(pacing=BySpeed())
    assert method.timing.steps_until_due(AT) == 500
    assert method.timing.steps_until_due(replace(AT, agreed=RoundStats(members=4.0, pace=40.0), pace=20.0)) == 1000


def test_a_trigger_or_averaging_may_come_before() -> None:
    method = LocalSGD(pacing=BySpeed(round_steps=40), trigger=AnyOf([Every(9)]), average_until_step=3)
    agreed = RoundStats(members=2.0, pace=2.0)
    assert method.timing.due(replace(AT, steps=1, inner_step=3)) is Due.YES
    shared = replace(AT, agreed=agreed, pace=0.5, inner_step=9)
    assert [method.timing.due(replace(shared, steps=n)) for n in (8, 9)] == [Due.NO, Due.YES]
    assert method.timing.due(replace(shared, pace=0.1, steps=2)) is Due.YES


def test_speeds_are_exchanged_only_where_they_are_asked_for_and_all_replicas_must() -> None:
    assert SHARED.timing.uses == Measurement.PACE
    assert LocalSGD(sync_every=50).timing.uses == Measurement.NONE
    assert (SHARED.timing.period, LocalSGD(sync_every=50).timing.period) == (None, 50)
    assert settings_of(SHARED)["pacing"] == "BySpeed"
    assert settings_of(SHARED)["pacing.round_steps"] == "200"
    assert settings_of(DiLoCo(sync_every=50))["pacing"] == "None"
    assert "sync_every" not in settings_of(DiLoCo(sync_every=50)) | settings_of(SHARED)
    assert settings_of(DiLoCo(sync_every=50, pacing=BySpeed()))["sync_every"] == "50", "then all go by it"


@pytest.mark.parametrize("method", [StreamingDiLoCo, DecoupledDiLoCo, SlowMo, SyncSGD, PAFT])
def test_other_methods_have_one_period_for_all(method: Any) -> None:
    with pytest.raises(UserError, match="no setting 'pacing'"):
        method(sync_every=10, pacing=BySpeed())
    with pytest.raises(UserError, match=r"sync_every=None; must be a whole number of inner steps"):
        method(sync_every=None)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sync_every": None}, r"sync_every=None; must be a whole number .* at least 1; use"),
        ({"pacing": 200}, r"pacing=200; must be None or ftopt.methods.BySpeed"),
        ({"sync_every": "by speed"}, r"sync_every='by speed'; must be a whole number .* at least 1; use"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LocalSGD(**settings)


@pytest.mark.parametrize("steps", [0, True, 1.5])
def test_a_round_has_a_positive_number_of_steps(steps: Any) -> None:
    with pytest.raises(UserError, match=f"pacing.round_steps={steps}; must be a whole number of inner steps"):
        BySpeed(round_steps=steps)
