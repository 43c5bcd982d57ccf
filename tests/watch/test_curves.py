"""Events are folded into points: which metrics there are, on which axes, and what they say."""

from __future__ import annotations

import math
import re
from itertools import count
from pathlib import Path
from typing import Any

import ftopt
from ftopt.events import Event
from ftopt.watch.trackers.curves import STEP, Curves, Point, Row, row_of
from ftopt.watch.trackers.mirror import Mirror
from tests.step.outer.test_metrics import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "watching.md"
_FIRST_CELLS = re.findall(r"^\| (`(?:inner|eval|outer)/[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
KNOWN = {
    name: "outer/version" if name.startswith("outer/") else "inner/step"
    for name in re.findall(r"`(\w+/\w+)`", " ".join(_FIRST_CELLS))
}
"""Metric -> its axis, as the page has it."""


def event(name: str, at: int = 0, **more: Any) -> Event:
    fields = {key: more.pop(key) for key in ("fragment", "version") if key in more}
    return Event(name, "r0", 1, inner_step=at, data=more, **fields)


def fold(curves: Curves, *events: Event) -> list[Point]:
    return [found for each in events for found in curves.fold(each) if isinstance(found, Point)]


def test_a_recipes_own_metrics_are_on_the_axis_of_inner_steps() -> None:
    told = event("evaluate", 40, loss=1.5, accuracy=None, metrics={"f1": 0.25, "name": "none"}, final=False)
    assert fold(Curves(2), told) == [Point(STEP, 40, {"eval/loss": 1.5, "eval/f1": 0.25})]


def test_a_jobs_events_give_metrics_of_the_table_alone() -> None:
    points: list[Point] = []

    class Folds(Mirror):
        def __init__(self) -> None:
            self._curves = {f"r{n}": Curves(2) for n in range(2)}

        def attend(self, job: str, replica: str) -> None: ...

        def __call__(self, event: Event) -> None:
            if event.replica in self._curves:
                points.extend(x for x in self._curves[event.replica].fold(event) if isinstance(x, Point))

    train(lambda: ftopt.DiLoCo(sync_every=2), Folds())
    found = {name: point.axis for point in points for name in point.values}
    assert {name: KNOWN.get(name) for name in found} == found
    assert {name for name in KNOWN if name.startswith("outer/")} - found.keys() == {"outer/fetched_bytes"}


def test_the_loss_is_the_mean_over_the_steps_since_the_last_point() -> None:
    clock = count()
    curves = Curves(4, clock=lambda: float(next(clock)))
    steps = [event("stepped", at, loss=float(at), lr=0.5, tokens=10, samples=1) for at in range(1, 9)]
    one, two = fold(curves, *steps)
    assert (one.axis, one.at, one.values["inner/loss"]) == (STEP, 4, 2.5)
    assert (two.at, two.values["inner/loss"], two.values["inner/lr"]) == (8, 6.5, 0.5)
    assert two.values["inner/tokens_per_s"] == 10 * two.values["inner/steps_per_s"]


def test_a_loss_that_is_no_number_is_seen() -> None:
    (point,) = fold(Curves(2), event("stepped", 1, loss=math.nan, lr=0.1), event("stepped", 2, loss=1.0, lr=0.1))
    assert math.isnan(point.values["inner/loss"])


def test_what_a_short_run_has_at_its_end_is_a_point_too() -> None:
    curves = Curves(10)
    assert fold(curves, event("stepped", 3, loss=1.0, lr=0.1)) == []
    (point,) = curves.rest()
    assert isinstance(point, Point) and point.values["inner/loss"] == 1.0


def outer(version: int, *, attempts: int = 1, fragment: int = 0, **peers: list[str]) -> list[Event]:
    at = {"fragment": fragment, "version": version}
    return [
        *(event("reduce", **at) for _ in range(attempts)),
        event("prepare", steps=5, size=3, **at),
        event("commit", **peers, **at),
        event("apply", 5 * version, **at),
        event("stall", 5 * version, stall_s=0.25),
    ]


def test_an_outer_steps_point_comes_when_it_is_applied_with_its_aborts_and_its_stall() -> None:
    one, two = fold(Curves(10), *outer(1, attempts=3), *outer(2, joined=["r4"], absent=["r1", "r2"]))
    assert (one.axis, one.at) == ("outer/version", 1)
    assert one.values["outer/aborts"] == 2 and one.values["outer/stall_s"] == 0.25
    assert two.values["outer/aborts"] == 0 and two.values["outer/steps_kept"] == 10
    assert (two.values["outer/joins"], two.values["outer/absences"]) == (1, 2)


def test_dropped_steps_are_counted() -> None:
    (point,) = fold(Curves(10), event("discarded", steps=7, reason="nonfinite", fragment=0), *outer(1))
    assert point.values["outer/steps_lost"] == 7


def test_further_fragments_have_names_and_axes_of_their_own() -> None:
    (point,) = fold(Curves(10), *outer(4, fragment=2))
    assert (point.axis, point.at, point.values["outer_2/members"]) == ("outer_2/version", 4, 3)
    assert "outer_2/joins" not in point.values


def test_a_fetched_version_is_a_point() -> None:
    at = {"fragment": 0, "version": 7}
    (point,) = fold(Curves(10), event("fetched", bytes=99, **at), event("apply", 70, **at), event("stall", stall_s=0.0))
    assert (point.at, point.values["outer/fetched_bytes"]) == (7, 99)


def test_an_event_for_a_person_has_an_alert_and_what_the_method_drops_has_none() -> None:
    assert row_of(event("discarded", 3, steps=2, reason="mixed")) == Row(
        3, 1, "discarded", "r0: 2 inner steps dropped (overwritten by an outer step that mixes)"
    )
    row = row_of(event("damaged", 3, version=2, blocks=[]))
    assert row is not None and row.alert == "error"
    assert row_of(event("stepped", 3)) is None
