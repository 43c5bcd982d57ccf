"""The content of a run's folder: of a run that has ended, is still going on, or was killed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ftopt.common.plural import natural
from ftopt.errors import UserError
from ftopt.watch.decisions import Incarnation
from ftopt.watch.folder import BEGAN, RunFolder
from ftopt.watch.jsonl import Line, data_of, pieces
from ftopt.watch.report.facts import Facts, gather
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import (
    LAST_S,
    MOST_STEPS,
    Again,
    Events,
    Progress,
    Say,
    Written,
    finite,
    of_a_run,
    selected,
    shifted,
)


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a folder, for all the jobs that its coordinator has served. Fields as in `Run`."""

    files: RunFolder
    events: Events
    index: Index
    facts: Facts
    steps: dict[str, Steps]
    recipe: str | None
    skipped: int
    age_s: float

    def _goes_on(self) -> bool:
        """Whether ``summary.json`` is of a former incarnation of the replica that wrote this folder."""
        last = next(reversed(self.facts.named("spawn", "end")), None)
        return self.index.own_job is not None and last is not None and last["event"] == "spawn"

    def jobs(self) -> list[str]:
        """The names of the jobs that its lines are of; empty if they do not say."""
        own = [] if self.index.own_job is None else [self.index.own_job]
        return sorted(self.index.jobs or own, key=natural)

    def runs(self, job: str | None) -> list[Run]:
        """The runs of ``job``, or of the only job that the folder has. Lines that name no job count."""
        several = len(self.jobs()) > 1
        index = Index.of(selected(self.events, job)) if several else self.index
        parts = [index.whole] if self.steps else index.parts()
        return [self._run(job, each, at, len(parts), several=several) for at, each in enumerate(parts)]

    def _run(self, job: str | None, part: Part, at: int, times: int, *, several: bool) -> Run:
        name, notes = self.files.path.resolve().name or str(self.files.path.resolve()), list[str]()
        about, age_s = _object(self.files.about), self.age_s
        events: Iterable[Line] = self.events
        facts = self.facts
        if several or times > 1:  # time counts from the start of each
            age_s += self.index.last_s - part.last_s
            if "began" in about:
                about["began"] = time.strftime(BEGAN, time.gmtime(self.files.began_s() + part.first_s))
            only = job if several else None
            events = Again(lambda: shifted([(selected(self.events, only, part.begin, part.end), part.first_s)]))
            facts = gather(events, self.steps)
        if several:
            name += f", job {job}"
        if times > 1:
            name += f", start {at + 1} of {times}"
            notes.append(
                f"The job was started {times} times under one name: its coordinator was started again without a "
                "journal that knew it. Each time is shown as a run of its own."
            )
        return Run(
            name=name,
            job=job,
            folders=[self.files.path],
            events=events,
            steps=self.steps,
            facts=facts,
            summarized=self.files.summary.is_file() and not self._goes_on(),
            recipe=self.recipe,
            about=about,
            skipped=self.skipped,
            age_s=age_s,
            notes=notes,
        )


class Part(NamedTuple):
    """The events of a job from one of its `start` events until before another one, counted from 1. 0: from the first
    event on; None: to the last."""

    begin: int
    end: int | None
    first_s: float
    last_s: float


class Index:
    """Takes up events in order, and finds the jobs, and where a job has started from nothing. A coordinator that does
    not know the job any more numbers incarnations from 1 again: then an incarnation joins that had joined before the
    job's last `start`. ``own_job``: of the replica that wrote the folder."""

    def __init__(self) -> None:
        self.jobs: set[str] = set()
        self.own_job: str | None = None
        self.last_s = 0.0
        self._first_s: float | None = None
        self._starts: list[tuple[float, float]] = []  # the time of each, and of the event before it
        self._cuts = [0]
        self._before, self._since = set[Incarnation](), set[Incarnation]()

    @classmethod
    def of(cls, events: Iterable[Line]) -> Index:
        index = cls()
        for event in events:
            index.add(event)
        return index

    def add(self, event: Line) -> None:
        name, t_s = event["event"], float(event["t_s"])
        if isinstance(job := event.get("job"), str):
            self.jobs.add(job)
        self._first_s = t_s if self._first_s is None else self._first_s
        if name == "start":
            self._starts.append((t_s, self.last_s))
            self._before, self._since = self._before | self._since, set()
        elif name == "join":
            who = event["replica"], event["incarnation"]
            if who in self._before:
                self._cuts.append(len(self._starts))
                self._before = set()
            self._since.add(who)
        elif name == "spawn" and self.own_job is None and isinstance(job := data_of(event).get("job"), str):
            self.own_job = job.partition(" ")[2]
        self.last_s = t_s

    @property
    def whole(self) -> Part:
        return Part(0, None, self._first_s or 0.0, self.last_s)

    def parts(self) -> list[Part]:
        """A part for each start from nothing."""
        found = []
        for begin, end in pairwise([*self._cuts, None]):
            assert begin is not None
            first_s = self._starts[begin - 1][0] if begin else self._first_s or 0.0
            found.append(Part(begin, end, first_s, self.last_s if end is None else self._starts[end - 1][1]))
        return found


def runs_of(records: Sequence[Record], job: str | None = None) -> list[Run]:
    """The run of ``job`` in each folder. Without ``job``, for a folder with several jobs: the runs of the jobs whose
    replicas have written the other folders.

    Raises:
        UserError: it is not clear which job is meant, or a folder has none of this name.
    """
    wanted = {record.index.own_job for record in records} if job is None else {job}
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
    """Reads a run's folder for the first time. UserError: it is not a run's folder, or cannot be read."""
    files = RunFolder(path)
    try:
        _check(path, files)
        written = {file: Written(file) for file in sorted(files.replicas.glob("*.jsonl"))}
        events = Events(path, files.events, say)
        progress = Progress(path, events.size + sum(each.size for each in written.values()), say)
        index, skipped = Index(), 0
        steps: dict[str, Steps] = {}
        for file, each in written.items():
            steps[file.stem], bad = _steps(each.lines(progress))
            skipped += bad
        with of_a_run(path):
            facts = gather(_indexed(events.read(progress), index), steps)
        age_s = time.time() - max(file.stat().st_mtime for name in (files.events, *written) for file in pieces(name))
        recipe = files.recipe.read_text(encoding="utf-8", errors="replace") if files.recipe.is_file() else None
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}; give a run's folder that you can read") from error
    return Record(files, events, index, facts, steps, recipe, skipped + events.skipped, age_s)


def _indexed(events: Iterable[Line], index: Index) -> Iterator[Line]:
    for event in events:
        index.add(event)
        yield event


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


def _steps(lines: Iterable[Mapping[str, Any] | None]) -> tuple[Steps, int]:
    steps, skipped = Steps(), 0
    add = steps.add
    for line in lines:
        try:
            t_s, incarnation, inner_step = line["t_s"], line["incarnation"], line["inner_step"]  # type: ignore[index]
            loss = line.get("loss")  # type: ignore[union-attr]
            if not (abs(t_s) < LAST_S and abs(incarnation) < MOST_STEPS and abs(inner_step) < MOST_STEPS):
                raise ValueError
            add(t_s, int(incarnation), int(inner_step), loss if finite(loss) else math.nan)  # type: ignore[arg-type]
        except (LookupError, TypeError, ValueError):
            skipped += 1
    return steps, skipped


def _object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object; empty if it does not exist or is not complete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
