"""Numbers with their nouns, for messages."""

from __future__ import annotations


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 replica``, ``2,000 replicas``. ``many``: default ``one`` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def times(factor: float) -> str:
    """``4.9 times``, ``1,234 times``."""
    return f"{factor:.2g} times" if factor < 99.5 else f"{factor:,.0f} times"
