"""A few processes that do the same work together, and a coordinator for them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

from tests.forkserver import CONTEXT, die_with_parent

_LIMIT_S = 600.0
_PR_SET_PDEATHSIG = 1


def together(
    work: Callable[..., Any], size: int, *arguments: Any, namespaces: list[str] | None = None, fresh: bool = False
) -> list[Any]:
    """``work(rank, size, *arguments)`` in ``size`` new processes; what they return, by rank.

    Args:
        work: a module's function.
        size: processes, of one torch thread each.
        arguments: for all alike.
        namespaces: the network namespace of each. Default: this one.
        fresh: they have imported nothing before. Default: they begin with torch and ftopt in memory.

    Raises:
        RuntimeError: one has failed.
    """
    context: Any = multiprocessing.get_context("spawn") if fresh else CONTEXT
    found: Queue[tuple[int, Any, str]] = context.Queue()
    os.environ["OMP_NUM_THREADS"] = "1"
    spaces = namespaces or [""] * size
    crew = [
        context.Process(target=_member, args=(work, rank, size, arguments, spaces[rank], found), daemon=True)
        for rank in range(size)
    ]
    results: dict[int, Any] = {}
    try:
        for member in crew:
            member.start()
        while len(results) < size:
            rank, result, failure = _next(found, crew)
            if failure:
                raise RuntimeError(f"rank {rank} of {work.__module__} failed:\n{failure}")
            results[rank] = result
    finally:
        for member in [member for member in crew if member.pid is not None]:  # an exit may come while they are started
            member.join(10.0) if len(results) == size else member.kill()
            if member.is_alive():
                member.kill()
            member.join()
    return [results[rank] for rank in range(size)]


def _next(found: Queue[tuple[int, Any, str]], crew: list[Any]) -> tuple[int, Any, str]:
    waited_s = 0.0
    while True:
        try:
            return found.get(timeout=1.0)
        except queue.Empty:
            waited_s += 1.0
            dead = [rank for rank, member in enumerate(crew) if member.exitcode not in (None, 0)]
            if dead or waited_s > _LIMIT_S:
                raise RuntimeError(f"ranks {dead} died" if dead else f"nothing in {_LIMIT_S:g} s") from None


def _member(
    work: Callable[..., Any], rank: int, size: int, arguments: tuple[Any, ...], namespace: str, found: Any
) -> None:
    die_with_parent()
    try:
        if namespace:
            enter(namespace)
        import torch

        torch.set_num_threads(1)
        found.put((rank, work(rank, size, *arguments), ""))
    except BaseException:
        found.put((rank, None, traceback.format_exc()))


def enter(namespace: str) -> None:
    """This thread, and those that it starts, into a network namespace of ``ip netns``."""
    with Path(f"/run/netns/{namespace}").open("rb") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


@contextmanager
def coordinator(
    folder: Path, *, host: str = "127.0.0.1", prefix: tuple[str, ...] = (), events: bool = False
) -> Iterator[str]:
    """``ftopt coordinator`` with a journal, and with its events in ``events.jsonl`` if asked to; its address."""
    command = [*prefix, sys.executable, "-m", "ftopt", "coordinator", "--new", "--bind", f"{host}:0"]
    command += ["--folder", str(folder)] if events else []
    with served([*command, "--journal", str(folder / "journal.sqlite")], r"https?://[\w.]+:\d+") as url:
        yield url


def _end_with_us() -> None:
    """A server that is started must not outlive a benchmark that is killed. (Linux.)"""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def served(command: list[str], address: str) -> Iterator[str]:
    """A server that tells its address in its first lines."""
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_end_with_us if sys.platform == "linux" else None,
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.search(address, line):
                threading.Thread(target=server.stdout.read, daemon=True).start()  # or it stops when the pipe is full
                yield found.group()
                return
        raise RuntimeError(f"{' '.join(command)} ended with status {server.wait()} before it listened")
    finally:
        server.terminate()
        server.wait(10.0)
