"""Gives each name of ``a, b: text`` in a docstring an entry of its own in the API reference: only so does it get its
type and default from the signature. An extension of griffe."""

from __future__ import annotations

import re
from typing import Any

import griffe

_TOGETHER = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +.*)*)", re.MULTILINE)


def split(text: str) -> str:
    """The docstring with an entry for each name."""
    return _TOGETHER.sub(lambda m: "\n".join(f"{m[1]}{name}{m[3]}" for name in m[2].split(", ")), text)


class SplitNames(griffe.Extension):
    """Splits the entries of all docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = split(obj.docstring.value)
