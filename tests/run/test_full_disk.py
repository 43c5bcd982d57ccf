"""A disk that is full: a replica that leaves in good order cannot write how."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ftopt.config.loader import load
from ftopt.run.runner import Runner
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import read_lines
from ftopt.watch.terminal import PlainLines


def test_a_replica_that_exits_with_0_and_has_not_said_how_counts_as_dead(tmp_path: Path) -> None:
    runner = Runner(load("diloco_bytes"), RunFolder(tmp_path / "run"), PlainLines(lambda _: None))
    child: Any = SimpleNamespace(name="r0", life=1, process=SimpleNamespace(poll=lambda: 0), end=lambda _: None)
    runner._children["r0"] = child
    runner._exited(child)
    assert runner._failed == {"r0": "r0 has left, and could not write how: is the disk full?"}
    assert runner._returns == [] and runner._children == {}
    (death,) = [x for x in read_lines(tmp_path / "run" / "events.jsonl") if x["event"] == "death"]
    assert (death["replica"], death["data"]) == ("r0", {"status": "exit status 0", "by_fault": False})
