"""``ftopt run``: the coordinator and all replicas of a job on this machine, to their end.

The runner starts the processes, follows their lines, writes down deaths, brings back what a fault killed, and stops
everything when the job is done, when it cannot go on, or on a signal.
"""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from ftopt.checkpoint.reader import verified, whole
from ftopt.config.loader import dump
from ftopt.config.schema import Recipe
from ftopt.errors import FtoptError, UserError
from ftopt.events import Event
from ftopt.faults.spec import COORDINATOR
from ftopt.job.processes import Child, describe_exit
from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import EventLog, JsonLines, Tail, read_lines
from ftopt.telemetry.progress import Display
from ftopt.telemetry.summary import summarize
from ftopt.telemetry.view import RunView

_POLL_S = 0.1
_REFRESH_S = 0.5
_LEAVE_S = 40.0
_LAST_S = 45.0
"""Seconds that the others have to come to the end once the first replica is there."""


class RunFailed(FtoptError):
    """The run did not come to its end. Exit status 1."""


@dataclass
class _Return:
    """A killed process that comes back at ``at``."""

    name: str
    life: int
    at: float
    journal: str = "keep"


@dataclass
class _State:
    """What the runner knows beyond the view."""

    children: dict[str, Child] = field(default_factory=dict)
    returns: list[_Return] = field(default_factory=list)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    incarnations: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    first_end: float | None = None
    interrupts: int = 0


