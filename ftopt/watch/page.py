"""The live page that ``GET /`` answers: static HTML without any data, so that it needs no token itself.

Its CSS and JavaScript are inline, and the only ones that the Content-Security-Policy lets the browser run. Its data
come from ``GET /live``, with the token in the Authorization header.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """The page, and its HTTP headers."""
    names = ("page.html", "page.css", "losses.js", "page.js")
    html, css, *scripts = ((_ASSETS / name).read_text(encoding="utf-8") for name in names)
    script = "".join(scripts)
    policy = [
        "default-src 'none'",
        f"style-src {_source(css)}",
        f"script-src {_source(script)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    text = html.replace("/*CSS*/", css).replace("/*SCRIPT*/", script)
    return text.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
