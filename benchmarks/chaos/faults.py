"""What strikes a job from outside: a deck of faults, shuffled by the seed and dealt one after the other."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.jobs import Processes, Run
from benchmarks.chaos.relay import CUTS, Link
from ftopt.checkpoint.manifest import order

MOST = 8
"""Replicas, at most."""
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
}
"""Kind -> cards of it."""
_REFUSED_S = 60.0
"""Until a process has found that it cannot use a file."""
RECOVERY_S = 1.5
"""A coordinator without its journal is left in peace for so long beyond ``recovery_s``."""


class Striker:
    """Deals the deck.

    Args:
        job: what is struck.
        seed: of all that is drawn.
        replicas: how many there should be.
        pause: waits so many seconds while the campaign goes on looking.
        tell: gets each fault.
    """

    def __init__(
        self,
        job: Processes,
        *,
        seed: int | str,
        replicas: int,
        pause: Callable[[float], None],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._job, self._replicas, self._pause, self._tell = job, replicas, pause, tell
        self.chance = random.Random(seed)
        self._deck: list[str] = []
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._cuts: list[Link] = []
        self._joined = replicas
        self.twins: list[Run] = []
        self.complaints: list[str] = []

    def strike(self) -> None:
        """The next card."""
        if not self._deck:
            self._deck = [kind for kind, count in DECK.items() for _ in range(count)]
            self.chance.shuffle(self._deck)
        kind = self._deck.pop()
        getattr(self, "_" + kind.replace(", ", "_").replace(" ", "_"))(kind)

    def tend(self) -> None:
        """Does what has become due."""
        now = time.monotonic()
        due = [call for at, call in self._later if at <= now]
        self._later = [x for x in self._later if x[0] > now]
        for call in due:
            call()

    def calm(self) -> None:
        """The faults are over: whoever is stopped goes on, whoever shall come back does; the coordinator is there."""
        later, self._later = self._later, []
        for _, call in later:
            call()
        self._connect()
        for run in self.twins:
            if run.alive:
                self._job.end(run, "kill")

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
        dead = self._job.options["sync"]["dead_after_s"]
        self._freeze(kind, dead * self.chance.uniform(1.2, 2.5))

    def _stop_till_gone(self, kind: str) -> None:
        self._freeze(kind, self._job.options["sync"]["gone_after_s"] + self.chance.uniform(1.0, 3.0))

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
        self._pause(self._job.options["sync"]["recovery_s"] + RECOVERY_S)

    def _all_stop(self, kind: str) -> None:
        """The machine sleeps, with all that runs on it; its processes go on one after the other."""
        for_s = self._job.options["sync"]["dead_after_s"] * self.chance.uniform(0.3, 2.0)
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
            if not refused and "nobody has asked to resume it" not in log:  # it is not this job's, and not read
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
        dead = self._job.options["sync"]["dead_after_s"]
        self._cut_off(kind, 1, dead * self.chance.uniform(1.2, 2.5), self.chance.choice(CUTS))

    def _cut_half(self, kind: str) -> None:
        """All whose way is a link: about half of the replicas."""
        dead = self._job.options["sync"]["dead_after_s"]
        self._cut_off(kind, MOST, dead * self.chance.uniform(0.3, 2.0), self.chance.choice(CUTS))

    def _cut_off(self, kind: str, count: int, for_s: float, how: str) -> None:
        linked = [run for run in self._job.alive if run.is_up and run.link is not None and run.link not in self._cuts]
        for run in self.chance.sample(linked, min(count, len(linked))):
            assert run.link is not None
            self._say(kind, run.life.name, for_s=for_s, how=how)
            self._cuts.append(run.link)
            self._job.relays.cut(run.link, how)
            self._after(for_s, partial(self._mend, run.link))

    def _mend(self, link: Link) -> None:
        if link in self._cuts:
            self._cuts.remove(link)
            self._job.relays.mend(link)

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
        self._pause(self._job.options["sync"]["recovery_s"] + RECOVERY_S)

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

    def _coordinator_stop(self, kind: str) -> None:
        if (pid := self._job.coordinator_pid) is not None:
            dead = self._job.options["sync"]["dead_after_s"]
            self._stop_coordinator(pid, kind, self.chance.choice((0.5, 1.0, 2.0)) * dead)

    def _stop_coordinator(self, pid: int, kind: str, for_s: float) -> None:
        self._say(kind, for_s=for_s)
        self._job.signal(pid, 19)
        self._after(for_s, lambda: self._job.signal(pid, 18))

    # Parts.

    def _one(self) -> Run | None:
        there = [run for run in self._job.alive if run.is_up and not self._job.is_stopped(run) and not run.fate]
        return self.chance.choice(there) if there else None

    def _end(self, run: Run, kind: str, *, back_s: float, how: str = "") -> None:
        self._say(kind, run.life.name)
        self._job.end(run, how or kind)
        self._after(back_s, self._starts(run.life.replica))

    def _starts(self, replica: str) -> Callable[[], object]:
        return lambda: self._job.start(replica)

    def _freeze(self, kind: str, for_s: float) -> None:
        if (run := self._one()) is not None:
            self._freeze_one(run, kind, for_s)

    def _freeze_one(self, run: Run, kind: str, for_s: float) -> None:
        self._say(kind, run.life.name, for_s=for_s)
        self._job.stop(run)
        self._after(for_s, lambda: self._job.thaw(run))

    def _everybody(self, kind: str, how: str = "kill") -> list[str]:
        """Ends all; the ids of those who come back."""
        self._later = [x for x in self._later if x[1] in (self._job.start_coordinator,)]
        self._connect()
        for run in self._job.alive:
            self._say(kind, run.life.name)
            self._job.thaw(run)
            self._job.end(run, how if run.is_up else "kill")
        if self._job.coordinator_pid is not None:
            self._job.signal(self._job.coordinator_pid, 18)
        return [f"r{i}" for i in range(self._replicas)]

    def _come_back(self, names: Sequence[str], within_s: float = 0.5) -> None:
        for replica in names:
            self._after(self.chance.uniform(0.0, within_s), self._starts(replica))
        self._pause(4.0)

    def _damage(self, path: Path, how: str) -> None:
        """A bit of its second half is flipped, or it is cut off there, or removed."""
        data = bytearray(path.read_bytes())
        at = self.chance.randrange(len(data) // 2, len(data))
        data[at] ^= 0x40
        path.write_bytes(data[:at] if how == "cut" else data)
        if how == "remove":
            path.unlink()

    def _fetch_back(self) -> None:
        self._connect()
        for run in self._job.alive:
            self._job.thaw(run)

    def _connect(self) -> None:
        for link in list(self._cuts):
            self._mend(link)

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, call))

    def _say(self, kind: str, who: str = "coordinator", **data: Any) -> None:
        self._tell({"at": time.time(), "kind": kind, "who": who, **data})


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the oldest first: versions begin anew with each new start of the job."""
    return sorted((path.parent for path in folder.glob("*/manifest.json")), key=lambda path: order(path.name) or ())
