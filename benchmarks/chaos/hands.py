"""What strikes a job from outside is made of: who is struck, when it goes on, and what is due later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.jobs import Processes, Run
from benchmarks.chaos.relay import Link

_LATER_S = 0.3
_JOINED_S = 20.0
"""Until a process that was started has joined."""


class Hands:
    """Strikes processes, and lets them go on.

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
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._cuts: list[Link] = []
        self._joined = replicas
        self._waits = False
        self.twins: list[Run] = []
        self.complaints: list[str] = []

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
        for run in self._job.runs:
            self._job.repair(run)
        for run in self.twins:
            if run.alive:
                self._job.end(run, "kill")

    def _one(self) -> Run | None:
        there = [run for run in self._job.alive if run.is_up and not self._job.is_stopped(run) and not run.fate]
        return self.chance.choice(there) if there else None

    def _end(self, run: Run, kind: str, *, back_s: float, how: str = "") -> None:
        self._say(kind, run.life.name)
        self._job.end(run, how or kind)
        self._after(back_s, self._starts(run.life.replica))

    def _starts(self, replica: str) -> Callable[[], object]:
        def start() -> None:
            if self._waits:
                self._after(_LATER_S, start)
            else:
                self._job.start(replica)

        return start

    def _all_in(self) -> bool:
        """Waits until whoever lives has joined; from then on nobody is started. Whether all have."""
        self._waits = True
        until = time.monotonic() + _JOINED_S
        while not all(run.joined for run in self._job.alive) and time.monotonic() < until:
            self._pause(_LATER_S)
        return all(run.joined for run in self._job.alive)

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

    def _mend(self, link: Link) -> None:
        if link in self._cuts:
            self._cuts.remove(link)
            self._job.relays.mend(link)

    def _after(self, seconds: float, call: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, call))

    def _say(self, kind: str, who: str = "coordinator", **data: Any) -> None:
        self._tell({"at": time.time(), "kind": kind, "who": who, **data})
