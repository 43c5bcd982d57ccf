"""Shared by several sections of a recipe: checks of numbers, and paths."""

from __future__ import annotations

import math

from ftopt.common.paths import user_path
from ftopt.errors import UserError


def at_least(section: str, low: float, **values: float) -> None:
    """Raises UserError for the first value below ``low``."""
    for name, value in values.items():
        if not low <= value < math.inf:
            raise UserError(f"{section}.{name}={value:g}; must be at least {low:g}{_finite(value)}")


def at_most(section: str, high: float, **values: float) -> None:
    """Raises UserError for the first value above ``high``."""
    for name, value in values.items():
        if not value <= high:
            raise UserError(f"{section}.{name}={value:,}; must be at most {high:,}")


def above_zero(section: str, **values: float) -> None:
    """Raises UserError for the first value that is not above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"{section}.{name}={value:g}; must be above 0{_finite(value)}")


def at_home(section: object, *names: str) -> None:
    """Replaces a leading ``~`` in these paths of a section by the home folder. None stays None."""
    for name in names:
        if (path := getattr(section, name)) is not None and path.startswith("~"):
            object.__setattr__(section, name, str(user_path(path)))


def _finite(value: float) -> str:
    return " and finite" if value == math.inf else ""
