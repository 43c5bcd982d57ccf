"""Protection that aiohttp's server lacks against strangers: no tracebacks in the log, no request without a path."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import ERROR


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drops the tracebacks of requests that are not valid HTTP (aiohttp answers them with a 4xx code)."""
    error = record.exc_info[1] if record.exc_info else None
    return getattr(error, "code", None) not in range(400, 500)


def quiet(name: str) -> logging.Logger:
    """Returns the logger ``name``, for an HTTP server; malformed requests cannot fill the disk by it."""
    logger = logging.getLogger(name)
    logger.addFilter(_is_worth_a_line)
    return logger


def guarded(runner: web.AppRunner) -> web.Server:
    """Returns the server of a runner that is set up, as a protocol factory.

    ``CONNECT`` with blanks for a path comes out of aiohttp's parser (3.14) without a URL, and ends the connection's
    task with an AttributeError; an ``Expect`` that is not UTF-8 ends it with a UnicodeEncodeError. Here these are
    requests like any other.
    """
    server = runner.server
    assert server is not None
    make = server.request_factory

    def request(message: Any, *rest: Any) -> Any:
        sound = message.url is not None and message.headers.get("Expect", "").isascii()
        return make(message if sound else ERROR, *rest)

    server.request_factory = request
    return server
