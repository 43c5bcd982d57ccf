"""Results on disk, and ``docs/performance.md`` from them: its tables are written anew, the text around them stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.figures import Row, plain, table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"


def keep(name: str, rows: Sequence[Row], facts: dict[str, Any], *, quick: bool) -> Path:
    """Writes a benchmark's JSON; a quick one beside the whole one."""
    path = RESULTS / ("quick" if quick else "speed") / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name, "quick": quick, **facts, "rows": plain(rows)}, indent=1) + "\n")
    return path


def write_page(name: str, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Puts the table in the page, between ``<!-- NAME -->`` and ``<!-- end NAME -->``."""
    where = f"{facts['cores']} cores, load {facts['load_before']} before, {facts['wall_s']:.0f} s, {facts['commit']}"
    block = "\n".join([f"<!-- {name} -->", *table(rows), "", f"({where})", f"<!-- end {name} -->"])
    page = PAGE.read_text()
    pattern = re.compile(rf"<!-- {name} -->.*?<!-- end {name} -->", re.DOTALL)
    if not pattern.search(page):
        raise LookupError(f"{PAGE} has no place for {name}: add the lines <!-- {name} --> and <!-- end {name} -->")
    PAGE.write_text(pattern.sub(lambda _: block, page))
