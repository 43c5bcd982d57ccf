"""`TensorBoard`: a replica's metrics in TensorBoard's files. Only this file imports it, in a process of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftopt.common.paths import user_path
from ftopt.errors import UserError, names_arguments
from ftopt.watch.trackers.mirror import Mirror

_FLUSH_S = 1.0


class TensorBoard(Mirror):
    """Copies metrics to TensorBoard: an ``on_event`` of `ftopt.connect`. Needs the extra ``tensorboard``.

    Each replica has a folder of its own, ``dir/JOB/REPLICA``; each incarnation adds a file to it. ``tensorboard
    --logdir dir`` shows one run per replica and job.

    Args:
        dir: the folder.
        every: inner steps between two points of the inner metrics. Default 10.

    Raises:
        UserError: an argument is wrong, or tensorboard is not installed.
    """

    kind = "tensorboard"
    sink = "ftopt.watch.trackers.tensorboard:TensorBoardSink"

    @names_arguments('ftopt.TensorBoard("runs")')
    def __init__(self, dir: str | Path, *, every: int = 10) -> None:
        if not isinstance(dir, str | Path) or not str(dir):
            raise UserError(f"dir={dir!r:.60}; must be a folder, as 'runs'")
        if find_spec("tensorboard") is None:
            raise UserError(
                "ftopt.TensorBoard needs tensorboard, which is not installed; pip install 'ftopt[tensorboard]'"
            )
        super().__init__({"dir": str(user_path(dir).absolute())}, every=every)


class TensorBoardSink:
    """Writes TensorBoard's files, in the other process."""

    def __init__(self, options: Mapping[str, Any], say: Callable[..., None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(options["dir"]).joinpath(*(_folder_of(options[name]) for name in ("job", "replica")))
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(folder))
        self._flushed_s = time.monotonic()
        self._rows = 0
        about = {name: options[name] for name in ("job", "replica", "life")}
        self._writer.add_text("ftopt", json.dumps(about))
        self._writer.flush()
        self.file = next(iter(folder.glob(f"events.out.tfevents.*.{os.getpid()}.*")), None)

    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)
        self._flush()

    def row(self, row: Mapping[str, Any]) -> None:
        self._writer.add_text("events", f"{row['event']}: {row['text']}", row["inner_step"])
        self._flush()

    def _flush(self) -> None:
        if time.monotonic() >= self._flushed_s + _FLUSH_S:
            self._writer.flush()
            self._flushed_s = time.monotonic()

    def close(self, *, killed: bool) -> None:
        self._writer.close()


def _folder_of(name: str) -> str:
    """A name, turned into that of a single folder."""
    return name.replace("/", "_") if name.strip(".") else "_" * len(name)
