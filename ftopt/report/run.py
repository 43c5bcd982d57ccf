"""What a run's folder holds, read whole: a run that has ended, that is still going on, or that was killed."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftopt.errors import UserError
from ftopt.report.steps import Steps
from ftopt.report.unsupervised import unrecorded, with_deaths
from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import Line, data_of
from ftopt.telemetry.summary import summarize

Say = Callable[[str], None]
"""Tells how far a long reading has come."""

COORDINATOR = "coordinator"
"""The ``replica`` of the coordinator's events."""
_NOT_NEEDED = tuple(f'"event":"{name}"'.encode() for name in ("gather", "payload", "reduce.after", "serve", "kept"))
"""Events of every outer step that nothing here uses; most of a long run's lines."""
_MOST = 1e300
"""No number of a run is so large; NaN is not below it either."""
_LAST_S = 1e11
_MOST_STEPS = 1 << 62
_TELL_EVERY_S = 2.0
_BLOCK_BYTES = 1 << 18
_GOING_ON_S = 60.0
"""A run without a summary whose last line is younger than this is taken for one that is still going on."""


@dataclass(slots=True)
class Run:
    """One run, or what several machines have recorded of one.

    Args:
        name: its folder's name.
        folders: where it was read from; several if they were merged.
        events: in the order of time.
        steps: replica -> its inner steps.
        summary: `summarize`'s figures, as ``summary.json`` has them; None for what ``unrecorded`` leaves unknown.
        summarized: there is a ``summary.json``: `ftopt run` has come to its end.
        recipe: the text of ``recipe.yaml``.
        about: when it began, versions; of ``about.json``.
        skipped: lines that could not be read.
        age_s: seconds since its last line was written.
        unrecorded: the replicas whose inner steps are not, or not all, on record, although the coordinator names them.
        notes: what a reader must know of how it was read.
    """

    name: str
    folders: list[Path]
    events: list[Line]
    steps: dict[str, Steps]
    summary: dict[str, Any]
    summarized: bool
    recipe: str | None
    about: dict[str, Any]
    skipped: int
    age_s: float
    unrecorded: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Nothing more comes: it was summarized, or each replica has told its end."""
        return self.summarized or bool((self.steps or self.named("leave")) and not self.without_end())

    def without_end(self) -> list[str]:
        """The replicas whose record does not come to their end."""
        told = {event["replica"] for event in self.named("end")}
        there: set[str] = set()  # as the coordinator sees it
        for event in self.named("join", "return", "leave", "gone"):
            (there.add if event["event"] in ("join", "return") else there.discard)(event["replica"])
        silent = set(self.unrecorded) - there  # has left, or died
        return [replica for replica in self.replicas() if replica not in told | silent]

    @property
    def going_on(self) -> bool:
        return not self.ended and self.age_s < _GOING_ON_S

    @property
    def loss_unit(self) -> str:
        """`` nats`` for the built-in cross-entropy; "" for a loss of the user's own, whose unit is not known."""
        own = self.recipe is None or re.search(r"^task:\n +name: (?!cross_entropy)", self.recipe, re.MULTILINE)
        return "" if own else " nats"

    @property
    def decided(self) -> bool:
        """The coordinator's events are there, and with them who contributed what."""
        return any(event["event"] in ("start", "recover", "decide", "quorum") for event in self.events)

    @property
    def end_s(self) -> float:
        """When the last thing was recorded."""
        last = max((steps.t_s[-1] for steps in self.steps.values() if steps), default=0.0)
        return max(last, self.events[-1]["t_s"] if self.events else 0.0)

    def replicas(self) -> list[str]:
        """All that ever were there, in the order of their names, numbers in them as numbers."""
        told = {event["replica"] for event in self.events} - {COORDINATOR}
        return sorted(told | set(self.steps), key=_natural)

    def named(self, *names: str) -> list[Line]:
        """Its events of these names."""
        return [event for event in self.events if event["event"] in names]


def read(path: Path, say: Say) -> Run:
    """Reads a run's folder.

    Raises:
        UserError: it is none, or cannot be read.
    """
    files = RunFolder(path)
    try:
        _check(path, files)
        progress = _Progress(path, files, say)
        events, skipped = _events(files.events, progress)
        steps: dict[str, Steps] = {}
        for file in sorted(files.replicas.glob("*.jsonl")):
            steps[file.stem], bad = _steps(file, progress)
            skipped += bad
        age_s = time.time() - max(file.stat().st_mtime for file in [files.events, *files.replicas.glob("*.jsonl")])
        recipe = files.recipe.read_text(encoding="utf-8", errors="replace") if files.recipe.is_file() else None
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}; give a run's folder that you can read") from error
    events = ordered(with_deaths(events, steps))
    silent = unrecorded(events, steps)
    summary = figures(events, steps, silent, files.events)
    resolved = path.resolve()
    name = resolved.name or str(resolved)
    about, summarized = _object(files.about), files.summary.is_file()
    return Run(name, [path], events, steps, summary, summarized, recipe, about, skipped, age_s, silent)


def figures(events: Sequence[Line], steps: dict[str, Steps], silent: Sequence[str], path: Path) -> dict[str, Any]:
    """`summarize`, of what has been read; None for what the ``silent``, `unrecorded` replicas make unknown."""
    lines = {replica: [_INCARNATION[i] for i in x.incarnation] for replica, x in steps.items()}
    try:
        found = summarize(events, lines)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: its events are not those of an ftopt run ({type(error).__name__}: {error}); "
            "give the folder of a run as `ftopt run` has written it"
        ) from error
    return found | dict.fromkeys(_BY_REPLICAS) if silent else found


