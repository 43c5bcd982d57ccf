"""What strikes a job from outside: a deck of faults, shuffled by the seed and dealt one after the other."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.broken import BROKEN
from benchmarks.chaos.hands import Hands
from benchmarks.chaos.jobs import Processes
from benchmarks.chaos.relay import CUTS
from ftopt.checkpoint.manifest import order
from ftopt.watch.jsonl import read_lines

MOST = 8
"""Replicas, at most."""
REPLACED = ("coordinator upgrade", "coordinator new")
"""Another coordinator has its place for some seconds."""
HELD = "all but one, which stops"
"""The only holder of the newest version stands still for less than ``evict_after_s``."""
DECK = {
    "kill": 5,
    "stop": 3,
    "stop long": 2,
    "stop till gone": 1,
    "term": 2,
    "int": 2,
    "join": 2,
    "twin": 1,
    "rolling": 1,
    "all but one": 1,
    "all": 1,
    "all, damaged checkpoint": 1,
    "coordinator kill": 2,
    "coordinator kill, no journal": 1,
    "coordinator kill, old journal": 1,
    "coordinator kill, damaged journal": 1,
    "coordinator stop": 2,
    "cut": 2,
    "cut long": 1,
    "cut half": 1,
    "all leave": 1,
    "all stop": 1,
    "everything": 1,
    "everything, no journal": 1,
    **dict.fromkeys(BROKEN, 1),
    HELD: 1,
    **dict.fromkeys(REPLACED, 1),
}
"""Kind -> cards of it."""
_REFUSED_S = 60.0
"""Until a process has found that it cannot use a file."""
_NOT_READ = (
    "nobody has asked to resume the checkpoint",
    "there is no checkpoint of it at hand",
    "it trains from the job's",
)
"""What a replica says that does not read a checkpoint: a new job starts, or others run one."""
_BETWEEN_S = 0.05
_ALONE_S = 8.0
"""Until the one that is left has made a version."""
_BACK_S = 4.0
"""In which those who were kept from each other can go on together."""
_TAKEN_S = 30.0
"""Until another coordinator has taken the place of the job's."""
RECOVERY_S = 1.5
"""A coordinator without its journal is left in peace for so long beyond ``recovery_s``."""


