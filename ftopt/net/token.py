"""The job's token: how it is read, how it is sent, and the one place where it is checked.

Replicas send the coordinator the token itself, and each other a key derived from it (`for_state`): an eavesdropper on a
plain connection between replicas gets nothing that the coordinator accepts.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from pathlib import Path

from ftopt.errors import UserError

_log = logging.getLogger(__name__)
MIN_CHARS = 16
"""A shorter token can be guessed over the network; ``openssl rand -hex 32`` makes one of 64 characters."""
MAX_CHARS = 1024  # sent in one HTTP header


def authorization(token: str | None) -> dict[str, str]:
    """Returns the HTTP headers that carry ``token``; none without one."""
    return {"Authorization": f"Bearer {token}"} if token is not None else {}


def admits(token: str | None, header: str) -> bool:
    """Whether the ``Authorization`` header of a request carries ``token``; without a token every request is admitted.

    The comparison takes constant time: it compares digests of equal length.
    """
    if token is None:
        return True
    shown = hashlib.sha256(header.encode("utf-8", "surrogatepass")).digest()
    return hmac.compare_digest(shown, hashlib.sha256(f"Bearer {token}".encode()).digest())


def for_state(token: str | None) -> str | None:
    """Returns the key that replicas send each other: HMAC-SHA256 of a fixed text under ``token``."""
    if token is None:
        return None
    return hmac.new(token.encode(), b"ftopt state transfer", hashlib.sha256).hexdigest()


def _checked(token: str, source: str) -> str:
    """Returns ``token`` if it is usable, else raises `UserError`. ``source`` says where it comes from."""
    if not token:
        raise UserError(
            f"{source} is empty; a token has {MIN_CHARS} to {MAX_CHARS} characters: `openssl rand -hex 32` makes one. "
            "To admit everybody, leave it unset"
        )
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(f"{source} contains blanks or non-ASCII characters; use letters and digits")
    if not MIN_CHARS <= len(token) <= MAX_CHARS:
        raise UserError(
            f"{source} has {len(token)} characters; {MIN_CHARS} to {MAX_CHARS} are allowed: `openssl rand -hex 32` "
            "makes one"
        )
    return token


def find_token(token: str | None = None, file: Path | None = None) -> str | None:
    """Returns the job's token: ``token``, else the first line of ``file``, else ``FTOPT_TOKEN``, else None. UserError:
    it is empty, too short, or the file cannot be read."""
    if token is not None:
        return _checked(token, "the token")
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise UserError(f"token file {file}: {reason}; give a file whose first line is the token") from None
        if file.stat().st_mode & stat.S_IROTH:
            _log.warning("token file %s can be read by all users of this machine; chmod 600 it", file)
        return _checked(lines[0].strip() if lines else "", f"token file {file}")
    given = os.environ.get("FTOPT_TOKEN")
    return None if given is None else _checked(given, "FTOPT_TOKEN")
