"""Steps 3 to 5 of an outer step, outside the training thread: reduce, prepare, decide; and the states that peers fetch.

The table of all six steps is in ``step.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ftopt.common.streams import SideStream, reached
from ftopt.methods import Method, OuterState, Round, own_code
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.mean import Mean, in_pieces
from ftopt.step.outer.metrics import OuterGradient, divergence
from ftopt.step.outer.shared import Shared
from ftopt.step.outer.state import (
    CommittedState,
    Snapshot,
    damaged_slices,
    name_tensors,
    place_all,
    repaired,
    sealed,
)
from ftopt.step.outer.trigger_metrics import methods_own
from ftopt.step.outer.usual import USUAL, moved, told_by, usual_of
from ftopt.step.tensors import pieces
from ftopt.step.tensors.buffers import part
from ftopt.step.tensors.digest import largest
from ftopt.sync.group import AttemptView, Collective, Committed, Damaged, Implausible, Reduced, Summed


@dataclass(slots=True)
class _Made:
    """The next anchor and outer state. ``moved``: the largest change of an element; inf: something is not finite.
    ``stepped``: an outer step made them; else they are the present ones."""

    anchor: Tensor
    outer: Mapping[str, Tensor]
    moved: float = 0.0
    stepped: bool = False
    sums: dict[str, Tensor] = field(default_factory=dict)


class Reduction:
    """The `Host` of a replica's group: the work of its reducer and network threads on the fragments.

    Attributes:
        fragments: the fragments that it hosts.
        committed_memory: the memory of committed states.
        lossy: payloads go through a codec that rounds.
        reduced: this replica's payload, while the event ``payload`` is emitted; the part of an arrived mean without an
            outer step yet, while ``reduce.after`` is.
    """

    def __init__(self, shared: Shared, method: Method) -> None:
        self._shared, self.fragments, self._group = shared, shared.fragments, shared.group
        self.committed_memory = shared.committed_memory
        self._mean = Mean(method.wire, method.error_feedback, shared.memory)
        self._reducing, self._installing = SideStream(), SideStream()
        self._tried: dict[int, int] = {}  # the version for which each fragment's last result was made
        self._doubted: dict[int, int] = {}  # the version of an implausible result
        # For each fragment, those of the committed result and the last attempt, by attempt, if requested.
        self._gradients: dict[int, dict[int, OuterGradient]] = {}
        self.lossy = not method.wire.exact
        self.reduced: Tensor | None = None

    def standing(self) -> tuple[int, float]:
        """For the group: the inner step, and the seconds per step. A newer state counts when it is applied, so that a
        hanging training thread does not seem to move with the others."""
        return self.fragments[0].applied_inner_step(), self._shared.counters.step_s

    def counted(self) -> tuple[int, int, int, int]:
        """For the group: see `Host.counted`."""
        counters = self._shared.counters
        return counters.local_steps, self.fragments[0].pending_steps, counters.tokens, counters.planned

    # Steps 3 and 4, on the reducer thread.

    @torch.no_grad()
    def reduce(self, attempt: AttemptView, collective: Collective) -> Reduced:
        """Computes this attempt's result from the frozen contribution; keeps it, and returns its digest.

        With one fragment the result is the whole committed state, so its digest scrubs that too.

        Raises:
            InterruptedError: the reduction was stopped, or a fetched state has overtaken the attempt.
            Damaged: this replica's own committed state has changed in memory and must be fetched.
            ConnectionError, TimeoutError: from ``collective``. The contribution does not change.
        """
        fragment = self.fragments[attempt.fragment]
        state, snapshot = fragment.begin_attempt()
        if snapshot is None or attempt.version != state.meta.version + 1:
            raise InterruptedError(
                f"attempt {attempt.attempt} for version {attempt.version} is overtaken: "
                f"this replica holds version {state.meta.version}"
            )
        if fragment.view.elsewhere:
            return self._keep_step(attempt, fragment, state)
        with self._reducing.after(snapshot.params.point, fragment.view.device):
            retry = self._tried.get(fragment.index) == attempt.version and attempt.size > 1
            doubted = self._doubted.get(fragment.index) == attempt.version
            if fragment.view.sliced:  # only one rank gets a codec's error
                retry, doubted = map(any, zip(*fragment.view.together((retry, doubted)), strict=True))
            if retry:
                self._check_damage(state)
            try:
                result = self._result(attempt, collective, fragment, state, snapshot, doubted=doubted)
            except FloatingPointError:  # a codec's, for a payload that was finite when proposed
                self._doubted[fragment.index] = self._tried[fragment.index] = attempt.version
                raise
            live, peak = fragment.compared(attempt.version, state) if attempt.size > 1 else ("", 0.0)
            if retry:  # two members that disagree again need a tie-break
                peak = max(peak, *map(largest, result.tensors().values()))
        self._tried[fragment.index] = attempt.version
        fragment.prepare(result, state)
        self.committed_memory.release()
        return Reduced(result.digest, live, peak, self._metrics(attempt, fragment, snapshot, collective))

    def _keep_step(self, attempt: AttemptView, fragment: Fragment, state: CommittedState) -> Reduced:
        """Keeps a marker of the result: rank 0 has the whole fragment, and reduces it."""
        digest, sums, described = sealed(state.tensors(), view=fragment.view)
        made = replace(
            state, digest=digest, sums=sums, described=described, fetched=False, live=None, made=attempt
        )  # fmt: skip
        fragment.prepare(made, state)
        return Reduced(digest, "", 0.0, {})

    def _result(
        self,
        attempt: AttemptView,
        collective: Collective,
        fragment: Fragment,
        state: CommittedState,
        snapshot: Snapshot,
        *,
        doubted: bool,
    ) -> CommittedState:
        """The result of the reduction and the outer step, checked for plausibility, with its digests."""
        view = fragment.view
        if attempt.size == 1 and view.sliced and any(found := view.together(state.damage())):
            raise damaged_slices(found)
        if attempt.size == 1 and (blocks := state.damage()):  # no peer to fetch from or compare digests with
            self._emit("damaged", attempt, blocks=blocks[:8])
            self._emit("repaired", attempt, blocks=len(blocks))
            state = repaired(state, snapshot.params.read())
            snapshot = replace(snapshot, start=fragment.view.cast(state.anchor))
        if doubted:  # measured from a start that is sound now
            self._clamp(attempt, fragment, snapshot)
        made = _Made(state.anchor, state.outer)
        if attempt.total_weight > 0:
            made = self._step(attempt, collective, fragment, state, snapshot)
            if view.sliced:
                made.moved = max(view.together(made.moved))
            usual, members = usual_of(state.outer), [told_by(row) for row in collective.told()]
            ratio = self._group.policy.outlier_ratio
            if not (doubted or usual.allows(made.moved, members, ratio)):
                self._doubt(attempt, made.moved)
            if attempt.size == 1 and not usual.allows(made.moved, members, ratio and ratio * ratio):
                made.moved = math.inf  # a faulty device repeats its error, and there is no peer's digest
            if math.isfinite(made.moved):
                made.outer = {**made.outer, USUAL: usual.after(members, made.moved).tensor()}
            else:
                self._emit("overflow", attempt, steps=snapshot.contribution.steps)
                made = _Made(state.anchor, state.outer)
        if not made.stepped:
            made.outer = fragment.unmoved(state)
        anchor, outer = self.committed_memory.place(made.anchor), place_all(made.outer, self.committed_memory)
        digest, sums, described = sealed(name_tensors(anchor, outer), made.sums, view)
        return CommittedState(state.meta, anchor, outer, digest, sums, made=attempt, described=described)

    def _step(
        self,
        attempt: AttemptView,
        collective: Collective,
        fragment: Fragment,
        state: CommittedState,
        snapshot: Snapshot,
    ) -> _Made:
        """The reduction and the outer step."""
        method, memory, trained = fragment.method, self.committed_memory, slice(0, fragment.view.trained)
        averages, metrics = attempt.inner_step < method.average_until_step, fragment.trigger_metrics
        own, steps = methods_own(state.outer), list[pieces.Steps]()
        look = self._measure(attempt, fragment, state)
        see = look.see if look is not None else None

        def begin(mean: Tensor, at: Round) -> Summed | None:
            self.reduced = mean  # this replica's payload so far
            self._emit("payload", attempt)
            self.reduced = None
            if averages or method.aggregation is not None or not in_pieces(fragment) or metrics.learns:
                return None  # the step needs the whole mean
            steps.append(pieces.Steps(method, state.anchor, own, mean, at, memory, see))
            return steps[0].there

        work, at = self._mean.reduce(attempt, fragment, state, snapshot, collective, begin)
        self.reduced = steps[0].waiting() if steps else work
        self._emit("reduce.after", attempt)
        self.reduced = None
        before, mean = part(state.anchor, trained), part(work, trained)
        made = _Made(before, own, stepped=True)
        if look is not None and averages:
            look.see_all(before, mean)
        if averages:
            made.anchor = own_code.like(method.average, before, before, mean, at)
        else:
            gradient = mean
            if method.aggregation is not None:
                gradient = own_code.like(method.aggregation.aggregate, mean, mean, at)
            if method.execution.elementwise:
                step = steps[0] if steps else pieces.Steps(method, before, own, gradient, at, memory, see)
                made.anchor, made.outer, (of_anchor, of_outer) = step.finish()
                made.moved, made.sums = step.moved, name_tensors(of_anchor, of_outer)
            else:
                if look is not None:
                    look.see_all(before, gradient)
                made.anchor, made.outer = outer_step(method, before, own, gradient, at, collective)
        if averages or not method.execution.elementwise:
            made.moved = moved(before, made.anchor, made.outer)
        if before.numel() < work.numel():
            made.anchor, made.outer = fragment.joined(made.anchor, made.outer, state, work, at)
            made.sums.pop("anchor", None)
            if not pieces.is_finite(made.anchor):
                made.moved = math.inf
        made.outer = {**state.outer, **made.outer, **metrics.after(state.outer, at.seen)}
        return made

    def _measure(self, attempt: AttemptView, fragment: Fragment, state: CommittedState) -> OuterGradient | None:
        """The measurement of this attempt's outer gradient; None: not requested."""
        if not self._group.tells_gradients:
            return None
        kept = self._gradients.get(fragment.index, {})
        made = state.made.attempt if state.made is not None else 0  # 0: it was fetched
        kept = {number: gradient for number, gradient in kept.items() if number == made}
        values = fragment.method.execution.values and not self.lossy
        measured = OuterGradient(fragment.view.trained, values=values, before=kept.get(made))
        self._gradients[fragment.index] = kept | {attempt.attempt: measured}
        return measured

    def _metrics(
        self, attempt: AttemptView, fragment: Fragment, snapshot: Snapshot, collective: Collective
    ) -> dict[str, Any]:
        """The data of an attempt's event."""
        c, method = snapshot.contribution, fragment.method
        counted = attempt.weight > 0
        found: dict[str, Any] = {"size": attempt.size, "contributors": attempt.contributors}
        found |= {"steps": c.steps if counted else 0, "staleness": snapshot.staleness if counted else None}
        found["norm"] = c.norm if counted else None
        gradient = self._gradients.get(fragment.index, {}).get(attempt.attempt)
        if gradient is None:
            return found
        found |= gradient.measured(fragment.view.total)
        displaces = method.execution.values or type(method).payload is Method.payload
        if displaces and not self.lossy and method.aggregation is None:
            found["divergence"] = divergence([told_by(row) for row in collective.told()], found["gradient_norm"])
        return found

    def _doubt(self, attempt: AttemptView, moved: float) -> None:
        """Fails the attempt. The next one for this version recomputes the result from checked contributions, and stands
        if it is finite: a result that two attempts share is not a flipped bit."""
        self._doubted[attempt.fragment] = self._tried[attempt.fragment] = attempt.version
        self._emit("implausible", attempt, moved=moved if math.isfinite(moved) else None)
        text = f"the result of version {attempt.version} moves an element by {moved:.3g}"
        raise Implausible(f"{text}, far more than its contributions or any outer step before")

    def _clamp(self, attempt: AttemptView, fragment: Fragment, snapshot: Snapshot) -> None:
        """Resets frozen parameters that have changed since the freezing, and drops error feedback, whose changes in
        memory cannot be detected."""
        c = snapshot.contribution
        fragment.forget_residuals()
        if attempt.weight > 0:
            elements = snapshot.params.clamp(snapshot.start, c.peak, fragment.view.trained)
            if elements:
                self._emit("repaired", attempt, elements=elements)

    def _emit(self, event: str, attempt: AttemptView, **data: Any) -> None:
        at = attempt
        self._group.emit(event, fragment=at.fragment, version=at.version, attempt=at.attempt, data=data)

    def _check_damage(self, state: CommittedState) -> None:
        """Checks the state before a retry after a prepared result, since this replica may have caused different
        digests."""
        if blocks := state.damage():
            at = state.meta
            self._group.emit("damaged", fragment=at.fragment, version=at.version, data={"blocks": blocks[:8]})
            raise Damaged(f"the committed state of version {at.version} is damaged in {', '.join(blocks[:8])}")

    # Step 5, on the network thread (install: a worker thread). O(1) under the lock, and parameters are not touched.

    def commit(self, attempt: AttemptView, committed: Committed) -> None:
        """Makes the result of ``attempt`` the committed state; the training thread applies it at its next boundary."""
        self.fragments[attempt.fragment].commit(attempt, committed)

    def exclude(self, fragment: int, reason: str, *, void: bool) -> None:
        """Notes that a round was decided without this replica's contribution, which was out of line."""
        self.fragments[fragment].exclude(reason, void=void)

    def discard(self, fragment: int) -> None:
        """Drops the result of a failed attempt; the contribution stays (FREEZE)."""
        self.fragments[fragment].discard_result()

    def state(self, fragment: int) -> tuple[str, dict[str, Tensor]]:
        """The committed state, for a peer: digest and tensors, which never change. LookupError: it is not available at
        the moment."""
        return self.fragments[fragment].serve()

    def awaited(self, fragment: int) -> AbstractContextManager[None]:
        """See `Host`."""
        return self.fragments[fragment].awaited()

    def begin(self, committed: Committed, *, reset: bool) -> None:
        """Commits the held state as another version."""
        self.fragments[committed.fragment].begin(committed, reset=reset)

    def install(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], *, reset: bool) -> None:
        """Makes a fetched state the committed one; pending work is rebased onto it, or dropped if ``reset``.
        ValueError: it is damaged or of another model; nothing has changed."""
        fragment = self.fragments[committed.fragment]
        device = fragment.view.device
        with self._installing.after(reached(device), device):
            state = fragment.check(committed, digest, tensors, self.committed_memory)
        fragment.install(state, reset=reset)


