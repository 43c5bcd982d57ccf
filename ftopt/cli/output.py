"""What the command line writes: results to standard output, everything else to standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A line of the result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(text: str) -> None:
    """A message about what went wrong."""
    sys.stderr.write(f"ftopt: {text}\n")
    sys.stderr.flush()
