"""The ranks of a replica as its `Core` sees them, one on each rank; and the simplest of them: one process, `Alone`.

All ranks make the same calls in the same order, but where a docstring says that a call is of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import nn

from ftopt.common.tree import Tree
from ftopt.methods import Method
from ftopt.optimizer.asked import Asked
from ftopt.optimizer.in_model import LoadedWeights, Loads
from ftopt.optimizer.saved.capture import SavedReplica, capture_replica
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.restore import Fallback, Resume
from ftopt.step.inner import Inner
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, check_covered
from ftopt.step.tensors.gradients import GradientView
from ftopt.step.tensors.live import Live
from ftopt.step.tensors.pool import CopyPool
from ftopt.step.tensors.views import views_of
from ftopt.sync.group import ReplicaGroup

T = TypeVar("T")
Views = tuple[Sequence[FlatView], tuple[GradientView, Live] | None]
"""Of parameters; and of gradients, with the model and the inner state, if they are not simply those of the model."""
Parts = Mapping[str, Callable[[], Any]]
"""What rank 0 may ask all ranks to do: name -> what each does."""


class Ranks(Protocol):
    """The ranks of one replica.

    Attributes:
        rank: this process; rank 0 leads: it alone speaks with the job.
        size: how many ranks there are.
        call: around what a call of the user's loop, by name, does with the other ranks.
    """

    rank: int
    size: int

    @property
    def call(self) -> Callable[[str], AbstractContextManager[object]]: ...

    # A call of the user's loop.

    def pull(self, fragment: int | None = None) -> None:
        """The slices become as the model is: those of a fragment, if an inner step has changed it; or all, in any
        case."""

    def push(self) -> None:
        """The model becomes as the slices are, where the outer step has changed them."""

    def same(self, value: T) -> T:
        """Rank 0's value."""

    def all(self, value: T) -> list[T]:
        """Each rank's value."""

    def now_s(self) -> float:
        """Rank 0's clock."""

    # What rank 0 does.

    def serve(self, parts: Parts) -> None:
        """What this rank does for each name that `each` is given."""

    def lead(self, call: str, act: Callable[[], T]) -> T:
        """Rank 0 does ``act``, and all ranks have the result, or raise what it raises."""

    def each(self, part: str, act: Callable[[], T]) -> T:
        """Rank 0, within `lead`: all ranks do a part of theirs, which is ``act`` here."""

    # Joining and leaving.

    def views(self, model: nn.Module, method: Method, inner: Inner, group: ReplicaGroup) -> Views:
        """What this rank's outer step works on."""

    def resumed(self, resume: Resume | None, fallback: Fallback | None) -> tuple[Resume | None, Fallback | None]:
        """What this rank resumes from: its slices."""

    def joined(self, outer: OuterStep, model: nn.Module, before_load: Callable[[], bool]) -> LoadedWeights:
        """The replica has joined its job. ``before_load``: see `Loads`."""

    def why(self) -> str:
        """Why the replica is asked to leave its job, as of the last check of the group; "": it is not."""

    def look(self) -> None:
        """Looks whether any rank is asked to leave, besides the checks of the group."""

    def leaves_whole(self, *, flush: bool) -> bool:
        """Whether the ranks leave the job together. If not, this rank can only `part`."""

    def part(self, *, early: bool, reason: str) -> None:
        """This rank leaves at once, by itself: the others may be in other calls."""

    def leave(self) -> None:
        """The replica has left the job: from here on the end of a rank is no loss."""

    def left(self) -> None:
        """Nothing is done together any more, but for looking at the outer parameters. Of this rank alone."""

    # Checkpoints.

    def capture(
        self, outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool, folder: Path | None
    ) -> SavedReplica:
        """The whole replica, on rank 0. ``folder``: of the job's checkpoints."""

    def capture_loop(self, loop: Loop, copies: CopyPool) -> list[Tree] | Exception:
        """The state of each rank's loop, on rank 0."""

    @property
    def saved_model(self) -> nn.Module | None:
        """What names and places a checkpoint's tensors have; None: the model's own."""


class Alone:
    """One process, which is its replica: there is nobody to agree with. See `Ranks`.

    Args:
        asked: what asks this process to leave; None: nothing does.
    """

    rank, size = 0, 1
    saved_model = None
    call = nullcontext
    """No function of its own, and no object that is kept: each step calls it."""

    def __init__(self, asked: Asked | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now_s, self._asked = clock, asked

    def pull(self, fragment: int | None = None) -> None: ...

    def push(self) -> None: ...

    def same(self, value: T) -> T:
        return value

    def all(self, value: T) -> list[T]:
        return [value]

    def serve(self, parts: Parts) -> None: ...

    def lead(self, call: str, act: Callable[[], T]) -> T:
        return act()

    def each(self, part: str, act: Callable[[], T]) -> T:
        return act()

    def views(self, model: nn.Module, method: Method, inner: Inner, group: ReplicaGroup) -> Views:
        check_covered(model, inner.param_groups)
        return views_of(model, method, inner, group.codec), None

    def resumed(self, resume: Resume | None, fallback: Fallback | None) -> tuple[Resume | None, Fallback | None]:
        return resume, fallback

    def joined(self, outer: OuterStep, model: nn.Module, before_load: Callable[[], bool]) -> LoadedWeights:
        return Loads(model, outer, before_load)

    def why(self) -> str:
        return "" if self._asked is None else self._asked.why()

    def look(self) -> None: ...

    def leaves_whole(self, *, flush: bool) -> bool:
        return True

    def part(self, *, early: bool, reason: str) -> None: ...

    def leave(self) -> None: ...

    def left(self) -> None: ...

    def capture(
        self, outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool, folder: Path | None
    ) -> SavedReplica:
        return capture_replica(outer, inner, model, outer.shared.group, copies=copies)

    def capture_loop(self, loop: Loop, copies: CopyPool) -> list[Tree] | Exception:
        return [loop.capture(copies.of)]
