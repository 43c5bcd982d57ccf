"""Losses of a report: thinned to what a picture can show, over steps and over time, and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ftopt.common.plural import count
from ftopt.watch.jsonl import data_of
from ftopt.watch.report.blocks import HUES, Block, legend, plot, plots, section, shape, table, text
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.text import clock, listed, real, whole
from ftopt.watch.report.thin import ends

_POINTS = 12_000
"""Total number of points of all lines in a picture."""
_PER_LINE = (20, 400)
_ROWS = 12


class Mean(NamedTuple):
    """The mean of some consecutive steps of one incarnation."""

    t_s: float
    inner_step: float
    loss: float


Line = tuple[str, str, Sequence[Mean]]
"""Name, classes of the style sheet, and points."""


def losses(run: Run, *, budget: float = 1.0) -> Block | None:
    """The section; None if no loss is on record. ``budget``: the share of the points that it may have."""
    known = by_replica(run)
    replicas = [replica for replica in run.replicas() if known.get(replica)]
    points = max(_PER_LINE[0], min(_PER_LINE[1], int(budget * _POINTS) // max(1, len(replicas))))
    lines = {replica: parts for replica in replicas if (parts := _thinned(known[replica], points))}
    tests = held_out(run)
    if not lines and not tests:
        return None
    few = len(lines) <= HUES
    looks = {replica: f"l{n}" if few else "many" for n, replica in enumerate(lines)}
    each_one, all_of_them = [(look, x) for x, look in looks.items()], [("many", f"{len(lines):,} replicas, training")]
    curves = [(replica, looks[replica], part) for replica, parts in lines.items() for part in parts]
    size = max((math.ceil(len(known[replica]) / points) for replica in lines), default=1)
    each = "each point is one inner step" if size == 1 else f"each point is the mean of up to {size:,} inner steps"
    heard = "as the coordinator heard of it, each point the mean of some steps"
    if partly := [replica for replica in lines if not run.steps.get(replica)]:
        each = heard if len(partly) == len(lines) else f"{each}; that of {listed(partly)} {heard}"
    training = f"Training loss of each replica ({each})"
    said = f"{training} and held-out loss" if lines and tests else training if lines else "Held-out loss"
    return section(
        "Losses",
        text(f"{said}{f', in{run.loss_unit}' if run.loss_unit else ''}."),
        legend([*(each_one if few else all_of_them), *([("held", "held-out")] if tests else [])]),
        *pair(curves, [("held-out", "held", tests)] if tests else [], run.end_s),
        _tests(run, tests),
        _training({replica: known[replica] for replica in replicas}),
    )


def by_replica(run: Run) -> dict[str, Steps]:
    """The steps on record with their losses; for a replica without any, those that the coordinator has reported."""
    return {**run.steps, **run.fold.heard.of}


def held_out(run: Run) -> list[Mean]:
    """The evaluations; of the final one only that of the first replica by name."""
    tests = run.named("evaluate")
    final = sorted((e for e in tests if data_of(e).get("final")), key=lambda e: str(e["replica"]))
    chosen = [*(e for e in tests if not data_of(e).get("final")), *final[:1]]
    return [Mean(e["t_s"], e.get("inner_step", 0), float(data_of(e)["loss"])) for e in chosen]


def mean(run: Run, points: int) -> list[Mean]:
    """The mean training loss of all replicas over equal ranges of the job's inner steps."""
    known = by_replica(run).values()
    width = max(1, math.ceil(max((max(x.inner_step) for x in known if x), default=0) / points))
    sums: dict[int, list[float]] = {}
    for steps in known:
        for t_s, inner_step, loss in zip(steps.t_s, steps.inner_step, steps.loss, strict=True):
            if not math.isnan(loss):
                into = sums.setdefault(inner_step // width, [0.0, 0.0, 0.0, 0.0])
                for place, value in enumerate((t_s, inner_step, loss, 1.0)):
                    into[place] += value
    return [Mean(t_s / n, step / n, loss / n) for _, (t_s, step, loss, n) in sorted(sums.items())]


def pair(lines: Sequence[Line], dotted: Sequence[Line], end_s: float) -> list[Block]:
    """Losses over inner steps and over time, side by side; ``dotted`` lines have a dot at each point."""
    y, above = _heights([*lines, *dotted])
    last = max((x.inner_step for _, _, part in [*lines, *dotted] for x in part), default=1.0)

    def drawn(what: str, x: Sequence[object], *, by_time: bool) -> Block:
        shapes = []
        for kind, named in (("line", [*lines, *dotted]), ("dots", dotted)):
            for name, look, part in named:
                points = (v for mean in part for v in (mean.t_s if by_time else mean.inner_step, mean.loss))
                shapes.append(shape(kind, look, name, points))
        return plot(f"losses by {what}", what, shapes, x=x, y=y)

    by_step = drawn("inner step", [0, last, "", 4], by_time=False)
    found = [plots(by_step, drawn("time since the start", [0, end_s, "clock", 4], by_time=True))]
    if above:
        is_ = "is" if above == 1 else "are"
        found.append(text(f"{count(above, 'point')} above the upper edge {is_} drawn on it.", "note"))
    return found


def _thinned(steps: Steps, points: int) -> list[list[Mean]]:
    """A list for each incarnation, with ``points`` means in all or a few more."""
    size = max(1, math.ceil(len(steps) / points))
    found: list[list[Mean]] = []
    start = 0
    while start < len(steps):
        stop = start
        while stop < min(start + size, len(steps)) and steps.incarnation[stop] == steps.incarnation[start]:
            stop += 1
        if start == 0 or steps.incarnation[start] != steps.incarnation[start - 1]:
            found.append([])
        if known := [n for n in range(start, stop) if not math.isnan(steps.loss[n])]:
            parts = (sum(of[n] for n in known) / len(known) for of in (steps.t_s, steps.inner_step, steps.loss))
            found[-1].append(Mean(*parts))
        start = stop
    return [line for line in found if line]


def _heights(lines: Iterable[Line]) -> tuple[list[float], int]:
    """The range of the losses, and how many are above it: a few losses far beyond all others must not flatten the
    rest."""
    losses = sorted(x.loss for _, _, part in lines for x in part)
    least, most = losses[0], losses[-1]
    usual = losses[int(0.98 * (len(losses) - 1))]
    if most - least > 4 * (usual - least) > 0:
        most = least + 1.5 * (usual - least)
    margin = 0.04 * (most - least)
    return [least - margin, most + margin], sum(loss > most + margin for loss in losses)


def _tests(run: Run, tests: Sequence[Mean]) -> Block | None:
    if not tests:
        return None
    found = {(e["t_s"], e.get("inner_step", 0)): data_of(e).get("accuracy") for e in run.named("evaluate")}
    has = any(value is not None for value in found.values())
    chosen, left = ends(tests)
    rows = [
        [whole(int(x.inner_step)), clock(x.t_s), real(x.loss), real(found.get(x[:2]), 3)][: 3 + has] for x in chosen
    ]
    head = ["inner step", "time", "held-out loss", "accuracy"][: 3 + has]
    return table(head, rows, f"Held-out loss{left}", fold=None if len(rows) <= 12 else "closed")


def _training(replicas: Mapping[str, Steps]) -> Block | None:
    """The mean training loss over a dozen ranges of the job's inner steps."""
    last = max((max(steps.inner_step) for steps in replicas.values()), default=0)
    if last < 1:
        return None
    width = max(1, math.ceil(last / _ROWS))
    sums: dict[str, dict[int, list[float]]] = {replica: {} for replica in replicas}
    for replica, steps in replicas.items():
        for inner_step, loss in zip(steps.inner_step, steps.loss, strict=True):
            if not math.isnan(loss):
                into = sums[replica].setdefault(max(0, inner_step - 1) // width, [0.0, 0.0])
                into[:] = into[0] + loss, into[1] + 1
    rows = []
    for number in range(math.ceil(last / width)):
        cells = [sums[replica].get(number) for replica in replicas]
        first, to = number * width + 1, min((number + 1) * width, last)
        said = f"{first:,}" if first == to else f"{first:,} to {to:,}"
        rows.append([said, *(real(cell[0] / cell[1] if cell else None, 4) for cell in cells)])
    head = ["inner steps", *replicas]
    return table(head, rows, "Training loss of each replica, as a table of means", fold="closed")
