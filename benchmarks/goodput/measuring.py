"""All ways in the same window: real jobs, on one schedule of failures."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ftopt
from benchmarks.goodput import account
from benchmarks.goodput.account import Account
from benchmarks.goodput.jobs import Job, OurJob, TorchftJob, play
from benchmarks.goodput.predicted import checkpoint_every
from benchmarks.goodput.restarting import RestartingJob
from benchmarks.goodput.schedule import Setting, deeds
from benchmarks.simulate.traces import Trace
from benchmarks.speed.theirjob import their_job
from benchmarks.speed.theirs import NoPeerError, TimeOuts
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines

BLOCKING, RESTART, TORCHFT = "ftopt, blocking", "checkpoint and restart", "torchft"


@dataclass(frozen=True)
class Window:
    """What was measured in one window.

    Args:
        accounts: by way.
        odd: by way, what happened that should not.
        late_s: how late a process was started or killed, at most.
        starts_s: from the start of a process of ftopt's to its `join`, without those that the job began with.
        stalls_s: of blocking rounds: how long each kept a training thread.
        step_s, spread: of an inner step of ftopt's, between two rounds.
        ddp_step_s: of one of DDP's, from the start of one to the start of the next.
        pauses_s: from a kill to DDP's next steps.
    """

    accounts: dict[str, Account]
    odd: dict[str, dict[str, int]]
    late_s: float
    starts_s: list[float]
    stalls_s: list[float]
    step_s: float
    spread: float
    ddp_step_s: float
    pauses_s: list[float]


def ways(setting: Setting) -> dict[str, Any]:
    """ftopt's, with their methods."""
    streaming = ftopt.StreamingDiLoCo(
        sync_every=setting.sync_every, delay=setting.delay, fragments=ftopt.fragments.Strided(n=1)
    )
    return {BLOCKING: ftopt.DiLoCo(sync_every=setting.sync_every), f"ftopt, delay {setting.delay}": streaming}


def policy_of(setting: Setting) -> ftopt.FaultPolicy:
    """As the simulation has it."""
    return ftopt.FaultPolicy(
        grace_s=setting.grace_s,
        dead_after_s=setting.dead_after_s,
        start_replicas=setting.machines,
        start_s=60.0,
    )


def measure(setting: Setting, trace: Trace, *, keep: Path | None = None, only: str | None = None) -> Window:
    """Plays ``trace`` on real jobs of all kinds at once.

    Args:
        setting: the jobs'.
        trace: the schedule.
        keep: a folder for the runs' files; default: a temporary one.
        only: one way of ftopt's; default: all ways of all systems.
    """
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ftopt-bench-")))
        mine: dict[str, OurJob] = {}
        for way, method in ways(setting).items():
            if only not in (None, way):
                continue
            place = folder / way.replace(", ", "-").replace(" ", "-")
            options = {"method": method, "policy": policy_of(setting), "step_s": setting.step_s}
            mine[way] = OurJob(place, replicas=setting.machines, **options)
            stack.callback(mine[way].close)
        jobs: dict[str, Job] = dict(mine)
        if only is None:
            jobs |= _torchft(stack, setting, folder)
            (folder / "ddp").mkdir()
            restart = RestartingJob(
                folder / "ddp", setting.machines, step_s=setting.step_s, start_s=setting.start_s,
                checkpoint_s=setting.checkpoint_s, every=checkpoint_every(setting),
            )  # fmt: skip
            stack.callback(restart.close)
            jobs[RESTART] = restart
        todo = deeds(trace, start_s=setting.start_s, notice_s=setting.notice_s)
        for job in jobs.values():  # one after the other: starts are no part of what is measured
            for deed in todo:
                if deed.at_s == todo[0].at_s:
                    job.start(deed.node)
            job.wait_ready()
        for job in mine.values():
            job.go.set()
        began = time.time() - setting.start_s
        late_s = play(todo, jobs, began_s=began, end_s=trace.end_s)
        over = time.time()
        for job in mine.values():
            job.finished()
        return _window(setting, trace, mine, jobs, began, over, late_s)


def _torchft(stack: ExitStack, setting: Setting, folder: Path) -> Mapping[str, TorchftJob]:
    times = TimeOuts(heartbeat_s=setting.dead_after_s, join_s=2.0, operation_s=3.0)
    (folder / "torchft").mkdir()
    with suppress(NoPeerError):
        job = stack.enter_context(
            their_job(
                folder / "torchft", replicas=setting.machines, sync_every=setting.sync_every, step_s=setting.step_s,
                times=times,
            )
        )  # fmt: skip
        return {TORCHFT: TorchftJob(job, setting.start_s)}
    return {}


def _window(
    setting: Setting,
    trace: Trace,
    mine: Mapping[str, OurJob],
    jobs: Mapping[str, Job],
    began: float,
    over: float,
    late_s: float,
) -> Window:
    steps = {way: steps_of(job) for way, job in mine.items()}
    step_s, spread = account.step_of(steps[BLOCKING], mine[BLOCKING].events())
    accounts = {way: account.ours(job.events(), steps[way], trace, step_s) for way, job in mine.items()}
    ddp_step_s, pauses_s = step_s, list[float]()
    for way, job in jobs.items():
        if isinstance(job, TorchftJob):
            lines = {
                name: [e for e in job.job.events(None, name) if e["t_s"] <= over - job.job.started]
                for name in job.job.names
            }
            trains_s = began - job.job.started + setting.start_s
            accounts[way] = account.torchft(lines, trace, step_s, since_s=trains_s, now_s=over - job.job.started)
        elif isinstance(job, RestartingJob):
            own, starts = read_lines(job.folder / "steps.jsonl"), read_lines(job.folder / "starts.jsonl")
            shift_s = began - job.started
            accounts[way] = account.restarting(
                own, starts, trace, began_s=shift_s, start_s=setting.start_s, step_s=step_s
            )
            ddp_step_s = account.median_gap(own)
            pauses_s = account.pauses_of(starts, job.kills)
    stalls = [e["data"]["stall_s"] for e in mine[BLOCKING].events("stall")]
    starts_s = [x for job in mine.values() for x in account.starts_of(job.events(), job.spawned)]
    odd = {way: {what: count for what, count in job.odd.items() if count} for way, job in jobs.items()}
    return Window(accounts, odd, late_s, starts_s, stalls, step_s, spread, ddp_step_s, pauses_s)


def steps_of(job: OurJob) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Replica -> the lines of its inner steps."""
    return {name: read_lines(RunFolder(job.folder).steps(name)) for name in job.names}
