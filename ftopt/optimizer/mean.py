"""Step 3, the reduction: this replica's payload, the codec with its error feedback, what all members learn alike."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.codecs import Codec
from ftopt.methods import Mine, Round
from ftopt.optimizer import pieces
from ftopt.optimizer.buffers import of, part, payload
from ftopt.optimizer.error_feedback import Residual, left_out, offered
from ftopt.optimizer.gauge import pack, seen_of
from ftopt.optimizer.state import Fragment, Snapshot, State
from ftopt.sync.group import Attempt, Collective


class Mean:
    """The weighted mean of the members' payloads. Reducer thread.

    Args:
        codec: wire precision.
        beta: of the error feedback; 0: none.
        lock: guards what a fragment holds of it.
    """

    def __init__(self, codec: Codec, beta: float, lock: threading.Lock) -> None:
        self._codec = codec
        self._beta = beta
        self._lock = lock

    def reduce(
        self,
        attempt: Attempt,
        fragment: Fragment,
        state: State,
        snapshot: Snapshot,
        collective: Collective,
        work: Tensor,
    ) -> Round:
        """Leaves the mean in ``work``; returns what all members know alike of the round."""
        method, layout = fragment.method, fragment.view.layout
        mine = Mine(
            anchor=state.anchor,
            start=snapshot.start,
            params=snapshot.params,
            layout=layout,
            steps=snapshot.contribution.steps,
            lr=snapshot.lr,
            alone=attempt.contributors == 1,
            lossy=not self._codec.exact,
            averages=attempt.inner_step < method.outer_start_step,
        )
        at = Round(attempt.fragment, attempt.version, attempt.inner_step, layout, lossy=mine.lossy)
        scalars, shares = method.scalars(of(mine, slice(0, fragment.view.trained))), list[float]()
        if scalars or mine.lossy:
            rows = [_floats(row) for row in collective.exchange(_bits([attempt.weight, *scalars]))]
            shares = [row[0] / attempt.total_weight for row in rows]
            taken = [(share, row[1:]) for share, row in zip(shares, rows, strict=True) if share > 0]
            at = replace(at, shares=tuple(share for share, _ in taken), scalars=tuple(row for _, row in taken))
        share = attempt.weight / attempt.total_weight if attempt.weight > 0 and not mine.alone else None
        in_pieces = method.elementwise and not mine.lossy and fragment.view.trained == work.numel()
        if attempt.weight <= 0:
            work.zero_()
        elif in_pieces:
            pieces.payload(method, mine, work, share)
        else:
            payload(method, mine, work, trained=fragment.view.trained)
        exact = work
        if mine.lossy:
            trained = slice(0, fragment.view.trained)
            self._encoded(attempt, fragment, collective, part(work, trained), shares, method.units(mine))
            exact = work[fragment.view.trained :]  # What is no direction of descent but a statistic is not rounded.
        if exact.numel():
            if share is not None and not in_pieces:
                exact.mul_(share)
            collective.all_reduce_(exact)
        if fragment.gauge.learns:
            distance = fragment.gauge.distance(method, mine, work) if attempt.weight > 0 else None
            told = replace(snapshot.seen, weight=attempt.weight, distance=distance)
            found = [seen_of(_floats(row)) for row in collective.exchange(_bits(pack(told)))]
            at = replace(at, seen=tuple(x for x in found if x.weight > 0))
        return at

    def _encoded(
        self,
        attempt: Attempt,
        fragment: Fragment,
        collective: Collective,
        payload: Tensor,
        shares: Sequence[float],
        units: str,
    ) -> None:
        """The mean through the codec. With error feedback: what was left out so far goes along, and what is left out
        now is kept for the next round in which this one is counted."""
        if not self._beta:
            collective.mean_encoded_(payload, self._codec, shares)
            return
        before = fragment.residuals.get(units) or Residual(None, (0, payload.new_empty(0)))
        after = before.own
        if attempt.weight > 0:
            if before.own is not None:
                offered(before.own, payload, out=payload, beta=self._beta)
            after = torch.empty_like(payload)
            if attempt.size > 1:
                left_out(payload, self._codec, out=after)
            else:
                after.zero_()  # One member alone sends nothing, and loses nothing.
        first, values = before.owed
        owed = collective.mean_encoded_(payload, self._codec, shares, (first, values * self._beta))
        with self._lock:
            if fragment.snapshot is not None and owed is not None:
                fragment.left_out = {**fragment.residuals, units: Residual(after, owed)}


def _bits(values: Sequence[float]) -> list[int]:
    """fp64 values as int64, to be exchanged exactly."""
    return list(struct.unpack(f"<{len(values)}q", struct.pack(f"<{len(values)}d", *values)))


def _floats(row: Sequence[int]) -> tuple[float, ...]:
    """The reverse of `_bits`."""
    return struct.unpack(f"<{len(row)}d", struct.pack(f"<{len(row)}q", *row))
