"""Copies a replica's metrics to wandb or TensorBoard: the part in the trainer's process.

A daemon thread takes points from a bounded queue, so that the trainer never waits for it. TensorBoard, and a wandb run
of the user's own, are written on this thread. A wandb run of ftopt's own gets a process for each replica
(``mirror_process.py``), which the thread feeds through a pipe: in the trainer's process the user's ``wandb.init()``
would return ftopt's run, and wandb's service would stay when the trainer is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Real
from typing import Any, ClassVar

from ftopt.errors import UserError, check_whole
from ftopt.events import Event
from ftopt.watch.trackers.curves import STEP, Curves, Point, Row
from ftopt.watch.trackers.mirror_process import Sink

_log = logging.getLogger("ftopt.watch")

QUEUED = 10_000
"""Points and rows that wait at most; while the queue is full, new ones are dropped."""
CLOSE_S = 30.0
_KILLED_S = 5.0


class Mirror:
    """The base of `ftopt.Wandb` and `ftopt.TensorBoard`: an ``on_event`` that copies metrics. Any thread; never blocks.

    Args:
        options: for the writer; JSON values.
        every: inner steps between two points of the inner metrics.
    """

    every_step = True
    outer_gradient = True
    only_copies = True
    kind: ClassVar[str]
    """The program's name."""
    sink: ClassVar[str] = ""
    """``module:class`` of the writer in the other process."""

    def __init__(self, options: Mapping[str, Any], *, every: int) -> None:
        every = check_whole("every", every, 1, of="inner steps", hint="use 10")
        self._options, self._every = dict(options), every
        self._runs: dict[str, MirrorRun] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def attend(self, job: str, replica: str) -> None:
        """Announces events of ``replica`` in ``job``; `ftopt.connect` calls it."""
        with self._lock:
            if self._closed:
                raise UserError(f"this ftopt.{type(self).__name__} was closed; make another one for the next group")
            if (known := self._runs.get(replica)) is not None:
                if known.job != job:  # events do not name their job
                    raise UserError(
                        f"this ftopt.{type(self).__name__} copies {replica} of the job {known.job!r}; make another one "
                        f"for its group in {job!r}"
                    )
                return
            if not self._runs:
                atexit.register(self.close)
            self._runs[replica] = MirrorRun(self, self._options | {"job": job, "replica": replica}, self._every)

    def here(self, options: Mapping[str, Any]) -> Sink | None:
        """The writer, if it is used on a thread of this process; None: another process makes ``sink``. It may block
        and raise."""
        return None

    def __call__(self, event: Event) -> None:
        run = self._runs.get(event.replica)
        if run is not None and os.getpid() == self._pid:
            run.tell(event)

    def log(self, values: Mapping[str, float], *, replica: str | None = None) -> None:
        """Adds metrics of your own at the present inner step. Returns at once.

        Args:
            values: name -> number; read numbers on a GPU with ``.item()`` first.
            replica: the replica they belong to; needed only if this mirror has several.

        Raises:
            UserError: a value is no number, it is not clear which replica is meant, or the mirror was closed.
        """
        for name, value in values.items():
            if not isinstance(name, str) or not isinstance(value, Real):
                raise UserError(
                    f"log({{{name!r}: {value!r:.60}}}); must be names and numbers; use float(...) or .item()"
                )
        if self._closed:
            raise UserError(f"log() after close(); log before this ftopt.{type(self).__name__} is closed")
        run = self._runs.get(replica) if replica is not None else None
        if replica is None and len(self._runs) == 1:
            (run,) = self._runs.values()
        if run is None:
            known = ", ".join(self._runs) or "none yet; give this object to ftopt.connect(on_event=) first"
            raise UserError(f"log(replica={replica!r:.60}); must be one of its replicas: {known}")
        if os.getpid() == self._pid:
            run.log({name: float(value) for name, value in values.items()})

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Hands over the queue and waits until it is written, at most ``timeout_s`` seconds in all; the rest is then
        lost, and the log says so. Called at the end of the process if you do not; idempotent."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        runs = list(self._runs.values())
        for run in runs:
            run.end()
        until_s = time.monotonic() + timeout_s
        for run in runs:
            run.wait(until_s, timeout_s)


