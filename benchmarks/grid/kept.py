"""Runs on disk, and the processes that make them."""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.grid.loop import Outcome, Point, train
from benchmarks.grid.points import wanted
from benchmarks.speed import machine
from ftopt.cli.shared.output import say


class Kept:
    """The runs of a file.

    Args:
        path: the file; written anew after each run, and never half.
        anew: forget what it has.

    Attributes:
        path: as given.
        outcomes: of all runs so far.
    """

    def __init__(self, path: Path, *, anew: bool = False) -> None:
        self.path = path
        self.outcomes: dict[Point, Outcome] = {}
        self._rows: list[dict[str, Any]] = []
        if path.exists() and not anew:
            for row in json.loads(path.read_text()):
                self._add(row)

    @property
    def losses(self) -> dict[Point, float]:
        """Of all runs so far, at their end."""
        return {point: outcome.loss for point, outcome in self.outcomes.items()}

    def keep(self, point: Point, outcome: Outcome, facts: Mapping[str, Any]) -> None:
        """Adds a run, and writes the file. A loss that is not finite becomes null."""
        told = {name: None if value == math.inf else value for name, value in asdict(outcome).items()}
        self._add({"point": asdict(point), "outcome": told, **facts})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text("[\n" + ",\n".join(map(json.dumps, self._rows)) + "\n]\n")
        new.replace(self.path)

    def _add(self, row: dict[str, Any]) -> None:
        told: dict[str, Any] = {name: math.inf if value is None else value for name, value in row["outcome"].items()}
        self.outcomes[Point(**row["point"])] = Outcome(**told)
        self._rows.append(row)


def facts() -> dict[str, Any]:
    """Of the program and the machine that make a run."""
    found = machine.facts()
    return {"commit": found["commit"], "torch": found["versions"]["torch"], "python": found["python"]}


def fill(kept: Kept, seeds: int, workers: int, seconds: float) -> None:
    """Makes the runs that are missing; begins none that would end after ``seconds``."""
    began, own = time.monotonic(), facts()
    paces: list[float] = []
    waiting: dict[Future[Outcome], Point] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            every = wanted(kept.losses, seeds)
            missing = [one for one in every if one.point not in kept.outcomes]
            pace = statistics.median(paces[-20:]) if paces else 0.0
            for one in missing:
                if len(waiting) == workers:
                    break
                late = time.monotonic() - began + pace * one.point.windows > seconds
                if one.ready and not late and one.point not in waiting.values():
                    waiting[pool.submit(train, one.point)] = one.point
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                point, outcome = waiting.pop(future), future.result()
                kept.keep(point, outcome, own)
                paces.append(outcome.wall_s / point.windows)
                left = _left(statistics.median(paces[-20:]) / workers, [one.point for one in missing], point)
                done = len(every) - len(missing) + 1
                told = f"{outcome.loss:.4f}  {outcome.wall_s:5.1f} s ({outcome.cpu_s:.1f} s of CPU)"
                say(f"{done}/{len(every)}  {told}  {described(point)}  {left} left")


def _left(pace: float, missing: Sequence[Point], done: Point) -> str:
    minutes = pace * sum(point.windows for point in missing if point != done) / 60
    return f"{minutes / 60:.1f} h" if minutes > 90 else f"{minutes:.0f} min"


def described(point: Point) -> str:
    """One line."""
    muon = "" if point.muon is None else f" muon={point.muon:g}"
    what = f"batch={point.batch} steps={point.steps} {point.kind} rate={point.rate:g}{muon} seed={point.seed}"
    if point.kind != "diloco":
        return what
    outer = f"({point.eta:g}, {point.mu:g}{' falling' if point.falling else ''})"
    return f"{what} x {point.part:g} H={point.h} {outer} lead={point.lead}"
