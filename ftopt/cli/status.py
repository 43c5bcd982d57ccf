"""``ftopt status URL``: what the coordinator knows, as JSON."""

from __future__ import annotations

import argparse
import json
import ssl
import urllib.error
import urllib.request

from ftopt.cli.doors import add_ca, add_token, tls_of, token_of
from ftopt.cli.output import say
from ftopt.doors.tls import why_not
from ftopt.doors.token import authorization
from ftopt.errors import Unreachable, UserError

_TIMEOUT_S = 5.0


def add(parser: argparse.ArgumentParser) -> None:
    """URL [--token-file FILE] [--ca FILE]."""
    parser.add_argument("url", metavar="URL", help="the coordinator's address, e.g. http://head:29400")
    add_token(parser)
    add_ca(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks and shows."""
    url = arguments.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{arguments.url!r} is no address; write http://HOST:PORT, as `ftopt coordinator` prints it")
    request = urllib.request.Request(f"{url}/status", headers=authorization(token_of(arguments)))
    context = tls_of(arguments).client() if url.startswith("https://") else None
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as got:
            status = json.load(got)
    except urllib.error.HTTPError as error:
        refused = error.code in (401, 403)
        hint = "give the job's token: --token-file, or FTOPT_TOKEN" if refused else "is this an ftopt coordinator?"
        raise UserError(f"{url} answers {error.code} {error.reason}; {hint}") from error
    except (OSError, ValueError) as error:
        if isinstance(reason := getattr(error, "reason", None), ssl.SSLError):
            raise UserError(why_not(url, reason)) from error
        raise Unreachable(
            f"no coordinator answers at {url} ({error}); start one with `ftopt coordinator`, or check the address"
        ) from error
    say(json.dumps(status, indent=2))
    return 0
