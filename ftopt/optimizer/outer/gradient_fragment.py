"""The fragment of gradients, of a method whose replicas exchange them before each inner step.

A contribution is minus the sum of the gradients that no round has counted. When a result is applied, the inner
optimizers take one step with the agreed gradient. All that differs from a fragment of parameters is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from ftopt.methods import GRADIENT, Method, OuterState, Round
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.counters import Counters
from ftopt.optimizer.outer.fragment import Fragment
from ftopt.optimizer.outer.state import CommittedState
from ftopt.optimizer.tensors.gradients import PRESENT, GradientView, Live
from ftopt.optimizer.tensors.memory import Memory
from ftopt.streams import publish
from ftopt.sync.group import Committed, ReplicaGroup

_LOCK_S = 1.0


class GradientFragment(Fragment):
    """Gradients as a fragment.

    Args:
        live: the model and the inner state, where they are the committed state.
        group: with a global batch a sum of gradients belongs to one version alone.

    Attributes:
        stepped: the state whose gradient the inner optimizers have used; written under the lock of ``live``.
    """

    view: GradientView
    keeps_still = False

    def __init__(
        self,
        view: GradientView,
        method: Method,
        state: CommittedState,
        counters: Counters,
        *,
        inner: Inner,
        live: Live | None,
        group: ReplicaGroup,
    ) -> None:
        super().__init__(view, method, state, counters)
        self.carries_over = group.global_batch is None
        self.live, self.stepped = live, state
        self._inner, self._group = inner, group

    def serve(self) -> tuple[str, dict[str, Tensor]]:
        """The model and inner state as they are, where they are the committed state. LookupError: an inner step that is
        being applied lasts longer than a second."""
        live = self.live
        if live is None:
            return super().serve()
        if not live.lock.acquire(timeout=_LOCK_S):
            raise LookupError("an inner step is being applied")
        try:
            state = self.state
            if state.live is not None and self.stepped is not state:  # the model here is still of another version
                return state.digest, dict(state.live)
            return live.serve({} if self.stepped is state else state.outer)
        finally:
            live.lock.release()

    def check(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], memory: Memory) -> CommittedState:
        """As for parameters; where the model is the committed state, that is what was fetched."""
        if self.live is None:
            return super().check(committed, digest, tensors, memory)
        live, held = self.live.check(digest, tensors), self.state
        return CommittedState(committed, held.anchor, held.outer, digest, held.sums, fetched=True, live=live)

    def follow(self, state: CommittedState) -> None:
        """Takes one step of the inner optimizers with the agreed gradient, or a peer's model in place of this one."""
        agreed = state.outer
        with self.live.lock if self.live is not None else nullcontext():
            if state.fetched:
                agreed = state.live or {}
                if self.live is not None and state.live is not None:
                    self.live.put(state.live)
            if GRADIENT in agreed:
                self.view.give(agreed)
                self._group.emit("aggregated", fragment=self.index, inner_step=self.inner_step())
                self._inner.step(None)
            self.stepped = state
            publish(self.view.device)  # where the model is copied for a peer

    def joined(
        self, anchor: Tensor, outer: OuterState, on: CommittedState, mean: Tensor, round: Round
    ) -> tuple[Tensor, OuterState]:
        """The anchor stays 0; which parameters have a gradient is agreed with it."""
        return on.anchor, {**outer, PRESENT: mean[self.view.trained :]}

    def unmoved(self, state: CommittedState) -> OuterState:
        """Nobody has a gradient."""
        return {name: torch.zeros_like(tensor) for name, tensor in state.outer.items()}

    def start_at(self, meta: Committed) -> None:
        before = self.applied
        with self.live.lock if self.live is not None else nullcontext():  # peers may fetch already
            super().start_at(meta)
            if self.stepped is before:
                self.stepped = self.applied

    def stand_on(self, state: CommittedState) -> None:
        super().stand_on(state)
        self.stepped = state
