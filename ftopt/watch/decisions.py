"""The decisions of a run that stand, counted one by one: the coordinator's, and those that a replica has followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ftopt.watch.history import WINDOW, History, Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.ranges import Numbers, without


@dataclass(slots=True)
class Counted:
    """Of one fragment.

    Attributes:
        count: how many decisions stand.
        inner_step: of the newest one.
        committed: the inner steps in them.
        twice: how many of these were counted before.
        undone: those that were in decisions that do not stand, of incarnations that had left by then (others contribute
            them again).
    """

    count: int = 0
    inner_step: int | None = None
    committed: Counter[Incarnation] = field(default_factory=Counter)
    twice: int = 0
    undone: Counter[Incarnation] = field(default_factory=Counter)
    _last: dict[Incarnation, int] = field(default_factory=dict)

    def take(self, decision: Line) -> None:
        """In the order of versions."""
        self.count += 1
        self.inner_step = decision["inner_step"]
        for replica, incarnation, steps, last_step, _weight, finite in data_of(decision)["members"]:
            who = (replica, incarnation)
            if finite:  # also of a share of a global batch without samples
                self.committed[who] += steps
                self.twice += max(0, steps - (last_step - self._last.get(who, 0)))
            self._last[who] = max(last_step, self._last.get(who, 0))


class Decisions:
    """The coordinator's. ``history`` has taken up the same events before.

    A coordinator that was killed after it had journalled a decision may not have told it: the next one does when it
    begins (`recover`). The last word counts. A rollback takes back those that the job does not go on from: they are
    made again.

    Attributes:
        forks: the versions of any fragment that were decided with more than one chain.
    """

    def __init__(self, history: History) -> None:
        self._history, self._now = history, History()
        self._counted: dict[int, Counted] = {0: Counted()}
        self._newest: dict[int, dict[int, tuple[Line, int]]] = defaultdict(dict)  # not counted yet, and when they came
        self.forks: set[int] = set()

    def add(self, event: Line) -> None:
        """One event, in order."""
        back = self._now.add(event)
        for fragment in back:
            self._go_back(fragment)
        if event["event"] == "decide":
            if back:  # nobody has told why: it is another history, as far as anybody knows
                self.forks.add(event["version"])
            self._take(event, data_of(event).get("chain", ""))
        elif event["event"] == "recover":
            for last in data_of(event).get("decided", ()):
                self._take({**last, "data": last}, last["chain"])

    def _take(self, decision: Line, chain: str) -> None:
        fragment, version = decision.get("fragment", 0), decision["version"]
        self._counted.setdefault(fragment, Counted())
        known = self._newest[fragment]
        if version in known and data_of(known[version][0]).get("chain", "") != chain:
            self.forks.add(version)
        known[version] = decision, len(self._now.turns[fragment])
        if len(known) > 2 * WINDOW:
            self._count(fragment, sorted(known)[:WINDOW])

    def _go_back(self, fragment: int) -> None:
        """What is uncounted, and does not stand; what was counted before has been found not to."""
        self._counted.setdefault(fragment, Counted())
        at = len(self._now.turns[fragment]) - 1
        known = self._newest[fragment]
        for version in [
            version for version, (_, turn) in known.items() if self._undone_at(fragment, version, turn) == at
        ]:
            self._take_back(fragment, known.pop(version)[0], at)

    def _undone_at(self, fragment: int, version: int, turn: int) -> int | None:
        turns = self._history.turns[fragment]
        return None if turns.stands(version, turn) else turns.undone_at(version, turn)

    def _take_back(self, fragment: int, decision: Line, at: int) -> None:
        for replica, incarnation, steps, *_, finite in data_of(decision)["members"]:
            left = self._history.left.get((replica, incarnation))
            if finite and left is not None and left.get(fragment, 0) <= at:
                self._counted[fragment].undone[replica, incarnation] += steps

    def _count(self, fragment: int, versions: list[int]) -> None:
        known = self._newest[fragment]
        for version in versions:
            decision, turn = known.pop(version)
            if (at := self._undone_at(fragment, version, turn)) is None:
                self._counted[fragment].take(decision)
            else:
                self._take_back(fragment, decision, at)

    def result(self) -> dict[int, Counted]:
        """Fragment -> what stands, once all events are there."""
        for fragment, known in self._newest.items():
            self._count(fragment, sorted(known))
        return self._counted


class OwnVersions:
    """The committed states that replicas have followed, by their own words. ``history`` has taken up the same events
    before: a version that was rolled back is one from before which a later incarnation has started."""

    def __init__(self, history: History) -> None:
        self._history, self._now = history, History()
        self._applied: dict[int, Numbers] = {0: Numbers()}
        self._made: dict[int, Numbers] = defaultdict(Numbers)
        self._fetched: dict[int, Numbers] = defaultdict(Numbers)
        self._counted: dict[int, dict[Incarnation, int]] = defaultdict(dict)
        self._last: tuple[int, int] | None = None

    def add(self, event: Line) -> None:
        """One event, in order."""
        self._now.add(event)
        name, fragment = event["event"], event.get("fragment", 0)
        if name in ("commit", "fetched") and (version := event.get("version")) is not None:
            (self._made if name == "commit" else self._fetched)[fragment].add(version)
        elif name == "apply":
            who, version, data = (event["replica"], fragment), event["version"], data_of(event)
            if not self._history.own[who].stands(version, len(self._now.own[who])):
                return
            self._applied.setdefault(fragment, Numbers()).add(version)
            self._counted[fragment][event["replica"], event["incarnation"]] = int(data.get("counted_step", 0))
            if not fragment and (self._last is None or version >= self._last[0]):
                self._last = version, data.get("committed_step", 0)

    def fragments(self) -> list[int]:
        """Those of which anything is known."""
        return sorted(self._applied)

    def inner_step(self) -> int | None:
        """Of the newest committed state; None: there is none."""
        return self._last[1] if self._last is not None else None

    def counted(self, fragment: int) -> dict[Incarnation, int]:
        """Of each incarnation, its last inner step that a committed state counts."""
        return self._counted[fragment]

    def took_part(self) -> int:
        """How many of the committed states the replicas have helped to make; the others they have fetched."""
        return sum(
            stop - start
            for fragment, applied in self._applied.items()
            for start, stop in without(applied, without(self._fetched[fragment], self._made[fragment]))
        )
