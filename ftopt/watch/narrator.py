"""Narrators: they tell what happens as it happens, on a thread of their own, of one replica or of a coordinator's jobs.

Subscribers must return at once, and a terminal may be slow or stopped (Ctrl-S): everything goes through a queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ftopt.events import OF_A_STEP, Event
from ftopt.watch.jsonl import data_of, record_of
from ftopt.watch.sentences import Note
from ftopt.watch.story import Story
from ftopt.watch.terminal import Display

_LOOK_S = 0.5
_CLOSE_S = 2.0
_LOGGED_OF_A_REPLICA = ("discarded", "discarded_nonfinite", "checkpoint_failed", "outlier", "left_out", "disconnected",
                        "slow", "up_to_speed", "promoted")  # fmt: skip
"""What the replica's log says better, with the cause and what to do."""
_LOGGED_OF_A_JOB = ("halt", "unlike", "diverged", "not_kept")
"""The same of a coordinator's log; so it does of a job that goes back (``undone``)."""
Item = tuple[str, Mapping[str, Any] | Note]
"""What it is about, a job or "", and an event's line, that of an inner step, or a note."""


class Narrator:
    """A queue, and a thread that hands its items to `_take`, and calls `_look` now and then.

    Args:
        display: gets the notes.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._started, self._looked_s = time.monotonic(), 0.0
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"ftopt-{type(self).__name__.lower()}", daemon=True)
        self._thread.start()

    def _take(self, about: str, item: Mapping[str, Any] | Note) -> None:
        raise NotImplementedError

    def _look(self, now_s: float) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Shows what is left; an output that does not take it is left behind."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _put(self, about: str, item: Mapping[str, Any] | Note) -> None:
        self._queue.put((about, item if isinstance(item, Note) else {"t_s": self._now_s(), **item}))

    def _now_s(self) -> float:
        return time.monotonic() - self._started

    def _work(self) -> None:
        with suppress(OSError):  # `ftopt replica ... | head`
            while self._next():
                if self._now_s() - self._looked_s >= _LOOK_S:
                    self._looked_s = self._now_s()
                    self._look(self._looked_s)
            self._look(self._now_s())
            self._display.close()

    def _next(self) -> bool:
        """False: there will be nothing more."""
        with suppress(queue.Empty):
            item = self._queue.get(timeout=_LOOK_S)
            if item is None:
                return False
            self._take(*item)
        return True


class JobsLog(Narrator):
    """A coordinator's: subscribes to the events of all its jobs, and makes a line of each notable one. Any thread."""

    def __init__(self, display: Display) -> None:
        self._stories: dict[str, Story] = {}
        super().__init__(display)

    def __call__(self, event: Event) -> None:
        self._put(event.job or "", record_of(event))

    def _take(self, about: str, item: Mapping[str, Any] | Note) -> None:
        assert not isinstance(item, Note)
        note = self._stories.setdefault(about, Story(0)).take(item)
        if note is not None and item["event"] not in _LOGGED_OF_A_JOB and not data_of(item).get("undone"):
            self._tell(about, note)

    def _look(self, now_s: float) -> None:
        for job, story in self._stories.items():
            story.now_s = now_s
            for note in story.due():
                self._tell(job, note)

    def _tell(self, job: str, note: Note) -> None:
        self._display.note(Note(f"job {job}: {note.text}", note.tone))


class Screen(Narrator, logging.Handler):
    """One replica's, in its own process: subscribes to its events and to the log, and drives a display.

    Args:
        story: of this replica alone.
        display: draws it.
    """

    def __init__(self, story: Story, display: Display) -> None:
        logging.Handler.__init__(self)
        self._story, self._replica = story, ""
        Narrator.__init__(self, display)

    def __call__(self, event: Event) -> None:
        """An event. Any thread."""
        if event.event not in OF_A_STEP:
            self._put("", record_of(event))

    def stepped(self, line: Mapping[str, Any]) -> None:
        """The line of an inner step."""
        self._put("", line)

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the log. Any thread."""
        tone = "bad" if record.levelno >= logging.ERROR else "warn" if record.levelno >= logging.WARNING else ""
        self._put("", Note(self.format(record), tone))

    def close(self) -> None:
        logging.Handler.close(self)
        Narrator.close(self)

    def _take(self, about: str, item: Mapping[str, Any] | Note) -> None:
        if isinstance(item, Note):
            self._display.note(item)
        elif "event" in item:
            self._replica = item["replica"]
            note = self._story.take(item)
            if note is not None and item["event"] not in _LOGGED_OF_A_REPLICA:
                self._display.note(note)
        else:
            self._story.stepped(self._replica, item)

    def _look(self, now_s: float) -> None:
        self._story.now_s = now_s
        self._display.refresh(self._story)
