"""Worker processes that prefetch, by torch's DataLoader; for a data set with a state, by torchdata's
StatefulDataLoader. The only file that imports torchdata.

Workers start when their `Pool` is made, which is before a replica connects: a process forked later would hold a copy of
the replica's sockets, and its peers would notice its death late.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing as mp
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from ftopt.errors import FtoptError, from_extra

_log = logging.getLogger(__name__)

_ENDING_S = 0.2
"""Seconds to wait for the end of a process that may be dying."""
_BROKEN_S = 5.0
"""The same after a connection breaks, which is noticed before the exit status of the process at its other end."""
_IN_WORKER = "in DataLoader worker process"
"""The text that torch adds to an error of the data set."""


class WorkerDied(FtoptError):
    """A worker process of a loader has died. No unit is lost: iterating again goes on with new workers."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """Settings of a pool, as in `DataLoader`; 0 ``workers``: it loads on the training thread."""

    workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    context: str | None = None


class Pool:
    """Batches of a data set in order, loaded by worker processes.

    Args:
        dataset: map-style or iterable.
        sampler: the indices to load; None for an iterable data set.
        batch_size: None: the data set returns batches.
        drop_last: whether a short last batch of an iterable data set is left out.
        collate: makes a batch from samples. Default torch's ``default_collate``.
        stateful: whether `state` may be called. If not, there must be workers.
        state: a result of `state`, to go on from there.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        settings: PoolSettings,
        *,
        seed: int,
        sampler: Iterable[Any] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        collate: Callable[[Any], Any] | None = None,
        stateful: bool = True,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._batches: Iterator[Any] | None = None
        some = settings.workers > 0
        over = mp.get_context(settings.context).RawValue("b", 0) if some else None
        if over is not None:
            _pools()[id(over)] = over

        def loader() -> Any:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
                made: Any = (_stateful() if stateful else TorchLoader)(
                    dataset,
                    batch_size=batch_size,
                    sampler=sampler,
                    num_workers=settings.workers,
                    collate_fn=collate,
                    pin_memory=settings.pin_memory,
                    drop_last=drop_last,
                    worker_init_fn=partial(_leave_signals, over),
                    multiprocessing_context=settings.context if some else None,
                    generator=torch.Generator().manual_seed(seed),
                    prefetch_factor=settings.prefetch_factor if some else None,
                    persistent_workers=some,
                )
            if state is not None:
                made.load_state_dict(dict(state))
            with _DEATHS.capture():  # starts the workers for the first `next`
                if stateful:
                    made.state_dict()
                else:
                    self._batches = iter(made)
            return made

        try:
            self._loader = loader()
        except RuntimeError as error:
            if "exited unexpectedly" not in str(error):
                raise
            _log.warning("%s as it started; starting workers once more", error)
            self._loader = loader()
        # torch's own finalizer waits for 5 s if the queues are closed while the workers live.
        self._end = weakref.finalize(self, _end, self._loader._iterator, over)

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there are no more; the next call starts over.
            WorkerDied: a worker process has died; this pool cannot be used any more.
            Exception: any error of the data set.
        """
        try:
            with _DEATHS.raised():
                if self._batches is None:
                    self._batches = iter(self._loader)
                return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        except (RuntimeError, OSError, EOFError) as error:
            broken = isinstance(error, ConnectionError | EOFError) and _IN_WORKER not in str(error)
            if not (died := self._died(_BROKEN_S if broken else _ENDING_S)):
                raise
            raise WorkerDied(
                f"a worker process of the data loader died ({died}). Nothing is lost: iterate over "
                "the loader again to go on with new workers, or end this replica. Usual causes: too little memory (use "
                "fewer num_workers or a smaller prefetch_factor), or too little space in /dev/shm"
            ) from error

    def _died(self, limit_s: float) -> str:
        """The workers that have died, and their exit codes; empty if none has."""
        workers = getattr(self._batches, "_workers", [])
        ended = wait([worker.sentinel for worker in workers], timeout=limit_s)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(limit_s)
        dead = [worker for worker in workers if worker.exitcode]
        return ", ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead)

    def state(self) -> dict[str, Any]:
        """The position after the last batch that `next` returned; opaque, of plain values and the data set's state."""
        return dict(self._loader.state_dict())

    def close(self) -> None:
        """Ends the workers, which otherwise end with this object."""
        self._end()


def _stateful() -> Any:
    with from_extra("data", "ftopt.DataLoader, for an iterable data set or one with a state in worker processes,"):
        from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def _leave_signals(over: Any, worker: int) -> None:
    """Ignores Ctrl-C and SIGTERM, which terminals, Slurm and containers send to all processes: the parent ends its
    workers by ``over``, and they end when it is gone. Not by SIG_IGN, with which programs that a data set starts would
    ignore SIGTERM, too."""

    def ignore(number: int, frame: object) -> None:
        if over.value or os.getppid() != parent:
            os._exit(0)

    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, ignore)


@cache
def _pools() -> weakref.WeakValueDictionary[int, Any]:
    """``over`` of all pools, which is set when this process ends. That handler is registered after multiprocessing's,
    and so runs before it; multiprocessing's sends its processes SIGTERM and waits for them."""
    pools: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def end() -> None:
        for over in list(pools.values()):
            over.value = 1

    atexit.register(end)
    return pools


def _end(iterator: Any, over: Any) -> None:
    """Ends the workers. A worker that is still busy after torch has waited for it is killed: it may never see a
    signal."""
    workers = getattr(iterator, "_workers", [])
    if over is not None:
        over.value = 1
    try:
        getattr(iterator, "_shutdown_workers", lambda: None)()
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()


class _Deaths:
    """Lets torch report a dead worker only while the training loop waits for a batch.

    torch's handler of SIGCHLD, which it installs once per process, raises at any point of the training thread, even
    within an optimizer's step, which would then be half done.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._before: Any = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Keeps the handler that torch may install in the block, and restores the previous one."""
        before = signal.getsignal(signal.SIGCHLD)
        try:
            yield
        finally:
            after = signal.getsignal(signal.SIGCHLD)
            if after is not before and before is not None:
                self._handler, self._before = after, before
                signal.signal(signal.SIGCHLD, before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Lets torch raise its error in the block, also for a worker that died before it."""
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGCHLD, self._handler)
        try:
            self._handler(signal.SIGCHLD, None)
            yield
        finally:
            signal.signal(signal.SIGCHLD, self._before)


_DEATHS = _Deaths()


def as_it_is(batch: Any) -> Any:
    """Replaces torch's conversion to tensors: the workers send whole batches."""
    return batch
