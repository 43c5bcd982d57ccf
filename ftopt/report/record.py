"""What a run's folder holds, read whole: a run that has ended, that is still going on, or that was killed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ftopt.errors import UserError
from ftopt.plural import natural
from ftopt.report.run import Run, figures, ordered
from ftopt.report.steps import Steps
from ftopt.report.told import are_counts
from ftopt.report.unsupervised import unrecorded, with_deaths
from ftopt.telemetry.folder import BEGAN, RunFolder
from ftopt.telemetry.jsonl import Line, data_of, pieces

Say = Callable[[str], None]
"""Tells how far a long reading has come."""

_NOT_NEEDED = tuple(f'"event":"{name}"'.encode() for name in ("gather", "payload", "reduce.after", "serve", "kept"))
"""Events of every outer step that nothing here uses; most of a long run's lines."""
_MOST = 1e300
"""No number of a run is so large; NaN is not below it either."""
_LAST_S = 1e11
_MOST_STEPS = 1 << 62
_TELL_EVERY_S = 2.0
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Record:
    """What a folder holds, of all the jobs that its coordinator has served. Fields as in `Run`."""

    files: RunFolder
    events: list[Line]
    steps: dict[str, Steps]
    recipe: str | None
    skipped: int
    age_s: float

    @property
    def own_job(self) -> str | None:
        """The job of the replica whose folder it is; None: it is no such folder."""
        spawned = (data_of(event).get("job") for event in self.events if event["event"] == "spawn")
        return next((job.partition(" ")[2] for job in spawned if isinstance(job, str)), None)

    def _goes_on(self) -> bool:
        """Whether ``summary.json`` is of a former life of the replica whose folder it is."""
        last = next((event for event in reversed(self.events) if event["event"] in ("spawn", "end")), None)
        return self.own_job is not None and last is not None and last["event"] == "spawn"

    def jobs(self) -> list[str]:
        """The names of the jobs that its lines are of; none where they do not tell."""
        told = {event["job"] for event in self.events if isinstance(event.get("job"), str)}
        return sorted(told or {self.own_job} - {None}, key=natural)

    def runs(self, job: str | None) -> list[Run]:
        """What it holds of ``job``, or all that it holds if it has no more than one. Lines that name no job count."""
        several = len(self.jobs()) > 1
        events = [event for event in self.events if not several or event.get("job", job) == job]
        begun = [events] if self.steps else _begun(events)
        return [self._run(job, each, at, len(begun), several=several) for at, each in enumerate(begun)]

    def _run(self, job: str | None, events: list[Line], at: int, times: int, *, several: bool) -> Run:
        name, notes = self.files.path.resolve().name or str(self.files.path.resolve()), list[str]()
        about, age_s = _object(self.files.about), self.age_s
        if several or times > 1:  # time counts from its own start
            first_s, last_s = float(events[0]["t_s"]), float(events[-1]["t_s"])
            age_s += float(self.events[-1]["t_s"]) - last_s
            if "began" in about:
                about["began"] = time.strftime(BEGAN, time.gmtime(self.files.began_s() + first_s))
            events = [{**event, "t_s": event["t_s"] - first_s} for event in events]
        if several:
            name += f", job {job}"
        if times > 1:
            name += f", start {at + 1} of {times}"
            notes.append(
                f"The job was started {times} times under one name: its coordinator was started again without a "
                "journal that knew it. Each time is shown as a run of its own."
            )
        events = ordered(with_deaths(events, self.steps))
        silent = unrecorded(events, self.steps)
        return Run(
            name=name,
            job=job,
            folders=[self.files.path],
            events=events,
            steps=self.steps,
            summary=figures(events, self.steps, silent, self.files.events),
            summarized=self.files.summary.is_file() and not self._goes_on(),
            recipe=self.recipe,
            about=about,
            skipped=self.skipped,
            age_s=age_s,
            unrecorded=silent,
            notes=notes,
        )


def _begun(events: Sequence[Line]) -> list[list[Line]]:
    """A job's events by its starts from nothing. A coordinator without a memory of the job numbers incarnations from 1
    again: one of that number joins that had joined before the job's last `start`."""
    cuts, start = [0], 0
    before, since = set[tuple[str, int]](), set[tuple[str, int]]()
    for at, event in enumerate(events):
        if event["event"] == "start":
            start, before, since = at, before | since, set()
        elif event["event"] == "join":
            who = event["replica"], event["incarnation"]
            if who in before:
                cuts.append(start)
                before = set()
            since.add(who)
    return [list(events[begin:end]) for begin, end in pairwise([*cuts, len(events)])]


def runs_of(records: Sequence[Record], job: str | None = None) -> list[Run]:
    """The run of ``job`` in each folder. Of a folder with several jobs and no ``job``: those of the jobs whose replicas
    have written the others.

    Raises:
        UserError: it is not clear which job is meant, or a folder has none of that name.
    """
    wanted = {record.own_job for record in records} if job is None else {job}
    found: list[Run] = []
    for record in records:
        jobs = record.jobs()
        meant = [name for name in jobs if name in wanted]
        if job is not None and not meant:
            of = f"is of {_named(jobs)}" if jobs else "does not tell its job"
            raise UserError(f"--job {job!r}, but {record.files.path} {of}; give a job's name and folders of that job")
        if job is None and len(jobs) > 1 and not meant:
            raise UserError(
                f"{record.files.path} is of {_named(jobs)}; choose one with --job NAME, or name the folders of its "
                "replicas too"
            )
        found += [run for name in meant or [*jobs, None][:1] for run in record.runs(name)]
    return found


def _named(jobs: Sequence[str]) -> str:
    return f"the job {jobs[0]!r}" if len(jobs) == 1 else f"{len(jobs)} jobs: {', '.join(map(repr, jobs))}"


def read(path: Path, say: Say) -> Record:
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
        age_s = time.time() - max(file.stat().st_mtime for file in _written(files))
        recipe = files.recipe.read_text(encoding="utf-8", errors="replace") if files.recipe.is_file() else None
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}; give a run's folder that you can read") from error
    return Record(files, events, steps, recipe, skipped, age_s)


def _written(files: RunFolder) -> list[Path]:
    return [each for file in [files.events, *files.replicas.glob("*.jsonl")] for each in pieces(file)]


class _Progress:
    """Says every few seconds how much has been read."""

    def __init__(self, path: Path, files: RunFolder, say: Say) -> None:
        self._path, self._say = path, say
        self._all = sum(file.stat().st_size for file in _written(files))
        self._read = 0
        self._told_at = time.monotonic()

    def took(self, count: int) -> None:
        self._read += count
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            self._say(f"{self._path}: {self._read / 1e6:.0f} of {self._all / 1e6:.0f} MB read")


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
    """The lines of a file, None for one that is no JSON object; the last one of a piece may have been cut off."""
    for each in pieces(path):
        with each.open("rb") as file:
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
        and (line["event"] != "losses" or _are_losses(data))
        and ("counts" not in data or are_counts(line))
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


def _are_losses(data: Line) -> bool:
    try:
        return all(
            _is_whole(incarnation) and _is_whole(inner_step) and _finite(loss)
            for incarnation, inner_step, loss in data["losses"].values()
        )
    except (AttributeError, LookupError, TypeError, ValueError):
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