class Runner:
    """One run.

    Args:
        recipe: the job; ``sync.start_replicas`` and ``log.wandb`` are resolved.
        folder: the run's folder, not there yet.
        display: shows it.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, display: Display) -> None:
        self._recipe = recipe
        self._folder = folder
        self._display = display
        self._started = time.time()
        self._view = RunView(recipe.train.inner_steps)
        self._state = _State()
        self._url = ""
        self._bind = "127.0.0.1:0"
        self._token = secrets.token_hex(32)  # other users of this machine reach the port, too
        folder.create()
        folder.recipe.write_text(dump(recipe), encoding="utf-8")
        self._events = EventLog(JsonLines(folder.events, self._started))
        self._tail = Tail(folder.events)
        self._step_tails = {replica: Tail(folder.steps(replica)) for replica in recipe.replica_ids()}
        self._refreshed = 0.0

    def run(self) -> dict[str, Any]:
        """Runs to the end; returns the summary, which is in the folder too.

        Raises:
            UserError: a process found the user's input wrong, or a replica was refused.
            RunFailed: all replicas died, or the run was interrupted. The summary is written all the same.
        """
        with _signals(self._state):
            try:
                self._start_coordinator(1)
                for replica in self._recipe.replica_ids():
                    self._start_replica(replica, 1)
                self._watch()
            finally:
                self._end_all()
                self._follow()
                self._display.refresh(self._view)
                self._display.close()
                summary = summarize_folder(self._folder)
                self._folder.write_summary(summary)
        return summary

    # Starting.

    def _start_coordinator(self, life: int) -> None:
        arguments = ["coordinator", "--bind", self._bind, "--journal", str(self._folder.journal), "--supervised"]
        arguments.append("--open-status")  # it listens on this machine alone, and tells no more than the terminal
        faults = [asdict(fault) for fault in self._recipe.faults if fault.replica == COORDINATOR]
        arguments += ["--life", str(life), "--faults", json.dumps(faults)]
        child = self._start(COORDINATOR, life, arguments, reports=True)
        self._url = child.first_line()
        if not self._url:
            child.end(5.0)
            self._complain(child, child.exit_status() or 1)
        self._bind = urlsplit(self._url).netloc

    def _start_replica(self, replica: str, life: int) -> None:
        arguments = ["replica", str(self._folder.recipe), "--coordinator", self._url, "--id", replica]
        if life > 1 and self._recipe.checkpoint.resume is not None:
            arguments.append("checkpoint.resume=null")  # The job has gone on from there: it joins.
        self._start(replica, life, [*arguments, "--job", self._recipe.name, "--supervised"])

    def _start(self, name: str, life: int, arguments: list[str], *, reports: bool = False) -> Child:
        threads = str(self._recipe.train.threads)
        child = Child(
            name,
            [*arguments, "--folder", str(self._folder.path), "--started", repr(self._started)],
            log=self._folder.log(name),
            life=life,
            env={"OMP_NUM_THREADS": threads, "FTOPT_TOKEN": self._token},
            reports=reports,
        )
        self._state.children[name] = child
        self._state.incarnations.pop(name, None)
        self._events(Event("spawn", name, data={"pid": child.process.pid, "life": life}))
        return child

    # Watching.

    def _watch(self) -> None:
        state, asked = self._state, False
        while any(name != COORDINATOR for name in state.children) or self._coming_back():
            time.sleep(_POLL_S)
            self._follow()
            for child in [child for child in state.children.values() if child.exit_status() is not None]:
                self._exited(child)
            if state.interrupts and not asked:
                asked = True
                self._ask_to_leave("interrupted: the replicas leave in good order; once more ends them at once")
            if state.interrupts > 1:
                raise RunFailed("interrupted twice; the processes were killed")
            if not asked:
                self._bring_back()
                self._end_when_done()
        if state.interrupts:
            raise RunFailed(f"interrupted before the end{self._way_on()}")
        if not state.ended:
            raise RunFailed(
                f"all replicas died before the end; what they said is in {self._folder.logs}{self._way_on()}"
            )

    def _follow(self) -> None:
        """Takes up the new lines of all processes."""
        for record in self._tail.more():
            self._note(record)
        for replica, tail in self._step_tails.items():
            for line in tail.more():
                self._view.row(replica).stepped(line)
                self._state.incarnations[replica] = line["incarnation"]
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH_S:
            self._refreshed = now
            self._display.refresh(self._view)

    def _note(self, record: dict[str, Any]) -> None:
        state, name, who = self._state, record["event"], record["replica"]
        if text := self._view.event(record):
            self._display.note(text)
        if name == "join" or who in state.incarnations:
            state.incarnations[who] = max(record["incarnation"], state.incarnations.get(who, 0))
        if name == "fault" and record["data"]["do"] == "kill":
            state.faults[who] = record["data"]
        if name == "end":
            state.ended.add(who)
            if record["data"]["reason"] == "done" and state.first_end is None:
                state.first_end = time.monotonic()

    def _exited(self, child: Child) -> None:
        state, status = self._state, child.exit_status()
        assert status is not None
        self._follow()
        del state.children[child.name]
        child.end(0.0)
        if child.name in state.ended:
            if status:  # It has left in good order, so this is no death; but it is worth a note.
                self._display.note(f"{describe_exit(status)} after its end: {_last_lines(child)}")
            return
        if status == 2:
            self._complain(child, status)
        fault = state.faults.pop(child.name, None)
        if child.name != COORDINATOR:
            incarnation = state.incarnations.get(child.name, 0)
            data = {"status": describe_exit(status), "by_fault": fault is not None}
            self._events(Event("death", child.name, incarnation, data=data))
        else:
            self._display.note(f"the coordinator died ({describe_exit(status)})")
        if fault is not None and fault["rejoin_s"] is not None:
            at = time.monotonic() + fault["rejoin_s"]
            state.returns.append(_Return(child.name, child.life + 1, at, fault["journal"]))
        elif child.name == COORDINATOR:
            raise RunFailed(f"the coordinator died and was not to come back (rejoin_s is null)\n{_last_lines(child)}")
        elif fault is None:
            self._display.note(_last_lines(child))

    def _bring_back(self) -> None:
        now = time.monotonic()
        for coming in [item for item in self._state.returns if item.at <= now]:
            self._state.returns.remove(coming)
            if coming.name != COORDINATOR:
                self._start_replica(coming.name, coming.life)
                continue
            if coming.journal == "delete":
                for path in self._folder.path.glob(f"{self._folder.journal.name}*"):
                    path.unlink()
            self._start_coordinator(coming.life)

    def _way_on(self) -> str:
        """How to go on from the newest checkpoint, if there is one."""
        folder = self._recipe.checkpoint.dir
        there = whole(Path(folder)) if folder is not None else []
        return f"; to go on from there: checkpoint.resume={there[-1]}" if there else ""

    # Ending.

    def _coming_back(self) -> bool:
        """Whether a replica comes back; once the job is done those that would come much later are let be."""
        state = self._state
        replicas = [item for item in state.returns if item.name != COORDINATOR]
        if state.first_end is not None:
            replicas = [item for item in replicas if item.at <= state.first_end + _LAST_S]
        return bool(replicas) and not state.interrupts

    def _end_when_done(self) -> None:
        state = self._state
        if state.first_end is None:
            return
        replicas = [child for name, child in state.children.items() if name != COORDINATOR]
        waiting = self._coming_back() or any(child.name not in state.ended for child in replicas)
        late = time.monotonic() - state.first_end > _LAST_S
        if waiting and not late:
            return
        if late:
            state.returns.clear()
        for child in replicas:
            child.finish_up()

    def _ask_to_leave(self, text: str) -> None:
        self._display.note(text)
        self._state.returns.clear()
        for name, child in self._state.children.items():
            if name != COORDINATOR:
                self._let_go(child)

    def _let_go(self, child: Child) -> None:
        """Lets a replica leave that is at its end, and asks one to leave that is not."""
        if child.name in self._state.ended:
            child.finish_up()
        else:
            child.terminate()

    def _end_all(self) -> None:
        """Ends every process that is left, the coordinator last."""
        children = sorted(self._state.children.values(), key=lambda child: child.name == COORDINATOR)
        at_once = self._state.interrupts > 1
        for child in children:
            if child.name != COORDINATOR and not at_once:
                self._let_go(child)
        deadline = time.monotonic() + (0.0 if at_once else _LEAVE_S)
        for child in children:
            if child.name == COORDINATOR and not at_once:
                child.terminate()
            patience_s = max(0.0, deadline - time.monotonic())
            while child.exit_status() is None and patience_s > 0 and self._state.interrupts < 2:
                time.sleep(_POLL_S)
                patience_s -= _POLL_S
            child.end(0.0)

    def _complain(self, child: Child, status: int) -> None:
        """The process found something wrong: its own message is the run's."""
        message = child.said().removeprefix("ftopt: ")
        if status == 2:
            raise UserError(f"{child.name}: {message}")
        raise RunFailed(f"{child.name} could not start ({describe_exit(status)})\n{message}")


