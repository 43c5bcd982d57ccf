"""What is wrong with a recipe's name and overrides as words: told before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.config.shipped import locate
from ftopt.errors import UserError


def check_words(source: str, overrides: Sequence[str]) -> None:
    """UserError: there is no such recipe, or an override is none. Whether there are such keys, `load` tells."""
    locate(source)
    check_overrides(overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """UserError: one is not ``key=value``."""
    for item in overrides:
        if "=" not in item or item.startswith("="):
            raise UserError(f"{item!r} is not an override; write key=value, e.g. train.inner_steps=200")
