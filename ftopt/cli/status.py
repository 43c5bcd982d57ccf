"""``ftopt status URL``: shows members, versions and rounds, once or again and again: tables, or JSON for programs.

`ftopt.watch.status` makes the text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.util import find_spec

from ftopt.cli.ps import processes
from ftopt.cli.shared.net import add_ca, add_token, tls_of, token_of
from ftopt.cli.shared.output import complain, say
from ftopt.cli.stop import chosen
from ftopt.common.printable import printable
from ftopt.errors import Unreachable, UserError
from ftopt.run.local_jobs import LocalJob, local_jobs
from ftopt.run.status_of import ask, serving, status_of
from ftopt.watch.status import NO_JOBS, Job, describe, line, picture

_HERE = "http://127.0.0.1:29410"
"""The default address of `ftopt coordinator`."""
_pause = time.sleep
_EVERY_S = 2.0
_ALLOWED_S = (0.2, 3600.0)
_COLUMNS = """\
of each fragment (a part of the model that is averaged by itself; usually one):
  version      outer steps that are committed
  round        the next one: replicas that have proposed, or are reducing
  attempts     reductions since the coordinator started
  failed       of these, those that were repeated

of each replica:
  state        training
               waiting: for its peers, in an outer step
               fetching: the job's state
               standby: a spare
               out_of_units: its data are used up
               stalled: it takes no step, and outer steps are made without it
               slow: its steps take much longer than usual in the job
               connected: it waits until the job runs
               away: not connected
               evaluating, checkpointing, ...: as the script says
               with --watch also awaited: an outer step waits for it
  incarnation  which start under its id this is: 1 for the first
  inner step   its own; steps/s: its speed while it trains
  loss         the mean of its last steps, if the script reports one
  version      what it holds of each fragment
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _COLUMNS, argparse.RawDescriptionHelpFormatter
    text = (
        "the coordinator's address, e.g. http://head:29410, or the name or process of a job of this machine, as `ftopt "
        "ps` shows it (default: FTOPT_COORDINATOR, else this machine's jobs)"
    )
    parser.add_argument("url", metavar="URL", nargs="?", help=text)
    parser.add_argument("--job", metavar="NAME", help="show only this job (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs; with --watch a line per answer")
    text = "show it again every SECONDS (default: %(const)g), until Ctrl-C: in place on a terminal, else as lines"
    parser.add_argument("--watch", nargs="?", type=_seconds, const=_EVERY_S, metavar="SECONDS", help=text)
    add_token(parser)
    add_ca(parser)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; the address comes first: URL --watch 5") from None


def run(arguments: argparse.Namespace) -> int:
    """Asks the coordinators and prints their answers, once or repeatedly."""
    url = (arguments.url or os.environ.get("FTOPT_COORDINATOR") or "").rstrip("/")
    local = [] if url else serving(local_jobs())
    if url and not url.startswith(("http://", "https://")):
        try:
            local = chosen([url], local_jobs(), everything=False)
        except UserError as error:
            form = "http://HOST:PORT, as `ftopt coordinator` prints it"
            raise UserError(f"{url!r:.60} is not an address ({form}), and {error}") from None
    url = url or _HERE
    if (every_s := arguments.watch) is not None:
        if not _ALLOWED_S[0] <= every_s <= _ALLOWED_S[1]:
            raise UserError(f"--watch {every_s:g}; must be {_ALLOWED_S[0]:g} to {_ALLOWED_S[1]:g} seconds")
        where = ", ".join(job.name for job in local) or url
        return _watch(lambda: _jobs(url, local, arguments), every_s, where=where, as_json=arguments.json)
    jobs = _jobs(url, local, arguments)
    if arguments.json:
        say(json.dumps({"jobs": jobs}, indent=2))
    else:
        told = [*map(describe, jobs), *(text for each in local if len(local) == 1 for text in processes(each))]
        say("\n\n".join(told) if jobs else NO_JOBS)
    return 0