def resumable(recipe: Recipe) -> Recipe:
    """The recipe with the one checkpoint that all replicas go on from, every file of it verified.

    Raises:
        UserError: it cannot be used.
    """
    path = recipe.checkpoint.resume
    if path is None:
        return recipe
    return replace(recipe, checkpoint=replace(recipe.checkpoint, resume=str(verified(Path(path).resolve()).path)))


def resolved(recipe: Recipe, wandb: str, folder: RunFolder) -> Recipe:
    """The recipe as the run's processes read it: as many replicas at the start as there are, wandb's mode settled, a
    folder for checkpoints."""
    start = recipe.sync.start_replicas or recipe.replicas
    sync = replace(recipe.sync, start_replicas=start)
    checkpoint = recipe.checkpoint
    if checkpoint.every:
        where = Path(checkpoint.dir) if checkpoint.dir is not None else folder.checkpoints
        checkpoint = replace(checkpoint, dir=str(where.resolve()))
    return replace(recipe, sync=sync, log=replace(recipe.log, wandb=wandb), checkpoint=checkpoint)


def summarize_folder(folder: RunFolder) -> dict[str, Any]:
    """The summary of whatever lines a run's folder holds."""
    steps = {path.stem: read_lines(path) for path in sorted(folder.replicas.glob("*.jsonl"))}
    return summarize(read_lines(folder.events), steps)


def _last_lines(child: Child, count: int = 15) -> str:
    said = child.said().splitlines()[-count:]
    return "\n".join([f"{child.name} ended; the last lines that it wrote:", *(f"  {line}" for line in said)])


@contextmanager
def _signals(state: _State) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        state.interrupts += 1

    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {
        number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
