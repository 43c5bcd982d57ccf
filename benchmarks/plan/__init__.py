"""What `ftopt plan` predicts, beside what is measured: ``python -m benchmarks plan [--earlier | --published]``.

Two replicas in network namespaces behind links of a given rate (`tc tbf`) train one job for each case, all in turns.
The outer step without a network is calibrated as ``ftopt plan --calibrate`` does it, anew for each rate, and the inner
step without ftopt, anew for each case. With ``--earlier``: the runs on slow links in ``docs/performance.md``, beside
what the defaults predict. With ``--published``: the Gbit/s that the same model needs, beside those of Streaming
DiLoCo's simulation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from benchmarks.plan.earlier import rows as earlier
from benchmarks.plan.measuring import RATES, measure
from benchmarks.plan.published import rows as published
from benchmarks.speed.figures import Row, plain, table
from benchmarks.speed.links import NoLinksError
from benchmarks.speed.machine import facts
from benchmarks.speed.report import RESULTS
from ftopt.cli.shared.output import complain, say


def add(parser: argparse.ArgumentParser) -> None:
    """[--earlier | --published] [--quick]"""
    instead = parser.add_mutually_exclusive_group()
    text = "take the runs of docs/performance.md and the defaults of `ftopt plan`; measure nothing"
    instead.add_argument("--earlier", action="store_true", help=text)
    text = "print the link rates of arXiv 2501.18512, table 4, beside the model's; measure nothing"
    instead.add_argument("--published", action="store_true", help=text)
    parser.add_argument("--quick", action="store_true", help="one rate, few periods")


def run(arguments: argparse.Namespace) -> int:
    """1: the machine has no network namespaces for us."""
    if arguments.published:
        say("\n".join(table(published())))
        return 0
    if arguments.earlier:
        _show(earlier())
        return 0
    about = facts()
    try:
        rows = measure(RATES[1:2] if arguments.quick else RATES, 2 if arguments.quick else 3)
    except NoLinksError as reason:
        complain(f"nothing is measured: {reason}")
        return 1
    _show(rows)
    say(f"({about['cores']} cores, load {about['load_before']} before, {about['commit']})")
    path = RESULTS / ("quick" if arguments.quick else "speed") / "plan.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "plan", **about, "rows": plain(rows)}, indent=1) + "\n")
    return 0


def _show(rows: Sequence[Row]) -> None:
    say("\n".join(table(rows)))
    errors = [abs(row["difference"]) for row in rows]
    say(f"\ndifference: median {statistics.median(errors):.3f}, largest {max(errors):.3f}, of {len(errors)}")
