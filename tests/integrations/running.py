"""Runs the examples of trainers as replicas of a real job, in processes that a fork server has ready."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from ftopt.events import Event
from ftopt.sync.server.coordinator import CoordinatorServer
from tests.forkserver import CONTEXT, die_with_parent

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGES = ("transformers", "accelerate", "lightning", "peft", "schedulefree")
LIMIT_S = 110.0
GATE = 40
"""The step at which the survivor waits for the other replica's return: the job must not end before."""


def needs(*packages: str) -> None:
    """Skips what needs a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install 'ftopt[trainers]'")


@dataclass(frozen=True)
class Told:
    """What a replica has told last."""

    step: int
    digest: str
    loss: float


@dataclass(frozen=True)
class Ended:
    """How two replicas ended, and the inner steps of ``r0``, of ``r1`` until its death, and of its second life."""

    back: Told
    survivor: Told
    executed: tuple[int, int, int]
    committed: tuple[int, int, int]


def _coordinator(tells: Connection) -> None:
    """Tells its URL, then the committed inner steps of each incarnation after each outer step."""
    die_with_parent()
    committed: Counter[tuple[str, int]] = Counter()

    def count(event: Event) -> None:
        if event.event == "decide":
            for replica, incarnation, steps, _last_step, _weight, finite in event.data["members"]:
                committed[replica, incarnation] += steps if finite else 0
            tells.send(dict(committed))

    CoordinatorServer("127.0.0.1", 0, new=True, on_event=count, start_replicas=2).run(ready=tells.send)


def _example(tells: Connection, starts: Any, gate: Any, name: str, replica: str, url: str) -> None:
    die_with_parent()
    starts.wait()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "STEP_S": "0.05", "CUDA_VISIBLE_DEVICES": "", "FTOPT_COORDINATOR": url}
    sys.path.insert(0, str(EXAMPLES))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            main = runpy.run_path(str(EXAMPLES / name))["main"]

            def tell(text: str, **_: Any) -> None:
                if isinstance(text, str) and text.startswith(f"{replica}: step "):
                    tells.send(step := int(text.split()[2].rstrip(",")))
                    if gate is not None and step >= GATE:
                        gate.wait(LIMIT_S)

            main.__globals__["print"] = tell
            tells.send(Told(*main()))
        except BaseException as error:
            traceback.print_exc()
            tells.send(f"{type(error).__name__}: {error}")
            raise


class Replica:
    """A process that runs an example, at once or when it is told to."""

    def __init__(self, name: str, replica: str, url: str, *, waits: bool = False, gate: Any = None) -> None:
        self._hears, tells = CONTEXT.Pipe(duplex=False)
        self._starts = CONTEXT.Event()
        if not waits:
            self._starts.set()
        args = (tells, self._starts, gate, name, replica, url)
        self.process: BaseProcess = CONTEXT.Process(target=_example, args=args)
        self.process.start()
        tells.close()
        self.steps: list[int] = []

    def go(self) -> None:
        """Starts what waits."""
        self._starts.set()

    def next(self) -> int | Told:
        """A step that it has taken, or its end."""
        assert wait([self._hears], LIMIT_S), f"nothing was told after step {self.steps[-1:]}"
        told = self._hears.recv()
        assert not isinstance(told, str), told
        if isinstance(told, int):
            self.steps.append(told)
        return told  # type: ignore[no-any-return]

    def until(self, step: int) -> None:
        """Reads on to a step."""
        while (told := self.next()) is not None and isinstance(told, int) and told < step:
            pass

    def kill(self) -> None:
        """Ends it as a crash does; what it has told before is heard, however late it is read."""
        self.process.kill()
        self.process.join(LIMIT_S)
        with suppress(EOFError, OSError):  # nothing more, or a part of the last word
            while True:
                self.next()

    def end(self) -> Told:
        """Reads on to the end."""
        while isinstance(told := self.next(), int):
            pass
        return told


@contextmanager
def coordinator() -> Iterator[tuple[str, Connection]]:
    """A coordinator's URL, and what it tells of committed steps; gone with the block."""
    hears, tells = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_coordinator, args=(tells,))
    process.start()
    try:
        assert hears.poll(LIMIT_S)
        yield hears.recv(), hears
    finally:
        process.kill()
        process.join(LIMIT_S)


def killed_and_back(name: str, told_per_step: int = 1) -> Ended:
    """Runs an example as two replicas, kills the second one and starts it again; it prints its step so often."""
    gate, found = CONTEXT.Event(), list[Replica]()
    with coordinator() as (url, told):
        try:
            for replica in "r0", "r1", "r1":
                last = len(found) == 2
                found.append(Replica(name, replica, url, waits=last, gate=None if found else gate))
            r0, r1, again = found
            r1.until(23)
            r1.kill()
            again.go()
            first = again.next()
            gate.set()
            assert isinstance(first, int) and first > 1, "it goes on where the job is"
            ended = again.end(), r0.end()
            committed: dict[tuple[str, int], int] = {}
            while told.poll():
                committed = told.recv()
            lives = (r0, ("r0", 1)), (r1, ("r1", 1)), (again, ("r1", 2))
            executed = tuple(len(replica.steps) // told_per_step for replica, _ in lives)
            return Ended(*ended, executed, tuple(committed.get(life, 0) for _, life in lives))  # type: ignore[arg-type]
        finally:
            for each in found:
                each.process.kill()
                each.process.join(LIMIT_S)
