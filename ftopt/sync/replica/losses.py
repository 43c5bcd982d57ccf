"""The losses of a replica's inner steps, on their way into its heartbeats.

The training thread adds each loss. It reads a tensor once per heartbeat at most, and one on a GPU only after the device
has copied it to the host: training never waits for the device.
"""

from __future__ import annotations

import math

from torch import Tensor

from ftopt.common.streams import Point, to_host
from ftopt.sync.protocol.limits import MAX_LOSS


class Losses:
    """The mean of the losses since the heartbeat before the last one; the last known one while no step is taken."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._wanted = True
        self._sum: float | Tensor = 0.0
        self._steps = 0
        self._coming: tuple[Tensor, Point, int] | None = None

    def add(self, loss: float | Tensor) -> None:
        """The loss of a step; a tensor has no dimensions. Training thread."""
        if hasattr(loss, "to_local"):
            return  # a DTensor's value may be spread over ranks that do not look for it in the same step
        if isinstance(loss, Tensor) and isinstance(self._sum, Tensor) and loss.device != self._sum.device:
            self._sum, self._steps = 0.0, 0  # of the steps since: to add them up would wait for a device
        self._sum, self._steps = self._sum + (loss.float() if isinstance(loss, Tensor) else loss), self._steps + 1
        if self._coming is None and self._wanted:
            self._wanted = False
            if isinstance(self._sum, Tensor):
                self._coming = (*to_host(self._sum), self._steps)
            else:
                self._mean = self._sum / self._steps
            self._sum, self._steps = 0.0, 0
        if self._coming is not None:
            total, point, steps = self._coming
            if point is None or point.query():  # type: ignore[no-untyped-call]
                self._mean, self._coming = float(total) / steps, None

    def take(self) -> float | str | None:
        """For a heartbeat: `ftopt.sync.protocol.limits.Loss`; the next step makes another one. Network thread."""
        self._wanted = True
        mean = self._mean
        if mean is None or math.isnan(mean):
            return None if mean is None else "nan"
        if abs(mean) > MAX_LOSS:
            return "inf" if mean > 0 else "-inf"
        return float(f"{mean:.6g}")
