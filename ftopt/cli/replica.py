"""``ftopt replica RECIPE --coordinator URL``: runs one replica of a job; all its ranks, if the recipe says several."""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

from ftopt.cli.net import add_ca, add_certificate, add_token, tls_of, token_of
from ftopt.cli.validate import add as add_recipe
from ftopt.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--coordinator", metavar="URL", help="the coordinator's address (default: FTOPT_COORDINATOR)")
    parser.add_argument("--id", metavar="ID", help="this replica's id (default: FTOPT_REPLICA, else HOST-PID)")
    parser.add_argument("--job", metavar="NAME", help="the job's name (default: FTOPT_JOB, else the recipe's name)")
    default = "FTOPT_HOST, else that of the interface that reaches the coordinator"
    parser.add_argument("--host", metavar="ADDR", help=f"address where peers reach this machine (default: {default})")
    what = "network interface of payloads and states, as eth1, in the place of --host (default: FTOPT_INTERFACE)"
    parser.add_argument("--interface", metavar="NAME", help=what)
    add_token(parser)
    add_ca(parser)
    add_certificate(parser)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="the run's folder (default: <log.dir>/<name>-<ID>)")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Trains until the job ends; on SIGTERM or Ctrl-C leaves in good order."""
    from ftopt.config.loader import load
    from ftopt.job.launcher import launch, launches

    recipe = load(arguments.recipe, arguments.overrides)
    url = arguments.coordinator or os.environ.get("FTOPT_COORDINATOR")
    if not url:
        raise UserError(
            "no coordinator given; give --coordinator URL (`ftopt coordinator` prints it) or set FTOPT_COORDINATOR"
        )
    if launches(recipe.ranks):
        return launch(arguments.given, recipe.ranks)
    from ftopt.job.replica import run_replica

    replica = arguments.id or os.environ.get("FTOPT_REPLICA") or f"{socket.gethostname()}-{os.getpid()}"
    run_replica(
        recipe,
        url=url,
        replica=replica,
        job=arguments.job or os.environ.get("FTOPT_JOB") or recipe.name,
        token=token_of(arguments),
        tls=tls_of(arguments),
        host=arguments.host,
        interface=arguments.interface,
        folder=arguments.folder or Path(recipe.log.dir) / f"{recipe.name}-{replica}",
        started=arguments.started or time.time(),
        supervised=arguments.supervised,
    )
    return 0
