"""What a coordinator says of its jobs: ``GET /status``, for code that blocks."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from ftopt.common.printable import printable
from ftopt.errors import Unreachable, UserError
from ftopt.net import direct
from ftopt.net.tls import find_tls, why_not
from ftopt.net.token import find_token
from ftopt.run.local_jobs import JOIN, LocalJob, local_jobs
from ftopt.watch.status import Job, describe

_TIMEOUT_S = 5.0
_MOST_BYTES = 256 << 20
"""Maximum size of an answer: another server at this address could send without end."""


def ask(
    url: str,
    *,
    token: str | None,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = _TIMEOUT_S,
    todo: str = "check the address",
) -> list[Job]:
    """Returns the jobs of the coordinator at ``url``. ``tls``: default that of the environment. ``todo``: advice for a
    user to whom no coordinator answers.

    Raises:
        UserError: it refuses, or is no coordinator.
        Unreachable: it does not answer within ``timeout_s``.
    """
    tls = tls or _tls(url)
    try:
        answer = direct.get(f"{url}/status", token=token, timeout_s=timeout_s, max_bytes=_MOST_BYTES, tls=tls)
    except urllib.error.HTTPError as error:
        if error.code == 403:
            text = error.read(1000).decode(errors="replace")
            raise UserError(f"{url} answers 403 {printable(text or error.reason)}") from error
        refused = error.code == 401
        wrong = "it does not accept this token; " if token is not None else ""
        give = f"{wrong}give the token that it was started with: --token-file FILE, or FTOPT_TOKEN"
        hint = give if refused else "is this an ftopt coordinator?"
        raise UserError(f"{url} answers {error.code} {printable(error.reason)}; {hint}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(reason := getattr(error, "reason", error), ssl.SSLError):
            raise UserError(why_not(url, reason)) from error
        why = printable(str(getattr(reason, "strerror", None) or error).strip())
        raise Unreachable(
            f"no coordinator answers at {url} ({why}); start one with `ftopt coordinator`, or {todo}"
        ) from error
    try:
        jobs = list(json.loads(answer)["jobs"])
        for job in jobs:
            describe(job)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        what = "is this an ftopt coordinator? Of this version?"
        raise UserError(f"{url} does not answer with a status; {what}") from None
    return jobs


def _tls(url: str) -> ssl.SSLContext | None:
    return find_tls().client() if url.startswith("https://") else None


def lets_in(url: str, token: str | None) -> bool:
    """Whether a replica may join with ``token``: a coordinator may show its status without one."""
    try:
        direct.get(f"{url}/connect", token=token, timeout_s=_TIMEOUT_S, max_bytes=_MOST_BYTES, tls=_tls(url))
    except urllib.error.HTTPError as error:
        return error.code != 401
    except (OSError, ValueError, http.client.HTTPException):
        return True  # the replicas say what is wrong
    return True


def token_at(url: str) -> str | None:
    """The token of this user's own job that has announced this address and still runs; None: there is no such job, or
    it has none. At another address of this machine, the same port may be somebody else's."""
    for job in local_jobs():
        if job.token_file is not None and _place(job.url) == _place(url):
            return find_token(file=Path(job.token_file))
    return None


def _place(url: str) -> tuple[str, str | None, int | None]:
    at = urlsplit(url)
    here = at.hostname in ("localhost", "0.0.0.0", "::")
    return at.scheme, "127.0.0.1" if here else at.hostname, at.port


def status_of(local: LocalJob, *, token: str | None = None, timeout_s: float = _TIMEOUT_S) -> list[Job]:
    """The jobs that a command of this machine serves; raises as `ask` does. ``token``: default that of the command's
    file, else the environment's."""
    if token is None or local.token_file is not None:
        token = find_token(file=None if local.token_file is None else Path(local.token_file))
    return ask(local.url, token=token, timeout_s=timeout_s)


def serving(jobs: Iterable[LocalJob]) -> list[LocalJob]:
    """The commands that serve jobs. Of launches that have joined a job they keep one where nobody here serves it."""
    found: dict[object, LocalJob] = {}
    for job in sorted(jobs, key=lambda job: job.kind == JOIN):
        found.setdefault(_place(job.url), job)
    return list(found.values())
