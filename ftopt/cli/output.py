"""Output of the command line: results to standard output, everything else to standard error."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONG_S = 5.0


def say(text: str) -> None:
    """Writes one line of the result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """Writes one error message."""
    sys.stderr.write(f"ftopt: {text}\n")
    sys.stderr.flush()


def set_up_logging() -> None:
    """Warnings of all libraries go to standard error, unless the process has set up its logging."""
    logging.basicConfig(format="ftopt: %(message)s", level=logging.WARNING)


def tell(text: str) -> None:
    """Writes one line about how far the work has come."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def loading() -> Iterator[None]:
    """Around what imports torch: says so when that takes long, as on a machine with much else to do."""
    timer = threading.Timer(_LONG_S, tell, ["loading PyTorch ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
