"""Runs a program on threads of this process, and checks what must hold of every program.

- Every step is in exactly one of committed, pending, dropped with a reason; a dead replica's rest died with it.
- Replicas that hold the same versions hold the same bits, and all come to the same versions when all have stopped.
- Nothing hangs; what comes out is the user's own error, or a `UserError` for a mistake; no thread is left.
"""

from __future__ import annotations

import copy
import gc
import logging
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from ftopt.errors import FtoptError
from ftopt.events import Event
from ftopt.watch.jsonl import record_of
from ftopt.watch.summary import summarize
from tests.problems import seeded
from tests.programs.actions import ACTIONS, Dies, Interrupt, Mine
from tests.programs.program import INNER, METHODS, MODELS, SCHEDULERS, TRAINED, Life, Program, constant

LIMIT_S = 120.0
"""A program takes a fraction of a second; whoever takes so long hangs."""
POLICY = ftopt.FaultPolicy(grace_s=0.1, dead_after_s=2.0, evict_after_s=4.0, heartbeat_s=0.05, start_s=30.0)
ROUNDS = 40
"""So many rounds are enough, when all have stopped, for all that is pending."""


class Failed(AssertionError):
    """A property does not hold."""


class Job:
    """What the lives of a program share."""

    def __init__(self, program: Program) -> None:
        self.program, self.method = program, replace(METHODS[program.method], codec=program.codec)
        self.changed = threading.Condition()
        self.lines: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.done = 0
        """Actions of the first life."""
        self.undecided = 0
        """Steps of those who left at once, of which a round may have counted some."""
        self.over = threading.Event()
        self.stands: dict[int, Any] = {}
        """What each that has stopped stands at: versions, and what is pending."""
        self.looks: dict[int, tuple[str, list[Tensor]]] = {}
        start = sum(life.after == 0 for life in program.lives)
        names = [life.replica for life in program.lives]
        self.groups = ftopt.local_groups(
            len(names),
            policy=replace(POLICY, start_replicas=start),
            on_event=self.on_event,
            names=names,
        )
        self.runs = [Running(self, i, life) for i, life in enumerate(program.lives)]
        self.ended: set[int] = set()

    def on_event(self, event: Event) -> None:
        with self.changed:
            if event.event not in ("inner",):
                self.lines.append({"t_s": 0.0, **record_of(event)})
        for run in self.runs:
            if event.replica == run.life.replica and run.alive:
                run.on_event(event)

    def fail(self, text: str) -> None:
        with self.changed:
            self.failures.append(text)
            self.changed.notify_all()

    def tell(self, line: dict[str, Any]) -> None:
        with self.changed:
            self.lines.append({"t_s": 0.0, **line})


