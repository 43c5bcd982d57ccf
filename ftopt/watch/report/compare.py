"""Several runs beside each other: figures, what their recipes set differently, and losses in one picture."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftopt.watch.report.html import Html, Number, el, table
from ftopt.watch.report.losses import COLORS, Mean, by_replica, held_out, pair
from ftopt.watch.report.plot import legend
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.text import cut, real, share, size, span, whole
from ftopt.watch.report.unsupervised import BROKE_OFF

_POINTS = 300
_LEFT_OUT = ("checkpoint.dir", "log.dir", "name")
"""Keys of a recipe that differ between any two runs."""


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The section; ``names`` are those that the page gives the runs."""
    head = ["", *names]
    figures = [[what, *(cell(run) for run in runs)] for what, cell in _FIGURES]
    return el(
        "section",
        el("h2", "Side by side"),
        table(head, figures),
        _losses(runs, names),
        _settings(runs, head),
    )


_FIGURES: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("state", lambda run: Number("ended" if run.ended else "going on" if run.going_on else "no end on record")),
    ("replicas", lambda run: whole(len(run.replicas()))),
    ("time", lambda run: span(run.end_s)),
    ("committed inner step", lambda run: whole(run.summary["inner_step"]) if run.decided else whole(None)),
    ("inner steps executed", lambda run: whole(run.summary["inner_steps_executed"])),
    ("in the model", lambda run: _part(run, "inner_steps_committed")),
    ("lost with dead replicas", lambda run: whole(run.summary["dead_inner_steps_lost"])),
    ("dropped", lambda run: whole(sum(run.summary["inner_steps_discarded"].values()))),
    ("deaths", lambda run: whole(None if run.named(BROKE_OFF) else len(run.summary["deaths"]))),
    ("outer steps", lambda run: whole(run.summary["outer_steps"]) if run.decided else whole(None)),
    ("attempts that failed", lambda run: whole(run.summary["attempts_aborted"])),
    ("wait for an outer step, median", lambda run: _stall(run)),
    ("longest wait", lambda run: _longest_wait(run)),
    ("sent", lambda run: size(sum(run.sent().values()) or None)),
    ("held-out loss at the end", lambda run: real(_last_loss(run))),
)


def _part(run: Run, name: str) -> str:
    s = run.summary
    if not run.decided or run.partly:
        return whole(None)
    return share(s[name], s["inner_steps_executed"] + s["inner_steps_inherited"])


def _stall(run: Run) -> str:
    stall: Mapping[str, float] | None = run.summary["stall_s"]
    return span(stall["median"]) if stall is not None else whole(None)


def _longest_wait(run: Run) -> str:
    """Also of a replica that has died."""
    waits = run.fold.waits.values()
    return span(max(each.every.most for each in waits)) if waits else whole(None)


def _last_loss(run: Run) -> float | None:
    tests = held_out(run)
    return tests[-1].loss if tests else None


def _losses(runs: Sequence[Run], names: Sequence[str]) -> Html | None:
    training, tests = [], []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        kind = f"c{number % COLORS}"
        if mean := _mean(run):
            training.append((f"{name}: training, mean of its replicas", f"{kind} thin", mean))
        if found := held_out(run):
            tests.append((f"{name}: held-out", kind, found))
    if not training and not tests:
        return None
    entries = [(f"c{number % COLORS}", name) for number, name in enumerate(names)]
    end_s = max(run.end_s for run in runs)
    units = {run.loss_unit for run in runs}
    unit = f", in{units.pop()}" if units == {" nats"} else ""
    said = f"Held-out loss (with dots) and the mean training loss of the replicas (thin){unit}."
    return el("div", el("h3", "Losses"), el("p", said), legend(entries), pair(training, tests, end_s))


def _mean(run: Run) -> list[Mean]:
    """The training losses of all replicas between equally many inner steps of the job."""
    known = by_replica(run).values()
    last = max((max(x.inner_step) for x in known if x), default=0)
    width = max(1, math.ceil(last / _POINTS))
    sums: dict[int, list[float]] = {}
    for steps in known:
        _add(sums, steps, width)
    return [Mean(t_s / n, step / n, loss / n) for _, (t_s, step, loss, n) in sorted(sums.items())]


def _add(sums: dict[int, list[float]], steps: Steps, width: int) -> None:
    for t_s, inner_step, loss in zip(steps.t_s, steps.inner_step, steps.loss, strict=True):
        if not math.isnan(loss):
            into = sums.setdefault(inner_step // width, [0.0, 0.0, 0.0, 0.0])
            for place, value in enumerate((t_s, inner_step, loss, 1.0)):
                into[place] += value


def _settings(runs: Sequence[Run], head: Sequence[str]) -> Html | None:
    """The keys of the recipes whose values differ."""
    found = [_flat(run.recipe) for run in runs]
    if not all(found):
        return el("p", "Not every run has a readable recipe.yaml, so the settings are not compared.")
    keys = dict.fromkeys(key for settings in found for key in settings)
    rows = []
    for key in keys:
        values = [settings.get(key, "\N{EN DASH}") for settings in found]
        if len(set(values)) > 1 and key not in _LEFT_OUT:
            rows.append([key, *(cut(value, 80) for value in values)])
    if not rows:
        return el("p", "Their recipes are the same.")
    return el("div", el("h3", "What their recipes set differently"), table(head, rows))


def _flat(recipe: str | None) -> dict[str, str]:
    import yaml

    try:
        settings = yaml.safe_load(recipe or "")
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}
    _flatten("", settings, flat)
    return flat


def _flatten(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(f"{name}.{key}" if name else str(key), item, into)
    else:
        into[name] = _flow(value)


def _flow(value: Any) -> str:
    """A value as one writes it on the command line; in a list of sections without what they do not set."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items() if item is not None)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
