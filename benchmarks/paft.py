"""PAFT against no protection and against other methods, when gradients are corrupted after the aggregation.

The convolutional net of the ``digits`` recipe, 4 workers; each worker's copy of the agreed gradient is corrupted in its
own way. Printed, as means over seeds: held-out accuracy, with SGD of momentum 0.9; and for three inner optimizers the
loss with fixed periods, and with those that a trigger chooses. ``--net resnet`` prints the accuracy of a ResNet-8 on
the same images, ``--net gpt`` the held-out loss of the byte GPT with AdamW, for PAFT's ways alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.training import Book, Case, Corruption, Outcome
from ftopt.cli.shared.output import say
from ftopt.methods import Method
from ftopt.triggers import PAFTRatio, SignalToNoise, Trigger

STEPS = 200
SIGMAS = (1e-4, 1e-3, 1e-2, 1e-1)
PERIOD_STEPS = 128
"""Of the runs with fixed and with chosen periods: a whole number of each fixed one."""
PERIOD_SIGMAS = (1e-2, 3e-2, 1e-1)
FIXED = (1, 2, 4, 8, 16, 32, 64)
INNERS: dict[str, dict[str, Any]] = {
    "SGD": {"inner": "sgd", "momentum": 0.0, "lr": 0.3},
    "momentum 0.9": {"inner": "sgd", "momentum": 0.9, "lr": 0.05},
    "AdamW": {"inner": "adamw", "lr": 3e-3},
}
CHOSEN: dict[str, Trigger] = {
    "SignalToNoise()": SignalToNoise(),
    "SignalToNoise(most=64)": SignalToNoise(most=64),
    "PAFTRatio(most=64)": PAFTRatio(most=64),
}

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
    Way("nothing is done", ftopt.SyncSGD(verify_every=None)),
    Way("PAFT-Sync, H 5", ftopt.PAFT(sync_every=5)),
    Way("PAFT-Sync, H 10", ftopt.PAFT(sync_every=10)),
    Way("PAFT-Sync, H 50", ftopt.PAFT(sync_every=50)),
    Way("PAFT-Dyn", ftopt.PAFT(sync_every=50, delay=1, trigger=SignalToNoise(most=50))),
    Way("local SGD, H 1", ftopt.LocalSGD(sync_every=1)),
    Way("int8 with error feedback", ftopt.SyncSGD(verify_every=None), codec="int8"),
    Way("clip_norm 1", ftopt.SyncSGD(clip_norm=1.0, verify_every=None)),
    Way("PAFT-Sync, H 10, clip_norm 1", ftopt.PAFT(sync_every=10, clip_norm=1.0)),
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


NETS: dict[str, dict[str, Any]] = {
    "resnet": {"recipe": str(Path(__file__).parent / "resnet.yaml")},
    "gpt": {"recipe": "adamw_bytes", "inner": "adamw", "lr": 8e-3},
}
"""What differs from `case`: ``gpt`` has AdamW at the best rate of `methods`."""


def of_net(net: str, way: Way, corrupted: tuple[Corruption, ...], seed: int) -> Case:
    """One run of another net."""
    return replace(case(way, corrupted, seed), **NETS[net])


def net_table(book: Book, net: str, columns: dict[str, tuple[Corruption, ...]], seeds: int) -> list[str]:
    """Markdown; a row a way of PAFT's, a column a kind of noise."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for way in WAYS[:5]:
        cells = list[str]()
        for corrupted in columns.values():
            found = book.all(of_net(net, way, corrupted, seed) for seed in range(seeds))
            losses = [outcome.loss for outcome in found]
            spread = f"{statistics.mean(losses):.3f} ± {statistics.pstdev(losses):.3f}"
            cells.append(cell(found) if found[0].own else spread)
        lines.append(f"| {way.name} | " + " | ".join(cells) + " |")
    return lines


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


def chosen_case(inner: str, method: Method, variance: float, seed: int) -> Case:
    """A run with a fixed or a chosen period."""
    noise = (Corruption(how="noise", size=variance),)
    return Case(
        recipe="digits",
        method=method,
        replicas=2,
        steps=PERIOD_STEPS,
        seed=seed,
        corrupted=noise,
        eval_every=PERIOD_STEPS,
        **INNERS[inner],
    )


