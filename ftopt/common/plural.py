"""Numbers with their nouns, for messages; and a sort key for names that contain numbers."""

from __future__ import annotations

import re


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 replica``, ``2,000 replicas``. ``many``: default ``one`` plus s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def times(factor: float) -> str:
    """``4.9 times``, ``1,234 times``."""
    return f"{factor:.2g} times" if factor < 99.5 else f"{factor:,.0f} times"


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key by which r10 comes after r9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d{1,18})", name)]
