"""How the ranks of an island act as one replica: the machine of rank 0, and each rank's.

Each rank holds a slice of every fragment's committed state. Rank 0 alone is a member of the job. What the job decides
comes to the ranks in two halves:

1. **Work** (`Work`): a reduction, or a fetched state that is checked. Each rank does its part; the whole is *done* when
   all have done it, and has failed as soon as one rank has failed: the others are stopped then.
2. **Change** (`Change`): what a slice becomes. Changes are numbered. They reach each rank when they happen, and take
   effect in its training thread, at a step boundary that begins with rank 0's word: how many changes count by now. So
   all ranks have the same versions in the same step.

Four rules:

- No commit and no install without work that all ranks have done, with one digest.
- While a fragment has a change that has not taken effect, no work on it begins, and it is not served.
- Changes take effect in order, each once, on all ranks at the same boundary.
- A rank that cannot follow raises `OutOfStep`: the island ends then, and starts again.

Pure: no clock, thread or socket. `ftopt.optimizer.ranks` has what it runs in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ftopt.errors import FtoptError


class OutOfStep(FtoptError):
    """A rank is not where rank 0 says that all are. The island must start again."""


class Deferred(InterruptedError):
    """A change of the fragment has not taken effect yet: not now."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something that all ranks do together, under a number of its own.

    Args:
        number: unique in the island's life.
        fragment: whose.
        version: that it makes.
        kind: ``reduce`` or ``install``.
    """

    number: int
    fragment: int
    version: int
    kind: Literal["reduce", "install"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a rank's part of some work.

    Args:
        number: of the work.
        rank: whose part.
        digest: of the whole, as every rank knows it by then; "": it has failed.
        failure: the kind of error; ``reason``: its text; ``peer``: the member that it names, -1: none.
        peak: the largest absolute value of what was compared, where it was looked for.
    """

    number: int
    rank: int
    digest: str = ""
    failure: str = ""
    reason: str = ""
    peer: int = -1
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """What takes effect at a boundary.

    Args:
        index: 1 for the first in the island's life.
        kind: ``commit`` or ``install`` of ``work``; ``exclude``; ``begin``: the held state is given a new record.
        version: of the fragment from then on.
    """

    index: int
    fragment: int
    kind: Literal["commit", "install", "exclude", "begin"]
    version: int = 0
    work: int = 0


_OF: dict[str, str] = {"commit": "reduce", "install": "install"}
"""Change -> the kind of work that it needs."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The other ranks' part of a work is to be stopped."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """All ranks have ended their parts. ``failed``: the first failure; None: done, with this ``digest``, and the
    largest ``peak``."""

    number: int
    digest: str = ""
    failed: Outcome | None = None
    peak: float = 0.0


@dataclass(slots=True)
class _UnderWay:
    work: Work
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    failed: Outcome | None = None


class Leader:
    """Rank 0's machine.

    Args:
        size: ranks of the island.

    Attributes:
        changes: so many have happened.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._under_way: dict[int, _UnderWay] = {}
        self._done: dict[tuple[int, str], Work] = {}  # of each fragment and kind the work that was done last
        self._waiting: list[Change] = []
        self._numbers = self.changes = 0

    def begin(self, fragment: int, version: int, kind: Literal["reduce", "install"]) -> Work:
        """New work, for all ranks. Raises `Deferred`."""
        if kind == "reduce" and self.deferred(fragment):
            raise Deferred(f"a newer state of fragment {fragment} waits for the next step boundary")
        self._numbers += 1
        work = Work(self._numbers, fragment, version, kind)
        self._under_way[work.number] = _UnderWay(work)
        self._done.pop((fragment, kind), None)
        return work

    def heard(self, outcome: Outcome) -> list[Stop | Done]:
        """A rank has ended its part, rank 0 too."""
        each = self._under_way.get(outcome.number)
        if each is None or outcome.rank in each.outcomes:
            raise OutOfStep(f"rank {outcome.rank} has ended work {outcome.number}, which it was not to do")
        effects: list[Stop | Done] = []
        each.outcomes[outcome.rank] = outcome
        if outcome.failure and each.failed is None:
            each.failed = outcome
            effects.append(Stop(outcome.number))
        if len(each.outcomes) == self._size:
            del self._under_way[outcome.number]
            digests = {o.digest for o in each.outcomes.values()}
            if each.failed is None and len(digests) > 1:
                raise OutOfStep(f"the ranks have {len(digests)} digests of work {outcome.number}")
            if each.failed is None:
                self._done[each.work.fragment, each.work.kind] = each.work
            peak = max(o.peak for o in each.outcomes.values())
            effects.append(Done(outcome.number, "" if each.failed else outcome.digest, each.failed, peak))
        return effects

    def change(
        self, fragment: int, kind: Literal["commit", "install", "exclude", "begin"], *, version: int = 0, work: int = 0
    ) -> Change:
        """A change happens; for all ranks."""
        if kind in _OF:
            done = self._done.pop((fragment, _OF[kind]), None)
            if done is None or done.number != work or done.version != version:
                raise OutOfStep(f"{kind} of version {version} of fragment {fragment}, which not all ranks hold")
        self.changes += 1
        change = Change(self.changes, fragment, kind, version, work)
        self._waiting.append(change)
        return change

    def discard(self, fragment: int) -> None:
        """What was reduced last for this fragment is given up."""
        self._done.pop((fragment, "reduce"), None)

    def taken(self, word: int) -> None:
        """The changes up to this one have taken effect on this rank."""
        self._waiting = [change for change in self._waiting if change.index > word]

    @property
    def waits(self) -> bool:
        """Whether a change has not taken effect yet."""
        return bool(self._waiting)

    def deferred(self, fragment: int) -> bool:
        """Whether a change of the fragment has not taken effect yet."""
        return any(change.fragment == fragment for change in self._waiting)


