"""The events of a job, reported through one injected function.

Every part of ftopt takes an ``on_event`` and calls it synchronously, on the thread where the event happens, just
*before* it takes effect. Telemetry writes the events down; fault injection strikes at them: a fault point is an event.
``on_event`` may be called from several threads at once, and must return at once: while it waits, heartbeats and commits
wait, too. Its exceptions are logged and go no further: a subscriber's error must not come between a decision and its
effect.
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
    """One event.

    Args:
        event: its name, one word of ``docs/watching.md`` (``propose``, ``commit``, ...).
        replica: the replica that emits it or that it is about; ``coordinator`` for the coordinator's.
        incarnation: the replica's incarnation, 0 before the coordinator has given one.
        fragment: the fragment concerned, None if there is none.
        version: the version that the round makes, None outside of a round.
        attempt: the attempt, None outside of one.
        inner_step: the replica's inner step (the coordinator's: the committed one).
        data: other facts; JSON values only, except for the loss in ``stepped``.
        job: the job's name, if the coordinator emits it, which may serve several; None for a replica's own event.
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
    """Emits an event in one replica's name. ``inner_step`` None: the training thread's present one."""

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
"""``event``: the event for which this thread is calling an ``on_event``."""


def guarded(on_event: OnEvent) -> OnEvent:
    """Wraps ``on_event``: its first exception is logged, and none goes further. (`SystemExit` and `KeyboardInterrupt`
    are no errors of a subscriber, and pass.)"""
    if on_event is ignore or isinstance(on_event, Subscribers):  # it guards each of its subscribers
        return on_event
    said = set[str]()

    def say(what: str, text: str, event: Event, *more: object, error: bool = False) -> None:
        if what in said:
            return
        said.add(what)
        with contextlib.suppress(Exception):  # a user's handler may raise
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
    """Whether ``error`` came out of an ``on_event``, which had then received the event."""
    return getattr(error, "_ftopt_told", False)


def check_not_telling(what: str) -> None:
    """Raises UserError if this thread is in an ``on_event``: ``what`` would wait for threads that wait for that."""
    if event := getattr(_telling, "event", ""):
        raise UserError(
            f"{what} in on_event, at the event {event!r}; an on_event may only look; set a flag there, and let the "
            "training loop do it"
        )


class Subscribers:
    """One ``on_event`` made of several, called in this order. An exception of one does not keep the event from
    others."""

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
    """Announces a replica's events to a subscriber, if it has a method of this name."""
    if (method := getattr(on_event, "attend", None)) is not None:
        method(job, replica)


OF_A_STEP = ("inner", "stepped")
"""The events of every inner step."""


def wants_steps(on_event: OnEvent) -> bool:
    """Whether it gets the events of every inner step (``inner``, ``stepped``): not `ignore`, nor a subscriber whose
    attribute ``every_step`` is False."""
    return on_event is not ignore and bool(getattr(on_event, "every_step", True))


def wants_gradients(on_event: OnEvent) -> bool:
    """Whether outer gradients are measured for it (``gradient_norm``, ``cosine`` of ``prepare``): if its attribute
    ``outer_gradient`` is True."""
    return bool(getattr(on_event, "outer_gradient", False))


def only_copies(on_event: OnEvent) -> bool:
    """Whether it shows the user nothing while the job runs, like a writer of curves: if its attribute ``only_copies``
    is True. What a user must know then goes to the log, as without an ``on_event``."""
    return bool(getattr(on_event, "only_copies", False))
