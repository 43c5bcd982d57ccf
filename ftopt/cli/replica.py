"""``ftopt replica RECIPE --coordinator URL``: runs one replica of a job; all its ranks, if the recipe says several."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftopt.cli.run import add_quiet, export_command, resume_command, tell_offline_wandb
from ftopt.cli.shared.net import add_ca, add_certificate, add_token, tls_of, token_of
from ftopt.cli.shared.output import complain, explain, loading, say, show_command
from ftopt.cli.validate import add as add_recipe
from ftopt.cli.validate import loaded
from ftopt.common.paths import near, user_path
from ftopt.config.shipped import check_words
from ftopt.errors import FtoptError, JobOver, UserError
from ftopt.net.interfaces import host_in
from ftopt.watch.account import closing_lines

if TYPE_CHECKING:
    from ftopt.config.schema import CheckpointConfig, Recipe
    from ftopt.run.replica_process import Result
    from ftopt.watch.narrator import Screen

_PATIENCE_S, _ORPHANED_S = 45.0, 10.0
"""How long a process of a run may take to leave after the run is over, and after its runner has died."""
_SHUTDOWN_S = 35
"""Longer than leaving in good order takes; torchrun then kills the rest."""
_WRONG = 2
"""Exit status of a rank that found the user's input wrong."""
_EXIT = """\
Ctrl-C or SIGTERM: the replica contributes its steps, saves the model, leaves,
and prints the commands with which to continue. A second one ends it at once.

A replica shown as "no step for 15 s" should train, and has taken no step for
that long.

exit status: 0 the job is done, or the replica has left in good order, or it is
               a spare (--standby) and the job has ended
             1 it failed, or its last checkpoint is not saved
             2 an option, the recipe or a file is wrong, no coordinator
               answered, or it refused this replica
             130, 143 ended by Ctrl-C, SIGTERM before it had joined, or by a
             second signal
"""


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    add_quiet(parser)
    parser.epilog, parser.formatter_class = _EXIT, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--coordinator", metavar="URL", help="the coordinator's address (default: FTOPT_COORDINATOR)")
    text = "this replica's id; give one that is the same after a restart (default: FTOPT_REPLICA, else HOST-PID)"
    parser.add_argument("--id", metavar="ID", help=text)
    parser.add_argument("--job", metavar="NAME", help="the job's name (default: FTOPT_JOB, else the recipe's name)")
    text = "FTOPT_HOST, else that of the interface that reaches the coordinator"
    parser.add_argument("--host", metavar="ADDR", help=f"address at which peers reach this machine (default: {text})")
    text = "network interface for payloads and states, e.g. eth1, instead of --host (default: FTOPT_INTERFACE)"
    parser.add_argument("--interface", metavar="NAME", help=text)
    add_token(parser)
    add_ca(parser)
    add_certificate(parser)
    text = "as a spare: hold the newest state, and begin to train when a replica is lost"
    parser.add_argument("--standby", action="store_true", help=text)
    text = "this replica's folder (default: <log.dir>/<name>-<ID>)"
    parser.add_argument("--folder", type=user_path, metavar="DIR", help=text)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Trains until the job ends; on SIGTERM or Ctrl-C contributes its steps and leaves."""
    check_words(arguments.recipe, arguments.overrides)
    url, token, tls = _url(arguments), token_of(arguments), tls_of(arguments)
    if arguments.host is not None and arguments.interface is not None:
        raise UserError(f"--host {arguments.host} and --interface {arguments.interface}; give one of them")
    replica = arguments.id or os.environ.get("FTOPT_REPLICA") or f"{socket.gethostname()}-{os.getpid()}"
    if "/" in replica or replica.startswith("."):
        raise UserError(f"--id {replica!r}; must be a name without /, not beginning with a dot, since it names files")
    from ftopt.config.loader import load

    silent = arguments.supervised or arguments.quiet
    with nullcontext() if silent else loading():
        read = load if arguments.supervised else loaded  # the runner has checked it
        recipe = read(arguments.recipe, arguments.overrides)
    if arguments.standby and recipe.checkpoint.resume is not None:
        raise UserError(
            f"--standby with checkpoint.resume={recipe.checkpoint.resume}; a spare takes the state of the replicas "
            "that train: leave out one of the two"
        )
    if _launches(recipe.ranks):
        return _launch(arguments.given, recipe.ranks)
    over = None
    if arguments.supervised:  # before any slow work: the runner may be killed during it
        from ftopt.run.supervised import finish_up, terminate_self

        over = finish_up(_PATIENCE_S, orphaned_s=_ORPHANED_S)
        terminate_self(over)
    with nullcontext() if silent else loading("loading what trains the model ..."):
        from ftopt.run.replica_process import run_replica

    screen = None if arguments.supervised else _screen(recipe, replica, arguments)
    try:
        result = run_replica(
            recipe,
            url=url,
            replica=replica,
            job=arguments.job or os.environ.get("FTOPT_JOB") or recipe.name,
            token=token,
            tls=tls,
            host=arguments.host,
            interface=arguments.interface,
            folder=arguments.folder or Path(recipe.log.dir) / f"{recipe.name}-{replica}",
            started=arguments.started or time.time(),
            over=over,
            screen=screen,
            standby=arguments.standby,
        )
    except JobOver as error:
        if _leads():
            say(f"replica {replica} has not trained: {error.reason}")
        return 0
    finally:
        if screen is not None:
            screen_off(screen)
    if result.files is not None:
        _tell(arguments, result, replica, recipe.checkpoint)
    if result.failed is not None:
        raise result.failed
    if result.files is not None and not result.saved:
        complain("the last checkpoint of this replica is not saved; the log says why")
        return 1
    return 0


def _url(arguments: argparse.Namespace) -> str:
    """The coordinator's address; raises UserError if it is missing or invalid."""
    url = arguments.coordinator or os.environ.get("FTOPT_COORDINATOR")
    if not url:
        raise UserError(
            "no coordinator given; give --coordinator URL (`ftopt coordinator` prints it) or set FTOPT_COORDINATOR"
        )
    if not host_in(url):
        given = f"--coordinator {url!r}" if arguments.coordinator else f"FTOPT_COORDINATOR={url!r}"
        raise UserError(f"{given} is not an address; write http://HOST:PORT, as `ftopt coordinator` prints it")
    return str(url)


