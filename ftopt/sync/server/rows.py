"""Rows of an append-only file: each has its length and a checksum over all rows before it.

A row is ``length sum body sum newline``: 8 hex digits, 16 over the length, the body, 32 over everything. Each sum
includes the row before, so that no row can be changed, omitted, repeated or moved without notice. A row cut off by the
end of the file was never whole on the disk (a loss of power), so nobody relies on it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_SECTOR = 512
"""Bytes that a disk writes all or not at all; unwritten ones are zeros."""
_HEAD, _TAIL = 24, 33


class Damaged(ValueError):
    """The bytes differ from those written; the text says where."""


@dataclass(frozen=True)
class Rows:
    """The ``bodies`` of all whole rows, which end at byte ``end``; ``last``: the sum that the next row continues."""

    bodies: tuple[bytes, ...]
    end: int
    last: bytes


def encode(last: bytes, body: bytes) -> tuple[bytes, bytes]:
    """The row of ``body`` after the row with the sum ``last`` (``b""``: this row is the first), and its own sum."""
    head = _head(last, len(body))
    tail = _sum(last, head, body)
    return head + body + tail + b"\n", tail


def decode(data: bytes) -> Rows:
    """Decodes all rows.

    Raises:
        Damaged: a row differs from the one written.
    """
    stop, at, last, bodies = _written(data), 0, b"", list[bytes]()
    while stop - at >= _HEAD:
        head = data[at : at + _HEAD]
        length = _length(head)
        if length is None or head != _head(last, length):
            raise Damaged(f"row {len(bodies) + 1}, at byte {at}, does not begin as it was written")
        end = at + _HEAD + length + _TAIL
        if end > stop:
            break
        body, tail = data[at + _HEAD : end - _TAIL], data[end - _TAIL : end]
        if tail != _sum(last, head, body) + b"\n":
            if end == stop and _holes(data, at, end):
                break
            raise Damaged(f"row {len(bodies) + 1}, from byte {at} to {end}, is not what was written")
        bodies.append(body)
        at, last = end, tail[:-1]
    return Rows(tuple(bodies), at, last)


def _head(last: bytes, length: int) -> bytes:
    digits = b"%08x" % length
    return digits + _sum(last, digits)[:16]


def _length(head: bytes) -> int | None:
    try:
        return int(head[:8], 16)
    except ValueError:
        return None


def _sum(*parts: bytes) -> bytes:
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:32].encode()


def _written(data: bytes) -> int:
    """Where the file ends without its last sectors that were allocated but not written."""
    end = len(data.rstrip(b"\0"))
    return end if -(-end // _SECTOR) * _SECTOR < len(data) else len(data)


def _holes(data: bytes, start: int, end: int) -> bool:
    """Whether a whole sector within a row was not written."""
    first = -(-start // _SECTOR) * _SECTOR
    return any(not any(data[at : at + _SECTOR]) for at in range(first, end - _SECTOR + 1, _SECTOR))
