"""The rules for outer settings in short runs: which settings they strike, and which never."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ftopt.config.loader import examine
from ftopt.config.shipped import shipped
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.methods.short_runs import AUTO, keeps_memory, outer_figures, outer_line, outer_problems
from ftopt.outer import SGD, Adam

GRID = Path(__file__).parents[2] / "benchmarks" / "results" / "grid.json"


def nesterov(lr: float, momentum: float) -> SGD:
    return SGD(lr=lr, momentum=momentum, nesterov=momentum > 0)


def test_gain_and_memory() -> None:
    papers = outer_figures(DiLoCo(sync_every=50, outer="paper"))
    assert papers == pytest.approx({"lr": 0.7, "momentum": 0.9, "gain": 7, "memory": 500})
    assert outer_figures(DiLoCo(outer=Adam())) == outer_figures(LocalSGD(sync_every=5)) == {}
    assert outer_line(DiLoCo(sync_every=50)).endswith("lr=1, momentum=0.25; gain 1.33, memory 67 inner steps")
    assert outer_line(LocalSGD(sync_every=5)) == ""
    assert keeps_memory(DiLoCo(sync_every=75), 600) and not keeps_memory(DiLoCo(sync_every=76), 600)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_no_shipped_recipe_breaks_a_rule(name: str) -> None:
    assert examine(name).warnings == []


def _grid() -> dict[tuple[Any, ...], dict[SGD, float]]:
    """What shares an inner rate and a period in the grid's 600 steps -> outer settings -> loss at seed 0."""
    found: dict[tuple[Any, ...], dict[SGD, float]] = defaultdict(dict)
    for row in json.loads(GRID.read_text()):
        p = row["point"]
        if (p["kind"], p["part"], p["falling"], p["steps"], p["seed"]) == ("diloco", 1.0, False, 600, 0):
            key = (p["muon"], p["rate"], p["lead"], p["batch"], p["h"])
            found[key][nesterov(p["eta"], p["mu"])] = row["outcome"]["loss"]
    return {key: losses for key, losses in found.items() if len(losses) > 1}


@pytest.mark.parametrize(
    ("key", "losses"), _grid().items(), ids=lambda value: str(value) if isinstance(value, tuple) else ""
)
def test_the_best_settings_of_the_grid_break_no_rule_and_auto_is_among_them(
    key: tuple[Any, ...], losses: dict[SGD, float]
) -> None:
    best = min(losses, key=losses.__getitem__)
    assert outer_problems(DiLoCo(sync_every=key[-1], outer=best), 600) == []
    assert losses[AUTO] <= 1.018 * losses[best]
    papers = nesterov(0.7, 0.9)
    assert outer_problems(DiLoCo(sync_every=key[-1], outer=papers), 600)
    assert losses[papers] > losses[AUTO]


@pytest.mark.parametrize(
    ("method", "steps", "said"),
    [
        (DiLoCo(sync_every=5, outer="paper"), 600, ["= 7: in a run of 600 inner steps outer steps overshoot"]),
        (DiLoCo(sync_every=10, outer=SGD(lr=0.7)), 600, ["= 0.7: in a run of 600 inner steps part of"]),
        (DiLoCo(sync_every=50, outer=nesterov(0.2, 0.9)), 600, ["= 500 inner steps, more than a sixth"]),
        (DiLoCo(), 1000, ["use sync_every=125 or less"]),
        (DiLoCo(sync_every=500, outer="paper"), 20_000, ["use outer=auto, or sync_every=333 or less"]),
        (StreamingDiLoCo(sync_every=50, outer="paper"), 600, ["= 4: in a run", "= 500 inner steps"]),
    ],
)  # fmt: skip
def test_each_broken_rule_is_told_with_what_to_write(method: Method, steps: int, said: list[str]) -> None:
    told = outer_problems(method, steps)
    assert len(told) == len(said)
    for text, part in zip(told, said, strict=True):
        assert part in text and "; use " in text


@pytest.mark.parametrize(("momentum", "steps"), [(0.25, 600), (0.9, 20_000), (0.9, 600)])
def test_the_advised_period_keeps_the_rule(momentum: float, steps: int) -> None:
    outer = nesterov(1.5 * (1 - momentum), momentum)
    (told,) = outer_problems(DiLoCo(sync_every=steps, outer=outer), steps)
    advised = int(told.partition("sync_every=")[2].partition("sync_every=")[2].split()[0])
    assert outer_problems(DiLoCo(sync_every=advised, outer=outer), steps) == []
    assert outer_problems(DiLoCo(sync_every=advised + 1, outer=outer), steps)


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (DiLoCo(outer="paper"), 88_000),
        (StreamingDiLoCo(outer="paper"), 20_000),
        (DiLoCo(sync_every=50, outer="paper"), 99),
        (DiLoCo(sync_every=300, outer=Adam()), 600),
        (LocalSGD(sync_every=300), 600),
    ],
)
def test_long_runs_trials_and_other_optimizers_are_left_alone(method: Method, steps: int) -> None:
    assert outer_problems(method, steps) == []
