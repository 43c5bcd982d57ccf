"""The optimizer's side of a global batch: gradients of micro-batches are summed until the batch is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from ftopt.common.plural import count
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.step.inner import Inner
from ftopt.step.outer.freeze import ShareOffer
from ftopt.step.outer.metrics import data_of_step
from ftopt.step.outer.step import OuterStep
from ftopt.sync.group import Ranges, ReplicaGroup

_log = logging.getLogger(__name__)


class MicroBatches:
    """Computes a replica's share (`ftopt.sync.replica.global_batch.Computes`). Training thread.

    A contribution is the mean over the replica's samples, weighted by their number, so that the members' mean is the
    mean over the batch:

        g = sum_m (n_m / N) * (1 / n_m) * sum_u n_u g_u        n_u samples in the unit u, n_m in the replica's units

    Args:
        counted: returns and resets the user's counts since the last step: ``tokens`` and ``samples``.
        loss: returns, and resets, the step's loss.
        set_back: replaces weights that user code has loaded into the model since the last call.
    """

    def __init__(
        self,
        outer: OuterStep,
        inner: Inner,
        group: ReplicaGroup,
        counted: Callable[[], dict[str, int]],
        loss: Callable[[], float | Tensor | None],
        set_back: Callable[[], object],
    ) -> None:
        assert outer.gradients is not None
        self._outer, self._fragment = outer, outer.gradients
        self._inner, self._group, self._counted, self._loss = inner, group, counted, loss
        self._set_back = set_back
        self._shown: list[tuple[Tensor, int] | None] = []

    @property
    def version(self) -> int:
        return self._fragment.applied.meta.version + 1

    @property
    def whole(self) -> bool:
        return self._outer.is_whole()

    @property
    def outstanding(self) -> bool:
        return self._group.outstanding(0)

    def catch_up(self) -> None:
        self._outer.take_whole(self._inner.largest_lr)

    def at_rest(self) -> AbstractContextManager[None]:
        return self._outer.at_rest()

    def clear(self) -> None:
        self._set_back()
        with self.at_rest():
            pass  # lets joining peers fetch before the end of the batch
        self._inner.zero_grad(set_to_none=True)

    def add(self, units: Ranges, samples: int, *, mine: bool) -> bool:
        kept = mine and self._fragment.view.add(float(samples))
        self.clear()
        self._emit("micro_batch", units, samples, {"kept": kept})
        return kept

    def left_out(self, units: Ranges, samples: int, *, reason: str) -> None:
        self.clear()
        _log.warning(
            "replica %s: a micro-batch of %s is left out of its global batch, which is the mean over the rest: %s",
            self._group.replica,
            count(samples, "sample"),
            reason,
        )
        self._emit("left_out", units, samples, {"reason": reason})

    def _emit(self, event: str, units: Ranges, samples: int, more: Mapping[str, object]) -> None:
        data = {"units": [list(each) for each in units], "samples": samples, **more}
        self._group.emit(event, version=self.version, inner_step=self._outer.inner_step(), data=data)

    def empty(self) -> None:
        self._fragment.view.write(self._fragment.start)

    def offer(self, plan: int, units: Ranges, samples: int) -> None:
        if not self._fragment.pending_steps:  # else it is the same step, with more units
            self._group.emit("inner", inner_step=self._outer.inner_step() + 1)
            counted, loss = self._counted(), self._loss()
            self._outer.count(self._inner.largest_lr, loss, None, tokens=counted["tokens"])
            data = None
            if self._group.tells_steps:
                data = data_of_step(counted if any(counted.values()) else None, loss, self._inner.largest_lr())
            self._group.emit("stepped", inner_step=self._outer.inner_step(), data=data)
        share = ShareOffer(plan, units, samples)
        self._outer.freezer.propose(self._fragment, self._inner.largest_lr(), share=share)

    def show(self) -> None:
        state, view = self._fragment.state, self._fragment.view
        if state.live is None:
            view.give(state.outer)
        else:  # a peer's model is coming, which may contain this step
            self._inner.zero_grad(set_to_none=True)
        self._shown = view.gradients()

    def check_gradients(self) -> None:
        """Called before the step. UserError: the gradients differ from the ones that all replicas have agreed on."""
        for now, was in zip(self._fragment.view.gradients(), self._shown, strict=True):
            if now is None or (was is not None and now[0] is was[0] and now[1] == was[1]):
                continue
            raise UserError(
                "the gradients were changed between the end of a global batch and step(), which uses what all replicas "
                "have agreed on: clip with ftopt.SyncSGD(clip_norm=...) or ftopt.PAFT(clip_norm=...) instead of "
                "clip_grad_norm_, use bf16 instead of a GradScaler, and put each backward() into the loop over the "
                "micro-batches"
            )

    def report(self, state: str, *, unit_s: float) -> None:
        self._outer.counters.set_step_s(unit_s)
        self._outer.report(state)


def check_averages_gradients(method: Method) -> None:
    """Raises UserError for a method that does not average the gradients of each step, and so does not suit a global
    batch."""
    gradients = method.gradients
    if gradients is None or gradients.sync_every != 1:
        raise UserError(
            f"method {method.name} with sync_every={method.sync_every} in a job with a global batch; that is for a "
            "method that averages gradients before each step: use ftopt.SyncSGD() or ftopt.PAFT(sync_every=...), or "
            "leave global_batch out"
        )
