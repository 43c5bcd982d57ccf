"""Losses: thinned to what a picture can show, drawn over steps and over time, and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftopt.common.plural import count
from ftopt.watch.jsonl import data_of
from ftopt.watch.report.html import Html, el, table
from ftopt.watch.report.plot import Axis, Plot, Point, axis, legend, times
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.text import clock, listed, real, some, whole

COLORS = 8
_POINTS = 12_000
"""Of all lines of a picture together."""
_PER_LINE = (20, 400)
_ROWS = 12


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of some steps that follow each other, in one incarnation."""

    t_s: float
    inner_step: float
    loss: float


def thinned(steps: Steps, points: int) -> list[list[Mean]]:
    """A list for each incarnation, ``points`` means in all or few more."""
    size = max(1, math.ceil(len(steps) / points))
    found: list[list[Mean]] = []
    start = 0
    while start < len(steps):
        stop = start
        while stop < min(start + size, len(steps)) and steps.incarnation[stop] == steps.incarnation[start]:
            stop += 1
        known = [n for n in range(start, stop) if not math.isnan(steps.loss[n])]
        if start == 0 or steps.incarnation[start] != steps.incarnation[start - 1]:
            found.append([])
        if known:
            mean = [
                sum(part) / len(known)
                for part in zip(*((steps.t_s[n], steps.inner_step[n], steps.loss[n]) for n in known), strict=True)
            ]
            found[-1].append(Mean(*mean))
        start = stop
    return [line for line in found if line]


def by_replica(run: Run) -> dict[str, Steps]:
    """The steps on record with their losses; of a replica without any, those of which the coordinator has told."""
    return {**run.steps, **run.fold.heard.of}


def held_out(run: Run) -> list[Mean]:
    """Its evaluations, the final one once: of the first replica in the order of names."""
    found = []
    final = sorted((e for e in run.named("evaluate") if data_of(e).get("final")), key=lambda e: str(e["replica"]))
    for event in [*(e for e in run.named("evaluate") if not data_of(e).get("final")), *final[:1]]:
        found.append(Mean(event["t_s"], event.get("inner_step", 0), float(data_of(event)["loss"])))
    return found


