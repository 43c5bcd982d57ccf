"""Weights that user code loads into an island's model after the join: see `ftopt.optimizer.in_model`.

Each rank sets its own parts of the parameters aside when a load begins, and all ranks restore them together when rank 0
says so: before the next step is counted, and before anything is handed in or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ftopt.errors import UserError
from ftopt.optimizer.in_model import watch
from ftopt.optimizer.ranks.rank_model import RankModel
from ftopt.step.tensors.flat import local

T = TypeVar("T")


class Together(Protocol):
    """The ranks, as the handling of loaded weights uses them."""

    def same(self, value: T) -> T: ...

    def all(self, value: T) -> list[T]: ...

    def drop_loaded(self) -> None: ...


class RankLoads:
    """What user code has loaded into this rank's model since the last call. Training thread.

    Args:
        counts: whether the parameters in the model are this replica's own.
        several: the ranks, which restore weights together.

    Attributes:
        noted: weights have been loaded into this rank's model, perhaps equal ones.
        begun: the same for rank 0's model, as of its last word.
    """

    def __init__(self, model: nn.Module, ranks: RankModel, counts: Callable[[], bool], several: Together) -> None:
        self._ranks, self._counts, self._several = ranks, counts, several
        self.noted = self.begun = False
        self._own: dict[str, Tensor] | None = None
        self._judged: bool | None = None
        self._handles = watch(model, self)

    def note(self, *, in_place: bool) -> None:
        """Notes that weights are about to be loaded."""
        if not self._counts():
            return
        if self._own is None and not self._judged:
            self._own, self._judged = self._parts(), None
        self.noted = True
        if in_place:
            self._judged = True

    def judge(self) -> bool:
        """Whether the load has changed the parameters; to be called before anything else changes them."""
        if self.noted and self._judged is None and self._own is not None:
            self._ranks.reshard()
            trained = self._ranks.trained
            self._judged = any(not torch.equal(local(trained[name]), part) for name, part in self._own.items())
            if not self._judged:
                self._own = None
        return bool(self._judged)

    def put_back(self) -> bool:
        """Restores this rank's own parts; returns whether they had changed."""
        differs, own = self.judge(), self._own
        self.noted, self._own, self._judged = False, None, None
        if differs and own is not None:
            self._write(own)
        return differs

    def loaded(self) -> bool:
        """Restores all ranks' own parts if rank 0 says so; returns whether any had changed."""
        if not self._several.same(self.noted):
            return False
        self.begun = False
        return any(self._several.all(self.put_back()))

    def set_back(self, *, closing: bool) -> None:
        """Drops pending steps after the parts were restored. The warning comes at the end of the call."""
        self._several.drop_loaded()

    def keep(self) -> Callable[[], None] | None:
        """For a rank that leaves with loaded weights: a function that puts them into the model again."""
        for handle in self._handles:
            handle.remove()
        return partial(self._write, self._parts()) if self.judge() else None

    def _parts(self) -> dict[str, Tensor]:
        self._ranks.reshard()
        return {name: local(parameter).clone() for name, parameter in self._ranks.trained.items()}

    @torch.no_grad()
    def _write(self, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            local(self._ranks.trained[name]).copy_(part)
        self._ranks.reshard()


def check_loaded_alike(differs: list[bool]) -> None:
    """Raises UserError if a rank has loaded weights and rank 0 has not."""
    if any(differs):
        raise UserError(
            f"rank {differs.index(True)} has loaded weights into the model after its replica had joined the job, and "
            "rank 0 has not; load them on all ranks alike, before `with optimizer:`"
        )
