"""What happens in a job, told through one injected function.

Every part of ftopt takes an ``on_event`` and calls it synchronously, on the thread where the thing happens, just
*before* the thing takes effect. Telemetry writes the events down; fault injection strikes at them: a fault point is an
event. ``on_event`` may be called from several threads at once, and must return at once: what it waits for, heartbeats
and commits wait for. What it raises is logged and goes no further: an error of a subscriber must come between no
decision and its effect.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ftopt.errors import UserError


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
        data: whatever else belongs to it; JSON values only, but for the loss in ``stepped``.
        job: the job's name, if the coordinator tells it, which may serve several; None of a replica's own event.
    """

    event: str
    replica: str
    incarnation: int = 0
    fragment: int | None = None
    version: int | None = None
    attempt: int | None = None
    inner_step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    job: str | None = None


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


_SLOW_S = 1.0
_telling = threading.local()
"""``event``: what this thread calls an ``on_event`` for."""


def guarded(on_event: OnEvent) -> OnEvent:
    """``on_event``, whose exceptions are logged, the first one of all, and go no further. (`SystemExit` and
    `KeyboardInterrupt` are no errors of a subscriber, and pass.)"""
    if on_event is ignore or isinstance(on_event, Subscribers):  # which guards each of its own
        return on_event
    said = set[str]()

    def say(what: str, text: str, event: Event, *more: object, error: bool = False) -> None:
        if what in said:
            return
        said.add(what)
        with contextlib.suppress(Exception):  # a handler's of the user's
            _log.log(
                logging.ERROR if error else logging.WARNING, text, event.event, event.replica, *more, exc_info=error
            )

    def tell(event: Event) -> None:
        outer, _telling.event = getattr(_telling, "event", ""), event.event
        began_s = time.monotonic()
        try:
            on_event(event)
        except Exception:
            say(
                "raised",
                "on_event raised at the event %r of %s; the job goes on, and further errors of this on_event are not "
                "shown; mend it, or leave it out",
                event,
                error=True,
            )
        except BaseException as error:
            error._ftopt_told = True  # type: ignore[attr-defined]
            raise
        finally:
            _telling.event = outer
            if (took_s := time.monotonic() - began_s) > _SLOW_S:
                say(
                    "slow",
                    "on_event, at the event %r of %s, took %.1f s: no message went out meanwhile, and peers may have "
                    "taken this process for dead; either the machine is overloaded, or on_event waits: let it put the "
                    "event into a queue, and return",
                    event,
                    took_s,
                )

    return tell


def was_told(error: BaseException) -> bool:
    """Whether it came out of an ``on_event``, which had then heard of the event."""
    return getattr(error, "_ftopt_told", False)


def check_not_telling(what: str) -> None:
    """UserError if this thread is in an ``on_event``: ``what`` waits for threads that wait for that."""
    if event := getattr(_telling, "event", ""):
        raise UserError(
            f"{what} in on_event, at the event {event!r}; an on_event may only look; set a flag there, and let the "
            "training loop do it"
        )


class Subscribers:
    """One ``on_event`` of several, called in this order. What one of them raises keeps no other from hearing."""

    def __init__(self, subscribers: Sequence[OnEvent]) -> None:
        self._told = [(guarded(each), wants_steps(each)) for each in subscribers]
        self._all = tuple(subscribers)
        self.every_step = any(wants_steps(each) for each in subscribers)
        self.outer_gradient = any(wants_gradients(each) for each in subscribers)
        self.only_copies = all(only_copies(each) for each in subscribers)

    def __call__(self, event: Event) -> None:
        of_a_step = event.event in OF_A_STEP
        for tell, wants in self._told:
            if wants or not of_a_step:
                tell(event)

    def attend(self, job: str, replica: str) -> None:
        """See `attend`."""
        for each in self._all:
            attend(each, job, replica)


def attend(on_event: OnEvent, job: str, replica: str) -> None:
    """Tells a subscriber whose events will come, if it has a method of this name."""
    if (method := getattr(on_event, "attend", None)) is not None:
        method(job, replica)


OF_A_STEP = ("inner", "stepped")
"""The events of every inner step."""


def wants_steps(on_event: OnEvent) -> bool:
    """Whether it is to be told of every inner step (``inner``, ``stepped``): all but `ignore` and those that have an
    attribute ``every_step`` that is False."""
    return on_event is not ignore and bool(getattr(on_event, "every_step", True))


def wants_gradients(on_event: OnEvent) -> bool:
    """Whether outer gradients are to be measured for it (``gradient_norm``, ``cosine`` of ``prepare``): if it has an
    attribute ``outer_gradient`` that is True."""
    return bool(getattr(on_event, "outer_gradient", False))


def only_copies(on_event: OnEvent) -> bool:
    """Whether it tells the user nothing while the job runs, as what writes curves: if it has an attribute
    ``only_copies`` that is True. What a user must know then goes to the log, as without an ``on_event``."""
    return bool(getattr(on_event, "only_copies", False))