class Rank:
    """Each rank's machine, rank 0's own slice included.

    Attributes:
        versions: of each fragment, as they have taken effect here.
        held: work whose result is held here, by number.
    """

    def __init__(self, fragments: int) -> None:
        self.versions = [0] * fragments
        self._changes: list[Change] = []
        self._heard = self._taken = 0
        self.held: dict[int, Work] = {}

    def begin(self, work: Work) -> None:
        """Its part of some work begins. Raises `Deferred`: it has been stopped, and a change has come since."""
        if work.kind == "reduce" and any(change.fragment == work.fragment for change in self._changes):
            raise Deferred(f"work {work.number} begins while a change of fragment {work.fragment} waits")
        self._drop(work.fragment, work.kind)

    def holds(self, work: Work) -> None:
        """Its part is done, and what it has made is held."""
        self.held[work.number] = work

    def discard(self, fragment: int) -> bool:
        """What it has reduced is given up; False: a change that waits needs it."""
        if any(change.fragment == fragment and change.kind == "commit" for change in self._changes):
            return False
        self._drop(fragment, "reduce")
        return True

    def _drop(self, fragment: int, kind: str) -> None:
        """Gives up what is held of this kind, but for what a change that waits needs: several states may be fetched
        between two boundaries."""
        needed = {change.work for change in self._changes}
        self.held = {
            number: work
            for number, work in self.held.items()
            if (work.fragment, work.kind) != (fragment, kind) or number in needed
        }

    def hear(self, change: Change) -> None:
        """A change has happened."""
        if change.index != self._heard + 1:
            raise OutOfStep(f"change {change.index} comes after change {self._heard}")
        self._heard = change.index
        self._changes.append(change)

    def has(self, word: int) -> bool:
        """Whether it knows all changes up to rank 0's word."""
        return self._heard >= word

    def take(self, word: int) -> Sequence[Change]:
        """The changes that take effect at this boundary, in order."""
        if not self.has(word) or word < self._taken:
            raise OutOfStep(f"the word is {word} after {self._taken}, and {self._heard} changes are known")
        due = [change for change in self._changes if change.index <= word]
        self._changes = self._changes[len(due) :]
        for change in due:
            if change.kind in _OF:
                held = self.held.pop(change.work, None)
                if held is None or (held.fragment, held.version) != (change.fragment, change.version):
                    raise OutOfStep(f"change {change.index} is of work {change.work}; held is {held}")
            if change.kind != "exclude":
                self.versions[change.fragment] = change.version
        self._taken = word
        return due
