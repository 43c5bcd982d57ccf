"""HTTP requests to a coordinator for code that blocks.

Replicas connect to their coordinator directly, whatever proxy the environment names (``http_proxy``, ``all_proxy``).
`get` does the same, so that the token reaches the coordinator only.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from typing import IO

from ftopt.net.token import authorization


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the token to its target."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:  # fmt: skip
        """Returns None, so that the redirect is raised as an HTTPError."""


def get(
    url: str, *, token: str | None = None, timeout_s: float, max_bytes: int, tls: ssl.SSLContext | None = None
) -> bytes:
    """Returns the answer of the server at ``url``, ``max_bytes`` of it at most. urllib.error.HTTPError: the server
    answers with an error, or a redirect. OSError, ValueError, http.client.HTTPException: the server does not answer."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    request = urllib.request.Request(url, headers=authorization(token))
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
        got: bytes = answer.read(max_bytes)
        return got
