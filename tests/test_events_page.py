"""``docs/watching.md`` has a line for every event that is emitted, and every key of ``summary.json``."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from ftopt.watch.summary import summarize

PACKAGE = Path(__file__).resolve().parent.parent / "ftopt"
PAGE = PACKAGE.parent / "docs" / "watching.md"
EVENTS = PAGE.read_text(encoding="utf-8").partition("\n## Events")[2].partition("\n## summary.json")[0]
EMITTERS = {"emit", "Emit", "Event", "tell", "_tell", "_event"}
_CALL = re.compile(rf"({'|'.join(EMITTERS)})\(\s*[\"']")


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Event, file and call of each call that emits, whose first argument is a literal."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if _CALL.search(text) else ():
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in EMITTERS and isinstance(node.args[0].value, str):
                found.append((node.args[0].value, path.relative_to(PACKAGE).as_posix(), node))
    return found


def emitted() -> dict[str, str]:
    """Event -> a file that emits it."""
    return {name: file for name, file, _ in calls()}


def test_every_event_has_a_line() -> None:
    events = emitted()
    assert len(events) > 30
    assert {name: file for name, file in events.items() if f"`{name}`" not in EVENTS} == {}


def test_the_fields_of_an_event_are_in_its_line() -> None:
    missing = {}
    for name, _, call in calls():
        given = [each for keyword in call.keywords if keyword.arg == "data" for each in ast.walk(keyword.value)]
        keys = {
            key.value
            for each in given
            if isinstance(each, ast.Dict)
            for key in each.keys
            if isinstance(key, ast.Constant)
        }
        lines = "".join(line for line in EVENTS.splitlines() if f"`{name}`" in line)
        if left := {key for key in keys if f"`{key}`" not in lines}:
            missing[name] = left
    assert missing == {}


def test_every_key_of_the_summary_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("\n## summary.json")[2]
    assert [key for key in summarize([], {}) if f"`{key}`" not in page] == []
