"""Bound methods that do not keep their object alive, and safe finalizers."""

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
    """Wraps the bound ``method``: calls it while its object lives, and afterwards returns ``gone``."""
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = found()
        return gone if bound is None else bound(*args, **kwargs)

    return call


def at_the_end(act: Callable[P, object]) -> Callable[P, None]:
    """Wraps ``act`` for use as a finalizer. Python prints and ignores exceptions in finalizers, even Ctrl-C: this
    raises Ctrl-C again a moment later, where it ends the program."""

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(*args, **kwargs)
        except KeyboardInterrupt:
            threading.Timer(_AGAIN_S, _thread.interrupt_main).start()

    return call
