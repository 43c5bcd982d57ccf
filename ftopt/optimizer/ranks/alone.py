"""The interface of a `Core` to its replica's ranks, and its simplest implementation, one process: `Alone`.

All ranks make the same calls in the same order, except calls that are documented as those of one rank alone.
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
"""The views of parameters; and that of gradients, with the model and the inner state, if these are not simply the
model's."""
Parts = Mapping[str, Callable[[], Any]]
"""The actions that rank 0 may request from all ranks, by name."""


class Ranks(Protocol):
    """The ranks of one replica.

    Attributes:
        rank: this process's rank; rank 0 leads: it alone speaks with the job.
        size: the number of ranks.
        call: a context for the collective work of a call of the user's loop, given by name.
    """

    rank: int
    size: int

    @property
    def call(self) -> Callable[[str], AbstractContextManager[object]]: ...

    # A call of the user's loop.

    def pull(self, fragment: int | None = None) -> None:
        """Updates the slices from the model: those of a fragment, if an inner step has changed it; or, by default,
        all."""

    def push(self) -> None:
        """Updates the model from the slices that the outer step has changed."""

    def same(self, value: T) -> T:
        """Rank 0's value."""

    def all(self, value: T) -> list[T]:
        """Each rank's value."""

    def now_s(self) -> float:
        """Rank 0's clock."""

    # What rank 0 does.

    def serve(self, parts: Parts) -> None:
        """Sets this rank's action for each name given to `each`."""

    def lead(self, call: str, act: Callable[[], T]) -> T:
        """Rank 0 runs ``act``; all ranks return its result or raise its error."""

    def each(self, part: str, act: Callable[[], T]) -> T:
        """Called by rank 0 within `lead`: all ranks run their action ``part``, which is ``act`` on rank 0."""

    # Joining and leaving.

    def views(self, model: nn.Module, method: Method, inner: Inner, group: ReplicaGroup) -> Views:
        """The views for this rank's outer step."""

    def resumed(self, resume: Resume | None, fallback: Fallback | None) -> tuple[Resume | None, Fallback | None]:
        """This rank's slices of the state to resume from."""

    def joined(self, outer: OuterStep, model: nn.Module, before_load: Callable[[], bool]) -> LoadedWeights:
        """Called when the replica has joined its job. ``before_load``: see `Loads`."""

    def why(self) -> str:
        """Why the replica is asked to leave its job, as of the group's last check; "": it is not."""

    def look(self) -> None:
        """Checks whether any rank is asked to leave, in addition to the group's checks."""

    def leaves_whole(self, *, flush: bool) -> bool:
        """Whether the ranks leave the job together. If not, this rank can only `part`."""

    def part(self, *, early: bool, reason: str) -> None:
        """Makes this rank leave at once, by itself, since the others may be in other calls."""

    def leave(self) -> None:
        """Called when the replica has left the job; from then on the end of a rank is not a loss."""

    def left(self) -> None:
        """Ends collective work, except views of the global parameters. Of this rank alone."""

    # Checkpoints.

    def capture(
        self, outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool, folder: Path | None
    ) -> SavedReplica:
        """The whole replica, on rank 0. ``folder``: the folder of the job's checkpoints."""

    def capture_loop(self, loop: Loop, copies: CopyPool) -> list[Tree] | Exception:
        """The state of each rank's loop, on rank 0."""

    @property
    def saved_model(self) -> nn.Module | None:
        """The model that determines the names and places of a checkpoint's tensors; None: the user's own."""


class Alone:
    """One process, which is its replica, without others to agree with. See `Ranks`.

    Args:
        asked: the source of requests to leave; None: there is none.
    """

    rank, size = 0, 1
    saved_model = None
    call = nullcontext
    """`nullcontext` itself, since each step calls it."""

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
        return views_of(model, method, inner), None

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
