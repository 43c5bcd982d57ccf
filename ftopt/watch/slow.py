"""Keeps back that a replica is slow until that has lasted: a busy machine has hiccups of seconds."""

from __future__ import annotations

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.sentences import Note

SAID_S = 15.0
"""As the replica's own log does (`ftopt.sync.replica.rounds_told`)."""
_ENDS = ("join", "return", "lost", "leave", "gone", "death", "end", "spawn")
"""With these events of a replica it is not slow any more."""


class SlowForLong:
    """Of one job: sits between its events in words and those who show them."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, Note]] = {}

    def sift(self, record: Line, note: Note | None) -> Note | None:
        """``note``, which is about the event ``record``; None: there is nothing to say of it now."""
        name, replica = record["event"], record["replica"]
        if name == "slow" and note is not None:
            self._kept[replica] = float(record["t_s"]) - float(data_of(record).get("for_s", 0.0)), note
            return None
        if name == "up_to_speed" and self._kept.pop(replica, None) is not None:
            return None  # nobody has heard that it was slow
        if name in _ENDS:
            self._kept.pop(replica, None)
        return note

    def due(self, now_s: float) -> list[Note]:
        """What is to be said by now; ``now_s``: on the clock of the events."""
        due = [replica for replica, (since_s, _) in self._kept.items() if now_s - since_s >= SAID_S]
        return [self._kept.pop(replica)[1] for replica in due]
