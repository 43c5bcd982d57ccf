"""Runs a coordinator, and replicas that run the user's own script, on this machine to their end."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from ftopt.common.launched import END
from ftopt.common.paths import new_file
from ftopt.errors import Unreachable, UserError
from ftopt.events import Event
from ftopt.run.fault_spec import COORDINATOR
from ftopt.run.interruption import Interrupts, interruption, killer
from ftopt.run.local_jobs import JOIN, Announcement, announce
from ftopt.run.processes import FTOPT, Child, Interrupted, RunFailed, describe_exit
from ftopt.run.scripts import words
from ftopt.run.scripts.absent import Absent
from ftopt.run.scripts.ends import Ends
from ftopt.run.scripts.others import Others
from ftopt.run.scripts.output import Output
from ftopt.run.scripts.plan import Plan, devices_of
from ftopt.run.scripts.restarts import Restarts
from ftopt.run.scripts.saved import Saved, newest_saved
from ftopt.run.scripts.screen import Screen
from ftopt.run.status_of import ask
from ftopt.run.supervised import on_signals
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, Tail
from ftopt.watch.sentences import Note
from ftopt.watch.status import Job
from ftopt.watch.story import Story

_POLL_S = 0.1
_START_S = 5.0
_LEAVE_S = 40.0
_OTHERS_S = 2.0
_AGAIN_S = 20.0
"""Seconds for which the coordinator is started again and again: its port may be taken for a while."""
_PATIENCE_S = 1.0


class Launch:
    """One launch.

    Args:
        plan: what to start.
        folder: its folder, which exists.
        token: the job's token; "": one is made, if this launch starts the coordinator.
        say: writes a line to the terminal.
        quiet: only problems, and what the replicas write.

    Attributes:
        url: the coordinator's address.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, token: str, say: Callable[[str], None], *, quiet: bool = False
    ) -> None:
        try:
            taken = folder.journal.exists() or not folder.claim()
        except OSError as error:
            raise UserError(f"{folder.path} (--folder): {error.strerror}; give a folder that can be written") from error
        if taken:
            raise UserError(f"{folder.path} (--folder) holds another launch; give a new folder")
        self._plan, self._folder = plan, folder
        self._token = token or ("" if plan.join else secrets.token_hex(32))
        self._display, self._listed = Screen(say, self._look, quiet=quiet, dated=bool(plan.join)), Announcement()
        self._story = Story(0, name=plan.job)
        self._children, self._began = dict[str, Child](), dict[str, float]()
        self._numbers = {replica: number for number, replica in enumerate(plan.replicas())}
        self._outputs = {replica: Output(folder.log(replica), replica, self._display.say) for replica in self._numbers}
        self._joined: dict[str, int] = {}  # replica -> its incarnation
        self._here: set[str] = set()  # replicas that have joined in their present life, and not left
        self._ends = Ends(folder, ranks=plan.ranks)
        self._restarts = Restarts(plan, self._ends)
        self._absent = Absent(self._display.note, self._evict_after_s, self._ends.has_left)
        self._given_up = set[str]()  # replicas that are not started again
        self._others, self._interrupts = Others(self._numbers), Interrupts(self._story, self._numbers)
        self._asked, self._devices = list[str](), devices_of(os.environ)
        self.url, self._bind, self._started = plan.join, plan.bind, time.time()
        self._events, self._tail = EventLog(JsonLines(folder.events, self._started)), Tail(folder.events)
        self._evict_s = FaultPolicy().evict_after_s  # a coordinator started again knows it when a replica has come

    @property
    def began(self) -> bool:
        """Whether the job has made an outer step."""
        return self._story.members > 0

    @property
    def joined(self) -> bool:
        """Whether a replica has joined the job."""
        return bool(self._joined)

    def run(self) -> None:
        """Runs to the end.

        Raises:
            UserError: the coordinator found the user's input wrong.
            RunFailed: no replica came to the end of its script, or a mistake of the user's has ended one;
                `Interrupted`: a signal.
        """
        halted = ""
        with on_signals(self._interrupts.come):
            try:
                if not self._plan.join and (why := self._start_coordinator(1)):
                    raise UserError(why)
                self._tell_way_in()
                for replica in self._numbers if not self._interrupts else ():
                    self._start_replica(replica, 1)
                if note := words.sharing(self._plan, self._devices):
                    self._display.note(note)
                self._watch()
                with suppress(UserError, Unreachable):
                    halted = next((job["phase"] for job in self._look() if job["phase"].startswith("halted")), "")
                if self._ends.done and not self._plan.join and not self.began:
                    self._display.note(words.no_outer_step(self._plan, self._joined, self._story))
                self._wait_for_others()
            finally:
                self._end_all()
                self._listed.close()
                if self._plan.join and self._began:
                    self._tell_account()
                self._display.close()
        if self._interrupts:
            why = words.interrupted(self._plan, self._interrupts, self._story, self._others.holders, self._saved())
            raise Interrupted(self._interrupts[0], why)
        if why := self._ends.why_failed(self._plan.script, self._folder.logs, halted):
            raise RunFailed(why)

    def _tell_account(self) -> None:
        """Says how the replicas of a launch that has joined a job have ended, and where the job is now."""
        self._display.say(self._ends.account(self._plan.script, self._numbers.keys(), self._restarts.times))
        found: list[Job] | None = None
        with suppress(UserError, Unreachable):
            found = self._look()
        for line in words.job_now(self._plan.job, found):
            self._display.say(line)

    def _look(self) -> list[Job]:
        """The job, as its coordinator describes it."""
        found = ask(self.url, token=self._token or None, timeout_s=_PATIENCE_S) if self.url else []
        jobs = [job for job in found if job["job"] == self._plan.job]
        self._evict_s = next((float(job["evict_after_s"]) for job in jobs if "evict_after_s" in job), self._evict_s)
        return jobs

    def _evict_after_s(self) -> float:
        with suppress(UserError, Unreachable):
            self._look()
        return self._evict_s

    # Starting.

    def _start_coordinator(self, life: int) -> str:
        """Starts a coordinator. Returns why it has ended; "": it listens, or a signal has come before."""
        plan, folder = self._plan, self._folder
        arguments = ["coordinator", "--bind", self._bind, "--journal", str(folder.journal), "--supervised"]
        arguments += ["--folder", str(folder.path), "--started", repr(self._started), "--life", str(life)]
        arguments += ["--start-replicas", str(plan.n), *(["--new"] if life == 1 else [])]
        arguments += ["--open-status"] if plan.is_private else []  # it shows no more than the terminal
        child = Child(
            COORDINATOR, [*FTOPT, *arguments], log=folder.log(COORDINATOR), life=life, env={},
            own={"FTOPT_TOKEN": self._token}, reports=True,
        )  # fmt: skip
        self._children[COORDINATOR], self._began[COORDINATOR] = child, time.monotonic()
        while not child.reports_now(_POLL_S):
            self._follow()
            if self._interrupts:
                return ""
        url = child.first_line()
        if not url:
            del self._children[COORDINATOR]
            child.end(_START_S)
            return child.complained() or describe_exit(child.process.poll() or 0)
        self._events(Event("spawn", COORDINATOR, data={"pid": child.process.pid, "life": life}))
        for replica in self._given_up:
            child.tell(replica)
        self.url, self._bind = url, urlsplit(url).netloc
        return ""

    def _bring_back_coordinator(self, life: int) -> None:
        """Starts the coordinator again; replicas train on alone until then. Raises RunFailed: it ends each time."""
        until = time.monotonic() + _AGAIN_S
        while (why := self._start_coordinator(life)) and not self._interrupts:
            if time.monotonic() >= until:
                raise RunFailed(f"the coordinator died and cannot be started again: {why}")
            time.sleep(1.0)
            self._follow()

    def _tell_way_in(self) -> None:
        """Lists this launch for `ftopt ps`. Says where to look, and how replicas of other machines join."""
        plan, folder, path = self._plan, self._folder.path, self._folder.path / "token"
        try:
            if self._token:
                with open(new_file(path, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123 (a descriptor)
                    file.write(self._token + "\n")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a --folder that can be written") from error
        at = urlsplit(self.url)
        here = self.url if plan.join or plan.is_private else f"{at.scheme}://127.0.0.1:{at.port}"
        kind, token_file = JOIN if plan.join else "launch", path if self._token else None
        self._listed = announce(kind, folder.name, here, folder=folder, token_file=token_file)
        for line in words.way_in(plan, at, here, path):
            self._display.say(line)

    def _start_replica(self, replica: str, life: int) -> None:
        own = self._plan.own(self._numbers[replica], self.url, self._token, self._devices)
        own |= {"FTOPT_FORMER_ENDED": "1"} if life > 1 else {}
        own[END] = str(self._ends.begin(replica))
        command = [sys.executable, "-m", "ftopt.run.scripts.tied", str(os.getpid()), *self._plan.command()]
        log = self._folder.log(replica)
        if life > 1:
            self._outputs[replica].mark(f"process {life} of {replica} begins")
        child = Child(replica, command, log=log, life=life, env=self._plan.usual(), own=own)
        self._children[replica], self._began[replica] = child, time.monotonic()
        self._here.discard(replica)
        self._events(Event("spawn", replica, data={"pid": child.process.pid, "life": life}))

    # Watching.

    def _watch(self) -> None:
        asked = False
        while self._replicas() and len(self._interrupts) < 2:
            time.sleep(_POLL_S)
            self._follow()
            self._display.refresh(self._story, over=bool(self._ends.done))
            self._look_at_processes()
            if self._ends.done and not self._plan.join:  # one that has joined another's job does not hear who is there
                self._absent.end(self._replicas())
            if self._interrupts and not asked:
                asked = self._story.ending = True
                self._display.note(words.leaving(self._plan, self._interrupts[0], map(self._ends.said, self._numbers)))
                self._asked = [child.name for child in self._replicas()]
                for child in self._replicas():
                    child.terminate()
                self._interrupts.ask(self._look)

    def _look_at_processes(self) -> None:
        for child in [child for child in self._children.values() if child.process.poll() is not None]:
            self._exited(child)

    def _wait_for_others(self) -> None:
        """Keeps the coordinator for replicas of other machines that still train, until they have left. After a signal,
        says how to keep the job going."""
        told = False
        while not self._plan.join and COORDINATOR in self._children and self._look_for_others():
            if self._interrupts:
                again = words.to_restart(self._bind, self._folder.journal, self._folder.path / "token")
                self._display.note(words.others_there(self._others, again))
                return
            if not told:
                self._display.note(words.others_there(self._others))
            told = True
            until = time.monotonic() + _OTHERS_S
            while time.monotonic() < until and not self._interrupts:
                time.sleep(_POLL_S)
                self._follow()
                self._display.refresh(self._story, over=True)
                self._look_at_processes()

    def _look_for_others(self) -> list[str]:
        """The connected replicas of other launches; those of the last answer while the coordinator does not answer. To
        one that has just been started again they may yet come back."""
        again = self._children[COORDINATOR].life > 1 and time.monotonic() - self._began[COORDINATOR] < _AGAIN_S
        with suppress(UserError, Unreachable):
            self._others.look(self._look(), away=again)
        return self._others.here

    def _follow(self) -> None:
        """Shows what the replicas have written, and what has happened to the job."""
        for output in self._outputs.values():
            output.more()
        for record in self._tail.more():
            if record.get("job", self._plan.job) != self._plan.job:  # another one of this coordinator
                continue
            if record["event"] in ("join", "return", "spare"):
                self._joined[record["replica"]] = record["incarnation"]
                self._here.add(record["replica"])
            elif record["event"] == "leave":
                self._here.discard(record["replica"])
            self._absent.hear(record)
            self._others.hear(record)
            if note := self._story.take(record):
                self._display.note(note)
        self._story.now_s = time.time() - self._started
        for note in self._story.due():
            self._display.note(note)

    def _replicas(self) -> list[Child]:
        return [child for name, child in self._children.items() if name != COORDINATOR]

    def _exited(self, child: Child) -> None:
        self._follow()
        status = child.process.poll() or 0
        del self._children[child.name]
        child.end(0.0)
        if child.name == COORDINATOR:
            self._display.note(Note(f"the coordinator died ({describe_exit(status)}); it is started again", "bad"))
            self._bring_back_coordinator(child.life + 1)
            return
        self._outputs[child.name].more(last=True)
        self._ends.take(child, here=child.name in self._here)
        if not self._interrupts and self._starts_again(child, status):
            self._restarts.times[child.name] += 1
            self._start_replica(child.name, child.life + 1)
            return
        if self._interrupts:
            self._note_lost(child)
        self._given_up.add(child.name)
        if COORDINATOR in self._children:
            self._children[COORDINATOR].tell(child.name)

    def _starts_again(self, child: Child, status: int) -> bool:
        """Whether a replica that has ended with ``status`` is to be started again; says why not."""
        how = describe_exit(status)
        if child.name in self._ends.done:
            return False
        asked = child.name in self._ends.early and (not status or child.name not in self._here)
        mistaken = child.name in self._ends.mistakes.keys() - self._ends.repeated - self._here
        if (asked or mistaken) and self._story.row(child.name).state == "starting":
            ended: dict[str, object] = {"reason": "not_joined", "local_steps": 0, "pending_steps": 0}
            self._events(Event("end", child.name, data=ended))
        if asked:
            self._display.note(Note(f"{child.name} was asked to leave, and is not started again", "warn"))
            return False
        if child.name in self._ends.late:
            self._display.note(Note(self._ends.came_late(child.name), "warn"))
            if not self._ends.late[child.name]:  # else it is accounted for as a dead one
                return False
        if mistaken:
            self._display.note(Note(f"{child.name} has failed ({how}) by a mistake that no restart can mend", "bad"))
            return False
        self._note_death(child, self._ends.how(child))
        lived_s = time.monotonic() - self._began[child.name]
        if why := self._restarts.why_not(child, status, lived_s, joined=child.name in self._joined):
            self._display.note(Note(f"{child.name} has failed ({how}), and is not started again: {why}", "bad"))
        return not why and child.name not in self._ends.late

    def _note_death(self, child: Child, how: str, *, by: str = "") -> None:
        data = {"status": how, "by_fault": False, **({"by": by} if by else {})}
        self._events(Event("death", child.name, self._joined.get(child.name, 0), data=data))
        self._follow()  # it is shown before what follows from it

    def _note_lost(self, child: Child, *, by: str = "") -> None:
        """Notes the death of a replica that has ended, after a signal, before it had left its job. ``by``: what has
        killed it, if it was this launch."""
        if child.name in self._here and not self._ends.has_left(child):
            self._note_death(child, self._ends.how(child).partition(": ")[0], by=by)

    # Ending.

    def _end_all(self) -> None:
        """Ends all remaining processes, the coordinator last."""
        at_once = len(self._interrupts) > 1
        for child in self._replicas() if not at_once else ():
            child.terminate()
        deadline = time.monotonic() + _LEAVE_S
        for child in sorted(self._children.values(), key=lambda child: child.name == COORDINATOR):
            if child.name == COORDINATOR and not at_once:
                child.terminate()
            while child.process.poll() is None and len(self._interrupts) < 2 and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            child.end(0.0)
        self._follow()
        for child in self._replicas():
            by = killer(self._interrupts, child, _LEAVE_S)
            self._ends.take(child, by=by)
            self._note_lost(child, by=by)
        if self._interrupts and not self._plan.join:
            at, story, saved = self._interrupts.at, self._story, self._saved()
            more = {"planned": story.inner_steps, "checkpoint": saved and str(saved.path)}
            self._events(interruption(self._interrupts, at, self._asked, **more, **self._others.told()))
        for output in self._outputs.values():
            output.more(last=True)

    def _saved(self) -> Saved | None:
        return newest_saved(map(self._ends.said, self._numbers))
