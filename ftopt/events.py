"""What happens in a job, told through one injected function.

Every part of ftopt takes an ``on_event`` and calls it synchronously, on the thread where the thing happens, just
*before* the thing takes effect. Telemetry writes the events down; fault injection strikes at them: a fault point is an
event. ``on_event`` may be called from several threads at once. What it raises is logged and goes no further: an error
of a subscriber must come between no decision and its effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens.

    Args:
        event: what happens, one word of ``docs/events.md`` (``propose``, ``commit``, ...).
        replica: whose event it is; ``coordinator`` for the coordinator's.
        incarnation: the life of the replica's process, 0 before the coordinator has given one.
        fragment: the fragment concerned, None when the event is about none.
        version: the version that the round works towards, None outside of a round.
        attempt: the attempt, None outside of one.
        inner_step: the replica's inner step (the coordinator's: the committed one).
        data: whatever else belongs to it; JSON values only.
    """

    event: str
    replica: str
    incarnation: int = 0
    fragment: int | None = None
    version: int | None = None
    attempt: int | None = None
    inner_step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


OnEvent = Callable[[Event], None]

_log = logging.getLogger(__name__)


class EmitEvent(Protocol):
    """Tells an event in one replica's name. ``inner_step``: None: the one that its training thread has come to."""

    def __call__(
        self,
        event: str,
        *,
        fragment: int | None = None,
        version: int | None = None,
        attempt: int | None = None,
        inner_step: int | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None: ...


def ignore(event: Event) -> None:
    """The ``on_event`` that does nothing."""


def guarded(on_event: OnEvent) -> OnEvent:
    """``on_event``, whose exceptions are logged, the first one of all, and go no further. (`SystemExit` and
    `KeyboardInterrupt` are no errors of a subscriber, and pass.)"""
    if on_event is ignore:
        return on_event
    told = False

    def tell(event: Event) -> None:
        nonlocal told
        try:
            on_event(event)
        except Exception:
            if not told:
                told = True
                _log.exception(
                    "on_event raised at the event %r of %s; the job goes on, and further errors of this on_event are "
                    "not shown; mend it, or leave it out",
                    event.event,
                    event.replica,
                )

    return tell


def wants_steps(on_event: OnEvent) -> bool:
    """Whether it is to be told of every inner step (``inner``, ``stepped``): all but `ignore` and those that have an
    attribute ``every_step`` that is False."""
    return on_event is not ignore and getattr(on_event, "every_step", True)