class MirrorRun:
    """One replica's mirror: its curves, the queue, the thread, and the process."""

    def __init__(self, mirror: Mirror, options: Mapping[str, Any], every: int) -> None:
        self._kind, self._sink, self._options = mirror.kind, mirror.sink, options
        self._here = mirror.here
        self.job = str(options["job"])
        self._curves, self._lock = Curves(every), threading.Lock()
        self._lines: queue.Queue[Point | Row | None] = queue.Queue(QUEUED)
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said: set[str] = set()
        self._over = self._ended = False

    def tell(self, event: Event) -> None:
        if self._over:
            return
        with self._lock:
            self._put(self._curves.fold(event))
            # An incarnation that never joins leaves nothing.
            if self._thread is None and event.incarnation > 0 and not self._ended:
                self._options = {**self._options, "life": event.incarnation}
                self._thread = threading.Thread(target=self._work, name=f"ftopt-{self._kind}", daemon=True)
                self._thread.start()

    def log(self, values: dict[str, Any]) -> None:
        """Takes up a user's own metrics."""
        with self._lock:
            self._put([Point(STEP, self._curves.inner_step, values)])

    def _put(self, found: list[Point | Row]) -> None:
        for each in found:
            if isinstance(each, Point):
                _note_streams(each)
            try:
                self._lines.put_nowait(each)
            except queue.Full:
                self._lost("full", f"does not keep up, {QUEUED} points wait: those that come now are left out")

    def _lost(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("replica %s: %s %s; training goes on", self._options["replica"], self._kind, text)

    def end(self) -> None:
        """Nothing more will come."""
        with self._lock:
            if self._ended:
                return
            self._put(self._curves.rest())
            self._ended = True
            with contextlib.suppress(queue.Empty):
                if self._lines.full():
                    self._lines.get_nowait()
            self._lines.put_nowait(None)

    def wait(self, until_s: float, timeout_s: float) -> None:
        """Waits until all is written, or until ``until_s``, which is ``timeout_s`` after the end."""
        thread = self._thread
        if thread is None:
            return
        thread.join(max(0.0, until_s - time.monotonic()))
        if thread.is_alive():
            self._lost("late", f"was not done within {timeout_s:g} s, and is ended: its copy may lack the end")
            self._over = True
            if self._process is not None:
                self._process.kill()
                thread.join(_KILLED_S)

    # The thread.

    def _work(self) -> None:
        try:
            if (sink := self._here(self._options)) is not None:
                self._write_here(sink)
            else:
                self._write_there()
        except Exception as error:
            self._lost("died", f"failed: {type(error).__name__}: {error}: nothing is copied")
        self._over = True

    def _write_there(self) -> None:
        with self._start() as process:
            hears = threading.Thread(target=self._hear, args=(process,), daemon=True)
            hears.start()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._write(process)
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            hears.join()
        if process.returncode:
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
            if "late" not in self._said:
                self._lost("died", f"has ended ({how}): from here on nothing is copied")

    def _write_here(self, sink: Sink) -> None:
        while (each := self._lines.get()) is not None and not self._over:
            line = _line_of(each)
            if "row" in line:
                sink.row(line["row"])
            else:
                sink.point(line["axis"], line["at"], line["values"])
        sink.close(killed=False)

    def _start(self) -> subprocess.Popen[bytes]:
        code = "import sys; sys.path[:] = {!r}; from ftopt.watch.trackers.mirror_process import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code.format(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "FTOPT_TOKEN"},
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        return self._process

    def _write(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        first: dict[str, Any] = {"sink": self._sink, "options": self._options, "parent": os.getpid()}
        while True:
            process.stdin.write(json.dumps(first).encode() + b"\n")
            process.stdin.flush()
            each = self._lines.get()
            if each is None:
                process.stdin.write(b'{"end": true}\n')
                process.stdin.flush()
                return
            first = _line_of(each)

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if said.get("fatal"):
                    self._said.add("died")
                _log.log(
                    logging.INFO if said.get("level") == "info" else logging.WARNING,
                    "replica %s: %s: %s",
                    self._options["replica"],
                    self._kind,
                    said.get("text"),
                )
        self._over = True
        with contextlib.suppress(queue.Full):  # if it is full, the other thread does not wait for more
            self._lines.put_nowait(None)


def _note_streams(point: Point) -> None:
    """Adds to a loss that is not read yet the point in its stream that must be reached first."""
    for name, value in point.values.items():
        if not isinstance(value, Real) and hasattr(value, "device"):
            from ftopt.common.streams import reached

            point.values[name] = (value, reached(value.device))


def _line_of(each: Point | Row) -> dict[str, Any]:
    if isinstance(each, Row):
        return {"row": asdict(each)}
    return {"axis": each.axis, "at": each.at, "values": {name: _read(value) for name, value in each.values.items()}}


def _read(value: Any) -> float | int:
    """A number; a tensor on another device is read when its stream has reached the point."""
    if not isinstance(value, tuple):
        return value if isinstance(value, int) else float(value)
    from ftopt.common.streams import SideStream

    tensor, point = value
    with SideStream().after(point, tensor.device):
        return float(tensor)