class Striker(Hands):
    """Deals the deck: the cards in ``kinds``, or all."""

    def __init__(self, job: Processes, *, kinds: Collection[str] = (), **how: Any) -> None:
        super().__init__(job, **how)
        self._kinds = kinds or DECK.keys()
        self._deck: list[str] = []

    def strike(self) -> None:
        """The next card."""
        if not self._deck:
            self._deck = [kind for kind, count in DECK.items() if kind in self._kinds for _ in range(count)]
            self.chance.shuffle(self._deck)
        kind = self._deck.pop()
        getattr(self, "_" + kind.replace(", ", "_").replace(" ", "_"))(kind)

    # Replicas.

    def _kill(self, kind: str) -> None:
        if (run := self._one()) is not None:
            self._end(run, kind, back_s=self.chance.uniform(0.2, 2.0))

    def _term(self, kind: str) -> None:
        if (run := self._one()) is not None:
            self._end(run, kind, back_s=self.chance.uniform(0.5, 3.0))

    _int = _term

    def _stop(self, kind: str) -> None:
        self._freeze(kind, self.chance.uniform(0.2, 1.5))

    def _stop_long(self, kind: str) -> None:
        dead = self._job.options["policy"]["dead_after_s"]
        self._freeze(kind, dead * self.chance.uniform(1.2, 2.5))

    def _stop_till_gone(self, kind: str) -> None:
        self._freeze(kind, self._job.options["policy"]["evict_after_s"] + self.chance.uniform(1.0, 3.0))

    def _join(self, kind: str) -> None:
        if len(self._job.alive) < MOST:
            replica = f"r{self._joined}"
            self._joined += 1
            self._say(kind, replica)
            self._job.start(replica)

    def _twin(self, kind: str) -> None:
        """The same id once more; the first one is killed, or the second."""
        if (run := self._one()) is None:
            return
        self._say(kind, run.life.replica)
        twin = self._job.start(run.life.replica)
        victim = self.chance.choice((run, twin))
        for other in {run.life.number: run, twin.life.number: twin}.values():
            if other is not victim:
                self.twins.append(other)
        self._after(self.chance.uniform(1.0, 4.0), lambda: self._job.end(victim, "kill"))

    def _rolling(self, kind: str) -> None:
        """All, one after the other; each comes back before the next but one dies."""
        for run in [run for run in self._job.alive if not self._job.is_stopped(run)]:
            if run.alive:
                self._end(run, kind, how="kill", back_s=0.5)
                self._pause(self.chance.uniform(0.3, 1.0))

    def _all_but_one(self, kind: str) -> None:
        if (spared := self._one()) is not None:
            for run in self._job.alive:
                if run is not spared:
                    self._end(run, kind, how="kill", back_s=self.chance.uniform(0.5, 2.0))

    def _all_but_one_which_stops(self, kind: str) -> None:
        """All others are killed, the last one makes a version and stands still; somebody starts another process under
        its id, and the others again. It goes on in time, and nothing may be given up until then."""
        self._fetch_back()
        there = [run for run in self._job.alive if run.joined and not run.fate and not self._job.is_broken(run)]
        if self._job.coordinator_pid is None or not there:
            return
        self._job.signal(self._job.coordinator_pid, 18)
        holder = self.chance.choice(there)
        self._later = [x for x in self._later if x[1] in (self._job.start_coordinator,)]
        for run in self._job.alive:
            if run is not holder:
                self._say(kind, run.life.name)
                self._job.end(run, "kill")
        policy = self._job.options["policy"]
        for_s = self.chance.uniform(policy["dead_after_s"] + 1.0, min(20.0, policy["evict_after_s"] - 2.0))
        if self._makes_a_version():
            self._say(kind, holder.life.name, for_s=for_s, alone=True)
            self._job.stop(holder)
            self.twins.append(self._job.start(holder.life.replica))
        for i in range(self._replicas):
            if f"r{i}" != holder.life.replica:
                self._after(self.chance.uniform(0.0, for_s + 1.0), self._starts(f"r{i}"))
        self._pause(for_s)
        self._job.thaw(holder)
        self._pause(_BACK_S)

    def _makes_a_version(self) -> bool:
        """Whether the one that is left has."""
        events, until = self._job.folder / "run" / "events.jsonl", time.monotonic() + _ALONE_S
        before = len(read_lines(events))
        while time.monotonic() < until:
            self._pause(0.2)
            if any(e["event"] == "decide" for e in read_lines(events)[before:]):
                return True
        return False

    # Broken ones.

    def _broken(self, kind: str) -> None:
        """One at a time: its reductions fail, in one of the ways of that kind."""
        if any(map(self._job.is_broken, self._job.alive)):
            return
        if (run := self._one()) is not None and run.joined:
            how, for_s = self.chance.choice(BROKEN[kind]), self.chance.uniform(15.0, 40.0)
            self._say(kind, run.life.name, for_s=for_s, how=how)
            self._job.break_down(run, how)
            self._after(for_s, partial(self._job.repair, run))

    _broken_address = _broken_reduction = _broken_blame = _broken_values = _broken

    def _all(self, kind: str) -> None:
        """Everybody, at once; they come back and resume from the newest checkpoint."""
        self._come_back(self._everybody(kind))

    def _all_leave(self, kind: str) -> None:
        """Everybody is asked to leave, as before a maintenance; they come back, some before the last one has gone."""
        self._come_back(self._everybody(kind, "term"), within_s=4.0)

    def _everything(self, kind: str) -> None:
        """A power failure, with the journal on a disk."""
        names = self._everybody(kind)
        if self._job.coordinator_pid is not None:
            self._job.kill_coordinator()
            self._after(self.chance.uniform(0.0, 2.0), self._job.start_coordinator)
        self._come_back(names)

    def _everything_no_journal(self, kind: str) -> None:
        """Nobody knows of the job any more: the replicas must be told to resume."""
        if self._job.coordinator_pid is None:
            return
        names = self._everybody(kind)
        self._job.kill_coordinator()
        self._job.journal.unlink(missing_ok=True)
        self._job.start_coordinator()
        for replica in names:
            self._job.start(replica, resume=True)
        self._pause(self._job.options["policy"]["recovery_s"] + RECOVERY_S)

    def _all_stop(self, kind: str) -> None:
        """The machine sleeps, with all that runs on it; its processes go on one after the other."""
        for_s = self._job.options["policy"]["dead_after_s"] * self.chance.uniform(0.3, 2.0)
        for run in [run for run in self._job.alive if run.is_up and not self._job.is_stopped(run)]:
            self._freeze_one(run, kind, for_s + self.chance.uniform(0.0, 0.3))
        if (pid := self._job.coordinator_pid) is not None:
            self._stop_coordinator(pid, kind, for_s + self.chance.uniform(0.0, 0.3))

    def _all_damaged_checkpoint(self, kind: str) -> None:
        """The newest checkpoint has a flipped bit, or a file is cut off, or has gone: who finds that says so and ends.
        That checkpoint is removed; all resume from the other."""
        names = self._everybody(kind)
        found = _complete(self._job.folder / "checkpoints")
        if len(found) > 1:
            path = self.chance.choice(sorted(found[-1].glob("committed-*.safetensors")))
            self._damage(path, self.chance.choice(("flip", "cut", "remove")))
            first = self._job.start(names[0])
            until = time.monotonic() + _REFUSED_S
            while first.alive and time.monotonic() < until:
                self._pause(0.2)
            log = (self._job.folder / f"{first.life.name}.log").read_text()
            refused = first.process.exitcode == 2 and found[-1].name in log
            unread = f"resuming from {found[-1]}" not in log and any(text in log for text in _NOT_READ)
            if not refused and not unread:
                self.complaints.append(f"{first.life.name} did not refuse the damaged {path}")
            first.fate = "refused"
            self._job.end(first, "kill")
            shutil.rmtree(found[-1], ignore_errors=True)
        self._come_back(names)

    # The network.

    def _cut(self, kind: str) -> None:
        """Of one replica from the coordinator, silently in both directions or in one, or with connections reset."""
        self._cut_off(kind, 1, self.chance.uniform(0.2, 1.5), self.chance.choice(CUTS))

    def _cut_long(self, kind: str) -> None:
        dead = self._job.options["policy"]["dead_after_s"]
        self._cut_off(kind, 1, dead * self.chance.uniform(1.2, 2.5), self.chance.choice(CUTS))

    def _cut_half(self, kind: str) -> None:
        """All whose way is a link: about half of the replicas."""
        dead = self._job.options["policy"]["dead_after_s"]
        self._cut_off(kind, MOST, dead * self.chance.uniform(0.3, 2.0), self.chance.choice(CUTS))

    def _cut_off(self, kind: str, count: int, for_s: float, how: str) -> None:
        linked = [run for run in self._job.alive if run.is_up and run.link is not None and run.link not in self._cuts]
        for run in self.chance.sample(linked, min(count, len(linked))):
            assert run.link is not None
            self._say(kind, run.life.name, for_s=for_s, how=how)
            self._cuts.append(run.link)
            self._job.relays.cut(run.link, how)
            self._after(for_s, partial(self._mend, run.link))

    # The coordinator.

    def _coordinator_kill(self, kind: str) -> None:
        if self._job.coordinator_pid is not None:
            self._say(kind)
            self._job.kill_coordinator()
            self._after(self.chance.uniform(0.2, 3.0), self._job.start_coordinator)

    def _coordinator_kill_no_journal(self, kind: str) -> None:
        """Deleted, with everybody there, who is then left in peace: what is promised without a journal."""
        self._other_journal(kind, lambda: self._job.journal.unlink(missing_ok=True))

    def _coordinator_kill_old_journal(self, kind: str) -> None:
        """A copy of some seconds ago is in its place."""
        copy = self._job.folder / "copy"
        if self._job.journal.exists():
            shutil.copy(self._job.journal, copy)
            self._pause(self.chance.uniform(0.5, 4.0))
            self._other_journal(kind, lambda: copy.replace(self._job.journal))

    def _coordinator_kill_damaged_journal(self, kind: str) -> None:
        """The new coordinator says so and ends; the journal is moved away, and the next one starts without."""
        self._other_journal(kind, self._damage_journal)

    def _other_journal(self, kind: str, change: Callable[[], object]) -> None:
        if self._job.coordinator_pid is None:
            return
        self._fetch_back()
        self._pause(2.0)
        self._say(kind)
        self._job.kill_coordinator()
        change()
        self._pause(self.chance.uniform(0.2, 1.0))
        self._job.start_coordinator()
        self._pause(self._job.options["policy"]["recovery_s"] + RECOVERY_S)

    def _damage_journal(self) -> None:
        journal, log = self._job.journal, self._job.folder / "coordinator.log"
        if not journal.exists():  # the coordinator was killed before it had made one
            return
        self._damage(journal, "flip")
        told = log.stat().st_size
        self._job.start_coordinator()
        until = time.monotonic() + _REFUSED_S
        while self._job.coordinator_pid is not None and time.monotonic() < until:
            self._pause(0.2)
        if not self._job.refused or str(journal) not in log.read_text()[told:]:
            self.complaints.append(f"the coordinator did not refuse the damaged {journal}")
        if self._job.coordinator_pid is not None:
            self._job.kill_coordinator()
        journal.replace(self._job.folder / "damaged")

    def _coordinator_upgrade(self, kind: str) -> None:
        """One that speaks another protocol takes its place, on its journal or on a copy."""
        journal = self.chance.choice((self._job.journal, self._job.folder / "other"))
        if journal != self._job.journal and self._job.journal.exists():
            shutil.copy(self._job.journal, journal)
        self._replaced(kind, "protocol", journal)

    def _coordinator_new(self, kind: str) -> None:
        """One that was started with ``--new`` takes its place, without a journal, and a stranger comes first."""
        (journal := self._job.folder / "other").unlink(missing_ok=True)
        self._replaced(kind, "job", journal)

    def _replaced(self, kind: str, how: str, journal: Path) -> None:
        """For some seconds, in which nobody is started: who is not in yet would be turned away. Then the right one is
        back, with its journal."""
        if self._job.coordinator_pid is None:
            return
        self._fetch_back()
        if self._all_in() and self._job.coordinator_pid is not None:
            began, stays_s = time.time(), self.chance.uniform(2.0, 8.0)
            self._job.kill_coordinator()
            stopped = self._job.alive if how == "job" else []
            for run in stopped:
                self._job.stop(run)
            taken, until = self._job.start_other(how, journal=journal), time.monotonic() + _TAKEN_S
            while not taken.exists() and time.monotonic() < until:
                self._pause(_BETWEEN_S)
            if not taken.exists():
                self.complaints.append(f"{kind}: the other coordinator did not take the place")
            for run in stopped:
                self._job.thaw(run)
            self._pause(stays_s)
            self._tell({"at": began, "kind": kind, "who": "coordinator", "for_s": time.time() - began})
            self._job.kill_coordinator()
            self._job.start_coordinator()
        self._waits = False
        self._pause(_BACK_S)

    def _coordinator_stop(self, kind: str) -> None:
        if (pid := self._job.coordinator_pid) is not None:
            dead = self._job.options["policy"]["dead_after_s"]
            self._stop_coordinator(pid, kind, self.chance.choice((0.5, 1.0, 2.0)) * dead)

    def _stop_coordinator(self, pid: int, kind: str, for_s: float) -> None:
        self._say(kind, for_s=for_s)
        self._job.signal(pid, 19)
        self._after(for_s, lambda: self._job.signal(pid, 18))


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first: versions begin anew with each new start of the job."""
    return sorted((path.parent for path in folder.glob("*/manifest.json")), key=lambda path: order(path.name) or ())
