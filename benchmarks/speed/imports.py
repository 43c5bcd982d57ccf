"""What ``import ftopt`` costs on top of torch."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.speed.figures import QUICK_REPETITIONS, REPETITIONS, Row, Spread

ABOUT = "Cumulative time of `python -X importtime` in fresh processes, after a warm-up. Torch is imported first."
GOALS = "`import ftopt` <= 60 ms"
DRAWN = "ms"


def run(quick: bool) -> list[Row]:
    """Rows: torch, `import ftopt` after it, and the names that need torch."""
    _import_ms()
    found = [_import_ms() for _ in range(QUICK_REPETITIONS if quick else REPETITIONS)]
    return [{"import": what, "ms": Spread.of([taken[what] for taken in found])} for what in found[0]]


def _import_ms() -> dict[str, float]:
    """Milliseconds of each, in one fresh process."""
    code = "import torch, ftopt; ftopt.wrap, ftopt.DiLoCo, ftopt.connect"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    outermost: dict[str, float] = {}
    for line in done.stderr.splitlines():
        _, cumulative, name = line.removeprefix("import time:").split("|")
        if cumulative.strip().isdigit() and not name.startswith("  "):
            outermost[name.strip()] = int(cumulative) / 1000
    later = sum(ms for name, ms in outermost.items() if name.startswith("ftopt."))
    names = "`ftopt.wrap`, `ftopt.DiLoCo`, `ftopt.connect`, when first used"
    return {"`import torch`": outermost["torch"], "`import ftopt`": outermost["ftopt"], names: later}
