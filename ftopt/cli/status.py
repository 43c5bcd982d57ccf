"""``ftopt status URL``: what the coordinator knows, as JSON."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request

from ftopt.cli.output import say
from ftopt.errors import Unreachable, UserError

_TIMEOUT_S = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    """URL [--token TOKEN]."""
    parser.add_argument("url", metavar="URL", help="the coordinator's address, e.g. http://head:29400")
    parser.add_argument("--token", help="the job's token (default: FTOPT_TOKEN, else none)")


def run(arguments: argparse.Namespace) -> int:
    """Asks and shows."""
    url = arguments.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{arguments.url!r} is no address; write http://HOST:PORT, as `ftopt coordinator` prints it")
    token = arguments.token or os.environ.get("FTOPT_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/status", headers=headers), timeout=_TIMEOUT_S
        ) as got:
            status = json.load(got)
    except urllib.error.HTTPError as error:
        hint = "give the job's --token" if error.code in (401, 403) else "is this an ftopt coordinator?"
        raise UserError(f"{url} answers {error.code} {error.reason}; {hint}") from error
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"no coordinator answers at {url} ({error}); start one with `ftopt coordinator`, or check the address"
        ) from error
    say(json.dumps(status, indent=2))
    return 0
