"""Schedules of the outer rate: what it is multiplied by at the outer optimizer's ``t``-th step.

The outer optimizer counts its steps in its state: fragments have their own count, newcomers fetch it, and rounds that
only average, before ``average_until_step``, are not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ftopt.errors import UserError
from ftopt.methods.checks import is_whole


class Schedule(Protocol):
    """A frozen dataclass."""

    @property
    def moves(self) -> bool:
        """Whether the factor is ever another than 1."""

    def factor(self, t: int) -> float:
        """What the rate is multiplied by at outer step ``t``, 1 for the first. The same bits on all machines."""


@dataclass(frozen=True, kw_only=True)
class ConstantRate:
    """The rate itself, after a warm-up: ``min(1, t / warmup)``.

    Args:
        warmup: outer steps, >= 0. Default 0: none.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        _check_steps("warmup", self.warmup, 0)

    @property
    def moves(self) -> bool:
        """Whether there is a warm-up."""
        return self.warmup > 0

    def factor(self, t: int) -> float:
        """See `Schedule`."""
        return _warm(t, self.warmup)


@dataclass(frozen=True, kw_only=True)
class CosineRate:
    """A warm-up as in `ConstantRate`, then half a cosine from 1 down to ``floor`` at step ``steps``, where it stays.

    Args:
        steps: outer steps of the whole run (of one fragment), above ``warmup``.
        warmup: outer steps, >= 0. Default 0.
        floor: from 0 to 1. Default 0.1.
    """

    steps: int
    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check_steps("warmup", self.warmup, 0)
        _check_steps("steps", self.steps, self.warmup + 1)
        if not 0 <= self.floor <= 1:
            raise UserError(f"schedule.floor={self.floor!r}; must be from 0 to 1, a share of the rate")

    @property
    def moves(self) -> bool:
        """True."""
        return True

    def factor(self, t: int) -> float:
        """See `Schedule`."""
        if t <= self.warmup:
            return _warm(t, self.warmup)
        done = min(1.0, (t - self.warmup) / (self.steps - self.warmup))
        # Rounded: the last bits of a cosine differ from one C library to another.
        return round(self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2, 9)


def _warm(t: int, warmup: int) -> float:
    return 1.0 if t >= warmup else t / warmup


def _check_steps(name: str, value: int, least: int) -> None:
    if not is_whole(value, least):
        raise UserError(f"schedule.{name}={value!r}; must be a whole number of outer steps, at least {least}")
