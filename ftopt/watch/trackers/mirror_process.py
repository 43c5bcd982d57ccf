"""The other process of a mirror: reads lines from the trainer, passes them to the writer, and ends with the trainer."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

_AFTER_PARENT_S = 60.0
_CHECK_S = 5.0
_SETTLED_S = 3.0

Say = Callable[..., None]
"""Sends a text to the trainer's log; ``level="info"``: it is no warning."""


class Sink(Protocol):
    """A writer of metrics. It may block and raise as it likes. ``file`` grows as it writes; None: not known."""

    file: Path | None

    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        """Writes values at one place of an axis."""

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes a notable event, see `ftopt.watch.trackers.curves.Row`."""

    def close(self, *, killed: bool) -> None:
        """Called after the last item. ``killed``: the trainer has ended without saying so."""


class Growth:
    """Notices that a file has stopped growing although there was something to write."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._size, self._checked_s, self._written, self._said = self._now(), clock(), 0, False

    def _now(self) -> int:
        try:
            return self._file.stat().st_size if self._file is not None else -1
        except OSError:
            return -1

    def written(self) -> str | None:
        """Notes that something was written; returns a complaint, once."""
        if not self._written:  # the file grows with a delay: this write does not count against it yet
            self._checked_s = self._clock()
        self._written += 1
        return self.check() if self._clock() - self._checked_s >= _CHECK_S else None

    def check(self) -> str | None:
        """Returns a complaint, once, if nothing that was written so far has reached the file."""
        if self._file is None or self._said or not self._written:
            return None
        size, before = self._now(), self._size
        self._size, self._checked_s, self._written = size, self._clock(), 0
        if size > before:
            return None
        self._said = True
        return f"{self._file} does not grow any more (a full disk?): what follows may be missing in it"

    def settled(self) -> str | None:
        """The same check at the end; waits a while for the last bytes."""
        until_s = self._clock() + _SETTLED_S
        while self._written and self._now() <= self._size and self._clock() < until_s:
            time.sleep(0.05)
        return self.check()


def main() -> None:
    """Runs until the trainer announces the end, or ends itself."""
    os.nice(5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all processes; the trainer says when to end
    said = os.fdopen(os.dup(1), "w", buffering=1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)

    def say(text: str, **more: Any) -> None:
        try:
            said.write(json.dumps({"text": text, **more}) + "\n")
        except OSError:
            return  # the trainer is gone

    lines = _lines(os.getppid())
    if (line := next(lines, None)) is None:
        return
    first = json.loads(line)
    threading.Thread(target=_end_with, args=(first["parent"],), daemon=True).start()
    try:
        _mirror(first, lines, say)
    except BaseException as error:
        text = " ".join(str(error).split())[:500]
        say(f"{type(error).__name__}: {text}: from here on nothing is copied; training goes on", fatal=True)
        os._exit(1)  # skip the exit handlers of a library that has just failed
    os._exit(0)


def _mirror(first: Mapping[str, Any], lines: Iterator[bytes], say: Say) -> None:
    module, _, name = first["sink"].partition(":")
    sink: Sink = getattr(import_module(module), name)(first["options"], say)
    growth, killed = Growth(sink.file), True
    for line in lines:
        try:
            message = json.loads(line)
        except ValueError:
            break  # cut off with the trainer
        if message.get("end"):
            killed = False
            break
        if "row" in message:
            sink.row(message["row"])
        else:
            sink.point(message["axis"], message["at"], message["values"])
        if complaint := growth.written():
            say(complaint)
    sink.close(killed=killed)
    if complaint := growth.settled():
        say(complaint)


def _lines(parent: int) -> Iterator[bytes]:
    """The lines from the trainer, until it ends. Its children may hold the pipe's other end open for longer."""
    rest = b""
    said = select.poll()
    said.register(0, select.POLLIN)
    while True:
        gone = os.getppid() != parent
        if not said.poll(0 if gone else 1000):
            if gone:
                return
            continue
        if not (data := os.read(0, 1 << 16)):
            return
        *whole, rest = (rest + data).split(b"\n")
        yield from whole


def _end_with(parent: int) -> None:
    """Ends this process at most a minute after the trainer, whatever hangs here."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(_AFTER_PARENT_S)
    os._exit(1)
