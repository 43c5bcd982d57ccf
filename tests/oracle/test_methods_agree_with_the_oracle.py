"""ftopt against an oracle that was written from the papers alone, replica by replica and tick by tick."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from tests.oracle import cases
from tests.oracle.compare import allowed, apart, compare
from tests.oracle.oracle import oracle
from tests.oracle.scenario import Change, Outer, Scenario, Spec

ALL = dict(chain(cases.plain(), cases.rates(), cases.changes(), cases.fragments(), cases.bfloat16()))
EVERY = 79
"""Of all scenarios, one in so many is among the default tests: a prime, so that they are of all kinds."""

SOME = dict(list(ALL.items())[::EVERY])
OTHERS = {name: scenario for name, scenario in ALL.items() if name not in SOME}


@pytest.mark.long
@pytest.mark.parametrize("scenario", SOME.values(), ids=SOME.keys())
def test_some_runs_of_all_kinds_differ_from_the_oracle_by_rounding_alone(scenario: Scenario) -> None:
    verdict = compare(scenario)
    assert verdict.same, verdict


@pytest.mark.slow
@pytest.mark.parametrize("scenario", OTHERS.values(), ids=OTHERS.keys())
def test_every_other_run_differs_from_the_oracle_by_rounding_alone(scenario: Scenario) -> None:
    verdict = compare(scenario)
    assert verdict.same, verdict


_DILOCO = Scenario(Spec("diloco", 4, outer=cases.NESTEROV), "adamw", replicas=3)
_SLOWMO = Scenario(Spec("slowmo", 4), "nesterov", rate=cases.RATES["restarts"])
_STREAMING = Scenario(Spec("streaming", 6, cut="strided", delay=2, outer=cases.STREAMING), "adamw", "mlp")
_DECOUPLED = replace(_STREAMING, spec=replace(_STREAMING.spec, kind="decoupled"))
_SYNC = Scenario(Spec("sync_sgd", 1, clip=0.3), "momentum", replicas=3)
_PAFT = Scenario(Spec("paft", 4), "momentum", noisy=True)
_UNEQUAL = replace(_DILOCO, **cases.UNEQUAL["unequal"])


def _with(scenario: Scenario, **settings: Any) -> tuple[Scenario, Scenario]:
    return scenario, replace(scenario, spec=replace(scenario.spec, **settings))


MISTAKES: dict[str, tuple[Scenario, Scenario]] = {
    "a heavy ball for Nesterov's momentum": _with(_DILOCO, outer=Outer(lr=0.7, momentum=0.9)),
    "an outer rate that is one hundredth too large": _with(_DILOCO, outer=replace(cases.NESTEROV, lr=0.707)),
    "another epsilon in the outer Adam": (
        replace(_DILOCO, spec=replace(_DILOCO.spec, outer=cases.ADAM)),
        replace(_DILOCO, spec=replace(_DILOCO.spec, outer=replace(cases.ADAM, eps=0.099))),
    ),
    "a round one step later": _with(_DILOCO, every=5),
    "uniform weights for steps": _with(_UNEQUAL, weights="uniform"),
    "tokens for steps": _with(_DILOCO, weights="tokens"),
    "a rate that is the first of the round": (_SLOWMO, replace(_SLOWMO, rate=lambda t: cases.RATES["restarts"](t - 1))),
    "a slow momentum one hundredth too large": _with(_SLOWMO, slow_momentum=0.606),
    "moments that are forgotten": _with(_SLOWMO, inner_state="reset"),
    "a result that comes a step later": _with(_STREAMING, delay=3),
    "a result that is mixed in": _with(_STREAMING, mix=0.5),
    "other fragments": _with(_STREAMING, cut="balanced"),
    "a plain mean for directions and lengths": (_DECOUPLED, _STREAMING),
    "a gradient that is not clipped": _with(_SYNC, clip=None),
    "a clipped gradient one hundredth too long": _with(_SYNC, clip=0.303),
    "an average that hides behind a step": _with(_PAFT, delay=1),
    "noise that nobody averages out": _with(_PAFT, every=100),
    "a contribution that is lost with a death": (
        replace(_DILOCO, changes=(Change(11, "die", 1),)),
        replace(_DILOCO, changes=(Change(11, "leave", 1),)),
    ),
    "a frozen parameter that moves": (replace(_DILOCO, changes=(Change(6, "freeze", what="bias"),)), _DILOCO),
}


@pytest.mark.long
@pytest.mark.parametrize("pair", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_would_be_at_least_a_hundred_times_what_rounding_may_do(pair: tuple[Scenario, Scenario]) -> None:
    right, wrong = (oracle(scenario) for scenario in pair)
    assert max(apart(right, wrong).values()) > 100 * allowed(pair[0], right)
