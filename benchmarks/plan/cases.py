"""The jobs that are predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ftopt


@dataclass(frozen=True)
class Case:
    """One job."""

    name: str
    method: Any
    codec: str = "fp32"


def _streaming(every: int, delay: int) -> Any:
    return ftopt.StreamingDiLoCo(sync_every=every, delay=delay, fragments=ftopt.fragments.Balanced(n=4))


CASES = (
    Case("SyncSGD", ftopt.SyncSGD()),
    Case("DiLoCo, H 10", ftopt.DiLoCo(sync_every=10)),
    Case("DiLoCo, H 20", ftopt.DiLoCo(sync_every=20)),
    Case("DiLoCo, H 50", ftopt.DiLoCo(sync_every=50)),
    Case("DiLoCo, H 20, fp4", ftopt.DiLoCo(sync_every=20), "fp4"),
    Case("Streaming, H 20, delay 0", _streaming(20, 0)),
    Case("Streaming, H 20, delay 2", _streaming(20, 2)),
    Case("Streaming, H 20, delay 5", _streaming(20, 5)),
    Case("Streaming, H 50, delay 5", _streaming(50, 5)),
    Case("Streaming, H 20, delay 5, fp4", _streaming(20, 5), "fp4"),
)
