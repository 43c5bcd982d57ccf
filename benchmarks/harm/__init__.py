"""One flipped bit: in any place, at any moment, under any method; and nothing found where nothing is wrong.

A cell is a run of up to four replicas, threads of one process with the real coordinator, in which one bit of one
element flips. In line is a cell whose survivors end alike, with a held-out loss within the noise band of clean runs of
the same method, inner optimizer and codec, and have lost no inner step. The band reaches to 1.25 times the worst of its
clean runs; these differ in initial parameters and data, and in the number of replicas, which share one batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.harm import cells as cells_of
from benchmarks.harm import clean
from benchmarks.harm.cells import SIZES, Cell
from benchmarks.harm.play import RUN_S, Outcome, run_cell
from benchmarks.harm.table import Band, Judged, judge, plain, tables
from benchmarks.harm.workers import in_processes
from ftopt.cli.shared.output import say

CLEAN_RUNS = 20
"""Clean runs for a band; a size of the job takes every fourth."""
RESULT = Path(__file__).parents[1] / "results" / "harm.json"
_PROGRESS_S = 10.0

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Run:
    """Work for a process. ``seed``: of what is drawn; None: a clean run. ``data_seed``: of model and data."""

    cell: Cell
    seed: int | None
    data_seed: int


def do(run: Run) -> Outcome:
    """One run, in this process."""
    return run_cell(run.cell, run.seed or 0, flips=run.seed is not None, data_seed=run.data_seed)


def hung(reason: str) -> Outcome:
    """What came of a run that has not come to its end."""
    return Outcome(float("inf"), False, failed=reason)


def configuration(cell: Cell) -> str:
    """The clean runs that a cell is compared with."""
    return f"{cell.method}/{cell.inner}/{cell.codec}"


def clean_runs(configurations: Iterable[str]) -> list[Run]:
    """For their bands."""
    runs = []
    for name in configurations:
        method, inner, codec = name.split("/")
        for seed in range(CLEAN_RUNS):
            cell = Cell(method, inner, codec, SIZES[seed % len(SIZES)], "params", 0, "inner", "middle", "stays")
            runs.append(Run(cell, None, seed))
    return runs


def played(
    title: str,
    do: Callable[[T], R],
    runs: Sequence[T],
    jobs: int,
    *,
    failed: Callable[[str], R],
    wrong: Callable[[T, R], str] = lambda run, result: "",
) -> list[R]:
    """All runs, with progress, and what is wrong at once."""
    found = dict[int, R]()
    began = told = time.monotonic()
    for number, result in in_processes(do, runs, jobs=jobs, limit_s=2 * RUN_S, failed=failed):
        found[number] = result
        if text := wrong(runs[number], result):
            say(text)
        now = time.monotonic()
        if now > told + _PROGRESS_S:
            told, left_s = now, (now - began) / len(found) * (len(runs) - len(found))
            say(f"{title}: {len(found)} of {len(runs)}, {left_s:.0f} s left")
    say(f"{title}: {len(runs)} runs in {time.monotonic() - began:.0f} s")
    return [found[number] for number in range(len(runs))]


def bands_of(configurations: Iterable[str], jobs: int) -> dict[str, Band]:
    """Bands by configuration."""
    names = list(dict.fromkeys(configurations))
    outcomes = played("clean runs", do, clean_runs(names), jobs, failed=hung)
    for run, outcome in zip(clean_runs(names), outcomes, strict=True):
        if outcome.failed or not outcome.equal:
            raise RuntimeError(f"a clean run of {run.cell.name}, data seed {run.data_seed}, failed: {outcome}")
    return {name: Band.of(outcomes[i * CLEAN_RUNS : (i + 1) * CLEAN_RUNS]) for i, name in enumerate(names)}


def own_bands(cells: Iterable[Cell], jobs: int) -> dict[Cell, Band]:
    """Bands of clean runs with the size and the fate of each of these cells, in which nothing is flipped."""
    cells = list(cells)
    runs = [Run(cell, None, seed) for cell in cells for seed in range(CLEAN_RUNS)]
    outcomes = played("clean runs of cells out of line", do, runs, jobs, failed=hung)
    return {cell: Band.of(outcomes[i * CLEAN_RUNS : (i + 1) * CLEAN_RUNS]) for i, cell in enumerate(cells)}


def chosen(words: Sequence[str], seed: int, *, everything: bool) -> list[Cell]:
    """The cells that the command line asks for: by name, or those of the design, or of the full product, that fit."""
    named = [cells_of.named(word) for word in words if "/" in word]
    rest = [word for word in words if "/" not in word]
    if named and not rest:
        return named
    found = cells_of.every() if everything else cells_of.design(seed)
    return [*named, *filter(cells_of.matching(rest), found)]


def add(parser: argparse.ArgumentParser) -> None:
    """[--all] [--cells WORD ...] [--seed N] [--jobs N] [--bands FILE] [--clean N [--each]]"""
    parser.add_argument("--all", action="store_true", help="the full product, 2.8 million cells")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[],
        metavar="WORD",
        help="FACTOR=LEVEL[,LEVEL] for those that fit all of these, or cells by their names",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the design and the elements (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--clean", type=int, metavar="N", help="in place of cells, so many clean runs; 1000 is usual")
    parser.add_argument("--each", action="store_true", help="with --clean: so many of each recipe")
    parser.add_argument("--bands", type=Path, metavar="FILE", help="take the noise bands of this earlier result")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables and writes the JSON; 1 when a cell is out of line, or a clean run has an alarm."""
    if arguments.clean is not None or any(map(clean.is_name, arguments.cells)):
        return _run_clean(arguments)
    try:
        cells = chosen(arguments.cells, arguments.seed, everything=arguments.all)
    except ValueError as error:
        say(str(error))
        return 2
    say(f"seed {arguments.seed}: {len(cells)} cells")
    bands = dict[str, Band]()
    if arguments.bands:
        bands = {k: Band(**v) for k, v in json.loads(arguments.bands.read_text())["bands"].items()}
    bands |= bands_of((c for c in map(configuration, cells) if c not in bands), arguments.jobs)
    runs = [Run(cell, arguments.seed, zlib.crc32(cell.name.encode()) % CLEAN_RUNS) for cell in cells]

    def judged_run(run: Run, outcome: Outcome) -> Judged:
        return judge(run.cell, outcome, bands[configuration(run.cell)])

    outcomes = played(
        "cells", do, runs, arguments.jobs, failed=hung, wrong=lambda run, outcome: judged_run(run, outcome).complaint
    )
    judged = list(map(judged_run, runs, outcomes))
    if high := [number for number, j in enumerate(judged) if j.loss_is_high]:
        own = own_bands((cells[number] for number in high), arguments.jobs)
        for number in high:
            band = bands[configuration(cells[number])].or_wider(own[cells[number]])
            judged[number] = judge(cells[number], outcomes[number], band)
    bad = [j for j in judged if j.wrong]
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(plain(judged, bands), indent=1))
    say("\n".join(tables(judged)))
    say(f"\n{len(judged)} cells, {len(bad)} out of line; all of them are in {RESULT}")
    return 1 if bad else 0


def _run_clean(arguments: argparse.Namespace) -> int:
    runs = [clean.named(word) for word in arguments.cells]
    runs = runs or clean.clean_runs(arguments.clean, arguments.seed, each=arguments.each)
    say(f"seed {arguments.seed}: {len(runs)} clean runs")
    found = played(
        "clean runs", clean.run_clean, runs, arguments.jobs, failed=lambda reason: [reason], wrong=clean.complaint
    )
    bad = sum(map(bool, found))
    say(f"{len(runs)} clean runs of {len({run.recipe for run in runs})} recipes, {bad} with an alarm")
    return 1 if bad else 0
