"""Jobs on links of a given rate, measured and predicted."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

import ftopt
from benchmarks.plan.cases import CASES, Case
from benchmarks.speed.figures import Row, Spread
from benchmarks.speed.links import Linked, linked
from benchmarks.speed.models import of_size
from ftopt.config.schema import Recipe
from ftopt.forecast.calibrate import outer_step_seconds
from ftopt.forecast.plan import Machines, forecast
from ftopt.run.check import parameters_of
from ftopt.run.preview import plan_of

STEP_S = 0.03
PARAMETERS = 1_000_000
RATES = (30, 100, 1000)
REPLICAS = 2
_PATIENT = ftopt.FaultPolicy(start_replicas=REPLICAS, dead_after_s=60.0, grace_s=60.0, heartbeat_s=1.0)
LATENCY_S = 0.0003
_BARE_STEPS = 20


def measure(rates: tuple[int, ...], periods: int) -> list[Row]:
    """A row a rate and case."""
    told = {"parameters": PARAMETERS, "step_s": STEP_S, "policy": asdict(_PATIENT)}
    rows: list[Row] = []
    with linked("benchmarks.plan.replica", REPLICAS, told) as links:
        for number in range(len(CASES)):
            links.crew.all(f"run {number} 1")
        for rate in rates:
            round_s, element_s, codec_s = outer_step_seconds()
            links.rate(rate)
            for number, case in enumerate(CASES):
                bare_s = max(taken_s / steps for ((steps, taken_s),) in links.crew.all(f"bare {_BARE_STEPS}"))
                machines = Machines(bare_s, rate / 1000, LATENCY_S, None, round_s, element_s, codec_s)
                found = _utilization(links, number, periods, bare_s)
                predicted = predict(case, machines)
                rows.append(
                    {
                        "case": case.name,
                        "Mbit/s": rate,
                        "measured": found,
                        "predicted": predicted,
                        "difference": predicted - found.median,
                        "step, ms": 1e3 * bare_s,
                        "round, ms": 1e3 * round_s,
                        "ns a parameter": 1e9 * element_s,
                    }
                )
    return rows


def predict(case: Case, machines: Machines) -> float:
    """The utilization that ``ftopt plan`` would print for it."""
    model: Any = of_size(PARAMETERS)
    recipe = Recipe(name="case", method=replace(case.method, codec=case.codec), replicas=REPLICAS)
    inner = [torch.optim.SGD(model.parameters(), lr=1e-9)]
    plan = plan_of(recipe, model, inner, case.method.partition(parameters_of(model)))
    return forecast(recipe, plan, machines).utilization


def _utilization(links: Linked, number: int, periods: int, bare_s: float) -> Spread:
    """What the same steps take without ftopt to what they took, of the slower one, by period; the first period is
    thrown away."""
    of_members = links.crew.all(f"run {number} {periods + 1}")
    used = [[steps * bare_s / taken_s for steps, taken_s in times[1:]] for times in of_members]
    return Spread.of([min(each) for each in zip(*used, strict=True)])
