"""What the protocol alone costs: rounds with an empty payload, and heartbeats, from 3 to 2,000 replicas."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.speed.crew import coordinator
from benchmarks.speed.figures import QUICK_REPETITIONS, REPETITIONS, Row, Spread
from benchmarks.speed.orders import Crew, crew
from benchmarks.speed.swarm import swarm
from benchmarks.speed.theirs import NoPeerError, lighthouse

ABOUT = (
    "The time from a replica's proposal to its commit, with all replicas proposing as soon as they have the last "
    "commit: the real `ftopt coordinator` with a journal, real replica machines on real sockets, an empty payload. Up "
    "to 32 replicas have a process each; more share four. They and the coordinator share this machine's cores; the "
    "coordinator's own part is its CPU time (`/proc`). *heartbeats*: its CPU time while the replicas only send a "
    "heartbeat per second. *journal*: how much its file grows. *memory*: resident, at the end. torchft: its quorum and "
    "its vote (`start_quorum`, `should_commit`), also without a reduction."
)
GOALS = (
    "a round of 3 <= 2 ms, of 1,000 <= 250 ms; heartbeats of 2,000 <= 25 % of a core; "
    "ms per replica constant from 200 on"
)
ALONE = (3, 8, 32)
MANY = (200, 500, 1000, 2000)
_PROCESSES = 4


DRAWN = "round, ms"


def run(quick: bool) -> list[Row]:
    """A row a number of replicas, and one of torchft."""
    rows: list[Row] = []
    for replicas in (3, 200) if quick else (*ALONE, *MANY):
        rounds = max(1 if quick else 3, (30 if quick else 300) // replicas)
        repetitions = QUICK_REPETITIONS if quick else REPETITIONS
        rows += _measure(replicas, rounds, repetitions, watch_s=2.0 if quick else 15.0)
    return rows


def _measure(replicas: int, rounds: int, repetitions: int, *, watch_s: float) -> list[Row]:
    policy = ftopt.FaultPolicy(start_replicas=replicas, start_s=300.0, heartbeat_s=1.0, dead_after_s=60.0, grace_s=60.0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        before = _children()
        url = stack.enter_context(coordinator(folder))
        (pid,) = _children() - before
        ways = {"ftopt": stack.enter_context(swarm(url, replicas, min(replicas, _processes(replicas)), policy))}
        if replicas == ALONE[0] and (theirs := _torchft(stack, replicas)):
            ways["torchft"] = theirs
        taken: dict[str, list[list[float]]] = {way: [] for way in ways}
        used_s: list[float] = []
        grown: list[float] = []
        journal = folder / "journal.sqlite"
        for repetition in range(repetitions + 1):
            for way, members in ways.items():
                size, spent_s, found = journal.stat().st_size, cpu_s(pid), members.all(f"rounds {rounds}")
                if not repetition:
                    continue  # the first ones are thrown away
                taken[way].append(sorted(1000 * s for each in found for s in each["taken_s"]))
                if way == "ftopt":
                    used_s.append((cpu_s(pid) - spent_s) / rounds)
                    grown.append((journal.stat().st_size - size) / rounds)
        spent = {
            "coordinator's CPU, ms a round": 1000 * statistics.fmean(used_s),
            "a replica, ms": 1000 * statistics.fmean(used_s) / replicas,
            "heartbeats, % of a core": 100 * _idle_share(pid, watch_s),
            "journal, kB a round": statistics.median(grown) / 1000,  # not the mean: at times it is written anew
            "memory, MB": _resident_bytes(pid) / 1e6,
        }
    return [
        _row(way, replicas, times, spent if way == "ftopt" else dict.fromkeys(spent)) for way, times in taken.items()
    ]


def _row(way: str, replicas: int, times: list[list[float]], spent: Mapping[str, float | None]) -> Row:
    pooled = sorted(t for each in times for t in each)
    return {
        "replicas": replicas,
        "way": way,
        "round, ms": Spread.of([statistics.median(t) for t in times]),
        "p99, ms": pooled[int(0.99 * len(pooled))],
        **spent,
    }


def _processes(replicas: int) -> int:
    return replicas if replicas <= max(ALONE) else _PROCESSES


def _torchft(stack: ExitStack, replicas: int) -> Crew | None:
    """Its replica groups with their lighthouse; None where torchft is not installed."""
    try:
        house = stack.enter_context(lighthouse(replicas))
    except NoPeerError:
        return None
    arguments: list[Any] = [[rank, replicas, house] for rank in range(replicas)]
    return stack.enter_context(crew("benchmarks.speed.torchft_quorum", arguments))


def _idle_share(pid: int, watch_s: float) -> float:
    """Cores that the process uses while nothing is asked of it."""
    used_s, began = cpu_s(pid), time.monotonic()
    time.sleep(watch_s)
    return (cpu_s(pid) - used_s) / (time.monotonic() - began)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}
