"""Step 1, propose: parameters are frozen as a contribution, and offered to the group.

There are two ways to freeze, and `Freezer.propose` chooses:

- **in place**, when the training thread will wait for the round: nothing is copied. Before anything changes the
  parameters, the training thread calls `join` or `release`;
- **a copy**, otherwise: with `delay`, for example. It is complete before `step()` returns: between two steps user code
  may put other weights into the model (an average of weights, to evaluate it), which must not be contributed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ftopt.common.plural import count
from ftopt.methods import ContributionStats, Method, ReplicaView, own_code
from ftopt.methods.method import reads_tensors
from ftopt.methods.triggers import Measurement
from ftopt.step.outer.apply import Applier
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.frozen import Frozen, flat_parts
from ftopt.step.outer.mean import in_pieces
from ftopt.step.outer.schedule import SyncSchedule
from ftopt.step.outer.shared import Shared
from ftopt.step.outer.state import CommittedState, Snapshot
from ftopt.step.outer.usual import Sizes, sizes, usual_of
from ftopt.step.tensors import pieces
from ftopt.step.tensors.pieces import Measured, piece_of
from ftopt.sync.group import Contribution, excluded


@dataclass(frozen=True, slots=True)
class ShareOffer:
    """A share of the global batch of ``plan``: units ``(start, stop)``; its weight is their number of ``samples``."""

    plan: int
    units: tuple[tuple[int, int], ...]
    samples: int


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A contribution at the boundary at which it was begun.

    Args:
        make: makes the snapshot from the measured contribution and the frozen parameters.
        lr: the mean of the largest rates of its steps.
        on: the state that the parameters are based on.
        start: the anchor of that state, cast.
    """

    make: Callable[..., Snapshot]
    lr: float
    contribution: Contribution
    on: CommittedState
    start: Tensor
    now: bool
    share: ShareOffer | None


