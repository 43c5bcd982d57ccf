"""File descriptors: how many are left, and a warning when none are."""

from __future__ import annotations

import logging
import resource
import time
from pathlib import Path
from typing import Any

_AGAIN_S = 60.0
_MOST = 1 << 16
"""No server here needs more; some systems allow a billion."""


def limit() -> int:
    """The number of descriptors that this process may have now."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> None:
    """Raises the soft limit to the hard limit, 65,536 at most: for ftopt's own processes, not for a user's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def free() -> int:
    """The number of descriptors left; where it is unknown, a large number."""
    try:
        return limit() - len(list(Path("/proc/self/fd").iterdir()))
    except FileNotFoundError:  # not Linux
        return _MOST
    except OSError:  # none left to list them with
        return 0


class Seldom:
    """Logs a warning once a minute at most."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next_s = 0.0

    def warn(self, text: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _AGAIN_S
            self._log.warning("%s", text)


class AcceptErrors:
    """Warns, once a minute at most, that connections cannot be accepted because no descriptors are left.

    asyncio tries again every second by itself, but logs a traceback for each connection that waits.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._seldom = Seldom(log)

    def takes(self, context: dict[str, Any]) -> bool:
        """Whether an event loop's ``context`` reports this error, which is then logged."""
        if context.get("message") != "socket.accept() out of system resource":
            return False
        self._seldom.warn(
            f"no connection can be accepted: {context['exception'].strerror}; this process may have {limit()} file "
            "descriptors: end what holds them, or allow more (ulimit -n); it tries again every second"
        )
        return True
