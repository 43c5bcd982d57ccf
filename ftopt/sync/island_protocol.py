"""How the ranks of an island act as one replica: the machine of rank 0, and each rank's.

Each rank holds a slice of every fragment's committed state. Rank 0 alone is a member of the job. The job's decisions
reach the ranks in two halves:

1. **Work** (`Work`): a reduction, or the check of a fetched state. Each rank does its part. The work is *done* when all
   ranks have done theirs, and has failed as soon as one has failed; the others are then stopped.
2. **Change** (`Change`): a new state of a slice. Changes are numbered. They reach each rank when they happen, and take
   effect in its training thread, at a step boundary. This begins with rank 0's word: the number of changes that take
   effect by now. So all ranks have the same versions in the same step.

Four rules:

- No commit and no install without work that all ranks have done, with one digest.
- While a fragment has a change that has not taken effect, no work on it begins, and it is not served.
- Changes take effect in order, each once, on all ranks at the same boundary.
- A rank that cannot follow raises `OutOfStep`: the island ends then, and starts again.

Pure: no clock, thread or socket. `ftopt.optimizer.ranks` has the threads and connections around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ftopt.errors import FtoptError


class OutOfStep(FtoptError):
    """A rank cannot follow rank 0's word. The island must start again."""


class Deferred(InterruptedError):
    """The work cannot begin now: a change of its fragment has not taken effect yet."""


@dataclass(frozen=True, slots=True)
class Work:
    """Something that all ranks do together, under a number of its own.

    Args:
        number: unique in the island's life.
        fragment: the fragment.
        version: the version that it makes.
        kind: ``reduce`` or ``install``.
    """

    number: int
    fragment: int
    version: int
    kind: Literal["reduce", "install"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a rank's part of some work.

    Args:
        number: the work's number.
        rank: the rank.
        digest: of the whole result, as every rank knows it by then; "": the part has failed.
        failure: the kind of error; ``reason``: its text; ``peer``: the member that it names, -1: none.
        peak: the largest absolute value of the compared result, where it was looked for.
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
    """A change that takes effect at a boundary.

    Args:
        index: 1 for the first in the island's life.
        kind: ``commit`` or ``install`` of ``work``; ``exclude``; ``begin``: the held state is given a new record.
        version: the fragment's version from then on.
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
    """The other ranks' parts of some work are to be stopped."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """All ranks have ended their parts. ``failed``: the first failure; None: the work is done, with this ``digest`` and
    the largest ``peak``."""

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
        changes: number of changes so far.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._under_way: dict[int, _UnderWay] = {}
        self._done: dict[tuple[int, str], Work] = {}  # the last work done, by fragment and kind
        self._waiting: list[Change] = []
        self._numbers = self.changes = 0

    def begin(self, fragment: int, version: int, kind: Literal["reduce", "install"]) -> Work:
        """Begins new work, for all ranks. Raises `Deferred`."""
        if kind == "reduce" and self.deferred(fragment):
            raise Deferred(f"a newer state of fragment {fragment} waits for the next step boundary")
        self._numbers += 1
        work = Work(self._numbers, fragment, version, kind)
        self._under_way[work.number] = _UnderWay(work)
        self._done.pop((fragment, kind), None)
        return work

    def heard(self, outcome: Outcome) -> list[Stop | Done]:
        """Takes the outcome of a rank's part; rank 0 reports its own, too."""
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
        """Makes a change, for all ranks."""
        if kind in _OF:
            done = self._done.pop((fragment, _OF[kind]), None)
            if done is None or done.number != work or done.version != version:
                raise OutOfStep(f"{kind} of version {version} of fragment {fragment}, which not all ranks hold")
        self.changes += 1
        change = Change(self.changes, fragment, kind, version, work)
        self._waiting.append(change)
        return change

    def discard(self, fragment: int) -> None:
        """Drops the last reduction of this fragment."""
        self._done.pop((fragment, "reduce"), None)

    def taken(self, word: int) -> None:
        """Notes that the changes up to this one have taken effect on this rank."""
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
        versions: the version of each fragment that has taken effect here.
        held: work whose result is held here, by number.
    """

    def __init__(self, fragments: int) -> None:
        self.versions = [0] * fragments
        self._changes: list[Change] = []
        self._heard = self._taken = 0
        self.held: dict[int, Work] = {}

    def begin(self, work: Work) -> None:
        """Begins this rank's part of ``work``. Raises `Deferred` if a change of the fragment still waits: the work was
        stopped before that change came."""
        if work.kind == "reduce" and any(change.fragment == work.fragment for change in self._changes):
            raise Deferred(f"work {work.number} begins while a change of fragment {work.fragment} waits")
        self._drop(work.fragment, work.kind)

    def holds(self, work: Work) -> None:
        """Notes that this rank's part is done, and its result held."""
        self.held[work.number] = work

    def discard(self, fragment: int) -> bool:
        """Drops what this rank has reduced; False: a change that waits needs it."""
        if any(change.fragment == fragment and change.kind == "commit" for change in self._changes):
            return False
        self._drop(fragment, "reduce")
        return True

    def _drop(self, fragment: int, kind: str) -> None:
        """Drops the held results of this kind, except those that a waiting change needs: several states may be fetched
        between two boundaries."""
        needed = {change.work for change in self._changes}
        self.held = {
            number: work
            for number, work in self.held.items()
            if (work.fragment, work.kind) != (fragment, kind) or number in needed
        }

    def hear(self, change: Change) -> None:
        """Takes the next change."""
        if change.index != self._heard + 1:
            raise OutOfStep(f"change {change.index} comes after change {self._heard}")
        self._heard = change.index
        self._changes.append(change)

    def has(self, word: int) -> bool:
        """Whether this rank knows all changes up to rank 0's word."""
        return self._heard >= word

    def take(self, word: int) -> Sequence[Change]:
        """Returns the changes that take effect at this boundary, in order."""
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
