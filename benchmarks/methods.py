"""Every method and codec against SyncSGD and one replica: held-out loss at equal tokens, and bytes.

The byte GPT of ``diloco_bytes``, 4 replicas, AdamW with a cosine schedule. Each family takes the best point of one
small grid of inner and outer rates (`GRID`, seed 0); then all rows run with every seed. Printed: the table, how the gap
to SyncSGD moves with the number of steps, and with the outer rate and momentum; drawn: ``results/methods/methods.png``.
Results are kept, so that an interrupted comparison continues where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ftopt
from benchmarks import pictures
from benchmarks.training import Book, Case, Outcome
from ftopt.cli.shared.output import say
from ftopt.methods import Method

RECIPE = "diloco_bytes"
STEPS = 600
H = 50
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
OUTER = ((0.7, 0.5), (0.7, 0.9), (1.0, 0.25), (1.0, 0.5))
"""Outer rate and Nesterov momentum."""
LENGTHS = (300, 600, 1200)
"""Inner steps, for the question how the gap moves with them."""
DRAWN = (
    "SyncSGD",
    "one replica",
    f"LocalSGD, H {H}",
    f"DiLoCo, H {H}",
    "DiLoCo, fp4",
    "Streaming, delay 5",
    f"SlowMo, H {H}",
)
THREE = ftopt.fragments.Strided(n=3)


def _outer(lr: float, momentum: float) -> ftopt.outer.SGD:
    return ftopt.outer.SGD(lr=lr, momentum=momentum, nesterov=True)


def _case(method: Method, lr: float, **more: object) -> Case:
    return Case(recipe=RECIPE, method=method, lr=lr, steps=STEPS, **more)  # type: ignore[arg-type]


def _streaming(delay: int, outer: tuple[float, float], **more: object) -> Method:
    return ftopt.StreamingDiLoCo(
        sync_every=H,
        fragments=THREE,
        delay=delay,
        outer=_outer(*outer),
        wait_for_result_s=600.0,
        **more,  # type: ignore[arg-type]
    )


GRID: dict[str, list[Case]] = {
    "sync_sgd": [_case(ftopt.SyncSGD(clip_norm=1.0), lr) for lr in RATES],
    "one replica": [_case(ftopt.LocalSGD(sync_every=H), lr, replicas=1) for lr in RATES],
    "local_sgd": [_case(ftopt.LocalSGD(sync_every=H), lr) for lr in RATES],
    "diloco": [_case(ftopt.DiLoCo(sync_every=H, outer=_outer(*outer)), lr) for lr in RATES for outer in OUTER],
    "streaming": [_case(_streaming(5, outer), lr) for lr in RATES[1:3] for outer in OUTER],
    "slowmo": [_case(ftopt.SlowMo(sync_every=H, slow_momentum=beta), lr) for lr in RATES for beta in (0.4, 0.6)],
}
"""Family -> its grid. Codecs take DiLoCo's best point, Decoupled DiLoCo Streaming's (at delay 5), PAFT SyncSGD's."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a name, and its case at seed 0."""

    name: str
    case: Case


def best(book: Book) -> dict[str, Case]:
    """Each family's best point."""
    grid = {family: cases[:1] for family, cases in GRID.items()} if book.quick else GRID
    book.all(case for cases in grid.values() for case in cases)
    found = {}
    for family, cases in grid.items():
        outcomes = book.all(cases)
        found[family] = min(zip(cases, outcomes, strict=True), key=lambda pair: pair[1].loss)[0]
    return found


def rows(point: dict[str, Case]) -> list[Row]:
    """All rows, at the families' best points."""
    diloco = point["diloco"]
    assert isinstance(diloco.method, ftopt.DiLoCo)
    overlapped = point["streaming"]
    assert isinstance(overlapped.method, ftopt.StreamingDiLoCo)

    def streaming(**more: object) -> Case:
        return replace(overlapped, method=replace(overlapped.method, **more))

    decoupled = ftopt.DecoupledDiLoCo(
        sync_every=H,
        fragments=ftopt.fragments.Balanced(n=3),
        delay=5,
        outer=overlapped.method.outer,
        wait_for_result_s=600.0,
    )
    local = point["local_sgd"]
    adacomm = ftopt.LocalSGD(sync_every=H, trigger=ftopt.triggers.AdaComm(initial=H, most=H))
    return [
        Row("SyncSGD", point["sync_sgd"]),
        Row("one replica", point["one replica"]),
        Row(f"PAFT, H {H}", replace(point["sync_sgd"], method=ftopt.PAFT(sync_every=H, clip_norm=1.0))),
        Row("LocalSGD, H 10", replace(local, method=ftopt.LocalSGD(sync_every=10))),
        Row(f"LocalSGD, H {H}", local),
        Row(f"LocalSGD, AdaComm from H {H}", replace(local, method=adacomm)),
        Row("DiLoCo, H 10", replace(diloco, method=replace(diloco.method, sync_every=10))),
        Row(f"DiLoCo, H {H}", diloco),
        Row("DiLoCo, bf16", replace(diloco, codec="bf16")),
        Row("DiLoCo, int8", replace(diloco, codec="int8")),
        Row("DiLoCo, fp4", replace(diloco, codec="fp4")),
        Row("DiLoCo, top-k 3 %, 4 bits", replace(diloco, codec="top_k:0.03:4")),
        Row("DiLoCo, H 100", replace(diloco, method=replace(diloco.method, sync_every=100))),
        Row("DiLoCo, H 100, fp4", replace(diloco, method=replace(diloco.method, sync_every=100), codec="fp4")),
        Row(
            "DiLoCo, 100 synchronous steps first",
            replace(diloco, method=replace(diloco.method, average_until_step=100)),
        ),
        Row("Streaming, delay 0", streaming(delay=0)),
        Row("Streaming, delay 5", streaming()),
        Row("Streaming, delay 5, mixed 0.5", streaming(mix=0.5)),
        Row("Streaming, delay 5, fp4", replace(streaming(), codec="fp4")),
        Row(f"Decoupled, H {H}, delay 5", replace(overlapped, method=decoupled)),
        Row(f"SlowMo, H {H}", point["slowmo"]),
    ]


