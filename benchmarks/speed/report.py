"""Results on disk, and ``docs/performance.md`` from them: the tables are rewritten, the text around them stays."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.figures import Row, plain, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"


def place(name: str, *, quick: bool) -> Path:
    """Where a benchmark's JSON belongs, in a folder that is there; a quick one's beside the whole one's."""
    path = RESULTS / ("quick" if quick else "speed") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def keep(name: str, rows: Sequence[Row], facts: dict[str, Any], *, quick: bool) -> None:
    """Writes a benchmark's JSON."""
    text = json.dumps({"name": name, "quick": quick, **facts, "rows": plain(rows)}, indent=1)
    place(name, quick=quick).write_text(text + "\n")


def write_page(
    name: str,
    rows: Sequence[Row],
    facts: dict[str, Any],
    picture: Path | None = None,
    *,
    page: str | None = None,
) -> None:
    """Puts the table, with date and commit, and a copy of a picture in the page, or in another one beside it, between
    ``<!-- NAME -->`` and ``<!-- end NAME -->``."""
    path = PAGE if page is None else PAGE.with_name(page)
    where = f"{facts['cores']} cores, load {facts['load_before']}, {facts['date']}, {facts['commit']}"
    if facts.get("gpu"):
        where = f"{facts['gpu']}, torch {facts['versions']['torch']}, {where}"
    where = f"(`run {name}`: {where})"
    shown = []
    if picture is not None:
        (PAGE.parent / "pictures").mkdir(exist_ok=True)
        shutil.copyfile(picture, PAGE.parent / "pictures" / f"{name}.png")
        shown = ["", f"![{name}](pictures/{name}.png)"]
    block = "\n".join([f"<!-- {name} -->", *table(rows), *shown, "", where, f"<!-- end {name} -->"])
    text = path.read_text()
    pattern = re.compile(rf"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    if not pattern.search(text):
        raise LookupError(f"{path} has no place for {name}: add the lines <!-- {name} --> and <!-- end {name} -->")
    path.write_text(pattern.sub(lambda _: block, text))
