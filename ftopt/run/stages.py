"""Says what a run is doing while nothing else is shown: one line when it takes longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ftopt.common.timers import if_longer
from ftopt.watch.sentences import Note

_LONG_S = 1.0


class Stages:
    """Says each thing once.

    Args:
        note: shows it.
        clock: seconds, monotonic.
    """

    def __init__(self, note: Callable[[Note], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._note, self._clock = note, clock
        self._begun: dict[str, float] = {}
        self._told: set[str] = set()

    def going_on(self, stage: str, text: str, *, after_s: float = _LONG_S) -> None:
        """Called repeatedly while the run is in ``stage``. ``text`` says what it is doing now."""
        begun = self._begun.setdefault(stage, self._clock())
        if stage not in self._told and self._clock() - begun >= after_s:
            self._told.add(stage)
            self._note(Note(text))

    def during(self, text: str) -> AbstractContextManager[None]:
        """Wraps work of this thread."""
        return if_longer(_LONG_S, self._note, Note(text))
