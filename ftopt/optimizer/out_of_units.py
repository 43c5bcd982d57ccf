"""Proposals of a replica while its loader waits for units that others hold."""

from __future__ import annotations

import math

from ftopt.optimizer.saving import Saving
from ftopt.optimizer.training import Training
from ftopt.step.outer.step import OuterStep

_SPENT_S = 2.0
"""Minimum seconds between proposals that carry only used units. Such a proposal cannot commit until another replica
brings steps."""


class OutOfUnits:
    """Proposes while the loader waits for units that others hold: the data ends only when all steps are offered."""

    def __init__(self, training: Training, saving: Saving) -> None:
        self._training, self._saving = training, saving
        self._spent_at = -math.inf

    def offer_rest(self) -> None:
        """Applies newer states, and proposes pending steps."""
        self._training.ranks.each("rest", self.offer_own)

    def offer_own(self) -> None:
        """This rank's part of `offer_rest`."""
        training = self._training
        outer, ranks = training.started(), training.ranks
        if training.closed or training.anchor.there:
            return
        if training.group is not None:
            training.group.check()
        outer.report("out_of_units")
        training.set_back()
        ranks.pull()
        with outer.at_rest():
            outer.apply()
            self._propose_rest(outer, spent=ranks.same(training.clock() >= self._spent_at + _SPENT_S))
            if ranks.size == 1:
                self._saving.while_waiting()
        ranks.push()
        training.ended_at = None

    def _propose_rest(self, outer: OuterStep, *, spent: bool) -> None:
        training = self._training
        for fragment in outer.fragments:
            if outer.propose_pending(fragment.index, lr=training.inner.largest_lr(), spent=spent) and spent:
                self._spent_at = training.clock()
        training.after_outer_work(outer)