class Freezer:
    """Freezes and proposes. Training thread.

    Attributes:
        in_place: fragments whose parameters must not change until `release` or `join`.
    """

    def __init__(self, shared: Shared, schedule: SyncSchedule, applier: Applier, *, lossy: bool) -> None:
        self._shared, self._group = shared, shared.group
        self._schedule, self._applier, self._lossy = schedule, applier, lossy
        self._warned_of_no_loss = self._warned_of_no_tokens = False
        self.in_place: dict[Fragment, Frozen] = {}

    @torch.no_grad()
    def propose(
        self, fragment: Fragment, lr: float, *, now: bool = False, share: ShareOffer | None = None, waits: bool = False
    ) -> None:
        """Freezes the parameters and offers the contribution.

        Args:
            fragment: one without an outstanding contribution.
            lr: the inner optimizer's largest rate.
            now: call the other replicas in.
            waits: the training thread will wait for the round, and then call `release`.
        """
        proposal = self._begin(fragment, lr, now, share)
        needs_copy = reads_tensors(fragment.method) or fragment.trigger_metrics.learns
        if waits and in_pieces(fragment) and not needs_copy:
            self._offer(fragment, proposal, *self._freeze_in_place(fragment, proposal))
        else:
            self._offer(fragment, proposal, *self._copy(fragment, proposal))

    def join(self) -> None:
        """Completes work that an exception has interrupted; the parameters may change then."""
        self._applier.go_on()
        while self.in_place:  # a boundary raised before it could release them
            self.release(next(reversed(self.in_place)))

    def thaw(self) -> None:
        """Lets the parameters change when a boundary raises; `join` does the rest."""
        for fragment, frozen in self.in_place.items():
            frozen.thaw(keep=fragment.waits_for(frozen))

    def release(self, fragment: Fragment) -> None:
        """Ends a wait: lets the parameters change, and applies a decided result. Without a copy later steps could not
        be measured, so a result for parameters frozen in place is applied whatever the current delay."""
        frozen = self.in_place.get(fragment)
        if frozen is not None:
            frozen.thaw(keep=fragment.waits_for(frozen))
        self._applier.apply(fragment, early=frozen is not None)
        self.in_place.pop(fragment, None)

    def _begin(self, fragment: Fragment, lr: float, now: bool, share: ShareOffer | None) -> _Proposal:
        """Begins a contribution, without the sizes that freezing measures; restarts triggers."""
        applied, index, counters = fragment.applied, fragment.index, self._shared.counters
        base, version, start = fragment.base, applied.meta.version, fragment.start
        steps, tokens, totals = fragment.pending_steps, counters.tokens - base.tokens, counters.totals
        work = ContributionStats(steps, tokens)
        weight = own_code.weight(fragment.method, work) if share is None else float(share.samples)
        if steps and share is None and counters.uncounted:
            self._warn_of_no_tokens(fragment.method, weight)
        self._group.emit("propose", fragment=index, version=version + 1, inner_step=self._shared.inner_step())
        ranges = self._group.units.offer() if self._group.units is not None and not index else ()
        tau = self._schedule.tau(fragment)
        contribution = Contribution(
            fragment=index,
            version=version,
            steps=steps,
            last_step=counters.local_steps,
            weight=weight,
            tokens=tokens,
            ranges=ranges if share is None else share.units,
            plan=share.plan if share is not None else 0,
            overlap_s=tau * counters.step_s,
            grace=fragment.overlap.adaptive_grace,
            at_step=self._shared.job_step() if fragment.by_job else 0,
        )
        if share is None and weight <= 0 and steps and not self._ends_data(fragment):
            contribution = excluded(contribution)  # it is not counted; its steps stay pending
        seen = fragment.trigger_metrics.seen(totals, base.totals)
        if Measurement.LOSS in fragment.timing.uses and steps and seen.loss is None:
            self._warn_of_no_loss(fragment)
        fragment.note_snapshot(counters.local_steps, seen.pace)
        # Replicas that take the same steps are due together again, including any that was called in at another step.
        self._schedule.restart(fragment, anew=fragment.by_job or self._schedule.averages(fragment))
        rate = totals.mean_rate(base.totals)
        lr = lr if rate is None else rate  # None: only adopted steps, or the rates are not needed
        make = partial(
            Snapshot,
            start=start,
            tokens=counters.tokens,
            lr=lr,
            totals=totals,
            seen=seen,
            until=counters.local_steps,
            staleness=version - base.version,
        )
        return _Proposal(make, lr, contribution, applied, start, now, share)

    def _freeze_in_place(self, fragment: Fragment, proposal: _Proposal) -> tuple[Frozen, Measured]:
        """Freezes without a copy, since the training thread waits; the sweep that measures the work computes the
        payload."""
        view, start, assumed = fragment.view, proposal.start, fragment.assumed
        frozen, made = Frozen(view), self._shared.memory.like(start)
        replica_view = ReplicaView(
            anchor=proposal.on.anchor,
            start=start,
            params=start.new_empty(0),
            layout=view.layout,
            steps=proposal.contribution.steps,
            lr=proposal.lr,
            alone=assumed.alone,
            lossy=self._lossy,
            averages=assumed.averages,
        )
        parts, measured = view.parts(piece_of(start)), Measured()
        pieces.payload(fragment.method, replica_view, parts, made, assumed.share, measured)
        frozen.offer(assumed, made)
        return frozen, measured

    @torch.no_grad()
    def _copy(self, fragment: Fragment, proposal: _Proposal) -> tuple[Frozen, Measured]:
        params, share = self._shared.memory.like(proposal.start), proposal.share
        parts: pieces.Parts = fragment.view.parts(piece_of(params))
        if share is not None and share.samples:
            parts = flat_parts(fragment.view.read(params).div_(share.samples), piece_of(params))
        measured = pieces.copy(parts, proposal.start, params, fragment.view.trained, fragment.view.measured)
        return Frozen(fragment.view, params), measured

    def _offer(self, fragment: Fragment, proposal: _Proposal, params: Frozen, measured: Measured) -> None:
        """Offers the frozen parameters, or drops them if they are not finite."""
        contribution, start, view, unused = proposal.contribution, proposal.start, fragment.view, ""
        if view.shared:
            measured = Measured.joined(view.together(measured.numbers()))
        if measured.finite:
            reach = contribution.steps * proposal.lr if fragment.keeps_still else 0.0
            contribution = self._sized(fragment, proposal, sizes(contribution.steps, measured, reach))
        if not measured.finite or self._spoils_batch(proposal, contribution):
            contribution = replace(contribution, weight=0.0, finite=False)
            params = Frozen(fragment.view, self._shared.memory.like(start).copy_(start))
            unused = "outlier" if measured.finite else "nonfinite"
            if proposal.share is None:  # a share keeps its non-finite values when units are added
                self._applier.drop(fragment, start, "nonfinite")
        if view.shared:  # rank 0's contribution, offered once all ranks have frozen
            contribution = view.together(contribution)[0]
        in_place = params.copy is None
        if in_place:
            self.in_place[fragment] = params
        if not fragment.offer(proposal.make(contribution, params, unused=unused), proposal.on):
            # A newer state has come since the boundary began. The caller applies it; these steps go into the next
            # round.
            if in_place:
                del self.in_place[fragment]
            return
        if view.shared:
            view.together(None)
        # An `install` may free the snapshot before the next line. The group then drops this proposal: its
        # version is old.
        self._group.propose(contribution, now=proposal.now)

    def _ends_data(self, fragment: Fragment) -> bool:
        """Whether a contribution has to be counted, whatever its weight: the data end only when the units of all steps
        are done."""
        units = self._group.units
        return units is not None and not fragment.index and units.out_of_units

    def _warn_of_no_tokens(self, method: Method, weight: float) -> None:
        asked = method.weights == "tokens" or method.weights == "tokens_per_step" != type(method).weights
        if not asked or self._warned_of_no_tokens:
            return
        self._warned_of_no_tokens = True
        counters, much = self._shared.counters, f"this contribution weighs {weight:g}"
        warnings.warn(
            f"{method.name}(weights={method.weights!r}), and no tokens were counted for {counters.uncounted} of "
            f"{count(counters.local_steps, 'inner step')} so far: "
            f"{much if weight else 'the contribution weighs nothing'}; call "
            "optimizer.log(tokens=n) before each step(), on every replica, or use weights='steps'",
            stacklevel=2,
        )

    def _sized(self, fragment: Fragment, proposal: _Proposal, own: Sizes) -> Contribution:
        """The contribution with its sizes, absolute and relative to the usual ones."""
        ratio, gradients = self._group.policy.outlier_ratio, not fragment.keeps_still
        limit = math.inf if ratio is None else ratio * ratio if gradients else ratio
        usual, redone = usual_of(proposal.on.outer), fragment.note_sizes(own, proposal.on, limit)
        return replace(
            proposal.contribution,
            norm=own.norm,
            peak=own.peak,
            behind=own.behind,
            reach=own.reach,
            rated=usual.rated(own),
            excess=0.0 if ratio is None else usual.excess(own, limit),
            alone=0.0 if ratio is None or redone else usual.alone(own, limit),
            gradients=gradients,
            finite=True,
        )

    def _spoils_batch(self, proposal: _Proposal, contribution: Contribution) -> bool:
        """Whether a share of a global batch is out of line. The batch needs the share's units, so the share is counted
        but left out of the mean, like one that is not finite."""
        ratio = self._group.policy.outlier_ratio
        if proposal.share is None or ratio is None or contribution.alone <= ratio * ratio:
            return False
        reason = (
            f"its share of the global batch, of norm {contribution.norm:.3g}, is {contribution.alone:.3g} times what "
        )
        reason += f"its steps can make it; at most {ratio * ratio:g} times is taken (policy.outlier_ratio)"
        self._group.emit("outlier", fragment=0, version=contribution.version + 1, data={"reason": reason})
        return True

    def _warn_of_no_loss(self, fragment: Fragment) -> None:
        if not self._warned_of_no_loss:
            self._warned_of_no_loss = True
            warnings.warn(
                f"the trigger of {fragment.method.name} goes by the loss, and none is counted, or it is NaN: it "
                "keeps its initial period; call optimizer.log(loss=loss) before step(), or give step() a closure",
                stacklevel=2,
            )
