"""The decisions of a run that stand, each counted once: the coordinator's, and those that a replica has followed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.versions import WINDOW, Numbers, Versions, without

Incarnation = tuple[str, int]
"""A replica and the number of its incarnation."""


@dataclass(slots=True)
class Counted:
    """The decisions that stand on one fragment: their number, the newest one's inner step, and the inner steps in them.
    ``contributions``: their number. ``twice``: steps that an earlier decision had counted. ``undone``: steps of
    decisions that do not stand, by incarnations that had left before (others contribute them again)."""

    count: int = 0
    inner_step: int | None = None
    committed: Counter[Incarnation] = field(default_factory=Counter)
    contributions: Counter[Incarnation] = field(default_factory=Counter)
    twice: int = 0
    undone: Counter[Incarnation] = field(default_factory=Counter)


class _Fragment:
    """A fragment's decisions, with the incarnation, steps, last step and finiteness of each contribution."""

    def __init__(self) -> None:
        self.contributions, self.inner_steps = Versions("iqqb"), Versions("q")
        self.chains: dict[int, str] = {}
        self.undone: Counter[Incarnation] = Counter()


class Decisions:
    """The coordinator's decisions.

    A coordinator that is killed right after it journals a decision may not have emitted the event; its successor does
    when it begins (`recover`). The last event about a version counts. A rollback takes back the decisions that the job
    does not go on from: their versions are made again. ``forks``: the versions that were decided with more than one
    chain, on any fragment. ``undone``: how many were taken back; ``undone_steps``: the inner steps in those of
    fragment 0; ``undone_contributions``: the contributions to them.
    """

    def __init__(self) -> None:
        self._fragments: dict[int, _Fragment] = {0: _Fragment()}
        self._who: dict[Incarnation, int] = {}
        self._left: set[Incarnation] = set()
        self._rolled_back = False
        self.forks: set[int] = set()
        self.undone = self.undone_steps = 0
        self.undone_contributions: Counter[Incarnation] = Counter()

    def add(self, event: Line) -> None:
        name, data = event["event"], data_of(event)
        if name == "decide":
            self._decide(event)
        elif name == "rollback":
            self._rolled_back = True
        elif name == "leave":
            self._left.add((event["replica"], event["incarnation"]))
        elif name in ("start", "recover"):
            if self._rolled_back or data.get("undone"):
                self._rolled_back = False
                for fragment, last in enumerate(data.get("versions", ())):
                    self._go_back(fragment, last)
            for told in data.get("decided", ()) if name == "recover" else ():
                self._take({**told, "data": told}, told["chain"])

    def _decide(self, event: Line) -> None:
        version, fragment = event["version"], event.get("fragment", 0)
        numbers = self._fragments[fragment].contributions.numbers if fragment in self._fragments else ()
        if numbers and version <= numbers[-1] - WINDOW:  # the job has gone back, although no event says so
            self._go_back(fragment, version - 1)
            self.forks.add(version)
        self._take(event, data_of(event).get("chain", ""))

    def _take(self, decision: Line, chain: str) -> None:
        version, of = decision["version"], self._fragments.setdefault(decision.get("fragment", 0), _Fragment())
        if of.chains.setdefault(version, chain) != chain:
            self.forks.add(version)
            of.chains[version] = chain
        if len(of.chains) > 2 * WINDOW:
            del of.chains[min(of.chains)]
        of.inner_steps.put(version, [(decision["inner_step"],)])
        of.contributions.put(
            version,
            [
                (self._who.setdefault((replica, incarnation), len(self._who)), steps, last_step, bool(finite))
                for replica, incarnation, steps, last_step, _weight, finite in data_of(decision)["members"]
            ],
        )

    def _go_back(self, fragment: int, last: int) -> None:
        of, names = self._fragments.setdefault(fragment, _Fragment()), list(self._who)
        self.undone += len(of.inner_steps.go_back(last))
        of.chains = {version: chain for version, chain in of.chains.items() if version <= last}
        for who, steps, _, finite in of.contributions.go_back(last):
            self.undone_contributions[names[who]] += 1
            self.undone_steps += steps if finite and not fragment else 0
            if finite and names[who] in self._left:
                of.undone[names[who]] += steps

    def result(self) -> dict[int, Counted]:
        """Fragment -> what stands."""
        return {fragment: self._counted(of) for fragment, of in self._fragments.items()}

    def _counted(self, of: _Fragment) -> Counted:
        found, names = Counted(count=len(of.contributions), undone=of.undone), list(self._who)
        found.inner_step = last[0] if (last := of.inner_steps.last()) else None
        known: dict[int, int] = {}
        for who, steps, last_step, finite in of.contributions.rows():
            found.contributions[names[who]] += 1
            if finite:  # also of one without samples
                found.committed[names[who]] += steps
                found.twice += max(0, steps - (last_step - known.get(who, 0)))
            known[who] = max(last_step, known.get(who, 0))
        return found


class OwnVersions:
    """The committed states that replicas have followed, from their own events. A version was rolled back if a later
    incarnation has started from a version before it."""

    def __init__(self) -> None:
        self._applied: dict[tuple[str, int], Versions] = defaultdict(lambda: Versions("qqqq"))
        self._made: dict[int, Numbers] = defaultdict(Numbers)
        self._fetched: dict[int, Numbers] = defaultdict(Numbers)
        self._life: dict[tuple[str, int], int] = {}

    def add(self, event: Line) -> None:
        name, fragment, version = event["event"], event.get("fragment", 0), event.get("version")
        if version is None:
            return
        if name in ("commit", "fetched"):
            (self._made if name == "commit" else self._fetched)[fragment].add(version)
        elif name in ("started", "apply"):
            at, life, data = (event["replica"], fragment), event["incarnation"], data_of(event)
            if self._life.get(at, life) < life:
                self._applied[at].go_back(version)
            if name == "apply":
                self._life[at] = max(life, self._life.get(at, life))
                row = version, life, int(data.get("counted_step", 0)), int(data.get("committed_step", 0))
                self._applied[at].put(version, [row])

    def fragments(self) -> list[int]:
        """The fragments of which anything is known."""
        return sorted({0, *(fragment for (_, fragment), own in self._applied.items() if own)})

    def inner_step(self) -> int | None:
        """The inner step of the newest committed state; None if there is none."""
        newest = [row for (_, of), own in self._applied.items() if not of and (row := own.last()) is not None]
        return max(newest)[3] if newest else None

    def counted(self, fragment: int) -> dict[Incarnation, int]:
        """For each incarnation, its last inner step that a committed state counts."""
        found: dict[Incarnation, int] = {}
        for (replica, of), own in self._applied.items():
            if of == fragment:
                found |= {(replica, life): counted for _, life, counted, _ in own.rows()}
        return found

    def took_part(self) -> int:
        """How many committed states the replicas have helped to make; they have fetched the others."""
        return sum(stop - start for fragment in self.fragments() for start, stop in self._helped(fragment))

    def _helped(self, fragment: int) -> Iterable[tuple[int, int]]:
        applied = Numbers()
        for (_, of), own in self._applied.items():
            for version in own.numbers if of == fragment else ():
                applied.add(version)
        return without(applied, without(self._fetched[fragment], self._made[fragment]))
