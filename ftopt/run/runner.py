"""``ftopt run``: runs the coordinator and all replicas of a job on this machine to their end.

The runner starts the processes, follows their lines, records deaths, restarts what a fault killed, and stops everything
when the job is done, when it cannot go on, or on a signal.
"""

from __future__ import annotations

import json
import math
import secrets
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ftopt.checkpoint.reader import Checkpoint, whole
from ftopt.config.loader import dump
from ftopt.config.own_code import failed_in
from ftopt.config.schema import Recipe
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.methods.short_runs import outer_line
from ftopt.run.fault_spec import COORDINATOR
from ftopt.run.interruption import interruption, killer
from ftopt.run.local_jobs import Announcement, announce
from ftopt.run.processes import FTOPT, Child, Interrupted, RunFailed, describe_exit
from ftopt.run.stages import Stages
from ftopt.run.supervised import on_signals
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, Tail
from ftopt.watch.sentences import Note, names
from ftopt.watch.story import INTERRUPTED, Story
from ftopt.watch.terminal import Display

_POLL_S = 0.1
_REFRESH_S = 0.5
_LEAVE_S = 40.0
_START_S = 5.0
"""Seconds after which a note says what a start waits for."""
_LAST_S = 45.0
"""Seconds that the others have to reach the end after the first replica."""
_STARTS = "waiting for {} to start: loading PyTorch, data and model takes longer on a busy machine"
_DONE = "the job is done: its replicas evaluate, save the last version and exit; another Ctrl-C ends them at once"


@dataclass
class _Return:
    """A killed process that comes back at ``at``."""

    name: str
    life: int
    at: float
    journal: str = "keep"


