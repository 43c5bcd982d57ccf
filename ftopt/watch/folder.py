"""A run's folder: where each file lies."""

from __future__ import annotations

import calendar
import importlib.metadata
import json
import logging
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftopt.common.paths import replace_text
from ftopt.watch.jsonl import Tail
from ftopt.watch.summary import summarize

_log = logging.getLogger("ftopt.watch")
BEGAN = "%Y-%m-%dT%H:%M:%SZ"
"""The format in which ``about.json`` has the time when the run began (UTC)."""


class RunFolder:
    """The files of one run below ``path``; only `create` creates anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        """The resolved recipe."""
        self.about = path / "about.json"
        """When the run began, on which machine, with which versions."""
        self.events = path / "events.jsonl"
        """One line per event, from all processes; in pieces (`ftopt.watch.jsonl`), like the files of inner steps."""
        self.replicas = path / "replicas"
        """The folder of the replicas' inner steps."""
        self.logs = path / "logs"
        """What the processes wrote to their standard streams."""
        self.journal = path / "coordinator.journal"
        self.checkpoints = path / "checkpoint"
        """The job's checkpoints, unless the recipe names another folder."""
        self.summary = path / "summary.json"
        """The run's figures."""

    def create(self, *, logs: bool = True) -> None:
        """Makes the folder and its subfolders; the first process to do so writes ``about.json``. ``logs``: also make
        the folder for the processes' standard streams."""
        self.replicas.mkdir(parents=True, exist_ok=True)
        if logs:
            self.logs.mkdir(exist_ok=True)
        with suppress(OSError), self.about.open("x", encoding="utf-8") as file:  # nothing depends on it
            file.write(json.dumps(_about(), indent=2) + "\n")

    def claim(self) -> bool:
        """Makes the folder, and in it the file of events; False: another command has made that, perhaps just now."""
        self.create()
        try:
            self.events.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def began_s(self) -> float:
        """When the run began, as ``time.time()`` gives it, in whole seconds; now, if the folder does not say."""
        try:
            began_s = since_1970_s(json.loads(self.about.read_text(encoding="utf-8"))["began"])
        except (OSError, ValueError, LookupError, TypeError):
            began_s = None
        return time.time() if began_s is None else began_s

    def steps(self, replica: str) -> Path:
        """The file with one line per inner step of ``replica``, over all its incarnations."""
        return self.replicas / f"{replica}.jsonl"

    def log(self, process: str) -> Path:
        """The file with the standard streams of ``process``."""
        return self.logs / f"{process}.log"

    def summarize(self) -> dict[str, Any]:
        """Computes the run's figures from its lines, writes them, and returns them."""
        steps = {path.stem: Tail(path).each() for path in sorted(self.replicas.glob("*.jsonl"))}
        summary = summarize(Tail(self.events).each(), steps)
        self.keep(summary)
        return summary

    def keep(self, summary: Mapping[str, Any]) -> None:
        """Writes the run's figures; if that fails, the log says so."""
        try:
            replace_text(self.summary, json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            _log.warning("%s: %s; the figures are not written", self.summary, error)


def since_1970_s(began: object) -> float | None:
    """The time that ``about.json`` gives as `BEGAN`; None if it is no such time."""
    try:
        return float(calendar.timegm(time.strptime(str(began), BEGAN)))
    except ValueError:
        return None


def _about() -> dict[str, str]:
    versions = {}
    for name in ("ftopt", "torch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    began = time.strftime(BEGAN, time.gmtime())
    return {"began": began, "host": socket.gethostname(), "python": platform.python_version(), **versions}