def _watch(look: Callable[[], list[Job]], every_s: float, *, where: str, as_json: bool) -> int:
    """Shows what ``look`` returns, until Ctrl-C. A mistake in the first answer ends it; later it keeps asking."""
    display: _Lines | _Screen = _JsonLines() if as_json else _Lines()
    try:
        jobs, trouble, answered_s = look(), "", time.time()
        if not as_json and sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and find_spec("rich"):
            display = _Screen(where, every_s)
        while True:
            display.show(jobs, f"no answer since {_clock(answered_s)}: {trouble}" if trouble else "")
            _pause(every_s)
            try:
                jobs, trouble, answered_s = look(), "", time.time()
            except (UserError, Unreachable) as error:
                trouble = str(error)
    except KeyboardInterrupt:
        return 0
    finally:
        display.close()


class _Lines:
    """Where ``--watch`` shows the jobs: a line per job and answer, for a log; two lines for a time without answers."""

    def __init__(self) -> None:
        self._troubled = False

    def show(self, jobs: list[Job], trouble: str) -> None:
        """``trouble``: since when and why no answer comes; else ""."""
        was, self._troubled = self._troubled, bool(trouble)
        if trouble:
            if not was:
                self._say(f"{trouble}; it asks again and again")
            return
        if was:
            self._say("the coordinator answers again")
        for text in map(line, jobs):
            self._say(text)
        if not jobs:
            self._say(NO_JOBS)

    def close(self) -> None:
        """Does nothing: there is nothing to restore."""

    def _say(self, text: str) -> None:
        say(f"{_clock(time.time())}  {text}")


class _JsonLines(_Lines):
    """For programs: one line of JSON per answer; everything else goes to standard error."""

    def show(self, jobs: list[Job], trouble: str) -> None:
        if not trouble:
            say(json.dumps({"jobs": jobs}))
        elif not self._troubled:
            complain(trouble)
        self._troubled = bool(trouble)


class _Screen:
    """A terminal, redrawn in place."""

    def __init__(self, where: str, every_s: float) -> None:
        from ftopt.watch.terminal import LiveText

        self._text = LiveText()
        self._where, self._every_s = where, every_s

    def show(self, jobs: list[Job], trouble: str) -> None:
        width, height = self._text.size
        head = f"{_clock(time.time())}  {self._where}, every {self._every_s:g} s; Ctrl-C ends this"
        above = textwrap.wrap(trouble or head, width, subsequent_indent="  ")
        self._text.show("\n".join([*above, "", picture(jobs, width, height - len(above) - 2)]))

    def close(self) -> None:
        self._text.close()


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _jobs(url: str, local: list[LocalJob], arguments: argparse.Namespace) -> list[Job]:
    """Returns the jobs that the user wants to see; raises `UserError` or `Unreachable`.

    Args:
        url: the coordinator to ask, if there are no ``local`` jobs.
        local: commands of this machine to ask; of several, each job has its command's name before its own.
    """
    token = token_of(arguments)
    if local:
        jobs = [
            {**job, "job": f"{each.name}/{job['job']}"} if len(local) > 1 else job
            for each in local
            for job in status_of(each, token=token)
        ]
    else:
        todo = "check the address" if arguments.url else "give its address: `ftopt status http://HOST:PORT`"
        tls = tls_of(arguments).client() if url.startswith("https://") else None
        jobs = ask(url, token=token, tls=tls, todo=todo)
    if arguments.job is None:
        return jobs
    names = [job["job"] for job in jobs]
    jobs = [job for job in jobs if arguments.job in (job["job"], str(job["job"]).rpartition("/")[2])]
    if not jobs:
        known = f"its jobs: {', '.join(map(printable, names))}" if names else "it has no jobs yet"
        where = "on this machine" if local else f"at {url}"
        raise UserError(f"job {arguments.job!r} is not known {where}; {known}")
    return jobs
