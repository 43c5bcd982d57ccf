"""Worker processes that load ahead, by torchdata's StatefulDataLoader. The one file that imports torchdata.

Workers are started when their `Pool` is made, which is before a replica connects: a process forked later would hold a
copy of its sockets, and peers would hear late of the replica's death.
"""

from __future__ import annotations

import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import Dataset

from ftopt.errors import FtoptError

_ENDING_S = 0.2
"""Seconds from a process' last sign to its end."""


class WorkerDied(FtoptError):
    """A worker process of a loader has died. No unit is lost: iterating again goes on with new workers."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How a pool loads.

    Args:
        workers: processes; 0 loads on the training thread.
        prefetch_factor: batches that each worker is ahead.
        pin_memory: whether batches lie in page-locked memory, for faster copies to a GPU.
        context: how processes are started, ``fork``, ``spawn`` or ``forkserver``; None is Python's default.
    """

    workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    context: str | None = None


class Pool:
    """Batches of a data set in order, loaded by worker processes.

    Args:
        dataset: of torch's two kinds.
        settings: how it loads.
        seed: of whatever is random in the workers.
        sampler: what ``dataset`` is asked for, None for iterable ones.
        batch_size: None if what ``dataset`` gives are batches.
        drop_last: whether an iterable's last batch is left out if it is short.
        collate: samples to batch; default torch's.
        stateful: whether `state` is asked for.
        state: what `state` gave, to go on from there.
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
        # Here: batches of the training thread's own do without it.
        from torchdata.stateful_dataloader import StatefulDataLoader

        some = settings.workers > 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
            self._loader = StatefulDataLoader(
                dataset,
                batch_size=batch_size,
                sampler=sampler,
                num_workers=settings.workers,
                collate_fn=collate,
                pin_memory=settings.pin_memory,
                drop_last=drop_last,
                worker_init_fn=_leave_signals,
                multiprocessing_context=settings.context if some else None,
                generator=torch.Generator().manual_seed(seed),
                prefetch_factor=settings.prefetch_factor if some else None,
                persistent_workers=some,
                snapshot_every_n_steps=1 if stateful else 0,
            )
        if state is not None:
            self._loader.load_state_dict(dict(state))
        with _DEATHS.learnt():
            self._loader.state_dict()  # starts the workers; the first `next` takes these up
        # torch's own way out may find the workers' queues closed before them, and then waits for 5 s.
        self._end = weakref.finalize(self, getattr(self._loader._iterator, "_shutdown_workers", _nothing))
        self._batches: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: there are no more; the next call begins anew.
            WorkerDied: a worker process has died; this pool is of no more use.
            Exception: what the data set raised.
        """
        try:
            with _DEATHS.heard():
                if self._batches is None:
                    self._batches = iter(self._loader)
                return next(self._batches)
        except StopIteration:
            self._batches = None
            raise
        except (RuntimeError, OSError, EOFError) as error:
            died = self._died()
            if not died:
                raise
            raise WorkerDied(
                f"a worker process of the data loader died ({died}). Nothing is lost: iterate over "
                "the loader again to go on with new workers, or end this replica. Usual causes: too little memory (use "
                "fewer num_workers or a smaller prefetch_factor), or too little space in /dev/shm"
            ) from error

    def _died(self) -> str:
        """Which workers have died and how; empty if none has."""
        workers = getattr(self._batches, "_workers", [])
        ended = wait([worker.sentinel for worker in workers], timeout=_ENDING_S)
        for worker in workers:
            if worker.sentinel in ended:
                worker.join(_ENDING_S)
        dead = [worker for worker in workers if worker.exitcode]
        return ", ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead)

    def state(self) -> dict[str, Any]:
        """Where the data set is behind the last batch that `next` gave; opaque, of plain values and the data set's."""
        return dict(self._loader.state_dict())

    def close(self) -> None:
        """Ends the workers; else they end with this pool."""
        self._end()


def _nothing() -> None:
    """There are no workers."""


def _leave_signals(worker: int) -> None:
    """Ctrl-C goes to all processes of a terminal: whether workers are still needed is their parent's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Deaths:
    """Lets torch tell of a dead worker only while the training loop waits for a batch.

    torch's handler of SIGCHLD, which it sets once a process, raises wherever the training thread is: in the midst of an
    optimizer's step, too, which would then be half done.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._before: Any = None

    @contextmanager
    def learnt(self) -> Iterator[None]:
        """For the time in which torch may set its handler."""
        before = signal.getsignal(signal.SIGCHLD)
        try:
            yield
        finally:
            after = signal.getsignal(signal.SIGCHLD)
            if after is not before and before is not None:
                self._handler, self._before = after, before
                signal.signal(signal.SIGCHLD, before)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """For the time in which an error of torch's is welcome; of a worker that died before, too."""
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
