"""What `ftopt plan` predicts with its defaults, beside the runs on slow links in ``docs/performance.md``."""

from __future__ import annotations

import re

from benchmarks.plan.cases import Case
from benchmarks.plan.measuring import LATENCY_S, predict
from benchmarks.speed.bandwidth import STEP_S
from benchmarks.speed.figures import Row
from benchmarks.speed.linked import method_of
from benchmarks.speed.report import PAGE
from ftopt.forecast.plan import Machines

_RATE = re.compile(r"([\d,]+) Mbit/s")


def measured() -> list[tuple[Case, float, float]]:
    """Each run of that page: the job, Mbit/s, and the utilization."""
    text = PAGE.read_text(encoding="utf-8").split("<!-- bandwidth -->")[1].split("<!-- end bandwidth -->")[0]
    lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line.startswith("|")]
    rates = [_RATE.fullmatch(head) for head in lines[0]]
    return [
        (Case(way, method_of(way), "fp4" if way == "+ fp4" else "fp32"), float(rate[1].replace(",", "")), float(found))
        for way, *cells in lines[2:]
        for rate, found in zip(rates[1:], cells, strict=True)
        if rate and found
    ]


def rows() -> list[Row]:
    """A row a run."""
    found: list[Row] = []
    for case, rate, utilization in measured():
        predicted = predict(case, Machines(STEP_S, rate / 1000, LATENCY_S))
        row: Row = {"way": case.name, "Mbit/s": int(rate), "measured": utilization}
        found.append({**row, "predicted": predicted, "difference": predicted - utilization})
    return found
