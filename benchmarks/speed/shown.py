"""What the documentation shows of each table; the whole of it is printed, and in the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.speed.figures import Row, Spread, number


@dataclass(frozen=True)
class Shown:
    """The columns of a page, with medians alone.

    Args:
        columns: those that are left as they are. Rows that are alike in these become one; the last figures count.
        values: the figures of a row; those that no row has are left out: another network cannot be had everywhere.
        across: each value of this column has its own columns of figures; "": there is one of each figure.
        unit: what follows such a value in the head of its columns.
        last: figures that do not depend on ``across``.
        leave_out: rows in which a value has this text are not shown; "": all are.
    """

    columns: tuple[str, ...]
    values: tuple[str, ...]
    across: str = ""
    unit: str = ""
    last: tuple[str, ...] = ()
    leave_out: str = ""

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that a page shows. Raises `KeyError`: there is no such column."""
        found: dict[tuple[Any, ...], Row] = {}
        kept = [row for row in rows if not (self.leave_out and any(self.leave_out in str(x) for x in row.values()))]
        across = list(dict.fromkeys(row[self.across] for row in kept)) if self.across else [""]
        across = sorted(across) if all(isinstance(of, int) for of in across) else across
        for row in kept:
            key = tuple(row[column] for column in self.columns)
            shown = found.setdefault(key, dict(zip(self.columns, key, strict=True)))
            of = row[self.across] if self.across else ""
            shown |= {self._head(of, value): _median(row[value]) for value in self.values if value in row}
            shown |= {column: _median(row[column]) for column in self.last}
        columns = (*self.columns, *(self._head(of, value) for of in across for value in self.values), *self.last)
        there = [column for column in columns if any(column in row for row in found.values())]
        return [{column: row.get(column) for column in there} for row in found.values()]

    def _head(self, of: Any, value: str) -> str:
        if not self.across:
            return value
        head = (f"{of:,}" if isinstance(of, int) else str(of)) + self.unit
        return head if len(self.values) == 1 else f"{head}, {value}"


def _median(value: Any) -> Any:
    return number(value.median) if isinstance(value, Spread) else value


SHOWN: Mapping[str, Shown] = {
    "inner": Shown(("model", "inner"), ("more, µs", "ratio")),
    "outer": Shown(("way",), ("ms", "to bare Gloo"), across="parameters"),
    "codec": Shown(("codec",), ("times fewer bytes", "loopback, ms", "1 Gbit/s, to fp32", "100 Mbit/s, to fp32")),
    "memory": Shown(("way",), ("peak",), across="inner"),
    "scale": Shown(("parameters", "replicas", "fragments"), ("ns a parameter",), leave_out="replicas"),
    "control": Shown(("replicas", "way"), ("round, ms", "coordinator's CPU, ms a round")),
    "stall": Shown(("fault",), ("longest, s",), across="way", leave_out="defaults"),
    "goodput": Shown(("way",), ("kept, %", "rate, %", "lost by others")),
    "failure": Shown(("way",), ("samples", "seconds lost per kill", "longest stop, s")),
    "spares": Shown(("way",), ("first step, s",), across="parameters"),
    "join": Shown(("parameters",), ("committed, s", "imports, s", "transfer, s", "their wait, s")),
    "joiners": Shown(("sources",), ("to the ideal",)),
    "bandwidth": Shown(("way",), ("utilization",), across="Mbit/s", unit=" Mbit/s", last=("90 %, Mbit/s",)),
    "utilization": Shown(("way", "H"), ("utilization",), across="Mbit/s", unit=" Mbit/s"),
    "convergence": Shown(("way",), ("loss", "to SyncSGD", "seconds", "sent a replica, MB")),
    "equal": Shown(("way",), ("steps", "loss", "to SyncSGD"), across="Mbit/s", unit=" Mbit/s"),
    "islands": Shown(("way",), ("to 2 replicas x 1, to bare",), across="parameters", leave_out="inner step"),
    "recovery": Shown(("inner", "precision"), ("s", "again", "difference"), across="way"),
    "paft": Shown(("way",), ("s", "ratio", "published"), across="replicas", unit=" replicas"),
    "reuse": Shown(("kills", "way"), ("wasted", "missing, %", "time"), across="replicas", unit=" replicas"),
    "gpu": Shown(("replicas", "way"), ("to bare", "added, ms", "memory")),
    "gpu_copies": Shown(("what",), ("GB/s",), leave_out="and back"),
}
"""Name -> what its page shows. Others are shown whole."""


def shown(name: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of a benchmark that its page shows."""
    return SHOWN[name].of(rows) if name in SHOWN else list(rows)
