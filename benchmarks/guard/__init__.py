"""Whether ftopt's own work has become slower: ``python -m benchmarks guard [NAME ...]``, ten seconds of CPU time.

Measured are an outer step, what the wrapper adds to an inner step, and each codec: CPU time in one process with one
torch thread, as a multiple of a plain copy of as many bytes (`torch.Tensor.copy_`) in the same turns. The multiples
must not exceed the limits in ``limits.json``, which are `MARGIN` times what ``--write`` has measured, the median of
`MORE` times. What exceeds its limit is measured once more with `MORE` times as many turns, and only that counts.

On a busy machine a multiple is the same as on an idle one, within 10 %; on another CPU it need not be: one that
computes slowly and copies fast has larger multiples. So the file names its CPU, and on any other one the limits are
`ELSEWHERE` times as large. (Torch's kernels for AVX2, in place of AVX-512, take up to 1.21 times as long. Without
vector units a codec takes up to 7 times as long, and needs limits of its own.) There the guard finds only what takes
twice as long. Limits of your own, written before a change, find more::

    python -m benchmarks guard --write --limits /tmp/before.json
    python -m benchmarks guard --limits /tmp/before.json

Exit status: 0 when all are within their limits, 1 when one is not, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.guard.works import WORKS, multiple
from benchmarks.speed.figures import Row, table
from ftopt.cli.shared.output import complain, say

LIMITS = Path(__file__).with_name("limits.json")
MARGIN = 1.3
MORE = 3
ELSEWHERE = 1.5


@dataclass(frozen=True)
class Limits:
    """The contents of the file.

    Args:
        cpu: the one that they were measured on.
        limits: name -> the largest multiple that is allowed there.
    """

    cpu: str
    limits: Mapping[str, float]

    @property
    def factor(self) -> float:
        """What the limits are multiplied with on this machine."""
        return 1.0 if self.cpu == cpu() else ELSEWHERE


def add(parser: argparse.ArgumentParser) -> None:
    """[NAME ...] [--limits FILE] [--write]"""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(WORKS)} (default: all)")
    parser.add_argument("--limits", type=Path, default=LIMITS, metavar="FILE", help="default: benchmarks/guard's own")
    parser.add_argument("--write", action="store_true", help=f"measure, and set the limits to {MARGIN:g} times that")


def run(arguments: argparse.Namespace) -> int:
    """1: something is too slow. 2: there is no such name, or no limit for it."""
    path: Path = arguments.limits
    if unknown := [name for name in arguments.names if name not in WORKS]:
        complain(f"benchmarks guard: {', '.join(unknown)}; must be of {', '.join(WORKS)}")
        return 2
    names = arguments.names or list(WORKS)
    try:
        known = _read(path)
    except (ValueError, KeyError, TypeError) as error:
        complain(f"benchmarks guard: {path} has no limits that can be read ({error!r}); remove it, and use --write")
        return 2
    if arguments.write:
        return _write(path, names, known)
    if known is None or (missing := [name for name in names if name not in known.limits]):
        complain(f"benchmarks guard: {path} has no limit for {', '.join(names if known is None else missing)}; --write")
        return 2
    return _judge(path, names, known)


def _judge(path: Path, names: list[str], known: Limits) -> int:
    rows, slow = [], []
    for name in names:
        limit, found = known.limits[name] * known.factor, multiple(WORKS[name], WORKS[name].turns)
        if found > limit:
            found = multiple(WORKS[name], MORE * WORKS[name].turns)
        if found > limit:
            slow.append(name)
        rows.append(_row(name, found, limit, "too slow" if name in slow else "ok"))
    say("\n".join(table(rows)))
    if known.factor != 1:
        say(f"({cpu()}; the limits are {known.factor:g} times those measured on {known.cpu})")
    if slow:
        words = " ".join([*slow, *([] if path == LIMITS else ["--limits", str(path)])])
        complain(
            f"{', '.join(slow)}: too slow; run `python -m benchmarks guard {words}` with and without the last change, "
            "and make it faster; if it is meant to cost that much, add --write, and say why in the commit"
        )
    return 1 if slow else 0


def _write(path: Path, names: list[str], known: Limits | None) -> int:
    if known is not None and known.factor != 1 and set(names) < set(known.limits):
        complain(f"benchmarks guard: {path} has limits of {known.cpu}, this is {cpu()}; write all of them")
        return 2
    # Not once with more turns: where the tensors lie in memory makes a difference, too.
    every = {name: [multiple(WORKS[name], WORKS[name].turns) for _ in range(MORE)] for name in names}
    measured = {name: statistics.median(found) for name, found in every.items()}
    limits = {**(known.limits if known is not None else {}), **{name: MARGIN * x for name, x in measured.items()}}
    ordered = {name: float(f"{limits[name]:.3g}") for name in WORKS if name in limits}
    path.write_text(json.dumps(asdict(Limits(cpu(), ordered)), indent=1) + "\n")
    say("\n".join(table([_row(name, measured[name], ordered[name], "written") for name in names])))
    return 0


def _read(path: Path) -> Limits | None:
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    return Limits(str(data["cpu"]), {str(name): float(limit) for name, limit in data["limits"].items()})


def _row(name: str, found: float, limit: float, verdict: str) -> Row:
    return {"name": name, "what": WORKS[name].what, "times a copy": found, "limit": limit, "": verdict}


def cpu() -> str:
    """This machine's, as Linux names it: servers often hide the name, but neither family nor model."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    found = dict(line.replace("\t", "").split(":", 1) for line in reversed(info.splitlines()) if ":" in line)
    what = [found.get(key, "").strip() for key in ("model name", "cpu family", "model")]
    return f"{what[0]}, family {what[1]}, model {what[2]}" if what[0] else "unknown"
