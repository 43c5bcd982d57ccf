"""What `ftopt plan` predicts, beside what is measured: ``python -m benchmarks plan [--published] [--quick]``.

Two replicas in network namespaces behind links of a given rate (`tc tbf`) train one job for each case, all in turns.
The outer step without a network is calibrated as ``ftopt plan --calibrate`` does it, anew for each rate. With
``--published``: the Gbit/s that the same model needs, beside those of Streaming DiLoCo's simulation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict
from typing import Any

import torch

import ftopt
from benchmarks.plan.cases import CASES, Case
from benchmarks.plan.published import rows as published
from benchmarks.speed.figures import Row, Spread, table
from benchmarks.speed.links import Linked, NoLinksError, linked
from benchmarks.speed.machine import facts
from benchmarks.speed.models import of_size
from benchmarks.speed.report import RESULTS
from ftopt.cli.output import complain, say
from ftopt.config.schema import Recipe
from ftopt.job.check import parameters_of
from ftopt.job.plan import plan_of
from ftopt.planning.calibrate import outer_step_seconds
from ftopt.planning.forecast import Machines, forecast
from ftopt.sync.protocol.settings import Sync

STEP_S = 0.03
PARAMETERS = 1_000_000
RATES = (30, 100, 1000)
REPLICAS = 2
_PATIENT = ftopt.Sync(start_replicas=REPLICAS, dead_after_s=60.0, grace_s=60.0, heartbeat_s=1.0)
_LATENCY_S = 0.0003
_BARE_STEPS = 40


def add(parser: argparse.ArgumentParser) -> None:
    """[--published] [--quick]"""
    text = "print the link rates of arXiv 2501.18512, table 4, beside the model's; measure nothing"
    parser.add_argument("--published", action="store_true", help=text)
    parser.add_argument("--quick", action="store_true", help="one rate, few periods")


def run(arguments: argparse.Namespace) -> int:
    """1: the machine has no network namespaces for us."""
    if arguments.published:
        say("\n".join(table(published())))
        return 0
    about = facts()
    try:
        rows = measure(RATES[1:2] if arguments.quick else RATES, 2 if arguments.quick else 4)
    except NoLinksError as reason:
        complain(f"nothing is measured: {reason}")
        return 1
    say("\n".join(table(rows)))
    errors = [abs(row["difference"]) for row in rows]
    say(f"\ndifference: median {statistics.median(errors):.3f}, largest {max(errors):.3f}, of {len(errors)}")
    say(f"({about['cores']} cores, load {about['load_before']} before, {about['commit']})")
    path = RESULTS / ("quick" if arguments.quick else "speed") / "plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = [{k: asdict(v) if isinstance(v, Spread) else v for k, v in row.items()} for row in rows]
    path.write_text(json.dumps({"name": "plan", **about, "rows": shown}, indent=1) + "\n")
    return 0


def measure(rates: tuple[int, ...], periods: int) -> list[Row]:
    """A row a rate and case."""
    told = {"parameters": PARAMETERS, "step_s": STEP_S, "sync": asdict(_PATIENT)}
    rows: list[Row] = []
    with linked("benchmarks.plan.replica", REPLICAS, told) as links:
        for number in range(len(CASES)):
            links.crew.all(f"run {number} 1")
        for rate in rates:
            round_s, element_s, codec_s = outer_step_seconds()
            bare_s = max(taken_s / steps for ((steps, taken_s),) in links.crew.all(f"bare {_BARE_STEPS}"))
            machines = Machines(bare_s, rate / 1000, _LATENCY_S, None, round_s, element_s, codec_s)
            links.rate(rate)
            for number, case in enumerate(CASES):
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
    recipe = Recipe(name="case", method=case.method, replicas=REPLICAS, sync=Sync(codec=case.codec))
    inner = [torch.optim.SGD(model.parameters(), lr=1e-9)]
    plan = plan_of(recipe, model, inner, case.method.partition(parameters_of(model)))
    return forecast(recipe, plan, machines).utilization


def _utilization(links: Linked, number: int, periods: int, bare_s: float) -> Spread:
    """What the same steps take without ftopt to what they took, of the slower one, by period; the first period is
    thrown away."""
    of_members = links.crew.all(f"run {number} {periods + 1}")
    used = [[steps * bare_s / taken_s for steps, taken_s in times[1:]] for times in of_members]
    return Spread.of([min(each) for each in zip(*used, strict=True)])
