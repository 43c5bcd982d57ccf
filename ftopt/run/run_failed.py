"""The errors of a run that does not reach its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftopt.errors import FtoptError


class RunFailed(FtoptError):
    """The run did not reach its end. Exit status 1.

    Attributes:
        summary: the run's figures so far.
        checkpoint: the newest complete checkpoint; None if there is none.
    """

    summary: dict[str, Any] | None = None
    checkpoint: Path | None = None


class Interrupted(RunFailed):
    """A signal has ended the run. Exit status 128 + ``number``."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
