"""What ftopt costs: ``python -m benchmarks run [NAME ...] [--quick]``.

Prints a table for each name, and writes ``benchmarks/results/speed/NAME.json``, a picture beside it, and the tables of
``docs/performance.md``. With ``--quick`` all of it takes 3 minutes at most, is written to ``benchmarks/results/quick``,
and leaves the page as it is.
"""

from __future__ import annotations

import argparse
import importlib
import time

from benchmarks import pictures
from benchmarks.speed import NAMES
from benchmarks.speed.figures import drawn, table
from benchmarks.speed.machine import facts
from benchmarks.speed.report import keep, write_page
from ftopt.cli.output import complain, say


def add(parser: argparse.ArgumentParser) -> None:
    """[NAME ...] [--quick]"""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repetitions, small models: 3 minutes in all")


def run(arguments: argparse.Namespace) -> int:
    """2: there is no such name."""
    if unknown := [name for name in arguments.names if name not in NAMES]:
        complain(f"benchmarks run: {', '.join(unknown)}; must be of {', '.join(NAMES)}")
        return 2
    for name in arguments.names or NAMES:
        module = importlib.import_module(f"benchmarks.speed.{_MODULES.get(name, name)}")
        about, began = facts(), time.monotonic()
        say(f"\n{name}: {module.ABOUT}\nTo be reached: {', '.join(f'{k} <= {v:g}' for k, v in module.GOALS.items())}\n")
        rows = module.run(arguments.quick)
        about["wall_s"] = time.monotonic() - began
        say("\n".join(table(rows)))
        path = keep(name, rows, about, quick=arguments.quick)
        pictures.bars(drawn(rows, module.DRAWN), path.with_suffix(".png"), what=module.DRAWN)
        say(f"({about['wall_s']:.1f} s; kept: {path})")
        if not arguments.quick:
            write_page(name, rows, about)
    return 0


_MODULES = {"import": "imports"}
"""Names that no module can have."""