class Running:
    """One life of a replica, on a thread of its own."""

    def __init__(self, job: Job, index: int, life: Life) -> None:
        self.job, self.index, self.life, self.over = job, index, life, job.over
        self.group, self.method = job.groups[index], job.method
        self.alive = False
        self.doing = "has not begun"
        self.executed = self.undone = 0
        self.interrupt_at = self.die_at = self.on_event_raises_at = ""
        self.broken_off = False
        self.ident = 0
        self.data = torch.Generator().manual_seed(1000 * job.program.seed + index)
        self.thread = threading.Thread(target=self.run, name=f"program-{life.replica}", daemon=True)

    # What actions use.

    def x(self) -> Tensor:
        return torch.randn(4, 8, generator=self.data).to(self.first.weight.dtype)

    def loss(self) -> Tensor:
        if self.method.weights == "tokens":  # what has none weighs nothing, and stays pending
            self.optimizer.log(tokens=4)
        return (self.model(self.x()) - 0.3).square().mean()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        with self.counted():
            self.optimizer.step(closure)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the steps taken inside."""
        before = self.optimizer.local_steps
        try:
            yield
        finally:
            self.executed += self.optimizer.local_steps - before

    def leave(self, *, times: int) -> None:
        for _ in range(times):
            self.optimizer.close(timeout_s=10.0)
        self.end("left")

    def leave_by_exception(self) -> None:
        try:
            with self.optimizer:
                raise Mine
        except Mine:
            self.end("left")

    # The life.

    def on_event(self, event: Event) -> None:
        here = threading.get_ident() == self.ident
        if event.event == self.die_at:
            self.alive = False
            self.group.cut(600.0)  # type: ignore[attr-defined]
            if here:
                raise Dies
        if event.event == self.interrupt_at and here:
            self.interrupt_at = ""
            raise Interrupt
        if event.event == self.on_event_raises_at:
            raise Mine

    def begin(self) -> None:
        program = self.job.program
        with seeded(program.seed):
            self.model: nn.Module = MODELS[program.model]()
        self.first: Any = self.model[0]  # type: ignore[index]
        self.weights = copy.deepcopy(self.model.state_dict())
        inner = INNER[program.inner](self.model)
        self.inners = inner if isinstance(inner, list) else [inner]
        known = all(type(each).__module__.startswith("torch.") for each in self.inners)
        undo = program.undo and known and self.method.gradients is None
        self.optimizer = ftopt.wrap(inner, self.model, self.method, group=self.group, undo=undo)
        scheduler = SCHEDULERS[program.scheduler](self.optimizer)
        self.scheduler = scheduler if self.method.gradients is None else constant(self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.alive = True
        self.optimizer.__enter__()

    def run(self) -> None:
        self.ident, job = threading.get_ident(), self.job
        former = [run.index for run in job.runs[: self.index] if run.life.replica == self.life.replica]
        with job.changed:
            job.changed.wait_for(
                lambda: job.failures or (job.done >= self.life.after and job.ended.issuperset(former)), LIMIT_S
            )
        try:
            self.doing = "joins"
            if job.failures or 0 in job.ended:
                return  # a job is over when all have left
            self.begin()
            self._loop()
            if self.alive:
                self._finish()
        except Dies:
            self.die()
        except FtoptError as error:
            if self.broken_off and "was broken off" in str(error):
                self.die()
            elif self.doing == "joins" and "the job of this group is over" in str(error):
                pass  # all others have left
            else:
                self._failed(error)
        except BaseException as error:
            self._failed(error)
        finally:
            with job.changed:
                job.ended.add(self.index)
                job.done = job.done if self.index else 1 << 30
                job.changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self.job.fail(f"{self.life.replica}, {self.doing}: {text}")
        self.die()

    def _loop(self) -> None:
        job = self.job
        for number, action in enumerate(self.life.actions):
            if not self.alive and action.name != "dies":
                raise Dies
            self.doing = f"action {number}, {action.name}({action.value!r})"
            kind = ACTIONS[action.name]
            try:
                kind.do(self, action.value)
            except Interrupt:
                if kind.ends:
                    raise Dies from None
                self.optimizer.zero_grad()
            if self.index == 0:
                with job.changed:
                    job.done += 1
                    job.changed.notify_all()
            if kind.ends:
                return
        self.interrupt_at = ""

    def _finish(self) -> None:
        """Stops, waits for the others, and takes part in rounds until all is committed and all are alike."""
        job = self.job
        ACTIONS["steps"].do(self, 1)  # what is edited without a step after it stays at home
        self.doing = "waits for the others to stop"
        self.on_event_raises_at = ""
        with job.changed:
            job.done = 1 << 30
            job.stands[self.index] = None
            job.changed.notify_all()
        while not job.failures:  # it has nothing to train on, and helps the others' rounds on
            with job.changed:
                stopped = lambda: all(r.index in job.stands or r.index in job.ended for r in job.runs)  # noqa: E731
                if job.changed.wait_for(stopped, 0.02):
                    break
            self.optimizer.sync()
        self.doing = "the last rounds"
        self.optimizer.sync(propose=False)
        until = time.monotonic() + LIMIT_S / 2
        while True:
            self.optimizer.sync()
            self.optimizer.sync(propose=False)
            mine = (self.optimizer.status.versions, self.optimizer.status.pending_steps)
            with job.changed:
                job.stands[self.index] = mine
                job.changed.notify_all()
                others = [stands for i, stands in job.stands.items() if i not in job.ended]
                if all(stands == mine for stands in others) and not any(mine[1]):
                    break
                if job.failures:
                    return
                if time.monotonic() > until:
                    job.failures.append(f"{self.life.replica}: the replicas do not come to one state: {job.stands}")
                    return
                job.changed.wait(0.02)
        trained = [p for p in self.model.parameters() if p.dtype in TRAINED]
        parameters = [p.detach().float().clone() for p in trained]
        with job.changed:
            job.looks[self.index] = (self.optimizer.digest(), parameters)
            job.changed.notify_all()
            job.changed.wait_for(lambda: job.failures or job.stands.keys() <= job.looks.keys() | job.ended, LIMIT_S)
        self.doing = "closes"
        self.optimizer.close(timeout_s=10.0)
        self.end("done")

    def end(self, reason: str) -> None:
        data = {"reason": reason, "pending_by_fragment": list(self.optimizer.status.pending_steps)}
        if any(map(self.group.outstanding, range(len(data["pending_by_fragment"])))):  # its round may still count them
            with self.job.changed:
                self.job.undecided += max(data["pending_by_fragment"])
        self.alive = False
        self.job.tell(
            {"event": "end", "replica": self.life.replica, "incarnation": self.group.incarnation, "data": data}
        )
        self._check_counts()

    def die(self) -> None:
        self.alive = False
        life = {"replica": self.life.replica, "incarnation": self.group.incarnation}
        self.job.tell({"event": "death", **life})
        self.group.close()
        if hasattr(self, "optimizer"):
            self._check_counts()

    def _check_counts(self) -> None:
        found = self.optimizer.local_steps
        if found != self.executed - self.undone:
            self.job.fail(f"{self.life.replica}: {found} local steps, {self.executed} executed, {self.undone} undone")


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs, and with a look at which threads are left. For the whole process."""
    before, log = set(threading.enumerate()), logging.getLogger("ftopt")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
    check_threads(before)


