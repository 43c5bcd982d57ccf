"""Resources of a job's processes, compared at equal moments: sizes at calm moments, from the first to the last quarter.

A process group, its threads and its connections are rebuilt with every fault, and are one fewer while a replica is
away: the resources of a process can be compared only between two moments at which the job is in the same condition.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sync.processes.job import TinyJob

QUIET_S = 4.0
"""Calm begins so long after the last trouble: a dropped process group is gone after 2.5 s at most (Gloo's time-out)."""
ROUNDS = 3
"""Calm needs so many outer steps of all replicas after the trouble, so that their process group stands again."""
TROUBLE = {
    "fault",
    "death",
    "join",
    "return",
    "lost",
    "gone",
    "stalled",
    "disconnected",
    "recover",
    "reset",
    "rollback",
}
TROUBLE |= {"abort", "mismatch", "evicted", "diverged", "damaged", "repaired", "outlier", "discarded", "fork"}
TROUBLE |= {"fetch", "fetched", "fetch_failed", "serve"}
"""Events after which the job does not stand as it does without faults."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a process holds."""

    threads: int
    fds: int
    sockets: int
    rss_mib: float


WHAT = tuple(Sizes.__dataclass_fields__)


def sizes_of(pid: int) -> Sizes | None:
    """A process' sizes, None when it is gone."""
    folder = Path(f"/proc/{pid}")
    links = []
    try:
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        for fd in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(str(fd.readlink()))
        rss_kib = int(status["VmRSS"].split()[0])
    except (OSError, KeyError):
        return None
    return Sizes(int(status["Threads"]), len(links), sum(x.startswith("socket:") for x in links), rss_kib / 1024)


@dataclass(frozen=True, slots=True)
class Growth:
    """One size of one process.

    Args:
        process: its name.
        what: the size.
        moments: calm moments at which it was looked at.
        first: median of the first quarter of them.
        last: median of the last quarter.
        most: ever, calm or not.
    """

    process: str
    what: str
    moments: int
    first: float
    last: float
    most: float


class Calm:
    """Whether the job stands as it does without faults, by its events.

    Args:
        names: all replicas.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)
        self._since_s = 0.0
        self._rounds = 0

    def trouble(self, until_s: float) -> None:
        """There is trouble until ``until_s``, in the events' time."""
        self._since_s = max(self._since_s, until_s)
        self._rounds = 0

    def hear(self, event: Mapping[str, Any]) -> None:
        """The next event."""
        if event["event"] in TROUBLE:
            self.trouble(event["t_s"] + (event.get("data", {}).get("for_s") or 0.0))
        elif event["event"] == "decide" and event["t_s"] > self._since_s:
            everybody = {member[0] for member in event["data"]["members"]} == self._names
            self._rounds = self._rounds + 1 if everybody else 0

    def is_calm(self, now_s: float) -> bool:
        """Whether it is at ``now_s``, in the events' time."""
        return self._rounds >= ROUNDS and now_s > self._since_s + QUIET_S


class Meter:
    """Samples of every process of ``job``."""

    def __init__(self, job: TinyJob) -> None:
        self._job = job
        self._samples: dict[tuple[str, int], list[tuple[float, bool, Sizes]]] = defaultdict(list)

    def look(self, now_s: float, *, calm: bool) -> None:
        """One sample of each living process."""
        for name, process in self._job.processes.items():
            if process.pid is not None and (sizes := sizes_of(process.pid)) is not None:
                self._samples[name, process.pid].append((now_s, calm, sizes))

    def growth(self, *, born_s: float, warm_s: float) -> list[Growth]:
        """Of the processes that lived from ``born_s`` to the end, without their first ``warm_s`` seconds."""
        end_s = max(samples[-1][0] for samples in self._samples.values())
        lines = []
        for (name, _), samples in sorted(self._samples.items()):
            if samples[0][0] > born_s or samples[-1][0] < end_s:
                continue
            calm = [sizes for at_s, calm, sizes in samples if calm and at_s >= samples[0][0] + warm_s]
            quarter = len(calm) // 4
            for what in WHAT if quarter else ():
                first, last = ([getattr(s, what) for s in part] for part in (calm[:quarter], calm[-quarter:]))
                most = max(getattr(s, what) for _, _, s in samples)
                lines.append(Growth(name, what, len(calm), statistics.median(first), statistics.median(last), most))
        return lines
