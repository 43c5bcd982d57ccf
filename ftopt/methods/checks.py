"""Checks of settings that several methods share. Messages say what, got, allowed, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.errors import UserError


def check_choice(name: str, value: object, allowed: Sequence[str], hint: str = "") -> None:
    """Refuses a word that is not among ``allowed``.

    Raises:
        UserError: says which are.
    """
    if value not in allowed:
        raise UserError(f"{name}={value!r}; allowed: {', '.join(allowed)}{hint and f'; {hint}'}")


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is an int, not a bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_sync_every(sync_every: object) -> None:
    """Refuses a period that is not a positive number of inner steps.

    Raises:
        UserError: ``sync_every`` is not an int of at least 1.
    """
    if not is_whole(sync_every, 1):
        raise UserError(
            f"sync_every={sync_every!r}; must be a whole number of inner steps, at least 1; "
            "use 1 to synchronize after every step, 500 for DiLoCo's default"
        )
