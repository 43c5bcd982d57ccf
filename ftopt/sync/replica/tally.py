"""A replica's events, and the losses and counts that its heartbeats report.

Scripts write no record of their own. The training thread adds each loss. It reads a tensor at most once per heartbeat,
and on a GPU only after the device has copied it to the host: training never waits for the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ftopt.common.spread import Spread
from ftopt.common.streams import Point, to_host
from ftopt.events import Event, OnEvent, guarded, ignore
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import MAX_INT, MAX_LOSS, MAX_REASONS, MAX_SECONDS, MAX_STEPS, MAX_WAITS
from ftopt.sync.replica.view import View

_WIDTH = 0.03
"""Waits within this share of each other count as one length."""


class Tally:
    """The counts of one process. Events come on any thread; each kind of number changes on one thread.

    Attributes:
        leaving: whether the counts are the last ones, which have all waits for outer steps.
    """

    def __init__(self) -> None:
        self.leaving = False
        self._waits = Spread(exact=0, width=_WIDTH)
        self._dropped: dict[str, int] = {}
        self._waited_s = 0.0
        self._sent = 0
        self._tested: tuple[float | str | None, int] = None, 0

    def hear(self, event: str, fragment: int | None, inner_step: int, data: Mapping[str, Any]) -> None:
        """Counts an event of this replica."""
        match event:
            case "discarded" if not fragment:
                known = {**self._dropped}  # the network thread may be reading
                known[data["reason"]] = known.get(data["reason"], 0) + int(data["steps"])
                self._dropped = dict([*known.items()][:MAX_REASONS])
            case "stall":
                self._waited_s = min(self._waited_s + float(data["stall_s"]), MAX_SECONDS)
                self._waits.add(min(float(data["stall_s"]), MAX_SECONDS))
            case "prepare":
                self._sent = min(int(data.get("wire_bytes", 0)), MAX_INT)
            case "evaluate":
                self._tested = _worded(data.get("loss")), min(inner_step, MAX_STEPS)

    def counts(self, steps: int, pending: int, tokens: int, planned: int) -> m.Counts:
        """The counts for a heartbeat."""
        steps = min(steps, MAX_STEPS)
        waited_s = round(self._waited_s, 3)
        pending, tokens = max(0, min(pending, steps)), min(tokens, MAX_INT)
        waits = tuple((round(s, 6), times) for s, times in self._waits.values())[:MAX_WAITS] if self.leaving else ()
        planned = min(planned, MAX_STEPS)
        return m.Counts(steps, pending, self._dropped, waited_s, self._sent, tokens, *self._tested, planned, waits)


class Emitter:
    """Passes a replica's events on. Any thread.

    Args:
        replica: its id.
        on_event: the subscriber.
        view: has the incarnation.
        inner_step: returns the replica's current inner step, for events without a step of their own.
        failed: called with the thread in which the subscriber has raised, and the error.
    """

    def __init__(
        self,
        replica: str,
        on_event: OnEvent,
        *,
        view: View,
        inner_step: Callable[[], int],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._replica, self._on_event, self._view = replica, guarded(on_event), view
        self._inner_step, self._failed = inner_step, failed
        self.tally = Tally()
        self.training_thread = 0
        """The thread that has started the replica; in it the subscriber's errors are raised."""

    def emit(
        self,
        event: str,
        *,
        fragment: int | None = None,
        version: int | None = None,
        attempt: int | None = None,
        inner_step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Emits an event in this replica's name."""
        if self._on_event is ignore and event != "evaluate":  # nobody hears it, and no count needs the step
            self.tally.hear(event, fragment, 0, data or {})
            return
        step = self._inner_step() if inner_step is None else inner_step
        life = self._view.incarnation
        self.tally.hear(event, fragment, step, data or {})
        try:
            self._on_event(Event(event, self._replica, life, fragment, version, attempt, step, data or {}))
        except BaseException as error:  # also sys.exit() in an on_event: the event takes effect all the same
            if threading.get_ident() == self.training_thread:
                raise
            self._failed(f"on_event (at {event!r})", error)


class Losses:
    """The mean of the losses since the heartbeat before the last one; the last known mean while no step is taken."""

    def __init__(self) -> None:
        self._mean: float | None = None
        self._wanted = True
        self._sum: float | Tensor = 0.0
        self._steps = 0
        self._coming: tuple[Tensor, Point, int] | None = None

    def add(self, loss: float | Tensor) -> None:
        """Adds the loss of a step; a tensor has no dimensions. Training thread."""
        if hasattr(loss, "to_local"):
            return  # a DTensor's value may be spread over ranks, which do not read it in the same step
        if isinstance(loss, Tensor) and isinstance(self._sum, Tensor) and loss.device != self._sum.device:
            self._sum, self._steps = 0.0, 0  # drops the sum so far: adding to it would wait for a device
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
        """The mean for a heartbeat, as `ftopt.sync.protocol.limits.Loss`; the next step starts another. Network
        thread."""
        self._wanted = True
        return _worded(self._mean)


def _worded(loss: float | None) -> float | str | None:
    """A loss with six digits, or as a word if it is not finite."""
    if loss is None or math.isnan(loss):
        return None if loss is None else "nan"
    if abs(loss) > MAX_LOSS:
        return "inf" if loss > 0 else "-inf"
    return float(f"{loss:.6g}")
