"""What a coordinator's operator reads: a line for each notable event of its jobs, on a thread that may be slow."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ftopt.events import Event
from ftopt.watch.jsonl import data_of, record_of
from ftopt.watch.sentences import Note
from ftopt.watch.slow import SlowForLong
from ftopt.watch.story import RunView
from ftopt.watch.terminal import Display

_LOOK_S = 1.0
_CLOSE_S = 2.0
_LOGGED = ("halt", "unlike", "diverged", "not_kept")
"""The log says it, with the cause; so it does of a job that goes back (``undone``)."""


class JobsLog:
    """Subscribes to a coordinator's events, of all its jobs. Any thread.

    Args:
        display: gets a note for each notable event.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._started = time.monotonic()
        self._queue: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._views: dict[str, tuple[RunView, SlowForLong]] = {}
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._work, name="ftopt-jobs-log", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._queue.put((event.job or "", {"t_s": self._now_s(), **record_of(event)}))

    def close(self) -> None:
        """Writes what is left; an output that does not take it is left behind."""
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    def _now_s(self) -> float:
        return time.monotonic() - self._started

    def _work(self) -> None:
        with suppress(OSError):  # `ftopt coordinator | head`
            self._read()

    def _read(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look()
                continue
            if item is None:
                return self._display.close()
            job, record = item
            view, slow = self._views.setdefault(job, (RunView(0), SlowForLong()))
            note = slow.sift(record, view.event(record))
            if record["event"] not in _LOGGED and not data_of(record).get("undone"):
                self._tell(job, note)
            if self._now_s() - self._looked_s >= _LOOK_S:
                self._look()

    def _look(self) -> None:
        self._looked_s = now_s = self._now_s()
        for job, (view, slow) in self._views.items():
            view.now_s = now_s
            for note in (view.waiting_for(), *slow.due(now_s)):
                self._tell(job, note)

    def _tell(self, job: str, note: Note | None) -> None:
        if note is not None:
            self._display.note(Note(f"job {job}: {note.text}", note.tone))
