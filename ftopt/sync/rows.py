"""Numbers of fp64 as rows of int64, to be exchanged exactly."""

from __future__ import annotations

import struct
from collections.abc import Sequence


def bits(values: Sequence[float]) -> list[int]:
    """fp64 values as int64."""
    return list(struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values)))


def floats(row: Sequence[int]) -> tuple[float, ...]:
    """The reverse of `bits`."""
    return struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}q", *row))
