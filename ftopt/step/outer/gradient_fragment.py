"""The fragment of gradients, for methods whose replicas exchange gradients before each inner step.

A contribution is minus the sum of the gradients that no round has counted. When a result is applied, the inner
optimizers take one step with the agreed gradient. This file has all differences from a fragment of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.common.streams import publish
from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method, OuterState, Round
from ftopt.methods.sync_sgd import GRADIENT, SyncSGD
from ftopt.step.inner import Inner
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.shared import Shared
from ftopt.step.outer.state import CommittedState, first_state, name_tensors
from ftopt.step.outer.usual import USUAL
from ftopt.step.tensors.digest import digest_and_sums
from ftopt.step.tensors.gradients import PRESENT, GradientView
from ftopt.step.tensors.live import Live
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.trained import Trained
from ftopt.sync.group import Busy, Committed

_COMPARES_S = 0.2
"""Seconds that a comparison waits for the training thread, which usually waits for the round."""
_LARGEST = torch.finfo(torch.float32).max
_ROUNDED = 1.01
"""A sound copy may be longer than ``clip_norm`` by this factor: it is rounded to the parameters' dtype."""


class GradientFragment(Fragment):
    """Gradients as a fragment.

    Args:
        method: the method for gradients.
        live: the model and the inner state, equal on all replicas: peers fetch them with the state.
        trained: what trains; it refuses further steps once the model differs from the others'. None: the parameters are
            averaged, too, which makes them equal again.

    Attributes:
        stepped: the state whose gradient the inner optimizers have used; written under the lock of ``live``.
        in_step: whether results are being applied within a ``step()`` of the user's.
    """

    view: GradientView
    keeps_still = False

    def __init__(
        self,
        view: GradientView,
        method: Method,
        shared: Shared,
        *,
        inner: Inner,
        live: Live,
        trained: Trained | None,
    ) -> None:
        present = {PRESENT: torch.zeros(view.numel - view.trained, device=view.device)}
        if view.elsewhere:
            present[GRADIENT] = view.empty()
        state = first_state(view, method, 0, shared.committed_memory, claimed=live.digest(), more=present)
        super().__init__(view, method, state, shared.counters)
        self.carries_over = shared.group.global_batch is None  # else a sum of gradients belongs to one version alone
        self.in_step = False
        self.live, self.stepped, self._verify_every = live, state, verify_every(method)
        self._begun = state, state.digest  # a model that has not changed since, and its digest
        self._handed_on: CommittedState | None = None  # the state whose gradient a peer has fetched
        self._travels = False  # whether a joining replica can get the inner state
        self._inner, self._group, self._trained = inner, shared.group, trained
        clip_norm = method.clip_norm if isinstance(method, SyncSGD) else None
        self._clip_norm = _LARGEST if clip_norm is None else clip_norm

    def compared(self, version: int, on: CommittedState) -> tuple[str, float]:
        """The live state before the step of ``version``. While the contribution is undecided the training thread takes
        no step, unless a state is fetched (InterruptedError). Nothing is compared while user code has the model, in a
        round for which the training thread does not wait."""
        live, every = self.live, self._verify_every
        if every is None or version % every:
            return "", 0.0
        with live.reading(_COMPARES_S) as readable:
            if self.stepped is not on:
                raise InterruptedError("a fetched state has overtaken the attempt")
            return live.compared() if readable else ("", 0.0)

    def awaited(self) -> AbstractContextManager[None]:
        return self.live.awaited()

    def serve(self) -> tuple[str, dict[str, Tensor]]:
        """The present model and inner state. `Busy`: an inner step is being applied, or user code has the model.
        LookupError: an inner step was interrupted."""
        live = self.live
        if not live.lock.acquire(blocking=False):
            raise Busy("an inner step is being applied")
        try:
            if self._trained is not None and self._trained.refused:
                raise LookupError("an inner step was broken off")
            state = self.state
            if state.live is not None and self.stepped is not state:  # the model here still has another version
                return state.digest, dict(state.live)
            begun, known = self._begun
            if self.stepped is state:
                used: tuple[str, ...] = (GRADIENT, PRESENT)  # contained in the model already
            else:
                used, self._handed_on = (), state
            agreed = {name: tensor for name, tensor in state.outer.items() if name not in used}
            if (served := live.serve(agreed, known if self.stepped is begun else "")) is None:
                raise Busy("its training thread is between two calls of its optimizer")
            return served
        finally:
            live.lock.release()

    def check(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], memory: Memory) -> CommittedState:
        """Checks a peer's model and inner state."""
        if self.view.elsewhere:
            (live, *_) = self.view.together({})
            return replace(self.state, meta=committed, digest=digest, fetched=True, live=live, made=None)
        live, held = self.live.check(digest, tensors), self.state
        outer = {**held.outer, **{name: live[name] for name in held.outer if name in live}}
        _, sums = digest_and_sums(name_tensors(held.anchor, outer))
        if self.view.shared:
            self.view.together(self.live.small(live))
        return CommittedState(committed, held.anchor, outer, digest, sums, fetched=True, live=live)

    def follow(self, state: CommittedState) -> None:
        """Takes one step of the inner optimizers with the agreed gradient, or replaces the model by a peer's."""
        if self.stepped is state:
            return  # done already; only later work was interrupted
        agreed = state.outer if state.live is None else state.live
        with self.live.lock:
            if state.live is not None:
                self.live.put(state.live)
            if GRADIENT in agreed:
                # In a step() the user's gradients are added up already. Outside, keep them: the loop may still need
                # them.
                own = None if self.in_step else self.view.take_gradients()
                try:
                    self.view.give(agreed)
                    self._group.emit("aggregated", fragment=self.index, inner_step=self.inner_step())
                    self._check_copy(agreed)
                    self._take_step(state, agreed)
                finally:
                    if own is not None:
                        self.view.put_gradients(own)
            self.stepped = state
            publish(self.view.device)  # for the stream that copies the model for a peer

    def _take_step(self, state: CommittedState, agreed: Mapping[str, Tensor]) -> None:
        """Takes the inner optimizers' step. An error of theirs, or of a hook, may leave it half done; it is not taken
        again, and this replica's model then differs from that of replicas that completed it."""
        try:
            with self.live.stepping(agreed):
                self._inner.step(None)
        except BaseException as error:
            self.stepped = state
            alone = state.made is not None and state.made.size == 1 and self._handed_on is not state
            if self._trained is not None and not alone:
                self._trained.refuse(_broken_off(self._group.replica, error))
            raise
        if not self._travels:
            self._check_travels(state)

    def _check_travels(self, state: CommittedState) -> None:
        """Checks the inner state after the first step, which has set it up."""
        try:
            self.live.check_travels()
        except UserError as error:
            self.stepped = state
            if self._trained is not None:
                self._trained.refuse(error)
            raise
        self._travels = True

    def _check_copy(self, agreed: Mapping[str, Tensor]) -> None:
        """Checks this replica's copy of the gradient, which may have been corrupted, before the inner optimizers use
        it. A copy longer than an agreed gradient can be is clipped again; one that is not finite is copied anew, and
        moves nothing if it is still not finite."""
        norm, limit = self.view.gradient_norm(), self._clip_norm
        if norm is None or norm <= _ROUNDED * limit:
            return
        if math.isfinite(norm):
            self.view.multiply_gradients(limit / norm)
        else:
            self.view.give(agreed)
            if not math.isfinite(self.view.gradient_norm() or 0.0):
                self._inner.zero_grad(set_to_none=True)
        data = {"norm": norm if math.isfinite(norm) else None}
        self._group.emit("spoiled", fragment=self.index, inner_step=self.inner_step(), data=data)

    def joined(
        self, anchor: Tensor, outer: OuterState, on: CommittedState, mean: Tensor, round: Round
    ) -> tuple[Tensor, OuterState]:
        """The anchor stays 0; replicas also agree which parameters have a gradient."""
        return on.anchor, {**outer, PRESENT: mean[self.view.trained :]}

    def unmoved(self, state: CommittedState) -> OuterState:
        """The outer state when no replica has a gradient."""
        return {name: tensor if name == USUAL else torch.zeros_like(tensor) for name, tensor in state.outer.items()}

    def start_at(self, meta: Committed) -> None:
        with self.live.lock:  # peers may fetch already
            self._rename(lambda: super(GradientFragment, self).start_at(meta))

    def begin(self, committed: Committed, *, reset: bool) -> None:
        with self.live.lock:
            self._rename(lambda: super(GradientFragment, self).begin(committed, reset=reset))

    def _rename(self, act: Callable[[], None]) -> None:
        """``act`` gives the committed state another version, which the model follows if it had the old one."""
        before, (begun, known) = self.state, self._begun
        act()
        if self.stepped is before:
            self.stepped = self.state
        if begun is before:
            self._begun = self.state, known

    def note_begun(self) -> None:
        """Notes that training begins. Until the first step user code may have the model for long, for example to
        compile it."""
        if self._begun[0] is not self.stepped and not self.view.elsewhere:
            self._begun = self.stepped, self.live.digest()

    def stand_on(self, state: CommittedState) -> None:
        super().stand_on(state)
        self.stepped = state


def _broken_off(replica: str, error: BaseException) -> FtoptError:
    refused = FtoptError(
        f"the inner optimizer of replica {replica} was broken off by {type(error).__name__}: {error}, in the step that "
        "all replicas take with the same gradient: its model may be half a step behind the others' and is not used any "
        "more; mend what has raised, and restart this replica, which fetches the others' model"
    )
    refused.__cause__ = error
    return refused


def verify_every(method: Method) -> int | None:
    """Inner steps between comparisons of the replicas' models; None: never."""
    return method.verify_every if isinstance(method, SyncSGD) else None
