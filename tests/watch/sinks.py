"""What a mirror's other process may meet: sinks that fail, hang, or write down what they get."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftopt.watch.trackers.mirror import Mirror


class Written:
    """Appends everything to the file ``to``."""

    file: Path | None = None

    def __init__(self, options: Mapping[str, Any], say: Callable[..., None]) -> None:
        self._to = Path(options["to"])
        self._write({"options": options, "pid": os.getpid()})

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._to.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        self._write({"axis": axis, "at": at, "values": values})

    def row(self, row: Mapping[str, Any]) -> None:
        self._write({"row": row})

    def close(self, *, killed: bool) -> None:
        self._write({"killed": killed})


class RaisesAtOnce(Written):
    def __init__(self, options: Mapping[str, Any], say: Callable[..., None]) -> None:
        raise RuntimeError("no key")


class RaisesLater(Written):
    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        raise OSError("no space left")


class Dies(Written):
    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Written):
    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        super().point(axis, at, values)
        time.sleep(600.0)


def mirror(sink: type, to: Path, *, every: int = 1, here: bool = False) -> Mirror:
    """A mirror whose other process has this sink, or with ``here`` a thread of this one."""
    made = Mirror({"to": str(to)}, every=every)
    if here:
        made.here = lambda options: sink(options, None)  # type: ignore[method-assign]
    made.kind, made.sink = "test", f"tests.watch.sinks:{sink.__name__}"  # type: ignore[misc]
    return made


def read(to: Path) -> list[dict[str, Any]]:
    """What `Written` has written by now."""
    return [json.loads(line) for line in to.read_text().splitlines()] if to.exists() else []
