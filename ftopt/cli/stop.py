"""``ftopt stop``: ends jobs that run on this machine, as SIGTERM or Ctrl-C in their terminal does."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from ftopt.cli.shared.output import complain, say
from ftopt.common.plural import count
from ftopt.errors import UserError
from ftopt.run.local_jobs import NO_JOB_RUNS, LocalJob, is_stopping, local_jobs
from ftopt.run.status_of import serving, status_of

_PATIENCE_S = 90.0
"""Longer than `ftopt run` and `ftopt launch` wait for their replicas."""
_LOOK_S = 0.1
_ENDS = (
    "ends: its replicas contribute their steps and leave",
    "ends; replicas train on alone until it is started again",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The replicas contribute their steps and leave, which may take a minute."
    text = "the job's name or process, as `ftopt ps` shows it, or the beginning of its name (default: the only job)"
    parser.add_argument("names", metavar="NAME", nargs="*", help=text)
    parser.add_argument("--all", action="store_true", help="all jobs")
    parser.add_argument("--now", action="store_true", help="end the processes at once; replicas lose pending steps")


def run(arguments: argparse.Namespace) -> int:
    """Asks the commands to end, and waits until they have."""
    jobs = chosen(arguments.names, local_jobs(), everything=arguments.all)
    for job in jobs:
        stopping = is_stopping(job, now=True)
        for _ in range(2 if arguments.now else 0 if stopping else 1):  # a second signal would end it at once
            with suppress(ProcessLookupError):  # it has ended
                if job.lives():
                    os.kill(job.pid, signal.SIGTERM)
            time.sleep(_LOOK_S if arguments.now else 0.0)  # two signals at once would count as one
        ends = "ends at once" if arguments.now else _ENDS[job.kind == "coordinator"]
        say(f"{job.name} {'was asked before, and ' if stopping else ''}{ends}")
    until = time.monotonic() + _PATIENCE_S
    while (left := [job for job in jobs if job.lives()]) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for job in left:
        complain(f"{job.name} still runs {_PATIENCE_S:.0f} s later; `ftopt stop --now {job.name}` ends it at once")
    say(f"{count(len(jobs) - len(left), 'job')} ended")
    return 1 if left else 0


def _jobs_of(local: LocalJob) -> list[str]:
    """The names of the jobs that a command serves; none while it does not answer."""
    with suppress(UserError):
        return [str(each["job"]) for each in status_of(local)]
    return []


def chosen(names: Sequence[str], jobs: Sequence[LocalJob], *, everything: bool) -> list[LocalJob]:
    """The jobs with these names, each once. Raises UserError where a name fits none, or several."""
    known = ", ".join(job.name for job in jobs)
    if not jobs:
        raise UserError(NO_JOB_RUNS)
    if everything and names:
        raise UserError("give names or --all, but not both")
    if everything or (not names and len(jobs) == 1):
        return list(jobs)
    if not names:
        raise UserError(f"{len(jobs)} jobs run on this machine; name one, or give --all: {known}")
    found: dict[int, LocalJob] = {}
    for name in names:
        exact = [job for job in jobs if name in (job.name, str(job.pid))]
        served = [] if exact else serving(job for job in jobs if name in _jobs_of(job))
        fitting = exact or [job for job in jobs if name and (job.name.startswith(name) or job in served)]
        if len(fitting) != 1:
            what = "fits several jobs" if fitting else "is no job of yours on this machine"
            raise UserError(f"{name!r:.60} {what}; give one of {known}")
        found[fitting[0].pid] = fitting[0]
    return list(found.values())