PERIODS: dict[str, Method] = {
    **{f"H {period}": ftopt.PAFT(sync_every=period) for period in FIXED},
    **{name: ftopt.PAFT(sync_every=64, trigger=trigger) for name, trigger in CHOSEN.items()},
}


def period_table(book: Book, seeds: int, what: Callable[[list[Outcome], list[Outcome]], str]) -> list[str]:
    """Markdown; a row an inner optimizer and a variance, a column a period. ``what`` makes a cell of the outcomes and
    of those with H 1."""
    lines = ["| | variance | " + " | ".join(PERIODS) + " |", "|---" * (len(PERIODS) + 2) + "|"]
    for inner, variance in period_rows(book):
        found = [
            book.all(chosen_case(inner, method, variance, seed) for seed in range(seeds)) for method in PERIODS.values()
        ]
        lines.append(f"| {inner} | {variance:g} | " + " | ".join(what(cell, found[0]) for cell in found) + " |")
    return lines


def period_rows(book: Book) -> list[tuple[str, float]]:
    """Inner optimizer and variance of each row."""
    rows = [(inner, variance) for inner in INNERS for variance in PERIOD_SIGMAS]
    return rows[:1] if book.quick else rows


def final_loss(cell: list[Outcome], every_step: list[Outcome]) -> str:
    """Held-out loss of the averaged parameters at the end, and its deviation over seeds."""
    losses = [outcome.loss for outcome in cell]
    return f"{statistics.mean(losses):.3f} ± {statistics.pstdev(losses):.3f}"


def cost_of_drift(cell: list[Outcome], every_step: list[Outcome]) -> str:
    """How much higher the replicas' own loss is on the way than with H 1, and the mean period."""
    more = statistics.mean(a.training for a in cell) / statistics.mean(b.training for b in every_step) - 1
    averages = sum(outcome.averages for outcome in cell)
    period = f"{PERIOD_STEPS * len(cell) / averages:.1f}" if averages else "never averaged"
    return f"{100 * more:+.1f} % ({period})"


def add(parser: argparse.ArgumentParser) -> None:
    """[--net NAME] [--seeds N] [--workers N] [--quick]"""
    parser.add_argument(
        "--net",
        choices=["convnet", *NETS],
        default="convnet",
        help="the digits' convolutional net, a ResNet-8 on them, or the byte GPT (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds a cell (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that train at a time (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="one seed, few cells and steps: to see that it works")


def run(arguments: argparse.Namespace) -> int:
    """Prints four tables: white noise by its variance, other kinds of damage, fixed and chosen periods."""
    book = Book("paft", arguments.workers, quick=arguments.quick)
    seeds = 1 if book.quick else arguments.seeds
    noises: dict[str, tuple[Corruption, ...]] = {
        "clean": (),
        **{f"{sigma:g}": (Corruption(how="noise", size=sigma),) for sigma in SIGMAS},
    }
    kinds = KINDS
    if book.quick:
        noises, kinds = {"clean": ()}, dict(list(KINDS.items())[-1:])
    if arguments.net != "convnet":
        columns = noises | dict(list(kinds.items())[1:2])
        book.all(
            of_net(arguments.net, way, c, seed) for seed in range(seeds) for c in columns.values() for way in WAYS[:5]
        )
        say("white noise by its variance, and bursts: held-out accuracy, %, or loss")
        say("\n".join(net_table(book, arguments.net, columns, seeds)))
        return 0
    every = [case(way, s, seed) for seed in range(seeds) for s in (*noises.values(), *kinds.values()) for way in WAYS]
    every += [
        chosen_case(inner, method, variance, seed)
        for seed in range(seeds)
        for inner, variance in period_rows(book)
        for method in PERIODS.values()
    ]
    book.all(every)
    for title, columns in (("white noise of variance", noises), ("other damage", kinds)):
        say(f"{title}: held-out accuracy, %")
        say("\n".join(table(book, columns, seeds)))
    say("periods: held-out loss of the averaged parameters at the end")
    say("\n".join(period_table(book, seeds, final_loss)))
    say("periods: the replicas' own loss over the run, beside H 1 (and the mean period)")
    say("\n".join(period_table(book, seeds, cost_of_drift)))
    return 0
