"""``ftopt ps``: lists the jobs of this user that run on this machine."""

from __future__ import annotations

import argparse
import json
import textwrap
import time
from dataclasses import asdict
from shutil import get_terminal_size

from ftopt.cli.shared.output import say
from ftopt.common.plural import natural
from ftopt.errors import Unreachable, UserError
from ftopt.run.local_jobs import JOIN, NO_JOB_RUNS, LocalJob, local_jobs
from ftopt.run.status_of import status_of
from ftopt.watch.sentences import clock
from ftopt.watch.status import NO_JOBS, line

_PATIENCE_S = 1.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "It lists what `ftopt run`, `launch` and `coordinator` serve, and launches that have joined a job. "
        "`ftopt stop` ends one; `ftopt status` shows more."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints two lines or more for each command: what and where it is, and what its coordinator says of each job."""
    found = local_jobs()
    if arguments.json:
        say(json.dumps({"commands": [asdict(each) | {"replicas": each.replicas()} for each in found]}, indent=2))
        return 0
    for each in found:
        passed = clock(time.time() - each.began_s)
        say(f"{each.name}  {'joined ' if each.kind == JOIN else ''}{each.url}  (process {each.pid}, for {passed})")
        for text in [*_states(each), *processes(each)]:
            say(textwrap.fill(text, get_terminal_size().columns, initial_indent="  ", subsequent_indent="    "))
    if not found:
        say(NO_JOB_RUNS)
    return 0


def processes(each: LocalJob) -> list[str]:
    """A line that names the processes of a job's replicas on this machine; none if none is known."""
    found = sorted(each.replicas().items(), key=lambda item: natural(item[0]))
    return [f"processes: {', '.join(f'{replica} {pid}' for replica, pid in found)}"] if found else []


def _states(each: LocalJob) -> list[str]:
    try:
        return [line(job) for job in status_of(each, timeout_s=_PATIENCE_S)] or [NO_JOBS]
    except (UserError, Unreachable) as error:
        return [str(error)]
