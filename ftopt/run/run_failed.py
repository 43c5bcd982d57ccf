"""How a run ends that does not come to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftopt.errors import FtoptError


class RunFailed(FtoptError):
    """The run did not come to its end. Exit status 1.

    Attributes:
        summary: the run's figures, as far as it came.
        checkpoint: the newest complete checkpoint; None: there is none.
    """

    summary: dict[str, Any] | None = None
    checkpoint: Path | None = None


class Interrupted(RunFailed):
    """A signal has ended the run. Exit status 128 + ``number``."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number
