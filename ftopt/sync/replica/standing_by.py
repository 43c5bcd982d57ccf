"""How the training thread of a spare waits for its promotion, and what it logs meanwhile (SPARE)."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NoReturn

from ftopt.common.launched import tell_end
from ftopt.errors import JobOver

if TYPE_CHECKING:
    from ftopt.sync.replica.session import Session

_log = logging.getLogger(__name__)

_SAY_S = 300.0
"""Seconds between two log lines of a waiting spare."""


def stand_by(session: Session) -> None:
    """Returns when this replica is promoted, or when something else ends its wait.

    Raises:
        JobOver: the job does not need this replica any more.
    """
    view, since_s = session.view, time.monotonic()
    began, said_s = False, 0.0

    def complete() -> bool:
        return session.machine.complete and session.machine.welcomed

    def ended() -> bool:
        return not view.standby or bool(view.over) or view.failure is not None or view.closed

    view.changed.wait_for(lambda: ended() or complete())
    while not ended():
        now = time.monotonic()
        if now >= said_s + _SAY_S or not began:
            began, said_s = True, now
            _log.info("%s", _standing(session, now - since_s))
        view.changed.wait_for(ended, _SAY_S)
    if view.over:
        leave_unneeded(session.replica, view.over)
    if view.failure is None and not view.closed:
        _log.warning(
            "replica %s is promoted: it trains in the place of %s", session.replica, session.takes_the_place_of
        )


def leave_unneeded(replica: str, why: str) -> NoReturn:
    """Ends a script whose replica has nothing to do, with status 0."""
    _log.warning("replica %s ends: %s", replica, why)
    tell_end(over=why)
    raise JobOver(why)


def _standing(session: Session, waited_s: float) -> str:
    versions = [f.record.version for f in session.machine.fragments if f.record is not None]
    held = f"version {versions[0]}" if len(versions) == 1 else f"versions {min(versions)} to {max(versions)}"
    return (
        f"replica {session.replica} stands by, since {waited_s:.0f} s: it holds {held}, and trains when a replica is "
        "lost; Ctrl-C ends it"
    )
