"""Bound methods that do not keep their object, and what objects do when they are gone."""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_AGAIN_S = 0.01


def weakly(method: Callable[P, T], gone: T) -> Callable[P, T]:
    """Calls the bound ``method`` as long as its object lives; afterwards the result is ``gone``."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = found()
        return gone if bound is None else bound(*args, **kwargs)

    return call


def at_the_end(act: Callable[P, object]) -> Callable[P, None]:
    """What a finalizer is to call. Python prints and ignores what is raised there, also by Ctrl-C: that is raised again
    a moment later, where it ends the program."""

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except KeyboardInterrupt:
            threading.Timer(_AGAIN_S, _thread.interrupt_main).start()

    return call
