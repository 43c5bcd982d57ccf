"""Messages about slow work, while it lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def if_longer(seconds: float, say: Callable[..., object], *args: object) -> Iterator[None]:
    """Calls ``say(*args)``, in a thread of its own, if the block takes longer than ``seconds``."""
    timer = threading.Timer(seconds, say, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
