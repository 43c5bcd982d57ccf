"""``ftopt launch -n 4 train.py ...``: runs one's own script as the replicas of a job."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from ftopt.cli import report
from ftopt.cli.run import add_quiet, new_folder
from ftopt.cli.shared.keep import add_keep, keep
from ftopt.cli.shared.net import add_token, token_of
from ftopt.cli.shared.output import complain, say
from ftopt.cli.shared.parser import at_least
from ftopt.common.paths import near, user_path
from ftopt.errors import UserError
from ftopt.net.interfaces import host_in
from ftopt.run.status_of import ask, lets_in, token_at

if TYPE_CHECKING:
    from ftopt.watch.report.write import Report

_BIND = "127.0.0.1:0"
_EXIT = """\
Options come before SCRIPT; all that follows it is the script's.

The script finds the job in its environment: `ftopt.wrap` needs no group, and
`ftopt.connect()` no argument. Each replica has an id (FTOPT_REPLICA) and GPUs
(CUDA_VISIBLE_DEVICES) of its own.
The job starts when all N have joined, a minute after the first at the latest.

Ctrl-C or SIGTERM: the replicas contribute their steps and leave. A second one
ends everything at once.

exit status: 0 the job is done: a replica has come to the end of the script
             1 no replica came to the end, or the job refused one
             2 an option, the script or a file is wrong; nothing was started
             130 ended by Ctrl-C; 143 ended by SIGTERM
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.usage = "ftopt launch [options] SCRIPT [ARG ...]"
    parser.epilog, parser.formatter_class = _EXIT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("-n", type=at_least(1), default=1, metavar="N", help="number of replicas (default: 1)")
    text = "how often each replica that dies is started again (default: %(default)s)"
    parser.add_argument("--restarts", type=at_least(0), default=3, metavar="K", help=text)
    text = "processes of each replica, started by torchrun, which hold one model together (default: 1)"
    parser.add_argument("--ranks", type=at_least(1), default=1, metavar="R", help=text)
    text = "join the job of this coordinator, here or on another machine (default: start one)"
    parser.add_argument("--join", default="", metavar="URL", help=text)
    text = "address that the coordinator listens on; 0.0.0.0:29410 lets other machines in (default: this machine only)"
    parser.add_argument("--bind", default=_BIND, metavar="HOST:PORT", help=text)
    text = "the job's name (default: FTOPT_JOB, else default; with --join the coordinator's only job)"
    parser.add_argument("--job", metavar="NAME", help=text)
    text = "beginning of the replicas' ids (default: r, with --join HOST-r)"
    parser.add_argument("--ids", default="", metavar="PREFIX", help=text)
    add_token(parser)
    text = "folder of events, output and report, which with --join is in the first launch's folder instead "
    text += "(default: runs/<script>-<time>)"
    parser.add_argument("--folder", type=user_path, metavar="DIR", help=text)
    add_quiet(parser)
    add_keep(parser)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="what each replica runs")
    words = parser.add_argument("words", metavar="ARG", nargs=argparse.REMAINDER, help="the script's own arguments")
    words.required = False  # else the message about a missing SCRIPT names it


def run(arguments: argparse.Namespace) -> int:
    from ftopt.run.processes import Interrupted, RunFailed
    from ftopt.run.scripts.launch import Launch
    from ftopt.run.scripts.plan import Plan
    from ftopt.watch.folder import RunFolder

    token, job = token_of(arguments) or "", arguments.job or os.environ.get("FTOPT_JOB") or "default"
    if arguments.join:
        if not host_in(arguments.join):
            raise UserError(f"--join {arguments.join!r}; must be http://HOST:PORT, as the job's first launch says")
        url = arguments.join.rstrip("/")
        token = token or token_at(url) or ""
        running = [each["job"] for each in ask(url, token=token or None)]  # else each replica says what is wrong
        if not lets_in(url, token or None):
            raise UserError(
                f"{url} lets nobody join without its token; copy the file `token` of its folder to this machine, and "
                "give it with --token-file"
            )
        job = _job_to_join(url, running, arguments.job or os.environ.get("FTOPT_JOB"))
        if arguments.bind != _BIND:
            raise UserError("--bind is of the coordinator, and --join starts none; leave one of them out")
    plan = Plan(
        arguments.script,
        _words(arguments),
        module=arguments.module,
        n=arguments.n,
        ranks=arguments.ranks,
        job=job,
        restarts=arguments.restarts,
        join=arguments.join.rstrip("/"),
        ids=arguments.ids,
        bind=arguments.bind,
    )
    plan.check()
    folder = arguments.folder or new_folder(Path("runs"), Path(arguments.script).stem, setting="folder")
    status, why, launch = 0, "", Launch(plan, RunFolder(folder), token, say, quiet=arguments.quiet)
    say(f"folder: {near(folder)}")
    if given_on := [word for word in plan.words if word in ("-n", "--ranks", "--join")]:
        say(f"{' and '.join(given_on)} after {plan.script} {'is' if len(given_on) == 1 else 'are'} for the script; "
            f"options of ftopt launch stand before it: ftopt launch -n 2 {plan.script}")  # fmt: skip
    try:
        launch.run()
    except RunFailed as failed:
        why = str(failed)
        status = 128 + failed.number if isinstance(failed, Interrupted) else 1
    if launch.joined and not plan.join:
        files = RunFolder(folder)

        def told(written: Report) -> None:
            files.keep(written.summary)
            for sentence in written.story:
                say(textwrap.fill(sentence.replace("\u00a0", " "), get_terminal_size().columns))

        report.after(folder, "the job is done; " if not status else "", told)
    if why:
        complain(why)
    if arguments.keep and launch.began and not plan.join and status < 128:
        keep(launch.url, folder / "report.html")
    return status


def _words(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The script's own arguments, with the ``--`` among them that argparse leaves out."""
    given: list[str] = arguments.given
    for at in (at for at, word in enumerate(given) if word == arguments.script):
        rest = given[at + 1 :]
        dash = rest.index("--") if "--" in rest else len(rest)
        if arguments.words in (rest, rest[:dash] + rest[dash + 1 :]):
            return tuple(rest)
    return tuple(arguments.words)


def _job_to_join(url: str, running: Sequence[str], given: str | None) -> str:
    """The job that replicas of this launch join. UserError: the coordinator has several, or another one, and a second
    job would begin unasked."""
    if given is None and len(running) <= 1:
        return running[0] if running else "default"
    if given is not None and (given in running or not running):
        return given
    what = "give one of them with --job" if given is None else f"it has no job {given!r}; leave out --job, or give one"
    raise UserError(f"{url} runs {', '.join(running)}; {what}")
