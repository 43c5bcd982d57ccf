"""Which outer rate, momentum and period are good in short runs: ``python -m benchmarks grid``.

The byte GPT of ``diloco_bytes``, 4 replicas in one process, a plain loop without ftopt's protocol. Beside DiLoCo with
AdamW or Muon inside, with or without a synchronous first tenth: `SyncSGD` with either, and one replica alone. Every
family has inner rates of its own; a run takes as many tokens as the others of its batch and length.

Each run is kept in ``results/grid.json`` as soon as it has ended, and is not made again. The whole grid takes two cores
days, so the most decisive runs come first, and ``--minutes`` ends it before. Then the tables are printed; ``--tables``
prints them alone.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path

from benchmarks.grid import study, tables
from benchmarks.grid.kept import Kept, facts, fill
from benchmarks.grid.loop import Point, train
from benchmarks.training import RESULTS
from ftopt.cli.shared.output import complain, say

_SMALL = Point(rate=8e-3, batch=2, steps=4)
FEW = (
    replace(_SMALL, kind="sync"),
    replace(_SMALL, kind="alone"),
    replace(_SMALL, h=2, eta=0.7, mu=0.9, falling=True),
    replace(_SMALL, h=2, muon=0.02, lead=1),
)
"""The runs of ``--quick``."""


def add(parser: argparse.ArgumentParser) -> None:
    """[--seeds N] [--workers N] [--minutes M] [--tables] [--picture FILE] [--results FILE] [--quick] [--study]"""
    parser.add_argument("--seeds", type=int, default=3, help="seeds of a point (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that train at a time (default: one a core)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begins no run that would end later than that")
    parser.add_argument("--tables", action="store_true", help="trains nothing")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draws one as well: a PNG")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: benchmarks/results/grid.json")
    parser.add_argument("--quick", action="store_true", help="a few runs of a few steps: to see that it works")
    parser.add_argument("--study", action="store_true", help="the settings of a published study in place of the grid")


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the tables."""
    default = RESULTS / "quick" / "grid.json" if arguments.quick else RESULTS / "grid.json"
    kept = Kept(arguments.results or default, anew=arguments.quick)
    if arguments.quick:
        for point in FEW:
            kept.keep(point, train(point), facts())
    elif arguments.study:
        for point in [] if arguments.tables else study.points(arguments.seeds):
            if point not in kept.outcomes:
                kept.keep(point, train(point), facts())
        say("\n".join(study.table(kept.losses, arguments.seeds)))
        return 0
    elif not arguments.tables:
        fill(kept, arguments.seeds, arguments.workers or os.cpu_count() or 1, arguments.minutes * 60)
    if not kept.outcomes:
        complain(f"benchmarks grid: there is no run in {kept.path}")
        return 1
    say("\n".join(tables.all_of(kept.losses, arguments.seeds)))
    if arguments.picture and tables.draw(kept.losses, arguments.seeds, arguments.picture):
        say(f"drawn: {arguments.picture}")
    return 0
