"""Numbers with their nouns, for messages."""

from __future__ import annotations


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 replica``, ``2,000 replicas``. ``many``: default ``one`` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
