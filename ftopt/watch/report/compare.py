"""Several runs side by side: figures, losses in one picture, and the settings in which their recipes differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftopt.errors import from_extra
from ftopt.watch.report.blocks import HUES, Block, line, section, table, text
from ftopt.watch.report.figures import figures
from ftopt.watch.report.losses import curves, held_out, held_out_lines, mean
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import DASH, cut

_POINTS = 300
_LEFT_OUT = ("checkpoint.dir", "log.dir", "name")
"""Keys of a recipe that differ between any two runs."""


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Block:
    """The section; ``names``: what the report calls the runs."""
    known = [figures(run) for run in runs]
    every = {what: [each.get(what, DASH) for each in known] for each in known for what in each}
    rows = [[what, *values] for what, values in every.items() if set(values) != {"0"}]
    return section("Side by side", *_losses(runs, names), table(["", *names], rows), _settings(runs, names), wide=True)


def _losses(runs: Sequence[Run], names: Sequence[str]) -> list[Block]:
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        hue = f"l{number % HUES}"
        if points := mean(run, _POINTS):
            lines.append(line("line", f"{hue} thin", f"{name}: training", [x[:3] for x in points]))
        lines += held_out_lines(hue, f"{name}: held-out", held_out(run))
    if not lines:
        return []
    units = {run.loss_unit for run in runs}
    unit = f", in{units.pop()}" if units == {" nats"} else ""
    said = f"Losses{unit}: held-out (with dots) and training, the mean of the replicas (thin)."
    return [text(said), curves(lines, max(run.end_s for run in runs))]


def _settings(runs: Sequence[Run], names: Sequence[str]) -> Block:
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
    return dict(_leaves("", settings))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(value, Mapping) and value):
        yield name, _flow(value)
        return
    for key, item in value.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), item)


def _flow(value: Any) -> str:
    """A value as one writes it on the command line; lists of sections omit unset keys."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items() if item is not None)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
