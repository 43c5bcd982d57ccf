"""Step 3, the reduction: this replica's payload, the codec with its error feedback, what all members learn alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from ftopt.codecs import Codec
from ftopt.methods import ReplicaView, Round
from ftopt.methods.method import reads_tensors
from ftopt.optimizer.outer.error_feedback import Feedback, Residual
from ftopt.optimizer.outer.fragment import Fragment, Snapshot, State
from ftopt.optimizer.outer.frozen import Assumed
from ftopt.optimizer.outer.trigger_metrics import pack, seen_of
from ftopt.optimizer.tensors import pieces
from ftopt.optimizer.tensors.buffers import of, part, payload_with_buffers
from ftopt.optimizer.tensors.memory import Memory
from ftopt.optimizer.tensors.pieces import piece_of
from ftopt.sync.group import AttemptView, Collective, Summed, bits, floats


class Mean:
    """The weighted mean of the members' payloads. Reducer thread.

    Args:
        codec: wire precision.
        beta: of the error feedback; 0: none.
        lock: guards what a fragment holds of it.
        memory: for flat tensors.
    """

    def __init__(self, codec: Codec, beta: float, lock: threading.Lock, memory: Memory) -> None:
        self._codec = codec
        self._beta = beta
        self._lock = lock
        self._memory = memory

    @property
    def lossy(self) -> bool:
        """Whether payloads go through a codec that rounds."""
        return not self._codec.exact

    def reduce(
        self,
        attempt: AttemptView,
        fragment: Fragment,
        state: State,
        snapshot: Snapshot,
        collective: Collective,
        begin: Callable[[Tensor, Round], Summed | None],
    ) -> tuple[Tensor, Round]:
        """The mean, flat fp32, and what all members know alike of the round.

        ``begin`` is given what is going to be the mean; what it returns is told, while the rest is on the wire, which
        elements of it are there.
        """
        method, layout, view = fragment.method, fragment.view.layout, fragment.view
        frozen = snapshot.params
        mine = ReplicaView(
            anchor=state.anchor,
            start=snapshot.start,
            params=frozen.flat() if frozen.copy is not None else state.anchor.new_empty(0),
            layout=layout,
            steps=snapshot.contribution.steps,
            lr=snapshot.lr,
            alone=attempt.contributors == 1,
            lossy=self.lossy,
            averages=attempt.inner_step < method.average_until_step,
        )
        at = Round(attempt.fragment, attempt.version, attempt.inner_step, layout, lossy=mine.lossy)
        scalars = method.scalars(of(mine, slice(0, view.trained)) if reads_tensors(method) else mine)
        shares = list[float]()
        if scalars or mine.lossy:
            shares = [floats(row)[1] / attempt.total_weight for row in collective.told()]
            rows = [floats(row) for row in collective.exchange(bits(scalars))] if scalars else [()] * len(shares)
            taken = [(share, row) for share, row in zip(shares, rows, strict=True) if share > 0]
            at = replace(at, shares=tuple(share for share, _ in taken), scalars=tuple(row for _, row in taken))
        share = attempt.weight / attempt.total_weight if attempt.weight > 0 and not mine.alone else None
        fragment.assumed = Assumed(None if mine.lossy else share, mine.alone, mine.averages)
        work = frozen.take(fragment.assumed) if attempt.weight > 0 else None
        if work is None:
            work = self._memory.take(view.numel, view.device)
            if attempt.weight <= 0:
                work.zero_()
            elif in_pieces(fragment):
                with frozen.parts(piece_of(work)) as parts:
                    pieces.payload(method, mine, parts, work, fragment.assumed.share)
            else:
                payload_with_buffers(method, mine, work, trained=view.trained)
                if fragment.assumed.share is not None:
                    work.mul_(fragment.assumed.share)
        exact, summed = work, begin(work, at)
        if mine.lossy:
            trained = slice(0, fragment.view.trained)
            units = method.aggregation.units(mine) if method.aggregation is not None else ""
            self._encoded(attempt, fragment, collective, part(work, trained), shares, units, summed)
            exact = work[fragment.view.trained :]  # What is no direction of descent but a statistic is not rounded.
        if exact.numel():
            if share is not None and mine.lossy:
                exact.mul_(share)
            collective.all_reduce_(exact, summed if exact is work else None)
        if fragment.trigger_metrics.learns:
            distance = fragment.trigger_metrics.distance(method, mine, work) if attempt.weight > 0 else None
            told = replace(snapshot.seen, weight=attempt.weight, distance=distance)
            found = [seen_of(floats(row)) for row in collective.exchange(bits(pack(told)))]
            at = replace(at, seen=tuple(x for x in found if x.weight > 0))
        return work, at

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
        """The mean through the codec. With error feedback: what was left out so far goes along, and what is left out
        now is kept for the next round in which this one is counted."""
        if not self._beta:
            collective.mean_encoded_(payload, self._codec, shares, summed=summed)
            return
        before = fragment.residuals.get(units) or Residual(None, (0, payload.new_empty(0)))
        after, feedback = before.own, None
        if attempt.weight > 0:
            after = self._memory.take(payload.numel(), payload.device)
            feedback = Feedback(self._codec, before.own, self._beta, after)
        first, values = before.owed
        paid = first, values if self._beta == 1.0 else values * self._beta
        owed = collective.mean_encoded_(payload, self._codec, shares, paid, feedback, summed)
        with self._lock:
            if fragment.snapshot is not None and owed is not None:
                fragment.left_out = {**fragment.residuals, units: Residual(after, owed)}


def in_pieces(fragment: Fragment) -> bool:
    """Whether its payload can be computed a piece after the other."""
    return fragment.method.execution.elementwise and fragment.view.trained == fragment.view.numel
