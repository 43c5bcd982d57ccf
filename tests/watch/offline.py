"""Reads wandb's offline files back: the records are wandb's own protobuf messages, in the framing of LevelDB's logs."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK = 7, 32 << 10
_FULL, _LAST = 1, 4


def records(file: Path) -> Iterator[Any]:
    """Each ``Record`` of a ``.wandb`` file, as far as it is whole."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data[:4] == b":W&B", data[:8]
    at, parts = _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + _HEADER : at + _HEADER + length]
        if not kind or len(part) < length:
            return
        at, parts = at + _HEADER + length, parts + part
        if kind in (_FULL, _LAST):
            record, parts = Record.FromString(parts), b""
            yield record


class Offline:
    """One offline run of wandb."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records = list(records(file))
        self.run = next(record.run for record in self.records if record.WhichOneof("record_type") == "run")
        self.config = {item.key: json.loads(item.value_json) for item in self.run.config.update}
        self.alerts = [record.alert for record in self.records if record.WhichOneof("record_type") == "alert"]
        self.exit_codes = [r.exit.exit_code for r in self.records if r.WhichOneof("record_type") == "exit"]

    @property
    def points(self) -> list[dict[str, Any]]:
        """What was logged: name -> value, in order."""
        return [
            {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in self.records
            if record.WhichOneof("record_type") == "history"
        ]

    def curve(self, name: str) -> list[Any]:
        """The values of one metric."""
        return [point[name] for point in self.points if name in point]

    @property
    def axes(self) -> dict[str, str]:
        """Metric -> its axis."""
        found = [record.metric for record in self.records if record.WhichOneof("record_type") == "metric"]
        return {metric.name: metric.step_metric for metric in found if metric.step_metric}

    @property
    def table(self) -> list[list[Any]]:
        """The newest table of events."""
        paths = self.curve("events.path")
        return list(json.loads((self.file.parent / "files" / paths[-1]).read_text())["data"]) if paths else []


def runs(folder: Path) -> list[Offline]:
    """All offline runs below a folder, in the order of their start."""
    return [Offline(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]
