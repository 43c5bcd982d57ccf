"""What ftopt costs: ``python -m benchmarks run [NAME ...] [--quick]``.

Prints a table for each name, and writes ``benchmarks/results/speed/NAME.json``, a picture and the processes' logs
beside it, and the tables of ``docs/performance.md``. With ``--quick`` all of it takes 2 to 5 minutes, is written to
``benchmarks/results/quick``, and leaves the page unchanged.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from benchmarks import pictures
from benchmarks.speed import NAMES
from benchmarks.speed.figures import NotHereError, Row, drawn, table
from benchmarks.speed.machine import facts
from benchmarks.speed.report import keep, place, write_page
from benchmarks.speed.shown import shown
from ftopt.cli.shared.output import complain, say


def add(parser: argparse.ArgumentParser) -> None:
    """[NAME ...] [--quick]"""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="few repetitions, small models: a few minutes in all")


def run(arguments: argparse.Namespace) -> int:
    """1: one could not be measured; the others are. 2: there is no such name."""
    if unknown := [name for name in arguments.names if name not in NAMES]:
        complain(f"benchmarks run: {', '.join(unknown)}; must be of {', '.join(NAMES)}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # processes and namespaces are removed
    return max([_measure(name, quick=arguments.quick) for name in arguments.names or NAMES])


def _measure(name: str, *, quick: bool) -> int:
    module = importlib.import_module(f"benchmarks.speed.{_MODULES.get(name, name)}")
    about, began = facts(), time.monotonic()
    say(f"\n{name}: {module.ABOUT}\nTarget: {module.GOALS}.\n")
    path = place(name, quick=quick)
    try:
        with aside(path.with_suffix(".log")):
            rows = module.run(quick)
    except NotHereError as reason:
        complain(f"{name} is not measured: {reason}")
        return 1
    except Exception as error:
        complain(f"{name} is not measured: {error}\nWhat its processes have said: {path.with_suffix('.log')}")
        return 1
    about["wall_s"] = time.monotonic() - began
    say("\n".join(table(rows)))
    keep(name, rows, about, quick=quick)
    of_page = shown(name, rows)
    _draw(module, rows, path.with_suffix(".png"))
    say(f"({about['wall_s']:.1f} s; written to {path})")
    if not quick:
        picture = path.with_suffix(".png") if hasattr(module, "draw") else None
        write_page(name, of_page, about, picture, page=getattr(module, "PAGE", None))
    return 0


def _draw(module: ModuleType, rows: list[Row], path: Path) -> None:
    if hasattr(module, "draw"):
        module.draw(rows, path)
    else:
        scale = getattr(module, "SCALE", "linear")
        pictures.bars(drawn(rows, module.DRAWN), path, what=module.DRAWN, scale=scale)


@contextmanager
def aside(path: Path) -> Iterator[None]:
    """Standard error goes to a file: that of processes too, whose libraries tell of every connection that is lost."""
    sys.stderr.flush()
    own = os.dup(2)
    with path.open("w") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    except Exception:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        sys.stderr.flush()
        os.dup2(own, 2)
        os.close(own)


_MODULES = {"import": "imports"}
"""Names that no module can have."""
