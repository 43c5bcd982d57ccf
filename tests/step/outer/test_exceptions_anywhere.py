"""An exception in any line behind an inner step, caught by the user's loop, which goes on: Ctrl-C, no memory left."""

from __future__ import annotations

import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch.utils._python_dispatch import TorchDispatchMode

import ftopt
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.outer import SGD
from ftopt.step.outer.step import OuterStep
from tests.optimizer.scripted import Scripted
from tests.step.outer.test_every_step_is_counted_once import SIZE, _check, _Trainer

ROOT = str(Path(ftopt.__file__).parent)
PACKAGES = (f"{ROOT}/optimizer/", f"{ROOT}/step/")


class Interrupter:
    """Raises KeyboardInterrupt before the ``at``-th line of `PACKAGES` that the training thread runs inside of `armed`;
    ``lines`` counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.where = at, 0, ""

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGES) or frame.f_code.co_name == "_give":  # a finalizer
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):  # the line where its block ends: it would not end
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename.removeprefix(ROOT)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)


class Deciding(Scripted):
    """Each round is decided while the training thread waits for it."""

    def wait(self, fragment: int, *, timeout_s: float | None = None) -> bool:
        network = threading.Thread(target=self.commit)
        network.start()
        network.join()
        return super().wait(fragment, timeout_s=timeout_s)


def foreign(group: Scripted) -> None:
    group.anchor += 1.0
    group.foreign()


def commit(group: Scripted) -> None:
    group.commit()


def nothing(group: Scripted) -> None:
    pass


def streaming(**more: Any) -> StreamingDiLoCo:
    one = ftopt.fragments.Balanced(n=1)
    return StreamingDiLoCo(sync_every=4, fragments=one, delay=2, outer=SGD(lr=1.0), wait_for_result_s=0.0, **more)


SCENARIOS: dict[str, tuple[Method, int, Callable[[Scripted], None]]] = {
    "rebase": (LocalSGD(sync_every=20), 3, foreign),
    "decided": (LocalSGD(sync_every=3), 2, nothing),
    "decided, momentum": (DiLoCo(sync_every=3, outer=SGD(lr=1.0)), 2, nothing),
    "delayed": (streaming(), 5, commit),
    "fetched under way": (streaming(), 5, foreign),
    "reset": (LocalSGD(sync_every=20), 3, lambda group: group.reset()),
}


class NoMemory(TorchDispatchMode):
    """Raises at the ``at``-th operation and at all that follow; ``operations`` counts them."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.operations = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if self.operations >= self.at:
            raise torch.OutOfMemoryError
        return func(*args, **(kwargs or {}))


@contextmanager
def behind_the_step(armed: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """What comes behind an inner step runs inside of ``armed()``."""
    boundary = OuterStep.boundary

    def run(self: OuterStep, largest_lr: Callable[[], float]) -> bool:
        with armed():
            return boundary(self, largest_lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterStep, "boundary", run)
        yield


def play(name: str, dtype: torch.dtype, armed: Callable[[], AbstractContextManager[object]]) -> bool:
    """Trains, is broken off, goes on; checks that each step is counted once. False: there was no exception."""
    method, steps, happens = SCENARIOS[name]
    group = Deciding(random.Random(0), SIZE)
    trainer = _Trainer(group, method, dtype)
    for _ in range(steps):
        trainer.step()
    happens(group)
    raised = False
    with behind_the_step(armed):
        try:
            trainer.step()
        except (KeyboardInterrupt, torch.OutOfMemoryError):
            raised = True
    if name == "reset":  # the group takes the last steps that there are for those that are dropped
        trainer.optimizer.sync(propose=False)
        group.reborn_pending = False
    for _ in range(5):
        trainer.step()
    trainer.optimizer._core.started().freezer.join()
    _check(trainer, group, 1e-5)
    if name != "reset":
        assert group.dropped == [], "nothing is lost"
    trainer.end()
    return raised


POINTS = 10
"""So many places are tried, spread over all that there are; by the slow tests, each."""


def cases() -> Iterator[ParameterSet]:
    """By default, parameters of two bytes, which have copies in fp32, where these are written to."""
    for name in SCENARIOS:
        for dtype in (torch.float32, torch.bfloat16):
            few = dtype == torch.float32 or name in ("rebase", "decided, momentum", "delayed")
            for each in (False, True):
                marks = [] if few and not each else [pytest.mark.slow]
                yield pytest.param(name, dtype, each, marks=marks, id=f"{name}-{dtype}-{'each' if each else 'some'}")


def places(count: int, each: bool) -> range:
    """The same in every run: what fails once fails again."""
    every = 1 if each else 1 + count // POINTS
    return range(1 + random.Random(count).randrange(every), count, every)


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "each"), list(cases()))
def test_each_step_is_counted_once_wherever_ctrl_c_comes(name: str, dtype: torch.dtype, each: bool) -> None:
    counts = Interrupter(sys.maxsize)
    assert not play(name, dtype, counts.armed)
    assert counts.lines > POINTS
    for at in places(counts.lines, each):
        interrupter = Interrupter(at)
        assert play(name, dtype, interrupter.armed), interrupter.where


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype", "each"), list(cases()))
def test_each_step_is_counted_once_wherever_memory_ends(name: str, dtype: torch.dtype, each: bool) -> None:
    """Until the next step: what would put things right fails, too."""
    counts = NoMemory(sys.maxsize)
    assert not play(name, dtype, lambda: counts)
    for at in places(counts.operations, each):
        mode = NoMemory(at)
        play(name, dtype, lambda mode=mode: mode)  # type: ignore[misc]