def _leads() -> bool:
    """Whether this process represents its replica: rank 0, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def _screen(recipe: Recipe, replica: str, arguments: argparse.Namespace) -> Screen | None:
    """Shows this replica and ftopt's log messages instead of the log; None on ranks other than 0."""
    if not _leads():
        return None
    from ftopt.watch.narrator import Screen
    from ftopt.watch.story import Story
    from ftopt.watch.terminal import display_for

    quiet, name = arguments.quiet, f"{recipe.name} {replica}"
    view = Story(recipe.train.inner_steps, name=name, whole=False, standby=arguments.standby)
    screen = Screen(view, display_for(explain, quiet=quiet, dated=True))
    log = logging.getLogger("ftopt")
    log.addHandler(screen)
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.propagate = False
    return screen


def screen_off(screen: Screen) -> None:
    """Draws the rest; later messages go to standard error again."""
    log = logging.getLogger("ftopt")
    log.removeHandler(screen)
    log.propagate = True
    log.setLevel(logging.NOTSET)  # its default: the root logger's level
    screen.close()


_BY_ENVIRONMENT = ("coordinator", "job", "host", "interface", "ca", "cert", "key")
"""Options that ``FTOPT_<OPTION>`` can set, too."""


def _tell(arguments: argparse.Namespace, result: Result, replica: str, saving: CheckpointConfig) -> None:
    """Shows the accounting, and how to go on."""
    from ftopt.checkpoint.reader import Checkpoint, newest_in

    assert result.files is not None
    explain(f"folder: {near(result.files.path)}")
    lines = ["no figures: events.jsonl is not there"] if result.summary is None else closing_lines(result.summary)
    for line in lines:
        explain(line)
    tell_offline_wandb(result.files.path)
    words = ["ftopt", "replica", arguments.recipe]
    for option in ("coordinator", "job", "host", "interface", "token_file", "ca", "cert", "key", "folder"):
        other = os.environ.get(f"FTOPT_{option.upper()}") if option in _BY_ENVIRONMENT else None
        if value := getattr(arguments, option, None) or other:
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += ["--id", replica]
    shared = Path(saving.dir) if saving.dir is not None and saving.every > 0 else None
    newest = newest_in([*([shared] if shared is not None else []), result.files.checkpoints])
    if newest is not None:
        explain(f"checkpoint: {near(newest)}")
        with suppress(UserError):  # other replicas may delete old ones meanwhile
            saved = Checkpoint(newest).manifest
            if result.summary is not None and saved.inner_step < result.summary["inner_step"]:
                explain(f"it is of version {saved.version}, inner step {saved.inner_step}, and the job was further on")
        show_command("to get the model from it:", export_command(newest))
    elif shared is not None:
        explain(f"there is no complete checkpoint in {shared} (checkpoint.dir) yet")
    elif saving.every > 0:
        explain("this replica has saved no checkpoint: it has taken part in no outer step, or the log says why")
    if result.done:
        return
    kept = [override for override in arguments.overrides if not override.startswith("checkpoint.resume=")]
    if result.failed is None:
        show_command("to take part again while the job runs:", shlex.join([*words, *kept]))
    if newest is not None:
        command = resume_command(words, arguments.overrides, newest)
        when = "" if result.failed is not None else " when all replicas have left"
        unless = "if no other one has a newer checkpoint" if shared is None else f"if there is no newer one in {shared}"
        show_command(f"to resume the job{when}, {unless}:", command)


class RankDied(FtoptError):
    """A rank has died. Exit status 1."""


def _launches(ranks: int) -> bool:
    """Whether this process must start ``ranks`` ranks; not if it is one itself, by the environment that torchrun
    sets."""
    return ranks > 1 and "WORLD_SIZE" not in os.environ


def _launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs ``python -m ftopt`` with ``arguments`` as each of ``ranks`` ranks on this machine until they end, by
    torchrun in this process.

    torchrun restarts nothing here: when a rank dies, it ends the others, and this process ends. Its parent,
    `ftopt.run.runner` or a supervisor, decides whether to restart it, and each incarnation gets a key-value store of
    its own. SIGTERM, SIGINT, SIGHUP and SIGQUIT are passed on to the ranks, which leave in good order.

    Returns:
        The exit status: 0, or 2 if a rank has found the user's input wrong and has said so.

    Raises:
        RankDied: a rank has died, and the others were ended.
    """
    from torch.distributed import run as torchrun  # here, since it imports torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("torch.distributed.elastic", "torch.distributed.run"):  # they log each signal, and each exit status
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", f"--shutdown-timeout={_SHUTDOWN_S}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "ftopt", *arguments]))  # type: ignore[no-untyped-call]
    except SignalException:
        return 0
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        if _WRONG in statuses.values():
            return _WRONG
        raise RankDied(_describe(statuses, ranks)) from None
    return 0


def _describe(statuses: Mapping[int, int], ranks: int) -> str:
    """Describes the rank that was killed, if any: its loss made the others fail, and torchrun has sent them SIGTERM."""
    rank, status = min(statuses.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"rank {rank} of {ranks} has died ({how}), and the replica with it"
