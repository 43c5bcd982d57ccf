"""A coordinator's address."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_in(url: str) -> str | None:
    """The host that ``url`` names; None: it is not ``http://HOST:PORT`` or ``https://HOST:PORT``."""
    try:
        parts = urlsplit(url)
        return parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # a port out of range, an unclosed bracket
        return None