def run_all(programs: Iterable[Program], *, at_once: int) -> Iterator[tuple[Program, str]]:
    """Runs programs, several at a time, since they wait for most of theirs; yields those that fail, and how."""
    with quiet(), ThreadPoolExecutor(at_once) as pool:
        for program, text in pool.map(lambda program: (program, failure(program)), programs):
            if text:
                yield program, text


def failure(program: Program) -> str:
    """Runs it; what does not hold, "" if all does. Within `quiet`."""
    try:
        run(program)
    except Failed as failed:
        return str(failed)
    return ""


def run(program: Program) -> None:
    """Runs it. Within `quiet`. Raises `Failed`."""
    with _NO_COLLECTOR.there(not program.collects), _MANY_FILES.there(program.many_files):
        _run(program)


class _Circumstance:
    """What the process is like while a program runs that asks for it, and for others that run at the same time."""

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        self._begin, self._end, self._lock, self._count = begin, end, threading.Lock(), 0

    @contextmanager
    def there(self, wanted: bool) -> Iterator[None]:
        self._add(wanted)
        try:
            yield
        finally:
            self._add(-wanted)

    def _add(self, change: int) -> None:
        with self._lock:
            before, self._count = self._count, self._count + change
            if bool(before) != bool(self._count):
                (self._begin if self._count else self._end)()


_files: list[Any] = []


