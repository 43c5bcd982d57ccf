"""``ftopt coordinator``: runs the process that forms quorums and decides outer steps."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ftopt.cli.shared.net import add_certificate, add_file, add_token, tls_of, token_of
from ftopt.cli.shared.output import say
from ftopt.cli.shared.parser import at_least
from ftopt.common.paths import user_path
from ftopt.errors import UserError
from ftopt.events import OnEvent, Subscribers, ignore
from ftopt.run.local_jobs import Announcement, announce

if TYPE_CHECKING:
    from ftopt.sync.server.coordinator import CoordinatorServer

_REPLICAS_LEAVE_S = 5.0
"""Delay after the runner was killed: all notice at once, but the replicas need the coordinator in order to leave."""


def add(parser: argparse.ArgumentParser) -> None:
    text = "address to listen on (default: %(default)s)"
    parser.add_argument("--bind", default="127.0.0.1:29410", metavar="HOST:PORT", help=text)
    add_file(parser, "--journal", "journal of all decisions, to restart from (default: none)")
    text = "all jobs are new: start each as soon as its replicas are connected, and wait for no others that may live"
    parser.add_argument("--new", action="store_true", help=text)
    text = "replicas that each new job waits for before its first step (default: none but the first)"
    parser.add_argument("--start-replicas", type=at_least(1), metavar="N", help=text)
    add_token(parser)
    add_certificate(parser)
    parser.add_argument(
        "--open-status", action="store_true", help="show the jobs without the token: /status, /metrics, the live page"
    )
    text = "write events.jsonl to this folder, for a report of each job (`ftopt report`; default: no events)"
    parser.add_argument("--folder", type=user_path, metavar="DIR", help=text)
    marks = "< messages that come, > that are sent, ! events, # what goes to disk, = what a round waits for"
    add_file(parser, "--trace", f"write to this file, to see why a job waits: {marks} (default: none)")
    text = "show errors, but no line for each replica that comes or goes"
    parser.add_argument("--quiet", "-q", action="store_true", help=text)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--faults", default="[]", help=argparse.SUPPRESS)
    parser.add_argument("--life", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    from ftopt.sync.server.address import parse_address
    from ftopt.sync.server.coordinator import CoordinatorServer
    from ftopt.sync.server.trace import Trace
    from ftopt.watch.narrator import JobsLog
    from ftopt.watch.terminal import PlainLines

    trace = None if arguments.trace is None else Trace(arguments.trace)
    on_event, made = _subscribers(arguments)
    log = None if arguments.supervised else JobsLog(PlainLines(say, quiet=arguments.quiet, dated=True))
    host, port = parse_address(arguments.bind)
    server = CoordinatorServer(
        host,
        port,
        journal=arguments.journal,
        new=arguments.new,
        start_replicas=arguments.start_replicas,
        token=token_of(arguments),
        tls=tls_of(arguments).server(),
        open_status=arguments.open_status,
        trace=trace,
        on_event=on_event if log is None else Subscribers([on_event, log]),
    )
    if made is not None:
        made(server)
    listed: list[Announcement] = []

    def supervised(url: str) -> None:
        from ftopt.run.supervised import finish_up, terminate_self

        loop = asyncio.get_running_loop()
        over = finish_up(patience_s=15.0, heard=lambda replica: loop.call_soon_threadsafe(server.give_up, replica))
        terminate_self(over, after_s=_REPLICAS_LEAVE_S)
        say(url)

    def ready(url: str) -> None:
        say(f"coordinator at {url} (open it in a browser, or run `ftopt status {url} --watch`; Ctrl-C stops it)")
        name = f"coordinator-{urlsplit(url).port}"
        listed.append(announce("coordinator", name, url, folder=arguments.folder, token_file=arguments.token_file))

    try:
        server.run(ready=supervised if arguments.supervised else ready)
    finally:
        for each in listed:
            each.close()
        if log is not None:
            log.close()
    return 0


def _subscribers(arguments: argparse.Namespace) -> tuple[OnEvent, Callable[[CoordinatorServer], None] | None]:
    """Makes the subscribers to events: the run's folder, and the faults that aim at this process (from ``ftopt run``).

    The second result, if any, is called with the server once it exists: a fault may cut it off.
    """
    if arguments.folder is None:
        return ignore, None
    from ftopt.run.fault_injector import FaultInjector
    from ftopt.run.fault_spec import Fault
    from ftopt.watch.folder import RunFolder
    from ftopt.watch.jsonl import EventLog, JsonLines

    folder = RunFolder(arguments.folder)
    try:
        folder.create()
        log = EventLog(JsonLines(folder.events, arguments.started or folder.began_s()))  # the start of its first life
    except OSError as error:
        raise UserError(f"{folder.path} (--folder): {error.strerror}; give a folder that can be written to") from error
    faults = [Fault(**fault) for fault in json.loads(arguments.faults)]
    injector = FaultInjector(faults, log, incarnation=arguments.life)

    def made(server: CoordinatorServer) -> None:
        injector.learn({"partition": lambda fault, event: server.cut(fault.for_s or 0.0)})

    return Subscribers([log, injector]), made