def table(found: Sequence[tuple[Row, list[Outcome]]]) -> list[str]:
    """Markdown."""
    losses = {row.name: [outcome.loss for outcome in outcomes] for row, outcomes in found}
    policy = losses["SyncSGD"]
    lines = ["| method | held-out loss (seeds) | mean | to SyncSGD | sent a replica, MB |", "|---|---|---|---|---|"]
    for row, outcomes in found:
        own = losses[row.name]
        gap = statistics.mean(a / b - 1 for a, b in zip(own, policy, strict=True))
        sent = statistics.mean(outcome.sent_bytes for outcome in outcomes) / 1e6
        each = " ".join(f"{loss:.3f}" for loss in own)
        lines.append(f"| {row.name} | {each} | {statistics.mean(own):.3f} | {gap:+.1%} | {sent:,.2f} |")
    return lines


def lengths(book: Book, point: dict[str, Case], seeds: int) -> list[str]:
    """How the gap to SyncSGD moves with the number of inner steps, as markdown."""
    lines = ["| inner steps | SyncSGD | one replica | DiLoCo | DiLoCo to SyncSGD | DiLoCo to one replica |"]
    lines.append("|---|---|---|---|---|---|")
    families = ("sync_sgd", "one replica", "diloco")
    book.all(
        replace(point[family], steps=steps, seed=seed)
        for steps in LENGTHS
        for family in families
        for seed in range(seeds)
    )
    for steps in LENGTHS:
        policy, alone, diloco = (
            [outcome.loss for outcome in book.all(replace(point[family], steps=steps, seed=s) for s in range(seeds))]
            for family in families
        )
        gaps = [statistics.mean(a / b - 1 for a, b in zip(diloco, other, strict=True)) for other in (policy, alone)]
        means = " | ".join(f"{statistics.mean(losses):.3f}" for losses in (policy, alone, diloco))
        lines.append(f"| {steps} | {means} | {gaps[0]:+.1%} | {gaps[1]:+.1%} |")
    return lines


def grids(book: Book) -> list[str]:
    """The grids' losses at seed 0, as markdown."""
    lines = ["| | " + " | ".join(f"{lr:g}" for lr in RATES) + " |", "|---" * (len(RATES) + 1) + "|"]
    for family, cases in GRID.items():
        by_setting: dict[str, dict[float, float]] = {}
        for case, outcome in zip(cases, book.all(cases), strict=True):
            by_setting.setdefault(_setting(family, case.method), {})[case.lr] = outcome.loss
        for name, losses in by_setting.items():
            lines.append(
                f"| {name} | " + " | ".join(f"{losses[lr]:.3f}" if lr in losses else "" for lr in RATES) + " |"
            )
    return lines


def _setting(family: str, method: Method) -> str:
    if isinstance(method, ftopt.DiLoCo | ftopt.StreamingDiLoCo) and isinstance(method.outer, ftopt.outer.SGD):
        return f"{family}, outer rate {method.outer.lr:g}, momentum {method.outer.momentum:g}"
    if isinstance(method, ftopt.SlowMo):
        return f"{family}, slow momentum {method.slow_momentum:g}"
    return family


def add(parser: argparse.ArgumentParser) -> None:
    """[--seeds N] [--workers N] [--quick]"""
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that train at a time (default: one a core)")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps: to see that it works")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables, draws the picture."""
    book = Book("methods", arguments.workers, quick=arguments.quick)
    seeds = 1 if book.quick else arguments.seeds
    point = best(book)
    for family, case in point.items():
        say(f"best of {family}: lr {case.lr:g}, {case.method}")
    every = rows(point)
    book.all(replace(row.case, seed=seed) for seed in range(seeds) for row in every)
    found = [(row, book.all(replace(row.case, seed=seed) for seed in range(seeds))) for row in every]
    say("\n".join(table(found)))
    if not book.quick:
        say("\n".join(lengths(book, point, seeds)))
        say("\n".join(grids(book)))
    curves = {row.name: [outcome.curve for outcome in outcomes] for row, outcomes in found if row.name in DRAWN}
    points = {
        row.name: (statistics.mean(o.sent_bytes for o in outcomes) / 1e6, statistics.mean(o.loss for o in outcomes))
        for row, outcomes in found
        if row.name != "one replica"
    }
    path = book.folder / "methods.png"
    alone = next(statistics.mean(o.loss for o in outcomes) for row, outcomes in found if row.name == "one replica")
    if pictures.methods(curves, points, path, alone=alone):
        say(f"drawn: {path}")
    return 0