_BY_REPLICAS = ("inner_steps_executed", "inner_steps_pending", "dead_inner_steps_lost", "survivor_inner_steps_lost")
"""Figures that are not known without every replica's own record."""


def ordered(events: Iterable[Line]) -> list[Line]:
    """By time; events of one moment stay as they were written."""
    return sorted(events, key=lambda event: float(event["t_s"]))


class _Incarnations(dict[int, Line]):
    """Number -> a step's line with that incarnation alone, one object for all its steps."""

    def __missing__(self, number: int) -> Line:
        return self.setdefault(number, {"incarnation": number})


_INCARNATION = _Incarnations()


class _Progress:
    """Says every few seconds how much has been read."""

    def __init__(self, path: Path, files: RunFolder, say: Say) -> None:
        every = [files.events, *files.replicas.glob("*.jsonl")]
        self._path, self._say = path, say
        self._all = sum(file.stat().st_size for file in every)
        self._read = 0
        self._told_at = time.monotonic()

    def took(self, count: int) -> None:
        self._read += count
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._say(f"{self._path}: {self._read / 1e6:.0f} of {self._all / 1e6:.0f} MB read")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """The key of an order in which r10 comes after r9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d{1,18})", name)]


def _check(path: Path, files: RunFolder) -> None:
    if path.is_file():
        raise UserError(f"{path} is a file; give the run's folder, {path.absolute().parent}")
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; give a run's folder, as `ftopt run` prints it at its end")
    if files.events.is_file():
        return
    runs = sorted(path.glob("*/events.jsonl"), key=lambda file: file.stat().st_mtime)
    hint = f"the newest run in it is {runs[-1].parent}" if runs else "give a run's folder, e.g. runs/NAME-TIME"
    raise UserError(f"{path} is not the folder of a run: it has no events.jsonl; {hint}")


def _lines(path: Path, progress: _Progress, leave: Sequence[bytes] = ()) -> Iterator[dict[str, Any] | None]:
    """The lines of a file, None for one that is no JSON object; the last one may have been cut off."""
    with path.open("rb") as file:
        while lines := file.readlines(_BLOCK_BYTES):
            progress.took(sum(map(len, lines)))
            if leave:
                lines = [line for line in lines if not any(word in line for word in leave)]
            for record in _parsed(lines):
                yield record if isinstance(record, dict) else None


def _parsed(lines: Sequence[bytes]) -> Sequence[Any]:
    """Each line's value, None where it has none; all at once if all are right, which is three times as fast."""
    try:
        values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return values
    except (ValueError, RecursionError):
        pass
    return [_value(line) for line in lines]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _events(path: Path, progress: _Progress) -> tuple[list[Line], int]:
    events: list[Line] = []
    skipped = 0
    for line in _lines(path, progress, _NOT_NEEDED):
        if line is not None and _is_event(line):
            events.append(line)
        else:
            skipped += 1
    return ordered(events), skipped


def _is_event(line: Line) -> bool:
    data = data_of(line)
    return (
        _finite(line.get("t_s"))
        and abs(line["t_s"]) < _LAST_S
        and isinstance(line.get("event"), str)
        and isinstance(line.get("replica"), str)
        and _is_whole(line.get("incarnation"))
        and isinstance(data, dict)
        and all(_is_whole(line.get(name, 0)) for name in ("fragment", "version", "attempt", "inner_step"))
        and all(isinstance(line.get(name), int) for name in _POSITIONS.get(line["event"], ()))
        and all(_finite(data.get(name)) for name in _NUMBERS.get(line["event"], ()))
        and (line["event"] != "decide" or _is_decision(data))
    )


_POSITIONS = {
    "decide": ("version", "inner_step"),
    "propose": ("version",),
    "apply": ("version",),
    "prepare": ("version",),
}
_NUMBERS = {
    "stall": ("stall_s",),
    "prepare": ("bytes", "seconds", "wire_bytes"),
    "discarded": ("steps",),
    "undone": ("steps",),
    "evaluate": ("loss",),
}
"""Event -> what it must have."""


def _is_decision(data: Line) -> bool:
    try:
        return all(
            isinstance(replica, str) and _is_whole(incarnation) and _is_whole(steps) and _is_whole(last_step)
            for replica, incarnation, steps, last_step, _weight, _finite_ in data["members"]
        )
    except (LookupError, TypeError, ValueError):
        return False


def _steps(path: Path, progress: _Progress) -> tuple[Steps, int]:
    steps, skipped = Steps(), 0
    add = steps.add
    for line in _lines(path, progress):
        try:
            t_s, incarnation, inner_step = line["t_s"], line["incarnation"], line["inner_step"]  # type: ignore[index]
            loss = line.get("loss")  # type: ignore[union-attr]
            if not (abs(t_s) < _LAST_S and abs(incarnation) < _MOST_STEPS and abs(inner_step) < _MOST_STEPS):
                raise ValueError
            add(t_s, int(incarnation), int(inner_step), loss if _finite(loss) else math.nan)  # type: ignore[arg-type]
        except (LookupError, TypeError, ValueError):
            skipped += 1
    return steps, skipped


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and abs(value) < _MOST_STEPS


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST


def _object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; empty when it is not there, or only half of it is."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
