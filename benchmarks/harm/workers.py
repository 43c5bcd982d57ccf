"""Runs in processes, several at a time; one that hangs is ended, and the others go on."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from tests.forkserver import CONTEXT

T = TypeVar("T")
R = TypeVar("R")


class _Worker:
    """A process that does one thing after the other."""

    def __init__(self, do: Callable[[Any], Any]) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(theirs, do), daemon=True)
        self.process.start()
        theirs.close()
        self.number = -1
        self.until_s = math.inf
        self._started = False
        self._limit_s = math.inf

    def begin(self, number: int, what: object, limit_s: float) -> None:
        self.number, self._limit_s = number, limit_s
        if self._started:
            self.until_s = time.monotonic() + limit_s
        self.pipe.send(what)

    def has_only_started(self) -> bool:
        """Takes the message that its imports are done, which may last; from then on time counts."""
        if self._started or not self.pipe.poll():
            return False
        try:
            self.pipe.recv()
        except EOFError:
            return False
        self._started, self.until_s = True, time.monotonic() + self._limit_s
        return True

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, do: Callable[[Any], Any]) -> None:
    warnings.simplefilter("ignore")
    pipe.send(None)
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        pipe.send(do(what))


def in_processes(
    do: Callable[[T], R], work: Sequence[T], *, jobs: int, limit_s: float, failed: Callable[[str], R]
) -> Iterator[tuple[int, R]]:
    """Gives ``(number, result)`` of each of ``work``, in the order in which they are done.

    Args:
        do: a module's function.
        jobs: processes.
        limit_s: seconds that one may take.
        failed: makes the result of one that takes longer, or ends its process, from the reason.
    """
    todo, workers = iter(enumerate(work)), list[_Worker]()
    try:
        for number, what in todo:
            workers.append(_Worker(do))
            workers[-1].begin(number, what, limit_s)
            if len(workers) == jobs:
                break
        while workers:
            next_s = min(worker.until_s for worker in workers) - time.monotonic()
            timeout_s = max(0.0, next_s) if math.isfinite(next_s) else None
            ready = wait([worker.pipe for worker in workers], timeout=timeout_s)
            for worker in list(workers):
                if worker.pipe in ready and worker.has_only_started():
                    continue
                if worker.pipe in ready:
                    number, (alive, result) = worker.number, _received(worker, failed)
                elif time.monotonic() > worker.until_s:
                    number, alive, result = worker.number, False, failed("hangs")
                else:
                    continue
                yield number, result
                workers.remove(worker)
                if not alive:
                    worker.end()
                following = next(todo, None)
                if following is not None:
                    again = worker if alive else _Worker(do)
                    again.begin(*following, limit_s)
                    workers.append(again)
                elif alive:
                    worker.end()
    finally:
        for worker in workers:
            worker.end()


def _received(worker: _Worker, failed: Callable[[str], R]) -> tuple[bool, R]:
    try:
        return True, worker.pipe.recv()
    except EOFError:
        worker.process.join()
        return False, failed(f"its process ended with status {worker.process.exitcode}")
