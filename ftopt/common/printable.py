"""Text of others for a log, a terminal or a page."""

from __future__ import annotations


def printable(text: str, most: int | None = None) -> str:
    """``text`` without control and format characters, cut off at ``most``: it may come from a replica."""
    text = text if most is None or len(text) <= most else f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)
