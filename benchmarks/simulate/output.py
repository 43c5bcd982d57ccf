"""What ``python -m benchmarks simulate`` shows: rows of a table, the conclusion, and how far it is."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence

from benchmarks.simulate.comparison import Row

_SHOWN_S = 0.5
_PLAN = "its period and delay are those of the options: `ftopt plan` recommends others"
_LEFT_S = 5.0
"""Minimum time that a policy must have run before the remaining time is shown."""


def conclusion(rows: Sequence[Row], *, notice_s: float) -> list[str]:
    """The policies of ftopt, and the models of other systems, with the highest goodput; and the settings of the policy
    of ftopt."""
    bests, settings = [], []
    for text, simulated in (("ftopt's policies", True), ("the models of other systems", False)):
        if found := [row for row in rows if row.simulated == simulated]:
            best = max(found, key=_goodput)
            of = f", the most of {text}" if len(found) > 1 else ""
            bests.append(f"{best.outcome.goodput:.1%} with `{best.policy}`{of}")
            if best.on_notice and (others := [x for x in found if not x.on_notice]):
                other = max(others, key=_goodput)
                bests[-1] += (
                    f", if each machine that goes has {notice_s:g} s of notice (--notice), else "
                    f"{other.outcome.goodput:.1%} with `{other.policy}`"
                )
            if simulated:
                notice = "; on notice see docs/operations.md, Spot machines" if best.on_notice else ""
                settings = [f"`{best.policy}` in a recipe: {shlex.join(best.settings)}; {_PLAN}{notice}"]
    return [f"Of what the machines could compute, the trained model contains: {'; '.join(bests)}", *settings]


def _goodput(row: Row) -> float:
    return row.outcome.goodput


def no_removal(arguments: argparse.Namespace) -> str:
    """A remark on a result without failures, which says how to get some."""
    if arguments.trace:
        how = "give another --trace, or a longer part of it (--hours)" if arguments.hours else "give another --trace"
    elif arguments.mtbf < math.inf:
        how = "give a shorter --mtbf, or more --hours"
    else:
        how = "give --mtbf, --failures or --trace"
    return f"No machine was removed, so this says nothing of failures: {how}"


HEAD = (
    "policy",
    "",
    "goodput",
    "of fault-free",
    "survivors keep",
    "twice",
    "taking part",
    "stall",
    "rounds",
    "messages/s",
)
WIDTHS = (1, 7, 8, 6, 6, 6, 6, 6, 16)
"""Minimum widths of all columns but the first: when the head is printed, later rows are unknown."""


def cells_of(row: Row) -> list[str]:
    """The cells of a row, in the columns of `HEAD`."""
    x = row.outcome
    return [
        row.policy,
        "S" if row.simulated else "M",
        f"{x.goodput:.2%}",
        f"{x.goodput / x.fault_free:.1%}" if x.fault_free else "no round",
        f"{x.kept:.1%}",
        f"{x.twice / x.capacity:.2%}" if x.capacity else "",
        "" if x.participation is None else f"{x.participation:.1%}",
        "" if x.stall is None else f"{x.stall:.2%}",
        "" if x.rounds is None else f"{x.rounds}",
        "" if x.messages_s is None else f"{x.messages_s:.1f} (max {x.busiest_s})",
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, below the head."""
    return aligned([head, *rows], [max(len(row[n]) for row in (head, *rows)) for n in range(len(head))])


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines in which all columns but the first are right-aligned."""
    return [
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(width) for x, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Progress:
    """On a terminal, a line that is overwritten; elsewhere nothing. ``of``: number of simulations, each a
    ``what``."""

    def __init__(self, what: str, of: int) -> None:
        self._what, self._of, self._number, self._share = what, of, 0, 1.0
        self._terminal = sys.stderr.isatty()
        self._shown_s = time.monotonic()
        self._name, self._began_s = "", self._shown_s

    def __call__(self, name: str, share: float) -> None:
        now = time.monotonic()
        if name != self._name or share < self._share:
            self._name, self._began_s = name, now
            self._number += 1
        self._share = share
        if self._terminal and now - self._shown_s >= _SHOWN_S:
            self._shown_s = now
            took_s = now - self._began_s
            left = f", about {_about(took_s * (1 - share) / share)} to go" if share > 0.01 and took_s >= _LEFT_S else ""
            text = f"{self._what} {self._number} of {self._of}, {name}: {share:.0%}{left}"
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        """Clears the line for other output."""
        if self._terminal:
            sys.stderr.write("\r\033[K")