def section(run: Run, *, budget: float = 1.0) -> Html | None:
    """Both pictures and their tables; None if no loss is on record."""
    known = by_replica(run)
    replicas = [replica for replica in run.replicas() if known.get(replica)]
    points = max(_PER_LINE[0], min(_PER_LINE[1], int(budget * _POINTS) // max(1, len(replicas))))
    lines = {replica: thinned(known[replica], points) for replica in replicas}
    lines = {replica: parts for replica, parts in lines.items() if parts}
    tests = held_out(run)
    if not lines and not tests:
        return None
    few = len(lines) <= COLORS
    kinds = {replica: f"c{n}" if few else "many" for n, replica in enumerate(lines)}
    curves = [(replica, kinds[replica], part) for replica, parts in lines.items() for part in parts]
    entries = (
        [(kinds[replica], replica) for replica in lines]
        if few
        else [("many", f"{count(len(lines), 'replica')}, training")]
    )
    entries += [("held", "held-out")] if tests else []
    size = max((math.ceil(len(known[replica]) / points) for replica in lines), default=1)
    each = "each point is one inner step" if size == 1 else f"each point is the mean of up to {size:,} inner steps"
    heard = "as the coordinator heard of it, each point the mean of some steps"
    if partly := [replica for replica in lines if not run.steps.get(replica)]:
        each = heard if len(partly) == len(lines) else f"{each}; that of {listed(partly)} {heard}"
    training = f"Training loss of each replica ({each})"
    said = f"{training} and held-out loss" if lines and tests else training if lines else "Held-out loss"
    unit = f", in{run.loss_unit}" if run.loss_unit else ""
    return el(
        "section",
        el("h3", "Losses"),
        el("p", f"{said}{unit}."),
        legend(entries),
        pair(curves, [("held-out", "held", tests)] if tests else [], run.end_s),
        _tests(run, tests),
        _training({replica: known[replica] for replica in replicas}),
    )


def pair(
    lines: Sequence[tuple[str, str, Sequence[Mean]]], dotted: Sequence[tuple[str, str, Sequence[Mean]]], end_s: float
) -> Html:
    """(name, class, points) over inner steps and over time, side by side; ``dotted`` ones with a dot at each point."""
    y, above = _heights([*lines, *dotted])
    last = max((mean.inner_step for _, _, part in [*lines, *dotted] for mean in part), default=1.0)
    pictures = []
    for what, x in (("inner step", axis(0, last, ticks=4)), ("time since the start", times(0, end_s, ticks=4))):
        plot = Plot(x, y)
        for name, kind, part in [*lines, *dotted]:
            plot.line(_points(part, by_time=what != "inner step"), kind, name)
        for name, kind, part in dotted:
            plot.dots(_points(part, by_time=what != "inner step"), kind, name)
        pictures.append(el("figure", plot.html(f"losses by {what}"), el("figcaption", what)))
    beyond = (
        f"{count(above, 'point')} above the upper edge {'is' if above == 1 else 'are'} drawn on it." if above else None
    )
    return el("div", el("div", pictures, class_="two"), el("p", beyond, class_="note") if beyond else None)


def _points(part: Iterable[Mean], *, by_time: bool) -> list[Point]:
    return [(mean.t_s if by_time else mean.inner_step, mean.loss) for mean in part]


def _heights(lines: Iterable[tuple[str, str, Sequence[Mean]]]) -> tuple[Axis, int]:
    """The axis of the losses, and how many are above it: a few that are far beyond all others must not flatten them."""
    losses = sorted(mean.loss for _, _, part in lines for mean in part)
    least, most = losses[0], losses[-1]
    usual = losses[int(0.98 * (len(losses) - 1))]
    if most - least > 4 * (usual - least) > 0:
        most = least + 1.5 * (usual - least)
    margin = 0.04 * (most - least)
    return axis(least - margin, most + margin, ticks=6), sum(loss > most + margin for loss in losses)


def _tests(run: Run, tests: Sequence[Mean]) -> Html | None:
    if not tests:
        return None
    accuracy = {
        (event["t_s"], event.get("inner_step", 0)): data_of(event).get("accuracy") for event in run.named("evaluate")
    }
    has = any(value is not None for value in accuracy.values())
    chosen, left = some(tests)
    rows = [
        [
            whole(int(x.inner_step)),
            clock(x.t_s),
            real(x.loss),
            *([real(accuracy.get((x.t_s, x.inner_step)), 3)] if has else []),
        ]
        for x in chosen
    ]
    head = ["inner step", "time", "held-out loss", *(["accuracy"] if has else [])]
    if len(rows) <= 12:
        return table(head, rows, caption=f"Held-out loss{left}")
    return el("details", el("summary", f"Held-out loss{left}, as a table"), table(head, rows))


def _training(replicas: Mapping[str, Steps]) -> Html | None:
    """Means of the training loss between a dozen steps of the job."""
    last = max((max(steps.inner_step) for steps in replicas.values()), default=0)
    if last < 1:
        return None
    width = max(1, math.ceil(last / _ROWS))
    sums: dict[str, dict[int, list[float]]] = {replica: {} for replica in replicas}
    for replica, steps in replicas.items():
        for inner_step, loss in zip(steps.inner_step, steps.loss, strict=True):
            if not math.isnan(loss):
                into = sums[replica].setdefault(max(0, inner_step - 1) // width, [0.0, 0.0])
                into[0] += loss
                into[1] += 1
    rows = []
    for number in range(math.ceil(last / width)):
        cells = [sums[replica].get(number) for replica in replicas]
        first, to = number * width + 1, min((number + 1) * width, last)
        said = f"{first:,}" if first == to else f"{first:,} to {to:,}"
        rows.append([said, *(real(cell[0] / cell[1] if cell else None, 4) for cell in cells)])
    shown = table(["inner steps", *replicas], rows)
    return el("details", el("summary", "Training loss of each replica, as a table of means"), shown)
