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
    """UserError: some are not ``key=value``; it names all of them."""
    wrong = [repr(item) for item in overrides if "=" not in item or item.startswith("=")]
    if wrong:
        said = "is not an override" if len(wrong) == 1 else "are not overrides"
        raise UserError(f"{', '.join(wrong)} {said}; write key=value, e.g. train.inner_steps=200")
