"""Several runs side by side: figures, losses in one picture, and the settings in which their recipes differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ftopt.errors import from_extra
from ftopt.watch.report.blocks import HUES, Block, legend, section, table, text
from ftopt.watch.report.figures import figures
from ftopt.watch.report.losses import held_out, mean, pair
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import DASH, cut

_POINTS = 300
_LEFT_OUT = ("checkpoint.dir", "log.dir", "name")
"""Keys of a recipe that differ between any two runs."""


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """The section; ``names``: what the report calls the runs."""
    known = [figures(run) for run in runs]
    rows = [
        [what, *(each.get(what, DASH) for each in known)] for what in dict.fromkeys(x for each in known for x in each)
    ]
    blocks = [table(["", *names], rows), *_losses(runs, names), _settings(runs, names)]
    return section("Side by side", *blocks)


def _losses(runs: Sequence[Run], names: Sequence[str]) -> list[Block]:
    training, tests = [], []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        look = f"l{number % HUES}"
        if points := mean(run, _POINTS):
            training.append((f"{name}: training, mean of its replicas", f"{look} thin", points))
        if found := held_out(run):
            tests.append((f"{name}: held-out", look, found))
    if not training and not tests:
        return []
    entries = [(f"l{number % HUES}", name) for number, name in enumerate(names)]
    units = {run.loss_unit for run in runs}
    unit = f", in{units.pop()}" if units == {" nats"} else ""
    said = f"Losses: held-out (with dots) and the mean training loss of the replicas (thin){unit}."
    return [text(said), legend(entries), *pair(training, tests, max(run.end_s for run in runs))]


def _settings(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """The keys of the recipes whose values differ."""
    found = [_flat(run.recipe) for run in runs]
    if not all(found):
        return text("Not every run has a readable recipe.yaml, so the settings are not compared.")
    keys = dict.fromkeys(key for settings in found for key in settings if key not in _LEFT_OUT)
    every = [(key, [settings.get(key, DASH) for settings in found]) for key in keys]
    rows = [[key, *(cut(value, 80) for value in values)] for key, values in every if len(set(values)) > 1]
    if not rows:
        return text("Their recipes are the same.")
    return table(["", *names], rows, "What their recipes set differently")


def _flat(recipe: str | None) -> dict[str, str]:
    if recipe is None:
        return {}
    with from_extra("cli", "a comparison of recipes"):
        import yaml

    try:
        settings = yaml.safe_load(recipe)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    flat: dict[str, str] = {}
    _flatten("", settings, flat)
    return flat


def _flatten(name: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _flatten(f"{name}.{key}" if name else str(key), item, into)
    else:
        into[name] = _flow(value)


def _flow(value: Any) -> str:
    """A value as one writes it on the command line; lists of sections omit unset keys."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items() if item is not None)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
