"""What the others lose when a replica is killed or hangs, at each point of a round."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import ftopt
from benchmarks.speed.figures import REPETITIONS, Row, Spread
from ftopt.faults.spec import Fault
from tests.sync.processes import TinyJob, tiny_job

STEP_S = 0.02
SYNC = ftopt.Sync(
    grace_s=0.25, heartbeat_s=0.1, dead_after_s=1.0, start_s=60.0, recovery_s=5.0, forget_s=600.0, start_replicas=3
)
METHODS = {
    "blocking": ftopt.DiLoCo(sync_every=20),
    "delay": ftopt.StreamingDiLoCo(sync_every=44, delay=40, fragments=ftopt.Strided(n=1)),
}
CASES = {
    "killed in the inner phase": ("inner", "kill"),
    "killed in the reduction": ("reduce", "kill"),
    "killed after it": ("reduce.after", "kill"),
    "hangs in the inner phase": ("inner", "stop"),
    "hangs in the reduction": ("reduce", "stop"),
}
ABOUT = (
    "Three replicas, real processes, with inner steps of 20 ms and a round every 20 of them; *delay*: one every 44, "
    "its result taken up 40 steps (0.8 s) later. One is killed (SIGKILL) or hangs (SIGSTOP, heartbeats and all; "
    f"grace_s={SYNC.grace_s:g}, dead_after_s={SYNC.dead_after_s:g}), and comes back later. How long outer steps keep "
    "the training threads of the other two: *usual*, and in the rounds after the fault the longest and the second "
    "longest (it is to be paid for once); the worse of the two."
)
GOALS = {
    "kill, blocking, s": 0.3,
    "kill, delay, s": 0.02,
    "hang, blocking, s (grace_s, and two steps or half a second)": SYNC.grace_s + 0.5,
    "hang, delay, s": 0.02,
}
_HANGS_S = 3.0
_VICTIM = "r1"


DRAWN = "longest, s"


def run(quick: bool) -> list[Row]:
    """A row a case and method."""
    cases = dict(list(CASES.items())[1:4:2]) if quick else CASES
    return [
        row
        for method in list(METHODS)[: 1 if quick else None]
        for row in _measure(method, cases, 3 if quick else REPETITIONS)
    ]


def _measure(method: str, cases: dict[str, tuple[str, str]], repetitions: int) -> list[Row]:
    found: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    with (
        tempfile.TemporaryDirectory(prefix="ftopt-bench-") as folder,
        tiny_job(Path(folder), method=METHODS[method], sync=SYNC, steps=None, step_s=STEP_S) as job,
    ):
        job.start_all()
        usual_s = _usual_s(job)
        for _ in range(repetitions):
            for case, (point, do) in cases.items():
                found[case].append(_strike(job, point, do))
        job.enough()
        lost = job.end()["survivor_inner_steps_lost"]
    rows: list[Row] = []
    for case, stalls in found.items():
        longest, second = zip(*stalls, strict=True)
        row = {"fault": case, "way": method, "usual, s": usual_s, "longest, s": Spread.of(longest)}
        rows.append({**row, "second, s": Spread.of(second), "inner steps lost": lost})
    return rows


def _usual_s(job: TinyJob) -> float:
    """Of ten rounds without a fault."""
    job.until("decide", count=12)
    return statistics.median(e["data"]["stall_s"] for e in job.events("stall"))


def _strike(job: TinyJob, point: str, do: str) -> tuple[float, float]:
    """One fault, and its end: the longest and the second longest stall of a survivor in the rounds after it."""
    count = len(job.events("fault", _VICTIM))
    job.order(_VICTIM, Fault(point=point, do=do, for_s=_HANGS_S if do == "stop" else None))
    struck = job.until("fault", _VICTIM, count=count + 1)
    others = [name for name in job.names if name != _VICTIM]
    third = job.after(struck, "decide", count=3)
    for name in others:
        job.after(third, "stall", name)
    stalls = [_longest(job, name, struck["t_s"]) for name in others]
    if do == "kill":
        job.died(_VICTIM)
        job.start(_VICTIM)
    since_s = job.events()[-1]["t_s"] if do == "kill" else struck["t_s"] + _HANGS_S
    job.wait_until(lambda: _together(job, since_s), "all three take part again")
    return max(s[0] for s in stalls), max(s[1] for s in stalls)


def _longest(job: TinyJob, name: str, since_s: float) -> tuple[float, float]:
    """Seconds that outer steps have kept one replica since then: the two longest."""
    second, longest = sorted(e["data"]["stall_s"] for e in job.events("stall", name) if e["t_s"] > since_s)[-2:]
    return longest, second


def _together(job: TinyJob, since_s: float) -> bool:
    members = [e["data"]["members"] for e in job.events("decide") if e["t_s"] > since_s]
    return any({m[0] for m in each if m[2] > 0} >= set(job.names) for each in members)