class Runner:
    """One run.

    Args:
        recipe: the job; ``log.wandb`` and ``checkpoint.dir`` are resolved.
        folder: the run's folder, which does not exist yet.
        display: shows the run.

    Attributes:
        url: the coordinator's address; "" before it has one.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, display: Display) -> None:
        self._recipe = recipe
        self._folder = folder
        self._display, self._stages = display, Stages(display.note)
        self._started = time.time()
        self._story = Story(recipe.train.inner_steps, name=recipe.name)
        if recipe.checkpoint.resume is not None:
            at = Checkpoint(Path(recipe.checkpoint.resume)).manifest
            self._story.version, self._story.inner_step = at.version, at.inner_step
        self._children: dict[str, Child] = {}
        self._returns: list[_Return] = []
        self._faults: dict[str, dict[str, Any]] = {}  # the fault that kills a process
        self._incarnations: dict[str, int] = {}
        self._restarts: Counter[str] = Counter()
        self._ended: set[str] = set()
        self._failed: dict[str, str] = {}  # replicas that have left with an error, and their messages
        self._died: dict[str, str] = {}  # messages of those that have died
        self._first_end: float | None = None
        self._job_failed = ""  # LOSS: why the job has ended for all
        self._interrupts: list[int] = []
        self.url, self._listed = "", Announcement()
        self._bind = "127.0.0.1:0"
        self._token = secrets.token_hex(32)  # other users of this machine can reach the port
        folder.create()
        folder.recipe.write_text(dump(recipe), encoding="utf-8")
        self._events = EventLog(JsonLines(folder.events, self._started))
        self._tail = Tail(folder.events)
        self._step_tails = {replica: Tail(folder.steps(replica)) for replica in recipe.replica_ids()}
        self._refreshed = 0.0
        self._disk_full, self._asked = False, list[str]()

    def run(self) -> dict[str, Any]:
        """Runs to the end; returns the summary, which is also in the folder.

        Raises:
            UserError: a process found the user's input wrong, or a replica was refused.
            RunFailed: all replicas died; `Interrupted`: a signal. They have the summary, which is written in any case.
        """
        summary: dict[str, Any] = {}
        with on_signals(self._interrupts.append):
            try:
                self._start_coordinator(1)
                self._listed = announce("run", self._folder.path.name, self.url, folder=self._folder.path)
                self._display.note(Note(f"live page: {self.url}/#steps={self._recipe.train.inner_steps}"))
                if line := outer_line(self._recipe.method):
                    self._display.note(Note(line))
                for replica in self._recipe.replica_ids():
                    self._start_replica(replica, 1)
                self._watch()
            except RunFailed as failed:
                failed.summary = summary if self._folder.events.exists() else None  # filled below
                raise
            finally:
                self._end_all()
                self._listed.close()
                self._follow()
                self._display.refresh(self._story)
                self._display.close()
                if self._folder.events.exists():
                    with self._stages.during("summing up the run"):
                        summary |= self._folder.summarize()
        return summary

    def newest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint of the run; None if there is none."""
        folder = self._recipe.checkpoint.dir
        there = whole(Path(folder)) if folder is not None else []
        return there[-1] if there else None

    # Starting.

    def _start_coordinator(self, life: int) -> None:
        faults = [asdict(fault) for fault in self._recipe.faults if fault.replica == COORDINATOR]
        arguments = ["coordinator", "--bind", self._bind, "--journal", str(self._folder.journal), "--supervised"]
        arguments += ["--life", str(life), "--faults", json.dumps(faults)]
        arguments += ["--new"] if life == 1 else []
        arguments.append("--open-status")  # it listens only on this machine, and shows no more than the terminal
        child = self._start(COORDINATOR, life, arguments, reports=True)
        self.url = child.first_line()
        if not self.url:
            child.end(5.0)
            self._complain(child, child.process.poll() or 1)
        self._bind = urlsplit(self.url).netloc

    def _start_replica(self, replica: str, life: int) -> None:
        arguments = ["replica", str(self._folder.recipe), "--coordinator", self.url, "--id", replica]
        if life > 1 and self._recipe.checkpoint.resume is not None:
            arguments.append("checkpoint.resume=null")  # The job has advanced since: the replica joins it.
        self._start(replica, life, [*arguments, "--job", self._recipe.name, "--supervised"])

    def _start(self, name: str, life: int, arguments: list[str], *, reports: bool = False) -> Child:
        arguments = [*arguments, "--folder", str(self._folder.path), "--started", repr(self._started)]
        env = {"OMP_NUM_THREADS": str(self._recipe.train.threads), "FTOPT_TOKEN": self._token}
        env |= {"FTOPT_FORMER_ENDED": "1"} if life > 1 else {}
        child = Child(name, [*FTOPT, *arguments], log=self._folder.log(name), life=life, env=env, reports=reports)
        self._children[name] = child
        self._incarnations.pop(name, None)
        self._events(Event("spawn", name, data={"pid": child.process.pid, "life": life}))
        return child

    # Watching.

    def _watch(self) -> None:
        asked = leaving = False
        while self._replicas() or self._coming_back():
            time.sleep(_POLL_S)
            self._follow()
            if not self._folder.events.exists():
                raise RunFailed(f"{self._folder.path} was removed during the run, which was ended: it wrote there")
            for child in [child for child in self._children.values() if child.process.poll() is not None]:
                self._exited(child)
            if self._interrupts and not asked:
                asked, leaving = True, not self._is_done()
                self._returns.clear()
                self._leave() if leaving else self._display.note(Note(_DONE))
            if len(self._interrupts) > 1:
                done = "" if leaving else "; the job had reached its last inner step"
                raise Interrupted(self._interrupts[0], f"interrupted twice: the processes were ended at once{done}")
            if leaving:
                for child in self._replicas():
                    if child.name in self._ended:  # it may have reached the end of the job instead, and waits there
                        child.finish_up()
            else:
                self._bring_back()
                self._end_when_done()
        if leaving:
            where = f"at inner step {self._story.inner_step} of {self._recipe.train.inner_steps}"
            raise Interrupted(self._interrupts[0], f"interrupted {where}")
        if self._job_failed:
            raise RunFailed(self._job_failed)
        if not self._ended:
            text = f"all replicas died before the end; what they said is in {self._folder.logs}"
            raise RunFailed(failed_in(self._died) or text)
        if self._first_end is None:
            where = f"at inner step {self._story.inner_step} of {self._recipe.train.inner_steps}"
            raise RunFailed("\n".join([f"all replicas have left {where}", *self._failed.values()]))

    def _leave(self) -> None:
        """Asks the replicas to leave in good order."""
        text = "interrupted: the replicas contribute their steps and leave; another Ctrl-C ends them at once"
        self._display.note(Note(text, "warn"))
        self._story.ending, self._asked = True, [child.name for child in self._replicas()]
        for child in self._replicas():
            self._let_go(child)

    def _follow(self) -> None:
        """Takes up the new lines of all processes."""
        for record in self._tail.more():
            self._note(record)
        for replica, tail in self._step_tails.items():
            for line in tail.more():
                self._story.stepped(replica, line)
                self._incarnations[replica] = line["incarnation"]
        now = time.monotonic()
        if now - self._refreshed >= _REFRESH_S:
            self._refreshed = now
            self._story.now_s = time.time() - self._started
            self._look_at_disk()
            if self._story.states().keys() == {"starting"} and not self._story.held:
                self._stages.going_on("start", _STARTS.format(names(self._story.rows)), after_s=_START_S)
            for note in self._story.due():
                self._display.note(note)
            self._display.refresh(self._story)

    def _look_at_disk(self) -> None:
        """Notes once that the disk is full: the job halts, since the coordinator's journal is on it
        (docs/operations.md), and the processes' lines are lost."""
        with suppress(OSError):
            if not self._disk_full and shutil.disk_usage(self._folder.path).free == 0:
                self._disk_full = True
                text = "no space is left on its disk; make room: until then there are no outer steps and no checkpoints"
                self._display.note(Note(f"{self._folder.path}: {text}, and figures are lost", "bad"))

    def _replicas(self) -> list[Child]:
        return [child for name, child in self._children.items() if name != COORDINATOR]

    def _note(self, record: dict[str, Any]) -> None:
        name, who = record["event"], record["replica"]
        if note := self._story.take(record):
            self._display.note(note)
        if name == "join" or who in self._incarnations:
            self._incarnations[who] = max(record["incarnation"], self._incarnations.get(who, 0))
        if name == "fault" and record["data"]["do"] == "kill":
            self._faults[who] = record["data"]
        if name == "job_failed":
            self._returns.clear()  # a replica that came now would be refused
            self._job_failed = (
                f"the job has failed, since {who} was lost (policy.on_loss=fail): {record['data']['reason']}; it stays "
                f"at version {record['data']['versions'][0]}, inner step {record['inner_step']}"
            )
        if name == "end":
            self._ended.add(who)
            if record["data"]["reason"] == "done" and self._first_end is None:
                self._first_end = time.monotonic()

    def _exited(self, child: Child) -> None:
        status = child.process.poll()
        assert status is not None
        self._follow()
        del self._children[child.name]
        child.end(0.0)
        if child.name in self._ended:
            if status and not self._job_failed:  # it has left in good order: no death, but worth a note
                self._failed[child.name] = child.complained()
                self._display.note(Note(f"{describe_exit(status)} after its end: {child.last_lines()}", "bad"))
            return
        if status == 2:
            self._complain(child, status)
        if status == 0 and child.name != COORDINATOR:
            self._tell_death(child)  # the fate of its last steps is unknown
            self._ended.add(child.name)
            self._failed[child.name] = f"{child.name} has left, and could not write how: is the disk full?"
            return
        fault = self._faults.pop(child.name, None)
        joined = child.name in self._incarnations  # a replica that dies before joining would die again
        if self._job_failed and not joined and child.name != COORDINATOR:
            return  # it was refused
        if self._interrupts and not joined and child.name != COORDINATOR and describe_exit(status) in INTERRUPTED:
            self._tell_not_joined(child)
            return
        if child.name != COORDINATOR:
            self._died[child.name] = child.complained()
            self._tell_death(child, by_fault=fault is not None)
        else:
            self._display.note(Note(f"the coordinator died ({describe_exit(status)})", "bad"))
        if self._job_failed and child.name != COORDINATOR:
            return
        if fault is not None and fault["rejoin_s"] is not None:
            at = time.monotonic() + fault["rejoin_s"]
            self._returns.append(_Return(child.name, child.life + 1, at, fault["journal"]))
        elif child.name == COORDINATOR:
            raise RunFailed(f"the coordinator died and was not to come back (rejoin_s is null)\n{child.last_lines()}")
        elif fault is None and not self._interrupts:
            self._display.note(Note(child.last_lines(), "bad"))
            if joined and self._restarts[child.name] < self._recipe.restarts:
                self._restarts[child.name] += 1
                self._returns.append(_Return(child.name, child.life + 1, time.monotonic()))

    def _bring_back(self) -> None:
        now = time.monotonic()
        for coming in [item for item in self._returns if item.at <= now]:
            self._returns.remove(coming)
            if coming.name != COORDINATOR:
                self._start_replica(coming.name, coming.life)
                continue
            if coming.journal == "delete":
                for path in self._folder.path.glob(f"{self._folder.journal.name}*"):
                    path.unlink()
            self._start_coordinator(coming.life)

    # Ending.

    def _coming_back(self) -> bool:
        """Whether a replica comes back; when the job is done, those that would come much later do not count."""
        last = math.inf if self._first_end is None else self._first_end + _LAST_S
        return not self._interrupts and any(item.name != COORDINATOR and item.at <= last for item in self._returns)

    def _is_done(self) -> bool:
        """Whether the job has reached its last inner step, or a replica has reached the end of the data."""
        return self._story.inner_step >= self._recipe.train.inner_steps or self._first_end is not None

    def _end_when_done(self) -> None:
        ending = any(child.name not in self._ended for child in self._replicas())
        if ending and self._is_done() and not self._interrupts:  # an interrupt has said so
            self._stages.going_on("end", "the last step is done; replicas evaluate and save the last version")
        if self._first_end is None:
            return
        waiting = self._coming_back() or ending
        late = time.monotonic() - self._first_end > _LAST_S
        if late:
            self._returns.clear()
        if late or not waiting:
            left = self._replicas()
            if left:
                self._stages.going_on("exit", f"waiting for {names(child.name for child in left)} to exit")
            for child in left:
                child.finish_up()

    def _let_go(self, child: Child) -> None:
        """Lets a replica at its end leave, and asks any other to leave."""
        if child.name in self._ended:
            child.finish_up()
        else:
            child.terminate()

    def _end_all(self) -> None:
        """Ends all remaining processes, the coordinator last."""
        at_once = len(self._interrupts) > 1
        if not at_once:
            for child in self._replicas():
                self._let_go(child)
        deadline = time.monotonic() + (0.0 if at_once else _LEAVE_S)
        for child in sorted(self._children.values(), key=lambda child: child.name == COORDINATOR):
            if child.name == COORDINATOR and not at_once:
                child.terminate()
            patience_s = max(0.0, deadline - time.monotonic())
            while child.process.poll() is None and patience_s > 0 and len(self._interrupts) < 2:
                self._stages.going_on(child.name, f"waiting for {child.name} to exit")
                time.sleep(_POLL_S)
                patience_s -= _POLL_S
            child.end(0.0)
        self._follow()
        for child in self._replicas():
            if child.name in self._incarnations and child.name not in self._ended:  # it had joined, and was killed
                self._tell_death(child, by=killer(self._interrupts, child, _LEAVE_S))
            elif self._interrupts and child.name not in self._incarnations and child.name not in self._ended:
                self._tell_not_joined(child)
        if self._interrupts and (at_once or self._story.ending):
            at, planned = self._story.inner_step, self._recipe.train.inner_steps
            self._events(interruption(self._interrupts, at, self._asked, planned=planned))
        self._follow()

    def _tell_not_joined(self, child: Child) -> None:
        """Records an interrupted start: no death, since the replica was no member."""
        self._ended.add(child.name)
        self._events(Event("end", child.name, data={"reason": "not_joined", "local_steps": 0, "pending_steps": 0}))

    def _tell_death(self, child: Child, *, by_fault: bool = False, by: str = "") -> None:
        data = {"status": describe_exit(child.process.poll() or 0), "by_fault": by_fault} | ({"by": by} if by else {})
        self._events(Event("death", child.name, self._incarnations.get(child.name, 0), data=data))

    def _complain(self, child: Child, status: int) -> None:
        """Raises the process' own message about an error as the run's."""
        message = child.complained()
        if status == 2:
            raise UserError(f"{child.name}: {message}")
        raise RunFailed(f"{child.name} could not start ({describe_exit(status)})\n{message}")
