"""Replicas of a launch that stay away while others have come to the end, such as stopped processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ftopt.run.processes import Child
from ftopt.watch.jsonl import Line
from ftopt.watch.sentences import Note

_SOON_S = 5.0


class Absent:
    """Which replicas are away, and since when.

    Args:
        note: shows a note.
        evict_after_s: returns after how many seconds the job counts a replica as gone.
        has_left: whether a replica's process has ended its training, and may evaluate or save now.
    """

    def __init__(
        self, note: Callable[[Note], None], evict_after_s: Callable[[], float], has_left: Callable[[Child], bool]
    ) -> None:
        self._note, self._evict_after_s, self._has_left = note, evict_after_s, has_left
        self._starting = set[str]()
        self._since_s: dict[str, float] = {}
        self._limits_s: dict[str, float] = {}

    def hear(self, event: Line) -> None:
        """Takes up an event of this launch, or of its coordinator."""
        name, replica = event["event"], event["replica"]
        if name == "lost":
            self._since_s[replica] = time.monotonic()
        elif name in ("spawn", "join", "return", "spare"):
            (self._starting.add if name == "spawn" else self._starting.discard)(replica)
            self._since_s.pop(replica, None)
            self._limits_s.pop(replica, None)

    def end(self, left: Sequence[Child]) -> None:
        """Kills those of the processes that are ``left`` whose replicas have been away for too long. Says before how
        long it waits. Call it when a replica has come to the end. One that has not joined yet is away if all are."""
        now, left = time.monotonic(), [child for child in left if not self._has_left(child)]
        if all(child.name in self._starting or child.name in self._since_s for child in left):
            self._since_s |= {x.name: now for x in left if x.name not in self._since_s}
        for name, child in ((x.name, x) for x in left if x.process.poll() is None):
            away_s, limit_s = now - self._since_s.get(name, math.inf), self._limits_s.get(name)
            if limit_s is None and away_s >= _SOON_S:
                limit_s = self._limits_s[name] = self._evict_after_s()
                how = "has not joined" if name in self._starting else "is cut off"
                left_s = f"{max(0.0, limit_s - away_s):.0f} s at most (policy.evict_after_s)"
                self._note(
                    Note(
                        f"others have come to the end, and {name} {how}, as when its process is stopped: this launch "
                        f"waits for it, {left_s}, and then kills it; `kill -9 {child.process.pid}` ends the wait",
                        "warn",
                    )
                )
            elif limit_s is not None and away_s >= limit_s:
                self._note(Note(f"{name} was away for {away_s:.0f} s, and is killed", "bad"))
                child.end(0.0)
