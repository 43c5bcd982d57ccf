"""Losses of a report: thinned to what a picture can show, and as tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ftopt.watch.jsonl import data_of
from ftopt.watch.report.blocks import HUES, SINCE_START, Block, chart, line, section, table, text
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.text import listed, real, whole
from ftopt.watch.sentences import clock
from ftopt.watch.thin import ends

_POINTS = 12_000
"""Total number of points of all lines in a picture."""
_PER_LINE = (20, 400)
_ROWS = 12
_NONE = (0.0, 0.0, 0.0, math.inf, -math.inf, 0.0)


class Mean(NamedTuple):
    """The mean of some consecutive steps of one incarnation."""

    t_s: float
    inner_step: float
    loss: float


def losses(run: Run, *, budget: float = 1.0) -> Block | None:
    """The section; None if no loss is on record. ``budget``: the share of the points that it may have."""
    known = by_replica(run)
    replicas = [replica for replica in run.replicas() if known.get(replica)]
    tests = held_out(run)
    if len(replicas) > HUES:
        lines, each = _together(mean(run, _PER_LINE[1])), "the mean, and the band from the least to the most"
    else:
        points = max(_PER_LINE[0], min(_PER_LINE[1], int(budget * _POINTS) // max(1, len(replicas))))
        of_each = [(f"l{n}", x, part) for n, x in enumerate(replicas) for part in _thinned(known[x], points)]
        lines = [line("line", hue, replica, part) for hue, replica, part in of_each]
        size = max((math.ceil(len(known[replica]) / points) for replica in replicas), default=1)
        each = f"each point is {'one inner step' if size == 1 else f'the mean of up to {size:,} inner steps'}"
    if not lines and not tests:
        return None
    heard = "as the coordinator heard of it, each point the mean of some steps"
    if partly := [replica for replica in replicas if not run.steps.get(replica)]:
        each = heard if len(partly) == len(replicas) else f"{each}; that of {listed(partly)} {heard}"
    training = f"Training loss of each replica ({each})"
    said = f"{training} and held-out loss" if lines and tests else training if lines else "Held-out loss"
    unit = f", in{run.loss_unit}" if run.loss_unit else ""
    return section(
        "Losses",
        curves([*lines, *held_out_lines("held", "held-out", tests)], run.end_s),
        text(f"{said}{unit}. Drag across the chart to zoom in; a double click shows all again.", "note"),
        _tests(run, tests),
        _training({replica: known[replica] for replica in replicas}),
        wide=True,
    )


def _together(bins: Sequence[Bin]) -> list[Block]:
    """Many replicas as their mean, and a band."""
    if not bins:
        return []
    edges = [
        line(look, "band", "least to most", [(x.t_s, x.inner_step, getattr(x, look)) for x in bins])
        for look in ("most", "least")
    ]
    return [line("line", "l0", "mean of the replicas", [x[:3] for x in bins]), *edges]


def held_out_lines(hue: str, name: str, tests: Sequence[Mean]) -> list[Block]:
    """The line of the evaluations; none without any."""
    return [line("dotted", hue, name, tests)] if tests else []


def curves(lines: Sequence[Block], end_s: float) -> Block:
    """Losses, over inner steps or over time."""
    return chart(
        "losses", lines, axes=[(*SINCE_START, [0, end_s]), ("inner step", "")], axis=1, scales=True, height=320
    )


def by_replica(run: Run) -> dict[str, Steps]:
    """The steps on record with their losses; for a replica without any, those that the coordinator has reported."""
    return {**run.steps, **run.fold.heard.of}


def held_out(run: Run) -> list[Mean]:
    """The evaluations; of the final one only that of the first replica by name."""
    tests = run.facts.named("evaluate")
    final = sorted((e for e in tests if data_of(e).get("final")), key=lambda e: str(e["replica"]))
    chosen = [*(e for e in tests if not data_of(e).get("final")), *final[:1]]
    return [Mean(e["t_s"], e.get("inner_step", 0), float(data_of(e)["loss"])) for e in chosen]


class Bin(NamedTuple):
    """The steps of all replicas in a range of inner steps; ``loss``: their mean."""

    t_s: float
    inner_step: float
    loss: float
    least: float
    most: float


def mean(run: Run, points: int) -> list[Bin]:
    """The training loss of all replicas over equal ranges of the job's inner steps."""
    known = by_replica(run).values()
    return list(_binned(known, max(1, math.ceil(_last(known) / points))).values())


def _last(known: Iterable[Steps]) -> int:
    return max((max(steps.inner_step) for steps in known if steps), default=0)


def _binned(known: Iterable[Steps], width: int) -> dict[int, Bin]:
    """Number of a range of ``width`` inner steps -> the steps in it that have losses."""
    sums: dict[int, list[float]] = {}
    for steps in known:
        for t_s, inner_step, loss in zip(steps.t_s, steps.inner_step, steps.loss, strict=True):
            if not math.isnan(loss):
                t, step, total, low, high, n = sums.get(number := max(0, inner_step - 1) // width, _NONE)
                sums[number] = [t + t_s, step + inner_step, total + loss, min(low, loss), max(high, loss), n + 1]
    return {at: Bin(t / n, step / n, loss / n, *edges) for at, (t, step, loss, *edges, n) in sorted(sums.items())}


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


def _tests(run: Run, tests: Sequence[Mean]) -> Block | None:
    if not tests:
        return None
    found = {(e["t_s"], e.get("inner_step", 0)): data_of(e).get("accuracy") for e in run.facts.named("evaluate")}
    has = any(value is not None for value in found.values())
    chosen, left = ends(tests)
    rows = [
        [whole(int(x.inner_step)), clock(x.t_s), real(x.loss), real(found.get(x[:2]), 3)][: 3 + has] for x in chosen
    ]
    head = ["inner step", "time", "held-out loss", "accuracy"][: 3 + has]
    return table(head, rows, f"Held-out loss{left}", fold="closed")


def _training(replicas: Mapping[str, Steps]) -> Block | None:
    """The mean training loss over a dozen ranges of the job's inner steps."""
    last = _last(replicas.values())
    if last < 1:
        return None
    width = max(1, math.ceil(last / _ROWS))
    bins = [_binned([steps], width) for steps in replicas.values()]
    rows = []
    for number in range(math.ceil(last / width)):
        first, to = number * width + 1, min((number + 1) * width, last)
        said = f"{first:,}" if first == to else f"{first:,} to {to:,}"
        rows.append([said, *(real(own[number].loss if number in own else None, 4) for own in bins)])
    return table(["inner steps", *replicas], rows, "Training loss of each replica, as a table of means", fold="closed")
