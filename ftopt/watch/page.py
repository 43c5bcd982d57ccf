"""The page: live, as ``GET /`` answers it, without any data; or a report, with its data inlined.

Its CSS and JavaScript, and uPlot's, are inline; the Content-Security-Policy lets the browser run no others. The data
are JSON, which its script shows as text; the live page gets them from ``GET /live``, with the token in the
Authorization header.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parent / "assets"
_LAYOUT = "\n\t\N{NO-BREAK SPACE}"
MADE_BY = '<meta name="generator" content="ftopt report">'
"""Marks our own reports, so that only those are overwritten."""


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The live page, and its HTTP headers."""
    html, css, script = _parts()
    policy = [*_policy(css, script), "connect-src 'self'", "frame-ancestors 'none'"]
    return _filled(html, css, script).encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def report_page(data: Any, title: str) -> str:
    """The page with these data; it needs nothing else. ``data``: JSON values, see ``assets/report.js``."""
    html, css, script = _parts()
    policy = escape("; ".join(_policy(css, script)), quote=True)
    head = f'{MADE_BY}\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = html.replace("<!--HEAD-->", head).replace("<title>ftopt</title>", f"<title>{escape(title)}</title>")
    shown = _shown(data)
    # Nothing in the data can close the element that holds them.
    inlined = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    before, after = _filled(html, css, script).split('id="inlined">null<')
    said = "".join(f"<p>{escape(text)}</p>" for run in shown["runs"] for text in (run["name"], *run["story"]))
    return f'{before.replace("</noscript>", f"{said}</noscript>")}id="inlined">{inlined}<{after}'


def _shown(data: Any) -> Any:
    """``data`` without what a page should not hold: control characters, lone surrogates, changes of direction."""
    if isinstance(data, dict):
        return {name: _shown(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_shown(value) for value in data]
    if not isinstance(data, str) or data.isprintable():
        return data
    return "".join(x if x.isprintable() or x in _LAYOUT else "\N{REPLACEMENT CHARACTER}" for x in data)


@cache
def _parts() -> tuple[str, str, str]:
    html, *styles_and_scripts = (
        (_ASSETS / name).read_text(encoding="utf-8")
        for name in (
            "page.html", "uplot/uPlot.min.css", "page.css",
            "charts.js", "uplot/uPlot.iife.min.js", "report.js", "first.js", "page.js",
        )
    )  # fmt: skip
    return html, "".join(styles_and_scripts[:2]), "".join(styles_and_scripts[2:])


def _filled(html: str, css: str, script: str) -> str:
    return html.replace("/*CSS*/", css).replace("/*SCRIPT*/", script)


def _policy(css: str, script: str) -> list[str]:
    return [
        "default-src 'none'",
        f"style-src {_source(css)}",
        f"script-src {_source(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