def outer_step(
    method: Method, anchor: Tensor, state: OuterState, gradient: Tensor, round: Round, collective: Collective
) -> tuple[Tensor, dict[str, Tensor]]:
    """`Method.outer_step`, with the same bits on all members, also for a method that is computed `sharded`.

    Shares are gathered as sums of tensors that are zero elsewhere, which is exact and needs only an all-reduce. It
    moves twice as much as a gather, ``2 (n-1)/n`` of the anchor and of each tensor of the outer state. ConnectionError,
    TimeoutError, InterruptedError: from ``collective``.
    """
    if not method.execution.sharded or collective.size == 1:
        return own_code.outer_step(method, anchor, state, gradient, round)
    rank, size, length = collective.rank, collective.size, anchor.numel()
    where = slice(-(-length * rank // size), -(-length * (rank + 1) // size))  # rounded up: rank 0's is never empty
    own = {name: t[where] if t.dim() else t for name, t in state.items()}
    made_anchor, made = own_code.outer_step(method, anchor[where], own, gradient[where], round)

    def gathered(part: Tensor, like: Tensor) -> Tensor:
        out = torch.zeros_like(like)
        if like.dim():
            out[where] = part
        elif rank == 0:
            out.copy_(part)
        collective.all_reduce_(out.view(-1))
        return out

    return gathered(made_anchor, anchor), {name: gathered(made[name], t) for name, t in sorted(state.items())}
