"""``--keep``: after the end of a run its report takes the place of the live page, until Ctrl-C."""

from __future__ import annotations

import argparse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from ftopt.cli.shared.output import explain
from ftopt.net.browsers import from_a_page

_HOST = "127.0.0.1"  # also if the coordinator let other machines in: the report asks for no token


def add_keep(parser: argparse.ArgumentParser) -> None:
    text = "after the end, show the report at the live page's address until Ctrl-C"
    parser.add_argument("--keep", action="store_true", help=text)


def keep(url: str, report: Path) -> None:
    """Serves the report at the port of the coordinator that was at ``url``. An open live page turns into it."""
    if not url or not report.is_file():
        return
    shown = report.read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_page = self.path.partition("?")[0] == "/"
            headers = {name.title(): value for name, value in self.headers.items()}
            status = 403 if from_a_page(headers, host=_HOST) else 200 if is_page else 410  # the page loads anew
            body = shown if status == 200 else b""
            self.send_response(status)
            for name, value in (("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    try:
        with ThreadingHTTPServer((_HOST, urlsplit(url).port or 0), Handler) as server:
            explain(f"the report is at http://{_HOST}:{server.server_port} until Ctrl-C (--keep)")
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    except OSError as error:
        explain(f"--keep: port {urlsplit(url).port}: {error.strerror}; the report is in {report}")
