"""A whole job of torchft's: its lighthouse, and replicas that train the tiny model while they die, hang and come back.

It has the same interface as `tests.sync.processes.job.TinyJob`, and its replicas do the same work.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.theirs import TimeOuts, diloco, lighthouse, manager
from ftopt.run.fault_spec import Fault
from ftopt.watch.jsonl import JsonLines, Tail
from tests.forkserver import CONTEXT, die_with_parent
from tests.sync.processes.job import tiny_model

LIMIT_S = 150.0
"""Nothing lasts longer: it is beyond two of torchft's time-outs at their defaults."""


class TheirJob:
    """A running job; made by `their_job`."""

    def __init__(self, folder: Path, house: str, *, replicas: int, sync_every: int, step_s: float, times: TimeOuts):
        self.names = [f"r{i}" for i in range(replicas)]
        self.sync_every = sync_every
        self.started = time.time()
        self._told = (folder / "events.jsonl", self.started, house, sync_every, step_s, times)
        self._tail = Tail(self._told[0])
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, BaseProcess] = {}
        self._orders: dict[str, Any] = {}

    def start(self, name: str) -> None:
        """Starts a replica, or its successor."""
        self._orders[name] = CONTEXT.SimpleQueue()
        process = CONTEXT.Process(target=_replica, args=(name, *self._told, self._orders[name]), name=name)
        process.start()
        self._processes[name] = process

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def order(self, name: str, fault: Fault) -> None:
        """Strikes when the replica gets to the fault's point: ``inner``, ``reduce`` or ``reduce.after``."""
        self._orders[name].put(fault)

    def wake(self, name: str) -> None:
        """Stopped processes go on."""
        pid = self._processes[name].pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self.died(name)

    def died(self, name: str) -> None:
        """Waits for the end of a process that was killed, and puts its death on record."""
        self._processes[name].join(LIMIT_S)
        _log(self._told[0], self.started, {"event": "death", "replica": name})

    def revive(self) -> None:
        """Starts processes anew that have ended by themselves."""
        for name, process in self._processes.items():
            if not process.is_alive():
                self.died(name)
                self.start(name)

    def events(self, event: str | None = None, replica: str | None = None) -> list[dict[str, Any]]:
        self._events += self._tail.more()
        return [e for e in self._events if event in (None, e["event"]) and replica in (None, e["replica"])]

    def together(self, since_s: float) -> bool:
        """Whether all have taken part in one outer step since then."""
        late = [e for e in self.events("round") if e["t_s"] > since_s and e["committed"]]
        return {e["replica"] for e in late if e["members"] == len(self.names)} == set(self.names)

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """Raises TimeoutError when it does not come."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"torchft: {what} did not come within {LIMIT_S:g} s: {self.events()[-9:]}")
            time.sleep(0.01)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(10.0)


@contextmanager
def their_job(folder: Path, *, replicas: int, sync_every: int, step_s: float, times: TimeOuts) -> Iterator[TheirJob]:
    """A job whose processes are gone when the block ends; a single replica may go on alone.

    Raises:
        NoPeerError: torchft is not installed.
    """
    with ExitStack() as stack:
        house = stack.enter_context(lighthouse(1, times))
        job = TheirJob(folder, house, replicas=replicas, sync_every=sync_every, step_s=step_s, times=times)
        stack.callback(job.close)
        yield job


def _log(path: Path, started: float, record: dict[str, Any]) -> None:
    lines = JsonLines(path, started)
    lines.write(record)
    lines.close()


class _Orders:
    """Faults that are to strike this process."""

    def __init__(self, queue: Any, lines: JsonLines, name: str) -> None:
        self._waiting: list[Fault] = []
        self._tell = lambda fault: lines.write({"event": "fault", "replica": name, "do": fault.do})
        threading.Thread(target=self._read, args=(queue,), daemon=True).start()

    def _read(self, queue: Any) -> None:
        with suppress(EOFError):
            while True:
                self._waiting.append(queue.get())

    def at(self, point: str) -> None:
        """Strikes what waits for this point."""
        for fault in [fault for fault in self._waiting if fault.point == point]:
            self._waiting.remove(fault)
            self._tell(fault)
            if fault.do == "hang":
                time.sleep(fault.for_s or 0.0)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault.do == "kill" else signal.SIGSTOP)


def _replica(
    name: str, path: Path, started: float, house: str, sync_every: int, step_s: float, times: TimeOuts, queue: Any
) -> None:
    """Trains until it is ended: a line an inner step and a line an outer one."""
    die_with_parent()
    torch.set_num_threads(1)
    lines = JsonLines(path, started)
    orders = _Orders(queue, lines, name)
    model = tiny_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    healed = threading.Event()

    def load(state: Any) -> None:
        healed.set()
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    def save() -> Any:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    with ExitStack() as stack:
        theirs = stack.enter_context(manager(int(name[1:]), house, 1, times=times, load=load, save=save))
        reduce, vote = theirs.allreduce, theirs.should_commit
        outcome: list[bool] = []

        def allreduce(*arguments: Any, **options: Any) -> Any:
            orders.at("reduce")
            return reduce(*arguments, **options)

        def should_commit(*arguments: Any, **options: Any) -> bool:
            orders.at("reduce.after")
            outcome.append(vote(*arguments, **options))
            return outcome[-1]

        theirs.allreduce, theirs.should_commit = allreduce, should_commit
        stack.enter_context(diloco(theirs, model, inner, sync_every))
        lines.write({"event": "join", "replica": name})
        data = torch.Generator().manual_seed(int(name[1:]))
        while True:
            x = torch.randn(4, 8, generator=data)
            (model(x) - x.flip(1)).square().mean().backward()
            orders.at("inner")
            time.sleep(step_s)  # an inner step of known length
            began = time.monotonic()
            try:
                inner.step()
            except Exception:
                failed = {"stall_s": time.monotonic() - began, "committed": False, "members": 0}
                lines.write({"event": "round", "replica": name, **failed})
                raise
            lines.write({"event": "step", "replica": name})
            if outcome:
                kept = outcome.pop() and not healed.is_set()  # with a peer's state, its own steps are lost
                healed.clear()
                members = theirs.num_participants()
                record = {"stall_s": time.monotonic() - began, "committed": kept, "members": members}
                lines.write({"event": "round", "replica": name, **record})
            inner.zero_grad()
