"""Shows one replica as it goes, in its own process: events, inner steps and log lines, on a thread that draws them.

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

from ftopt.events import Event
from ftopt.watch.jsonl import record_of
from ftopt.watch.sentences import Note
from ftopt.watch.story import RunView
from ftopt.watch.terminal import Display

_REFRESH_S = 0.5
_CLOSE_S = 2.0
_UNTOLD = ("stepped", "inner")
_LOGGED = ("discarded", "discarded_nonfinite", "checkpoint_failed", "outlier", "left_out", "disconnected",
           "slow", "up_to_speed", "promoted")  # fmt: skip
"""What the log says better, with the cause and what to do."""


class Screen(logging.Handler):
    """Subscribes to a replica's events and to the log, and drives a display.

    Args:
        view: of this replica alone.
        display: draws it.
    """

    def __init__(self, view: RunView, display: Display) -> None:
        super().__init__()
        self._view, self._display = view, display
        self._started = time.time()
        self._queue: queue.SimpleQueue[Mapping[str, Any] | Note | None] = queue.SimpleQueue()
        self._replica = ""
        self._thread = threading.Thread(target=self._work, name="ftopt-screen", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """An event. Any thread."""
        if event.event not in _UNTOLD:
            self._queue.put({"t_s": time.time() - self._started, **record_of(event)})

    def stepped(self, line: Mapping[str, Any]) -> None:
        """The line of an inner step."""
        self._queue.put({"t_s": time.time() - self._started, **line})

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the log. Any thread."""
        tone = "bad" if record.levelno >= logging.ERROR else "warn" if record.levelno >= logging.WARNING else ""
        self._queue.put(Note(self.format(record), tone))

    def close(self) -> None:
        """Draws what is left; a terminal that does not take it is left behind."""
        super().close()
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        with suppress(OSError):  # `ftopt replica ... | head`
            self._draw()

    def _draw(self) -> None:
        drawn_s = 0.0
        while True:
            try:
                item = self._queue.get(timeout=_REFRESH_S)
            except queue.Empty:
                item = ()  # type: ignore[assignment]
            if item is None:
                break
            self._take(item)
            if time.monotonic() - drawn_s >= _REFRESH_S:
                drawn_s = time.monotonic()
                self._refresh()
        self._refresh()
        self._display.close()

    def _refresh(self) -> None:
        self._view.now_s = time.time() - self._started
        self._display.refresh(self._view)

    def _take(self, item: Mapping[str, Any] | Note) -> None:
        if isinstance(item, Note):
            self._display.note(item)
        elif "event" in item:
            self._replica = item["replica"]
            note = self._view.event(item)
            if note is not None and item["event"] not in _LOGGED:
                self._display.note(note)
        elif item:
            self._view.stepped(self._replica, item)