def _open_many() -> None:
    """So many that the next ones have numbers above 1,024, if this process may have so many."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 4096:
        _files.extend(Path(os.devnull).open() for _ in range(1100))  # noqa: SIM115


def _close_many() -> None:
    while _files:
        _files.pop().close()


_NO_COLLECTOR, _MANY_FILES = _Circumstance(gc.disable, gc.enable), _Circumstance(_open_many, _close_many)


def _run(program: Program) -> None:
    job = Job(program)
    for each in job.runs:
        each.thread.start()
    until = time.monotonic() + LIMIT_S
    for each in job.runs:
        each.thread.join(max(0.0, until - time.monotonic()))
    hang = [each for each in job.runs if each.thread.is_alive()]
    if hang:
        job.fail("hangs")
        frames = sys._current_frames()
        stacks = "\n".join(
            f"{each.life.replica} ({each.doing}):\n" + "".join(traceback.format_stack(frames[each.ident]))
            for each in hang
            if each.ident in frames
        )
        raise Failed(f"hangs: {', '.join(f'{each.life.replica} ({each.doing})' for each in hang)}\n{stacks}")
    if job.failures:
        raise Failed("\n".join(job.failures))
    check_books(job)
    check_alike(job)


def check_books(job: Job) -> None:
    """Every step is in one place."""
    steps: dict[str, list[dict[str, Any]]] = {}
    for line in job.lines:
        if line["event"] == "stepped":
            steps.setdefault(line["replica"], []).append({"incarnation": line["incarnation"]})
    executed = Counter[str]()
    for each in job.runs:
        executed[each.life.replica] += each.executed
    told = {replica: len(lines) for replica, lines in steps.items()}
    if told != {replica: count for replica, count in executed.items() if count}:
        raise Failed(f"steps executed {dict(executed)}, events `stepped` {told}")
    found = summarize(job.lines, steps)
    lost = found["survivor_inner_steps_lost"]
    if any(line["event"] == "rollback" for line in job.lines):
        lost = min(lost, 0)  # all who held them have died or left
    if -job.undecided <= lost < 0:
        lost = 0
    if lost or found["inner_steps_counted_twice"] or found["chain_conflicts"]:
        wanted = ("survivor_inner_steps_lost", "inner_steps_counted_twice", "chain_conflicts", "inner_steps_executed")
        more = ("inner_steps_committed", "inner_steps_pending", "dead_inner_steps_lost", "inner_steps_discarded")
        told = ("decide", "end", "death", "discarded", "undone", "join", "start", "recover")
        shown = "\n".join(
            f"{line['event']} {line.get('replica')}.{line.get('incarnation')} fragment {line.get('fragment')} "
            f"version {line.get('version')} {line.get('data')}"
            for line in job.lines
            if line["event"] in told
        )
        raise Failed(f"the books do not balance: { {name: found[name] for name in (*wanted, *more)} }\n{shown}")


def check_alike(job: Job) -> None:
    """What must be equal is."""
    if not job.looks:
        return
    versions = [stands[0] for i, stands in job.stands.items() if i in job.looks]
    (first, model), *others = job.looks.values()
    for digest, parameters in others:
        if digest != first:
            raise Failed(f"at versions {versions[0]} the committed states are {digest[:12]} and {first[:12]}")
        if isinstance(job.method, ftopt.PAFT):
            continue  # a gradient of one that has left since moves them by what each one's moments say
        if not all(torch.equal(a, b) for a, b in zip(parameters, model, strict=True)):
            apart = max(float((a - b).abs().max()) for a, b in zip(parameters, model, strict=True))
            raise Failed(f"at versions {versions[0]}, with nothing pending, parameters are {apart:g} apart")


def check_threads(before: set[threading.Thread]) -> None:
    """None of ftopt's is left."""
    gc.collect()
    until = time.monotonic() + 60.0
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith("ftopt")]:
        if time.monotonic() > until:
            raise Failed(f"threads are left: {sorted(t.name for t in left)}")
        left[0].join(0.1)


def script(program: Program) -> str:
    """The program as a short script."""
    lines = [
        f"# program {program.seed}: python -m tests.programs {program.seed}",
        f"model = {program.model}",
        f"inner = {program.inner}",
        f"optimizer = ftopt.wrap(inner, model, {program.method}, group=group, undo={program.undo})",
        f"scheduler = {program.scheduler}",
        *([] if program.collects else ["gc.disable()"]),
        *(["files = [open(os.devnull) for _ in range(1100)]"] if program.many_files else []),
        f"# policy = ftopt.FaultPolicy(grace_s={POLICY.grace_s}, dead_after_s={POLICY.dead_after_s})",
    ]
    for life in program.lives:
        when = f" starts when r0 has done {life.after} of its actions" if life.after else ""
        lines.append(f"# {life.replica}{when}\nwith optimizer:")
        for action in life.actions:
            text = ACTIONS[action.name].script
            text = text.format(*[action.value] * text.count("{")) if "{}" in text or "{!r}" in text else text
            lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)
