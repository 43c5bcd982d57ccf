"""`TensorBoard`: a replica's metrics in TensorBoard's files. Only this file imports it, on a thread of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ftopt.common.paths import user_path
from ftopt.errors import UserError, lacking, names_arguments
from ftopt.watch.trackers.mirror import Mirror

_FLUSH_S = 1


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

    @names_arguments('ftopt.TensorBoard("runs")')
    def __init__(self, dir: str | Path, *, every: int = 10) -> None:
        if not isinstance(dir, str | Path) or not str(dir):
            raise UserError(f"dir={dir!r:.60}; must be a folder, as 'runs'")
        if find_spec("tensorboard") is None:
            raise UserError(lacking("tensorboard", "ftopt.TensorBoard", "tensorboard"))
        super().__init__({"dir": str(user_path(dir).absolute())}, every=every)

    def here(self, options: Mapping[str, Any]) -> TensorBoardSink:
        return TensorBoardSink(options)


class TensorBoardSink:
    """Writes TensorBoard's files."""

    file: Path | None = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(options["dir"]).joinpath(*(_folder_of(options[name]) for name in ("job", "replica")))
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_S)
        self._writer.add_text("ftopt", json.dumps({name: options[name] for name in ("job", "replica", "life")}))
        self._writer.flush()

    def point(self, axis: str, at: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)

    def row(self, row: Mapping[str, Any]) -> None:
        self._writer.add_text("events", f"{row['event']}: {row['text']}", row["inner_step"])

    def close(self, *, killed: bool) -> None:
        self._writer.close()


def _folder_of(name: str) -> str:
    """A name, turned into that of a single folder."""
    return name.replace("/", "_") if name.strip(".") else "_" * len(name)
