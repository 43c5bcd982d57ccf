"""Private words stay out of pages, recipes, examples and the package: each has a usual one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.pages import PAGES, ROOT, named

USUAL = {
    r"likewise": "the same, also; or name it",
    r"such a one": "name it",
    r"in vain": "without an answer, without effect",
    r"to and fro": "back and forth",
    r"comes? to its end": "ends",
    r"(stands?|stood) still": "stops, waits, does not change",
    r"(is|are) told": "gets, learns, is called with",
    r"so many (bytes|steps|payloads|replicas|rounds)": "this many, or a number with its name",
    r"gives? way": "fails, yields",
    r"what is lost": "the loss, lost work",
    r"hand(s|ed)? in (its|their|the) steps": "contribute",
}
"""Pattern -> what to write instead."""
FILES = (
    *PAGES,
    *sorted((ROOT / "recipes").iterdir()),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "ftopt").rglob("*.py")),
)


def found(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for pattern, usual in USUAL.items():
            if re.search(rf"\b{pattern}\b", line, re.IGNORECASE):
                yield f"{named(path)}:{number}: {pattern}: write {usual}"


def test_no_private_words() -> None:
    assert [each for path in FILES if path.is_file() for each in found(path)] == []
