"""Checks of numbers that several sections of a recipe share."""

from __future__ import annotations

from ftopt.errors import UserError


def at_least(section: str, low: float, **values: float) -> None:
    """Raises UserError for the first value below ``low``."""
    for name, value in values.items():
        if not value >= low:
            raise UserError(f"{section}.{name}={value:g}; must be at least {low:g}")


def above_zero(section: str, **values: float) -> None:
    """Raises UserError for the first value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{section}.{name}={value:g}; must be above 0")
