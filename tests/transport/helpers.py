"""Stores, threads and real processes for the tests of the transport. Nothing started here outlives its test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from tests.forkserver import CONTEXT


class DictOps:
    """The coordinator's store as a dict, for members that are threads. `lose` cuts the link."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._lost = False

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._check()
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._lost or key in self.values, timeout_s):
                raise TimeoutError(key)
            self._check()
            return self.values[key]

    def lose(self) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._lost:
            raise ConnectionError("the link to the coordinator is lost")


class TcpOps:
    """The same over torch's TCPStore, for members that are processes."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str, timeout_s: float) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
            return self._store.get(key)
        except DistNetworkError as error:
            raise ConnectionError(str(error)) from error
        except DistStoreError as error:
            raise TimeoutError(str(error)) from error


@contextmanager
def tcp_store() -> Iterator[int]:
    """A TCPStore's server in this process; its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


class Member:
    """A process that runs ``target(pipe, *args)``, seen from the test."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(target, theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, limit_s: float = 100.0) -> Any:
        assert self.pipe.poll(limit_s), "the member said nothing"
        return self.pipe.recv()


def _run(target: Callable[..., None], pipe: Connection, *args: Any) -> None:
    torch.set_num_threads(1)
    target(pipe, *args)


@contextmanager
def members(count: int, target: Callable[..., None], *args: Any) -> Iterator[list[Member]]:
    """``count`` processes running ``target(pipe, rank, count, *args)``; none is left at the end."""
    started: list[Member] = []
    try:
        for rank in range(count):
            started.append(Member(target, rank, count, *args))
        yield started
    finally:
        for member in started:
            member.process.kill()
        for member in started:
            member.process.join()
            member.process.close()
            member.pipe.close()


def survivors_of_a_kill(count: int, target: Callable[..., None], soon_s: float) -> tuple[list[Any], list[Any]]:
    """Kills rank 1 of ``count``, each running ``target(pipe, rank, count, port)``, when all have said that they are at
    it. What the others say of that, and then, told their new rank and size, of their meeting again; in ``soon_s``."""
    with tcp_store() as port, members(count, target, port) as started:
        for member in started:
            member.receive()
        victim = started.pop(1)
        victim.process.kill()
        before_s = time.monotonic()
        failures = [member.receive() for member in started]
        for rank, member in enumerate(started):
            member.pipe.send((rank, len(started)))
        results = [member.receive() for member in started]
        assert time.monotonic() - before_s < soon_s
        started.append(victim)
    return failures, results


def in_threads(count: int, work: Callable[[int], Any], limit_s: float = 100.0) -> list[Any]:
    """What ``work(rank)`` returned, or raised, on ``count`` threads, in rank order."""
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
        assert not thread.is_alive(), "a member is stuck"
    return results


def wait_until(true: Callable[[], bool], limit_s: float = 100.0) -> None:
    """Waits for a condition; an AssertionError when it does not come."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


class Late:
    """A `Staging` that copies as late as the rules allow, whatever the device; until then there is rubbish."""

    def __init__(self, device: torch.device) -> None:
        self._later: list[tuple[Tensor, Tensor]] = []

    def begin(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = self.room(tensor)
        return lambda: host.copy_(tensor)

    def room(self, tensor: Tensor) -> Tensor:
        return _spoilt(torch.empty(tensor.shape, dtype=tensor.dtype))

    def back(self, host: Tensor, tensor: Tensor) -> None:
        _spoilt(tensor)
        self._later.append((host, tensor))

    def join(self) -> None:
        for host, tensor in self._later:
            tensor.copy_(host)
        self._later.clear()


def _spoilt(tensor: Tensor) -> Tensor:
    tensor.view(torch.uint8).fill_(0xA5)
    return tensor
