"""Runs' folders for tests, written by ftopt's own writers; and what a report holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ftopt.events import Event
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines

ATTEMPTS = 1_000_000


class Recorder:
    """Writes a run of synchronous rounds; ``started`` is this machine's clock at its start."""

    def __init__(self, path: Path, *, started: float = 0.0) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.files = RunFolder(path)
        self.files.create()
        self.now = started
        self._started = started
        self._events = EventLog(JsonLines(self.files.events, started, clock=lambda: self.now))
        self._steps: dict[str, JsonLines] = {}

    def event(self, name: str, replica: str = "coordinator", incarnation: int = 0, **more: Any) -> None:
        self._events(Event(name, replica, incarnation, **more))

    def steps(self, replica: str, first: int, count: int, *, incarnation: int = 1, job_step: int = 0) -> None:
        """Inner steps of 0.1 s each."""
        lines = self._steps.get(replica) or self._steps.setdefault(
            replica, JsonLines(self.files.steps(replica), self._started, clock=lambda: self.now)
        )
        began = self.now
        for number in range(first, first + count):
            self.now += 0.1
            loss = 5.0 / (1 + 0.1 * (job_step + number))
            step = {"incarnation": incarnation, "local_step": number, "inner_step": job_step + number}
            lines.write({**step, "loss": round(loss, 5), "lr": 0.1})
        self.now = began

    def round(
        self,
        version: int,
        members: Mapping[str, tuple[int, int, int]],
        *,
        here: Sequence[str] | None = None,
        coordinator: bool = True,
    ) -> None:
        """An outer step of 0.5 s.

        Args:
            version: what it makes.
            members: replica -> incarnation, its steps in it, its last step.
            here: those that record it here. Default: all.
            coordinator: records it here, too.
        """
        lives = [(replica, members[replica][0]) for replica in (members if here is None else here)]
        at = {"fragment": 0, "version": version}
        for who in lives:
            self.event("propose", *who, **at)
        self.now += 0.2
        at["attempt"] = ATTEMPTS + version
        if coordinator:
            who = [[replica, life] for replica, (life, *_) in members.items()]
            waited = [0.2 * (n + 1 < len(who)) for n in range(len(who))]
            self.event("quorum", **at, data={"members": who, "retry": False, "waited": waited, "for": who[-1][0]})
        for who in lives:
            self.event("reduce", *who, **at)
        self.now += 0.3
        for who in lives:
            self.event("prepare", *who, **at, data={"bytes": 1000, "seconds": 0.3, "wire_bytes": 1000 * version})
        if coordinator:
            told = [[r, i, steps, last, float(steps), True] for r, (i, steps, last) in members.items()]
            data = {"members": told, "digest": "d", "chain": f"c{version}", "inner_step": 10 * version}
            self.event("decide", **at, inner_step=10 * version, data=data)
        for who in lives:
            self.event("commit", *who, **at, inner_step=10 * version)
            self.event("apply", *who, fragment=0, version=version, inner_step=10 * version)
            self.event("stall", *who, data={"stall_s": 0.5})

    def end(self, replica: str, incarnation: int = 1, *, pending: int = 0) -> None:
        data = {"reason": "done", "local_steps": 0, "pending_steps": pending, "anchor_digest": "a"}
        self.event("end", replica, incarnation, data=data)

    def summarize(self) -> dict[str, Any]:
        """Writes summary.json, as the runner does."""
        return self.files.summarize()


def record(
    path: Path, replicas: Sequence[str] = ("r0", "r1", "r2"), *, rounds: int = 3, ended: bool = True
) -> Recorder:
    """A run in which the second replica dies 5 steps into the second round and does not come back."""
    run = Recorder(path)
    run.files.recipe.write_text("name: tiny\nmethod:\n  name: diloco\n  sync_every: 10\n", encoding="utf-8")
    for replica in replicas:
        run.event("spawn", replica, data={"pid": 1, "life": 1})
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in replicas:
        run.event("join", replica, 1, version=0, inner_step=0)
    run.event("evaluate", replicas[0], 1, inner_step=0, data={"loss": 5.5, "accuracy": None, "final": False})
    there = list(replicas)
    for version in range(1, rounds + 1):
        for replica in there:
            run.steps(replica, 10 * version - 9, 10)
        if version == 2 and len(replicas) > 1:
            dead = there.pop(1)
            run.now += 1.0
            fault = {"do": "kill", "point": "inner", "for_s": None, "what": None}
            run.event("fault", dead, 1, inner_step=15, data=fault)
            run.event("death", dead, 1, data={"status": "SIGKILL", "by_fault": True})
        else:
            run.now += 1.0
        run.round(version, dict.fromkeys(there, (1, 10, 10 * version)))
    if ended:
        final = {"loss": 2.25, "accuracy": None, "final": True}
        run.event("evaluate", replicas[0], 1, inner_step=10 * rounds, data=final)
        for replica in there:
            run.end(replica)
        run.summarize()
    return run


class Page:
    """The data of a report: all its texts, and its tables, each with its head first."""

    def __init__(self, html: str) -> None:
        (inlined,) = re.findall(r'<script type="application/json" id="inlined">(.*?)</script>', html)
        self.data = json.loads(inlined)
        self.tables: list[list[list[str]]] = []
        self.text = " ".join(" ".join(self._texts(self.data)).split())

    def _texts(self, value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            for each in value:
                yield from self._texts(each)
        elif isinstance(value, dict):
            if "head" in value:
                rows = [value["head"], *value["rows"]]
                self.tables.append([[cell.replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in rows])
            for each in value.values():
                yield from self._texts(each)

    def figures(self) -> dict[str, str]:
        """The account of the inner steps."""
        return {row[0]: row[1] for row in self.table("what", "figure")}

    def table(self, *head: str) -> list[list[str]]:
        """The rows of the table whose head begins so."""
        return next(table[1:] for table in self.tables if table[0][: len(head)] == list(head))


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def numbers(path: Path) -> dict[str, Any]:
    """summary.json."""
    found: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return found
