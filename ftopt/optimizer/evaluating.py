"""Puts the committed anchor into the model during an evaluation."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from ftopt.events import check_not_telling
from ftopt.optimizer.training import Training

_log = logging.getLogger(__name__)


class Evaluating:
    """Puts the committed anchor into the model and takes it out, by a block or by ``eval()`` and ``train()``."""

    def __init__(self, training: Training) -> None:
        self._training, self._anchor = training, training.anchor
        self._by_eval = False  # whether `eval` has put the anchor into the model

    def eval(self) -> None:
        """See `ReplicaOptimizer.eval`."""
        training = self._training
        if training.outer is None:
            training.inner.turn("eval")
        elif not (training.closed or self._anchor.there):
            self.enter(training.started)
            self._by_eval = True
            training.inner.turn("eval", keep=True)

    def train(self) -> None:
        """See `ReplicaOptimizer.train`."""
        if self._by_eval:
            self.exit()
        elif not (self._training.closed or self._anchor.there):
            self._training.inner.turn("train")

    def enter(self, start: Callable[[], object]) -> bool:
        """Puts the committed anchor into the model until `exit`, and sets the replica's parameters aside. False: `eval`
        has put it there, and `train` takes it out. RuntimeError: it is there already. ``start`` joins the job unless it
        has joined."""
        training = self._training
        check_not_telling("global_parameters()")
        if self._by_eval:
            return False
        if self._anchor.there:
            raise RuntimeError("the global parameters are in the model already; leave global_parameters() first")
        with training.between_steps("global_parameters", start, checks=training.ranks.size > 1):
            outer = training.started()
            training.finish_freezing(outer)
            # Only if the method also averages parameters; else the model itself is the committed state.
            live = outer.gradients.live if outer.gradients is not None and len(outer.fragments) > 1 else None
            self._anchor.put(outer.fragments, live)
        training.report("evaluating")
        return True

    def exit(self) -> None:
        """Restores the replica's parameters, bit for bit, unless they are in the model."""
        training = self._training
        if self._by_eval:
            self._by_eval = False
            training.inner.turn("train", keep=True)
        if not self._anchor.there:
            return
        if training.ranks.size > 1 and (error := sys.exc_info()[1]) is not None and not training.closed:
            _log.error(
                "rank %d of replica %s: global_parameters() is left by an error, and waits for the other ranks: %r",
                training.ranks.rank, training.trains[1], error,
            )  # fmt: skip
        with training.between_steps("global_parameters", training.started):
            self._anchor.take_out()
        training.report("training")

    def keep(self) -> None:
        """Leaves the committed anchor in the model of a replica that has left its job."""
        if not self._anchor.there:
            self.enter(self._training.started)
        self._anchor.keep()
        self._by_eval = False

    @property
    def there(self) -> bool:
        """Whether the committed anchor is in the model."""
        return self._anchor.there

    def take_out(self) -> None:
        """Like `exit`, for an optimizer that user code has dropped, without calls of the other ranks."""
        self._anchor.take_out()
        self._by_eval = False
