"""Every method and codec against SyncSGD and one replica: held-out loss at equal tokens, and bytes.

The byte GPT of ``diloco_bytes``, 4 replicas, AdamW with a cosine schedule. Each family takes the best point of one
small grid of inner and outer rates (`GRID`, seed 0); then all rows run with every seed. Runs are kept, so that the
can be stopped and goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ftopt
from benchmarks.training import Book, Case, Outcome
from ftopt.cli.output import say
from ftopt.methods import Method

RECIPE = "diloco_bytes"
STEPS = 600
H = 50
RATES = (2e-3, 4e-3, 8e-3)
OUTER = ((0.7, 0.5), (0.7, 0.9), (1.0, 0.5))
"""Outer rate and Nesterov momentum."""
THREE = ftopt.Strided(n=3)


def _outer(lr: float, momentum: float) -> ftopt.SGD:
    return ftopt.SGD(lr=lr, momentum=momentum, nesterov=True)


def _case(method: Method, lr: float, **more: object) -> Case:
    return Case(recipe=RECIPE, method=method, lr=lr, steps=STEPS, **more)  # type: ignore[arg-type]


GRID: dict[str, list[Case]] = {
    "sync_sgd": [_case(ftopt.SyncSGD(max_norm=1.0), lr) for lr in RATES],
    "one replica": [_case(ftopt.LocalSGD(sync_every=H), lr, replicas=1) for lr in RATES],
    "local_sgd": [_case(ftopt.LocalSGD(sync_every=H), lr) for lr in RATES],
    "diloco": [_case(ftopt.DiLoCo(sync_every=H, outer=_outer(*outer)), lr) for lr in RATES for outer in OUTER],
    "slowmo": [_case(ftopt.SlowMo(sync_every=H, slow_momentum=beta), lr) for lr in RATES for beta in (0.4, 0.6)],
}
"""Family -> its grid. Streaming DiLoCo and the codecs take DiLoCo's best point."""


@dataclass(frozen=True)
class Row:
    """A row of the table: a name, and its case at seed 0."""

    name: str
    case: Case


def best(book: Book) -> dict[str, Case]:
    """Each family's best point."""
    book.all(case for cases in GRID.values() for case in cases)
    found = {}
    for family, cases in GRID.items():
        outcomes = book.all(cases)
        found[family] = min(zip(cases, outcomes, strict=True), key=lambda pair: pair[1].loss)[0]
    return found


def rows(point: dict[str, Case]) -> list[Row]:
    """All rows, at the families' best points."""
    diloco = point["diloco"]
    assert isinstance(diloco.method, ftopt.DiLoCo)
    outer = diloco.method.outer

    def streaming(delay: int, **more: object) -> Case:
        method = ftopt.StreamingDiLoCo(
            sync_every=H,
            fragments=THREE,
            delay=delay,
            outer=outer,
            patience_s=600.0,
            **more,  # type: ignore[arg-type]
        )
        return replace(diloco, method=method)

    local = point["local_sgd"]
    return [
        Row("SyncSGD", point["sync_sgd"]),
        Row("one replica", point["one replica"]),
        Row("LocalSGD, H 10", replace(local, method=ftopt.LocalSGD(sync_every=10))),
        Row(f"LocalSGD, H {H}", local),
        Row(f"DiLoCo, H {H}", diloco),
        Row("DiLoCo, bf16", replace(diloco, codec="bf16")),
        Row("DiLoCo, int8", replace(diloco, codec="int8")),
        Row("DiLoCo, fp4", replace(diloco, codec="fp4")),
        Row("DiLoCo, top-k 3 %, 4 bits", replace(diloco, codec="top_k:0.03:4")),
        Row("DiLoCo, H 100", replace(diloco, method=replace(diloco.method, sync_every=100))),
        Row("DiLoCo, H 100, fp4", replace(diloco, method=replace(diloco.method, sync_every=100), codec="fp4")),
        Row(
            "DiLoCo, 100 synchronous steps first", replace(diloco, method=replace(diloco.method, outer_start_step=100))
        ),
        Row("Streaming, delay 0", streaming(0)),
        Row("Streaming, delay 5", streaming(5)),
        Row("Streaming, delay 5, mixed 0.5", streaming(5, merge="mix", alpha=0.5)),
        Row("Streaming, delay 5, fp4", replace(streaming(5), codec="fp4")),
        Row(f"SlowMo, H {H}", point["slowmo"]),
    ]


def table(found: Sequence[tuple[Row, list[Outcome]]]) -> list[str]:
    """Markdown."""
    losses = {row.name: [outcome.loss for outcome in outcomes] for row, outcomes in found}
    sync = losses["SyncSGD"]
    lines = ["| method | held-out loss (seeds) | mean | to SyncSGD | sent a replica, MB |", "|---|---|---|---|---|"]
    for row, outcomes in found:
        own = losses[row.name]
        gap = statistics.mean(a / b - 1 for a, b in zip(own, sync, strict=True))
        sent = statistics.mean(outcome.sent_bytes for outcome in outcomes) / 1e6
        each = " ".join(f"{loss:.3f}" for loss in own)
        lines.append(f"| {row.name} | {each} | {statistics.mean(own):.3f} | {gap:+.1%} | {sent:,.2f} |")
    return lines


def add(parser: argparse.ArgumentParser) -> None:
    """[--seeds N] [--workers N]"""
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row (default: %(default)s)")
    parser.add_argument("--workers", type=int, help="processes that train at a time (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    book = Book("methods", arguments.workers)
    point = best(book)
    for family, case in point.items():
        say(f"best of {family}: lr {case.lr:g}, {case.method}")
    every = rows(point)
    book.all(replace(row.case, seed=seed) for seed in range(arguments.seeds) for row in every)
    found = [(row, book.all(replace(row.case, seed=seed) for seed in range(arguments.seeds))) for row in every]
    say("\n".join(table(found)))
    return 0
