"""Runs an example as two replicas, ends one or both in some way, and says where every inner step is."""

from __future__ import annotations

import logging
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

import ftopt
from tests.forkserver import CONTEXT, die_with_parent
from tests.integrations.running import EXAMPLES, LIMIT_S, coordinator

AT = 17
"""The step at which it is ended: seven steps after a round."""


@dataclass(frozen=True)
class Way:
    """How replicas end.

    Attributes:
        signal: what is sent to them; None: user code raises an error.
        listens: ``leave_on_signals``.
        callback: the trainer has its callback; else its optimizer joins at the first step, and nobody closes it.
        both: ends both replicas; else the second one alone.
    """

    signal: signal.Signals | None
    listens: bool = True
    callback: bool = True
    both: bool = False


@dataclass
class Life:
    """What is known of a replica that has ended.

    Attributes:
        taken, pending: inner steps; -1: it was killed, and told nothing.
        saved: the complete checkpoints of the job, by version.
    """

    taken: int = -1
    pending: int = -1
    digest: str = ""
    status: object = None
    log: list[str] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    committed: int = 0

    @property
    def lost(self) -> int:
        """Inner steps that its log gives up."""
        found = [re.search(r"has left with (\d+) inner steps? that no committed state contains", x) for x in self.log]
        return sum(int(each[1]) for each in found if each)


def _without_callback() -> None:
    """The callbacks of ftopt do nothing."""
    if "transformers" in sys.modules:
        import transformers

        import ftopt.integrations.hf

        ftopt.integrations.hf.FtoptCallback = lambda *_, **__: transformers.TrainerCallback()  # type: ignore
    if "lightning" in sys.modules:
        import lightning.pytorch

        import ftopt.integrations.lightning

        ftopt.integrations.lightning.FtoptCallback = lambda *_, **__: lightning.pytorch.Callback()  # type: ignore


def _live(tells: Connection, name: str, replica: str, url: str, way: Way, folder: Path, ends: bool) -> None:
    """A process that runs an example as the interpreter does, up to what happens after its last line."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "STEP_S": "0.05", "CUDA_VISIBLE_DEVICES": "", "FTOPT_COORDINATOR": url}
    sys.path.insert(0, str(EXAMPLES))
    life, made = Life(), list[ftopt.ReplicaOptimizer]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: life.log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ftopt").addHandler(handler)
    wrap = ftopt.wrap

    def wrapped(*args: Any, **settings: Any) -> ftopt.ReplicaOptimizer:
        made.append(wrap(*args, **settings | {"leave_on_signals": way.listens}))
        if folder_of_job is not None:
            ftopt.Checkpoints(folder_of_job, made[0], every=100)
        return made[0]

    folder_of_job = folder if way.signal is not None and way.listens else None
    ftopt.wrap = wrapped
    with tempfile.TemporaryDirectory() as own:
        os.chdir(own)
        try:
            example = runpy.run_path(str(EXAMPLES / name))
            if not way.callback:
                _without_callback()
                example = runpy.run_path(str(EXAMPLES / name))

            def tell(text: str, **_: Any) -> None:
                if isinstance(text, str) and text.startswith(f"{replica}: step "):
                    tells.send(step := int(text.split()[2].rstrip(",")))
                    if ends and way.signal is None and step >= AT:
                        raise ZeroDivisionError("in user code")

            example["main"].__globals__["print"] = tell
            example["main"]()
            life.status = 0
        except SystemExit as error:
            life.status = error.code
        except BaseException as error:
            life.status = type(error).__name__
            sys.last_type, sys.last_value = type(error), error  # as the interpreter does with what it prints
        threading._shutdown()  # type: ignore[attr-defined]
        (optimizer,) = made
        life.taken, life.pending = optimizer.local_steps, optimizer.pending_steps
        life.digest = optimizer.digest()
        life.saved = sorted(int(each.parent.name.split("-")[-1]) for each in folder.glob("*/manifest.json"))
        tells.send(life)


class _Replica:
    def __init__(self, *args: Any) -> None:
        self.hears, tells = CONTEXT.Pipe(duplex=False)
        self.process: BaseProcess = CONTEXT.Process(target=_live, args=(tells, *args))
        self.process.start()
        tells.close()
        self.steps, self.life = 0, Life()

    def hear(self, done: Callable[[], bool] = lambda: False) -> None:
        """Until ``done``, or its end."""
        while not done():
            assert wait([self.hears], LIMIT_S), f"nothing was told after {self.steps} steps"
            try:
                told = self.hears.recv()
            except EOFError:
                return
            if isinstance(told, Life):
                self.life = told
                return
            self.steps = told


def ended(name: str, way: Way, folder: Path) -> tuple[Life, Life]:
    """How both replicas of an example ended."""
    found: list[_Replica] = []
    with coordinator() as (url, told):
        try:
            for replica in "r0", "r1":
                found.append(_Replica(name, replica, url, way, folder, way.both or replica == "r1"))
            r0, r1 = found
            last = found if way.both else [r1]
            for each in last:
                each.hear(lambda each=each: way.signal is not None and each.steps >= AT)  # type: ignore[misc]
            for each in last:
                if way.signal is not None and each.process.pid is not None:
                    os.kill(each.process.pid, way.signal)
            for each in found:
                if way.signal is not None or each is r0:
                    each.hear()
            for each in found:
                each.process.join(LIMIT_S)
            committed: dict[tuple[str, int], int] = {}
            while told.poll():
                committed = told.recv()
            for each, replica in zip(found, ("r0", "r1"), strict=True):
                each.life.committed = committed.get((replica, 1), 0)
            return r0.life, r1.life
        finally:
            for each in found:
                each.process.kill()
                each.process.join(LIMIT_S)
