"""Where a job goes back to an earlier version, so that a second reading of its events knows what will stand.

Figures of a long run are folded from its events one by one, and hold no event for long. A decision is counted when it
is some hundred versions old, unless the job goes back to an earlier one later: `History` is told of each event in a
first reading, and knows that in the second one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ftopt.watch.jsonl import Line, data_of

Incarnation = tuple[str, int]
"""A replica and the number of its incarnation."""
OF_THE_JOB = frozenset(("start", "recover", "decide", "rollback", "leave", "used_twice"))
"""The events that tell of the job's decisions, and of the samples in them."""
WINDOW = 256
"""So many of the newest versions are held uncounted: a coordinator that comes back may tell its last ones again."""


class Turns:
    """The versions that a job, or a replica, has gone back to, one after the other."""

    def __init__(self) -> None:
        self._to: list[int] = []
        self._least: list[int] = []  # of each turn and all later ones

    def __len__(self) -> int:
        return len(self._to)

    def add(self, version: int) -> None:
        self._to.append(version)
        self._least.clear()

    def stands(self, version: int, taken: int) -> bool:
        """Whether what is made after so many turns is there at the end."""
        if taken >= len(self._to):
            return True
        if not self._least:
            self._least = [*self._to]
            for at in range(len(self._to) - 2, -1, -1):
                self._least[at] = min(self._to[at], self._least[at + 1])
        return version <= self._least[taken]

    def undone_at(self, version: int, taken: int) -> int:
        """The turn that takes it back, of what does not stand."""
        return next(at for at in range(taken, len(self._to)) if self._to[at] < version)


class History:
    """Takes up events in order. In the second reading another one is at the same place of the first reading's.

    Attributes:
        decided: the coordinator's events are there.
        alone: they are those of `ftopt replica`, without the coordinator's.
        turns: fragment -> where the coordinator says that the job goes back.
        ledger: where it does so by what the coordinator says of units, in fragment 0.
        own: of a replica and a fragment, where one of its later incarnations starts from an earlier version.
        dead: the incarnations that have died.
        left: when an incarnation has left: after so many turns of each fragment.
    """

    def __init__(self) -> None:
        self.decided = False
        self._spawned_for_a_job = False
        self.turns: dict[int, Turns] = defaultdict(Turns)
        self.ledger = Turns()
        self.own: dict[tuple[str, int], Turns] = defaultdict(Turns)
        self.dead: set[Incarnation] = set()
        self.left: dict[Incarnation, Mapping[int, int]] = {}
        self._rolled_back = False
        self._newest: dict[int, int] = {}
        self._life: dict[tuple[str, int], int] = {}

    @property
    def alone(self) -> bool:
        return not self.decided and self._spawned_for_a_job

    def add(self, event: Line) -> list[int]:
        """The fragments in which the job goes back with this event, or was found to have gone back."""
        name = event["event"]
        if name == "decide":
            self.decided = True
            return self._decide(event.get("fragment", 0), event["version"])
        if name in ("start", "recover"):
            self.decided = True
            return self._begin(event)
        if name == "quorum":
            self.decided = True
        elif name == "rollback":
            self._rolled_back = True
        elif name == "leave":
            who = event["replica"], event["incarnation"]
            self.left.setdefault(who, {fragment: len(turns) for fragment, turns in self.turns.items()})
        elif name == "death":
            self.dead.add((event["replica"], event["incarnation"]))
        elif name == "spawn":
            self._spawned_for_a_job = self._spawned_for_a_job or "job" in data_of(event)
        elif name in ("started", "apply"):
            self._follow(event)
        return []

    def _begin(self, event: Line) -> list[int]:
        data, back = data_of(event), []
        if "done" in data:
            self.ledger.add(event["version"])
        if self._rolled_back:
            self._rolled_back = False
            for fragment, last in enumerate(data.get("versions", ())):
                back.append(fragment)
                self._turn(fragment, last)
        return back

    def _decide(self, fragment: int, version: int) -> list[int]:
        """A version that was made long ago is made again: the job has gone back, although nobody has said so."""
        if version <= self._newest.get(fragment, version) - WINDOW:
            self._turn(fragment, version - 1)
            self._newest[fragment] = version
            return [fragment]
        self._newest[fragment] = max(version, self._newest.get(fragment, version))
        return []

    def _turn(self, fragment: int, last: int) -> None:
        self.turns[fragment].add(last)
        self._newest[fragment] = min(last, self._newest.get(fragment, last))

    def _follow(self, event: Line) -> None:
        who, life = (event["replica"], event.get("fragment", 0)), event["incarnation"]
        if self._life.get(who, life) < life and "version" in event:
            self.own[who].add(event["version"])
        if event["event"] == "apply":
            self._life[who] = max(life, self._life.get(who, life))
