"""A run's folder: which file lies where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """The files of one run below ``path``; nothing is created but by `create`."""

    path: Path

    def create(self) -> None:
        """Makes the folder and its subfolders."""
        self.replicas.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def events(self) -> Path:
        """One line an event, from all processes."""
        return self.path / "events.jsonl"

    @property
    def replicas(self) -> Path:
        """The folder of the replicas' inner steps."""
        return self.path / "replicas"

    @property
    def logs(self) -> Path:
        """What the processes wrote to their standard streams."""
        return self.path / "logs"

    @property
    def journal(self) -> Path:
        """The coordinator's journal."""
        return self.path / "coordinator.journal"

    @property
    def checkpoints(self) -> Path:
        """The job's checkpoints, unless the recipe names another folder."""
        return self.path / "checkpoint"

    @property
    def summary(self) -> Path:
        """The run's figures."""
        return self.path / "summary.json"

    def steps(self, replica: str) -> Path:
        """One line an inner step of ``replica``, over all its incarnations."""
        return self.replicas / f"{replica}.jsonl"

    def log(self, process: str) -> Path:
        """The standard streams of ``process``."""
        return self.logs / f"{process}.log"

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes ``summary.json``."""
        self.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
