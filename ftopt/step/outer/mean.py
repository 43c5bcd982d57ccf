"""Step 3, the reduction: this replica's payload, the codec with its error feedback, the members' shared data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ftopt.codecs import FP32, Codec
from ftopt.methods import ReplicaView, Round, own_code
from ftopt.methods.method import reads_tensors
from ftopt.step.outer.error_feedback import Feedback, Residual
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.frozen import Assumed, Frozen
from ftopt.step.outer.state import CommittedState, Snapshot
from ftopt.step.outer.trigger_metrics import pack, seen_of
from ftopt.step.tensors import pieces
from ftopt.step.tensors.buffers import of, part, payload_with_buffers
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pieces import piece_of
from ftopt.sync.group import AttemptView, Collective, Summed, bits, floats


@dataclass(frozen=True, slots=True)
class Mean:
    """The weighted mean of the members' payloads. Reducer thread. ``beta``: the factor of error feedback; 0: none."""

    codec: Codec
    beta: float
    memory: Memory

    def reduce(
        self,
        attempt: AttemptView,
        fragment: Fragment,
        state: CommittedState,
        snapshot: Snapshot,
        collective: Collective,
        begin: Callable[[Tensor, Round], Summed | None],
    ) -> tuple[Tensor, Round]:
        """Returns the mean, flat fp32, and the `Round`, equal on all members.

        ``begin`` gets the memory of the mean; the callable that it returns is called with the elements that have
        arrived, while the rest is on the wire.
        """
        method, view, frozen = fragment.method, fragment.view, snapshot.params
        own = ReplicaView(
            anchor=state.anchor,
            start=snapshot.start,
            params=frozen.flat() if frozen.copy is not None else state.anchor.new_empty(0),
            layout=view.layout,
            steps=snapshot.contribution.steps,
            lr=snapshot.lr,
            alone=attempt.contributors == 1,
            lossy=not self.codec.exact,
            averages=attempt.inner_step < method.average_until_step,
        )
        scalars = own_code.scalars(method, of(own, slice(0, view.trained)) if reads_tensors(method) else own)
        values = values_of(fragment, own)
        # The same on all ranks, also on one whose slice is empty.
        sends_values = values.start < view.numel or is_value(fragment, own)
        at, shares = self._round(attempt, collective, own, scalars, sends_values)
        share = attempt.weight / attempt.total_weight if attempt.weight > 0 and not own.alone else None
        fragment.assume(Assumed(None if own.lossy or not values.start else share, own.alone, own.averages))
        work = self._payload(attempt, fragment, own, frozen)
        exact, summed = part(work, slice(0, values.start)), begin(work, at)
        if own.lossy:
            trained = part(work, slice(0, view.trained))
            units = own_code.call(method.aggregation.units, own) if method.aggregation is not None else ""
            self._encoded(attempt, fragment, collective, trained, shares, units, summed)
            exact = exact[view.trained :]  # Buffers and moments are sent exactly.
            if share is not None:
                exact.mul_(share)
        if exact.numel():
            collective.all_reduce_(exact, summed if exact is work else None)
        if values.start < view.numel:
            alike = part(work, values)
            collective.mean_encoded_(alike, FP32(), shares, summed=summed if alike is work else None)
        if fragment.trigger_metrics.learns:
            sent = replace(snapshot.seen, weight=attempt.weight)
            if attempt.weight > 0:
                sent = fragment.trigger_metrics.at_mean(sent, method, own, work)
            found = [seen_of(floats(row)) for row in collective.exchange(bits(pack(sent)))]
            at = replace(at, seen=tuple(x for x in found if x.weight > 0))
        return work, at

    def _round(
        self, attempt: AttemptView, collective: Collective, own: ReplicaView, scalars: Sequence[float], values: bool
    ) -> tuple[Round, list[float]]:
        """The `Round`, equal on all members, and all their shares, if needed."""
        at = Round(attempt.fragment, attempt.version, attempt.inner_step, own.layout, lossy=own.lossy)
        shares = list[float]()
        if scalars or own.lossy or values:
            shares = [floats(row)[1] / attempt.total_weight for row in collective.told()]
            rows = [floats(row) for row in collective.exchange(bits(scalars))] if scalars else [()] * len(shares)
            present = [(share, row) for share, row in zip(shares, rows, strict=True) if share > 0]
            at = replace(at, shares=tuple(share for share, _ in present), scalars=tuple(row for _, row in present))
        return at, shares

    def _payload(self, attempt: AttemptView, fragment: Fragment, own: ReplicaView, frozen: Frozen) -> Tensor:
        """This replica's payload, which freezing may have computed already."""
        method, view, assumed = fragment.method, fragment.view, fragment.assumed
        work = frozen.take(assumed) if attempt.weight > 0 else None
        if work is not None:
            return work
        work = self.memory.take(view.numel, view.device)
        if attempt.weight <= 0:
            return work.zero_()
        if in_pieces(fragment):
            with frozen.parts(piece_of(work)) as parts:
                pieces.payload(method, own, parts, work, assumed.share)
            return work
        payload_with_buffers(method, own, work, trained=view.trained)
        if assumed.share is not None:
            part(work, slice(0, values_of(fragment, own).start)).mul_(assumed.share)
        return work

    def _encoded(
        self,
        attempt: AttemptView,
        fragment: Fragment,
        collective: Collective,
        payload: Tensor,
        shares: Sequence[float],
        units: str,
        summed: Summed | None,
    ) -> None:
        """Computes the mean through the codec. With error feedback, adds the accumulated error, and keeps the new error
        until this contribution is counted."""
        if not self.beta:
            collective.mean_encoded_(payload, self.codec, shares, summed=summed)
            return
        before = fragment.residuals.get(units) or Residual(None, (0, payload.new_empty(0)))
        after, feedback = before.own, None
        if attempt.weight > 0:
            after = self.memory.take(payload.numel(), payload.device)
            feedback = Feedback(self.codec, before.own, self.beta, after, self.memory.like)
        first, values = before.owed
        paid = first, values if self.beta == 1.0 else values * self.beta
        owed = collective.mean_encoded_(payload, self.codec, shares, paid, feedback, summed)
        if owed is not None:
            fragment.leave_out(units, Residual(after, owed))


def values_of(fragment: Fragment, own: ReplicaView) -> slice:
    """The part of the payload that holds values, whose mean is exact where they are equal: buffers, and the parameters
    if the method averages them directly."""
    return slice(0 if is_value(fragment, own) else fragment.view.carried.stop, None)


def is_value(fragment: Fragment, own: ReplicaView) -> bool:
    """Whether the method averages the parameters directly."""
    return fragment.method.execution.values and not own.lossy


def in_pieces(fragment: Fragment) -> bool:
    """Whether the fragment's payload can be computed piece by piece."""
    return fragment.method.execution.elementwise and not fragment.view.has_more
