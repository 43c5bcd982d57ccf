"""PAFT against no protection and against other methods, when gradients are corrupted after the aggregation.

The convolutional net of the ``digits`` recipe, SGD with momentum 0.9, 4 workers; each worker's copy of the agreed
gradient is corrupted in its own way. Printed: held-out accuracy, the mean over seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import ftopt
from benchmarks.training import Book, Case, Corruption, Outcome
from ftopt.cli.output import say
from ftopt.methods import Method
from ftopt.methods.adaptive import SignalToNoise

STEPS = 200
SIGMAS = (1e-4, 1e-3, 1e-2, 1e-1)
DRIFT = 100.0
"""Of momentum 0.9 beside plain SGD: 1 / (1 - 0.9)^2."""

KINDS: dict[str, tuple[Corruption, ...]] = {
    "burst, variance 0.1": (Corruption(how="noise", size=1e-4), Corruption(how="noise", size=0.1, every=50)),
    "burst, variance 1": (Corruption(how="noise", size=1e-4), Corruption(how="noise", size=1.0, every=50)),
    "a flipped bit every 10 steps": (Corruption(how="bit", every=10),),
    "an element stuck at 1": (Corruption(how="stuck", size=1.0),),
    "one worker biased by 0.01": (Corruption(how="bias", size=0.01, replicas=1),),
    "parameters too: variance 1e-6 every 10 steps": (
        Corruption(how="noise", size=1e-3),
        Corruption(how="noise", size=1e-6, every=10, params=True),
    ),
}


@dataclass(frozen=True)
class Way:
    """A row of the table."""

    name: str
    method: Method
    codec: str = "fp32"


WAYS = (
    Way("nothing is done", ftopt.SyncSGD()),
    Way("PAFT-Sync, H 5", ftopt.PAFT(sync_every=5)),
    Way("PAFT-Sync, H 10", ftopt.PAFT(sync_every=10)),
    Way("PAFT-Sync, H 50", ftopt.PAFT(sync_every=50)),
    Way("PAFT-Dyn", ftopt.PAFT(sync_every=50, delay=1, trigger=SignalToNoise(drift=DRIFT, most=50))),
    Way("local SGD, H 1", ftopt.LocalSGD(sync_every=1)),
    Way("int8 with error feedback", ftopt.SyncSGD(), codec="int8"),
    Way("SlowMo, H 10", ftopt.SlowMo(sync_every=10, slow_momentum=0.4)),
)


def case(way: Way, corrupted: tuple[Corruption, ...], seed: int) -> Case:
    """One run."""
    return Case(
        recipe="digits",
        method=way.method,
        codec=way.codec,
        lr=0.05,
        inner="sgd",
        steps=STEPS,
        seed=seed,
        corrupted=corrupted,
        eval_every=STEPS,
    )


def cell(outcomes: Sequence[Outcome]) -> str:
    """Accuracy of what the method holds at the end, in percent: of parameters that drift apart, each worker's own."""
    found = [100 * statistics.mean(outcome.own) for outcome in outcomes]
    return f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f}"


def table(book: Book, columns: dict[str, tuple[Corruption, ...]], seeds: int) -> list[str]:
    """Markdown; a row a way, a column a kind of spoiling."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for way in WAYS:
        cells = [cell(book.all(case(way, corrupted, seed) for seed in range(seeds))) for corrupted in columns.values()]
        lines.append(f"| {way.name} | " + " | ".join(cells) + " |")
    averaged = [
        statistics.mean(
            100 * (o.mean or 0.0) for o in book.all(case(WAYS[0], corrupted, seed) for seed in range(seeds))
        )
        for corrupted in columns.values()
    ]
    lines.append("| nothing, but averaged once at the end | " + " | ".join(f"{a:.1f}" for a in averaged) + " |")
    return lines


def add(parser: argparse.ArgumentParser) -> None:
    """[--seeds N] [--workers N]"""
    parser.add_argument("--seeds", type=int, default=3, help="seeds a cell (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that train at a time (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    """Prints two tables: white noise by its variance, and other kinds of damage."""
    book = Book("paft", arguments.workers)
    noises = {"clean": (), **{f"{sigma:g}": (Corruption(how="noise", size=sigma),) for sigma in SIGMAS}}
    every = [
        case(way, s, seed)
        for seed in range(arguments.seeds)
        for s in (*noises.values(), *KINDS.values())
        for way in WAYS
    ]
    book.all(every)
    for title, columns in (("white noise of variance", noises), ("other damage", KINDS)):
        say(f"{title}: held-out accuracy, %")
        say("\n".join(table(book, columns, arguments.seeds)))
    return 0
