"""``ftopt status URL``: shows members, versions and rounds; as tables, or as JSON for programs."""

from __future__ import annotations

import argparse
import http.client
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from ftopt.cli.net import add_ca, add_token, tls_of, token_of
from ftopt.cli.output import say
from ftopt.errors import Unreachable, UserError
from ftopt.net.tls import why_not
from ftopt.net.token import authorization

_TIMEOUT_S = 5.0
_FRAGMENTS_SHOWN = 4


_COLUMNS = """\
what is shown of each fragment (a part of the model that is averaged by itself; usually there is one):
  version      outer steps that are committed
  round        what the next one is at: replicas that have proposed, or are reducing
  attempts     reductions so far; aborted: of these, those that failed and were repeated

and of each replica:
  state        training; waiting (for its peers, in an outer step); fetching (the job's state); evaluating, ...;
               out_of_units (its data are used up); stalled (its training thread takes no step); away (not connected)
  incarnation  how often it has begun anew under its id
  inner step   its own, s/step: how long one takes
  version      what it holds of each fragment
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _COLUMNS, argparse.RawDescriptionHelpFormatter
    parser.add_argument("url", metavar="URL", help="the coordinator's address, e.g. http://head:29400")
    parser.add_argument("--job", metavar="NAME", help="show only this job (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_token(parser)
    add_ca(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks the coordinator and prints its answer."""
    url = arguments.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UserError(
            f"{arguments.url!r} is not an address; write http://HOST:PORT, as `ftopt coordinator` prints it"
        )
    jobs = _ask(url, arguments)
    if arguments.job is not None:
        names = [job["job"] for job in jobs]
        jobs = [job for job in jobs if job["job"] == arguments.job]
        if not jobs:
            known = f"its jobs: {', '.join(map(_shown, names))}" if names else "it has no jobs yet"
            raise UserError(f"job {arguments.job!r} is not known at {url}; {known}")
    if arguments.json:
        say(json.dumps({"jobs": jobs}, indent=2))
    else:
        say("\n\n".join(map(describe, jobs)) or "no jobs yet; a job starts when its first replica connects")
    return 0


def _ask(url: str, arguments: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Returns the jobs of the coordinator at ``url``; raises `UserError` or `Unreachable`."""
    request = urllib.request.Request(f"{url}/status", headers=authorization(token_of(arguments)))
    context = tls_of(arguments).client() if url.startswith("https://") else None
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as got:
            answer = got.read()
    except urllib.error.HTTPError as error:
        refused = error.code in (401, 403)
        hint = "give the job's token: --token-file, or FTOPT_TOKEN" if refused else "is this an ftopt coordinator?"
        raise UserError(f"{url} answers {error.code} {_shown(error.reason)}; {hint}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(reason := getattr(error, "reason", None), ssl.SSLError):
            raise UserError(why_not(url, reason)) from error
        why = _shown(str(error).strip())
        raise Unreachable(
            f"no coordinator answers at {url} ({why}); start one with `ftopt coordinator`, or check the address"
        ) from error
    try:
        return list(json.loads(answer)["jobs"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{url} does not answer with a status; is this an ftopt coordinator?") from None


def describe(job: Mapping[str, Any]) -> str:
    """Returns one job's status as text: a line, a table of its fragments, a table of its replicas."""
    fragments = job["fragments"] if job["phase"] == "running" else []
    step = f", inner step {fragments[0]['inner_step']}" if fragments else ""
    parts = [_shown(f"job {job['job']}: {job['phase']}{step}")]
    if fragments:
        head = ["fragment", "version", "round", "attempts", "aborted"]
        parts.append(_table(head, [[number, *_fragment(x)] for number, x in enumerate(fragments)]))
    if job["replicas"]:
        head = ["replica", "state", "incarnation", "inner step", "s/step", "version"]
        parts.append(_table(head, [_replica(x) for x in job["replicas"]]))
    return "\n\n".join(parts)


def _fragment(x: Mapping[str, Any]) -> list[object]:
    doing = f"{len(x['proposed'])} proposed" if x["attempt"] is None else "reducing"
    return [x["version"], doing, x["attempts"], x["attempts_aborted"]]


def _replica(x: Mapping[str, Any]) -> list[object]:
    state = "stalled" if x["stalled"] else x["state"]
    step_s = f"{x['step_s']:.3g}" if x["step_s"] else "-"
    return [x["replica"], state, x["incarnation"], x["inner_step"], step_s, _versions(x["versions"])]


def _versions(held: Sequence[int | None]) -> str:
    """Returns the version of each fragment, "-" where unknown; of many fragments only the range."""
    known = [version for version in held if version is not None]
    if len(held) > _FRAGMENTS_SHOWN and known:
        return f"{min(known)} to {max(known)}"
    return " ".join("-" if version is None else str(version) for version in held[:_FRAGMENTS_SHOWN])


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table with columns as wide as their widest cell, numbers aligned right."""
    cells = [[_shown(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    columns = [f">{width}" if to_right else f"<{width}" for width, to_right in zip(widths, right, strict=True)]
    lines = ["  ".join(map(format, row, columns)) for row in [head, *cells]]
    return "\n".join(line.rstrip() for line in lines)


def _shown(text: str) -> str:
    """Replaces control characters: text that comes from replicas must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)
