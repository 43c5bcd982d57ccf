"""Bound methods that do not keep their object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T], gone: T) -> Callable[P, T]:
    """Calls the bound ``method`` as long as its object lives; afterwards the result is ``gone``."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = found()
        return gone if bound is None else bound(*args, **kwargs)

    return call
