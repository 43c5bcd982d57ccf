"""What a launch shows: the job's state, redrawn in place on a terminal, and above it what replicas write."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from ftopt.errors import Unreachable, UserError
from ftopt.watch.sentences import Note
from ftopt.watch.status import Job, line, picture
from ftopt.watch.story import Story
from ftopt.watch.terminal import LiveText, PlainLines, can_redraw, figures

_EVERY_S = 2.0


class Screen:
    """The display of one launch.

    Args:
        say: writes a line to standard output.
        look: asks the coordinator for the job; raises UserError or Unreachable.
        quiet: only problems, and what the replicas write.
        dated: the job is another launch's, whose report counts from its own start: begin lines with date and time.
    """

    def __init__(
        self, say: Callable[[str], None], look: Callable[[], Sequence[Job]], *, quiet: bool, dated: bool
    ) -> None:
        self._look, self._joined = look, dated
        redraws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and can_redraw()
        self._live = LiveText() if redraws and not quiet else None
        self._plain = PlainLines(say, quiet=quiet, dated=dated)
        self.say = say if self._live is None else self._live.say
        """Writes a line."""
        self.note: Callable[[Note], None] = self._plain.note if self._live is None else self._live.note
        """Something notable has happened."""
        self._last_s, self._heard = 0.0, ""

    def refresh(self, story: Story, *, over: bool = False) -> None:
        """Shows the job's state, if it is time; ``story`` takes it up. ``over``: replicas have come to the end, and a
        log needs no more lines."""
        if self._live is None:
            if not over:
                self._plain.refresh(story, lambda: self._state(self._jobs(), story))
        elif time.monotonic() - self._last_s >= _EVERY_S:
            width, height = self._live.size
            jobs = self._jobs()
            state = self._state(jobs, story)
            head = "" if state else ", ".join(figures(story))[:width]
            table = picture(jobs, width, height // 2) if jobs else state[:width]
            self._live.show("\n".join(filter(None, (head, table))))
            self._last_s = time.monotonic()

    def close(self) -> None:
        """The launch is over."""
        self._plain.close()
        if self._live is not None:
            self._live.show("")
            self._live.close()

    def _state(self, jobs: Sequence[Job] | None, story: Story) -> str:
        """What the job waits for, before it runs and when it is over; "": it runs, and ``story`` takes it up. A launch
        that has joined another's job knows it by the coordinator's answers alone."""
        if jobs is None and self._joined:
            return f"no coordinator answers; last known{self._heard}: {', '.join(figures(story)[:2])}"
        for job in (each for each in jobs or () if each["phase"] == "running"):
            story.heard(job)
            self._heard = time.strftime(", at %H:%M:%S")  # replicas' own lines may tell of newer versions
            return ""
        return "; ".join(map(line, jobs or ()))

    def _jobs(self) -> Sequence[Job] | None:
        """The job; None while the coordinator does not answer, as while it is started again."""
        try:
            return self._look()
        except (UserError, Unreachable):
            return None
