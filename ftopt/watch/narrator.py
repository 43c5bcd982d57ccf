"""Narrators: tell what happens to one replica, or to a coordinator's jobs, as it happens, on their own thread.

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
"""Events that the replica's log describes better, with the cause and what to do."""
_LOGGED_OF_A_JOB = ("halt", "unlike", "diverged", "not_kept")
"""The same for a coordinator's log, which also describes a job that goes back (``undone``)."""
Item = tuple[str, Mapping[str, Any] | Note]
"""A job's name or "", and a note or a line: that of an event, or that of an inner step."""


class Narrator:
    """A queue, and a thread that hands its items to `_take` and calls `_look` now and then."""

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
        """Shows the remaining items; gives up if the output blocks."""
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
        """Handles the next item; False when nothing more will come."""
        with suppress(queue.Empty):
            item = self._queue.get(timeout=_LOOK_S)
            if item is None:
                return False
            self._take(*item)
        return True


class JobsLog(Narrator):
    """Narrates a coordinator: subscribes to the events of all its jobs, and writes a line for each notable one."""

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
    """Narrates one replica in its own process: subscribes to its events and to the log, and drives a display."""

    def __init__(self, story: Story, display: Display) -> None:
        logging.Handler.__init__(self)
        self._story, self._replica = story, ""
        Narrator.__init__(self, display)

    def __call__(self, event: Event) -> None:
        """Takes an event. Any thread."""
        if event.event not in OF_A_STEP:
            self._put("", record_of(event))

    def stepped(self, line: Mapping[str, Any]) -> None:
        self._put("", line)

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a record of the log. Any thread."""
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
