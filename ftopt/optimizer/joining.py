"""A replica's join of its job, as a new member or as the one in a checkpoint."""

from __future__ import annotations

import logging
from contextlib import nullcontext

from torch import nn

from ftopt.common.weakly import weakly
from ftopt.events import check_not_telling
from ftopt.methods import Method
from ftopt.methods.short_runs import outer_line, outer_problems
from ftopt.optimizer.ending.at_exit import Raised, at_exit
from ftopt.optimizer.leaving import Leaving
from ftopt.optimizer.out_of_units import OutOfUnits
from ftopt.optimizer.saved.replay import Replays
from ftopt.optimizer.saved.restore import Resume, start_or_resume
from ftopt.optimizer.saving import Saving
from ftopt.optimizer.training import CLOSED, Training
from ftopt.step.outer.fingerprint import own_lines
from ftopt.step.outer.micro_batches import MicroBatches, check_averages_gradients
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.frozen_weights import frozen_lines
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import Committed, ReplicaGroup

_log = logging.getLogger(__name__)


class Joining:
    """The start of a replica's membership.

    Args:
        memory: memory of committed states. Default: in RAM.

    Attributes:
        first_step: the inner step of a new job's version 0.
        planned: the inner step at which the loop will end; 0: not known.
        start_step: the job's inner step at which this replica has started.
        own_lines: rates and settings of the inner optimizers when they were wrapped, before any restore.
        micro_batches: this replica's share of a global batch, if the job has one.
    """

    def __init__(self, training: Training, saving: Saving, leaving: Leaving, *, memory: Memory | None) -> None:
        self.first_step = self.planned = self.start_step = 0
        self.own_lines = own_lines(training.inner)
        self.micro_batches: MicroBatches | None = None
        self._training, self._saving, self._leaving, self._memory = training, saving, leaving, memory
        self._out_of_units = OutOfUnits(training, saving)
        self._resume: Resume | None = None

    def go_on_from(self, resume: Resume) -> None:
        """Sets the state from which this replica resumes at its start, which refuses one that does not fit
        (`UserError`)."""
        if self._training.outer is not None:
            raise RuntimeError("resume() after the start; call it before `with optimizer:` and the first step()")
        self._resume = resume

    def warn(self, planned: int) -> None:
        """Warns of outer settings that do not suit a job of ``planned`` inner steps."""
        training = self._training
        if training.method is not None and planned > 0 and not training.ranks.rank:
            for text in outer_problems(training.method, planned):
                _log.warning("%s", text)

    def start(self) -> bool:
        """Joins the job unless it has joined; True if the parameters came from another replica."""
        training = self._training
        if training.outer is not None:
            return False
        check_not_telling("the start")
        training.raised = Raised()
        if training.group is None or training.model is None or training.method is None:
            raise RuntimeError(
                "this ReplicaOptimizer is a copy (deepcopy or pickle) without a group; call ftopt.wrap() to make one "
                "that takes part in a job"
            )
        if training.closed:
            raise RuntimeError(CLOSED)
        with training.ranks.call("start"), at_exit.joining(training.model, training.group.replica):
            return self._start(training.model, training.method, training.group)

    def _start(self, model: nn.Module, method: Method, group: ReplicaGroup) -> bool:
        training, ranks = self._training, self._training.ranks
        at_exit.await_dropped(group.replica)
        training.inner.turn("train")
        if group.global_batch is not None:
            check_averages_gradients(method)
        outer = self._outer_step(model, method, group)
        if group.policy.recover == "replay":
            training.replays = Replays(training.inner, model, group, method, clock=training.clock)
        asked = None if ranks.rank else training.asked  # other ranks wait for rank 0, and listen once it has joined
        with asked.joining() if asked is not None else nullcontext():
            resume, fallback = ranks.resumed(self._resume, self._saving.fallback)
            read, self._resume = self._resume, None
            fetched = start_or_resume(outer, training.inner, model, group, resume, fallback)
        if asked is None and training.asked is not None:
            training.asked.joined()
        training.begin(outer)
        if training.replays is not None:
            fetched |= training.replays.inherit(outer)
        self.start_step = outer.fragments[0].state.meta.inner_step
        ranks.serve({"rest": self._out_of_units.offer_own, **self._saving.parts()})
        training.loads = ranks.joined(outer, model, weakly(training.before_load, False))
        if not ranks.rank:
            life = 1 if outer.counters.resumed else group.incarnation  # else it has died
            _log_joined(group.replica, life, outer.fragments[0].state.meta, read)
            if line := outer_line(method):
                _log.info("%s", line)
        self._serve_loader(outer, group)
        outer.report("training")
        at_exit.add(self._leaving, keep=ranks.size > 1)  # several ranks cannot leave when one optimizer was dropped
        return fetched

    def _outer_step(self, model: nn.Module, method: Method, group: ReplicaGroup) -> OuterStep:
        training = self._training
        views, gradients = training.ranks.views(model, method, training.inner, group)
        outer = OuterStep(
            views, method, group, (training.inner, model), gradients=gradients,
            clock=training.clock, memory=self._memory, refresh=weakly(training.ranks.pull, None),
        )  # fmt: skip
        if group.policy.frozen == "compare":
            outer.frozen = frozen_lines(model)
        outer.start_step, outer.own_lines = self.first_step, self.own_lines
        outer.counters.plan(self.planned)
        return outer

    def _serve_loader(self, outer: OuterStep, group: ReplicaGroup) -> None:
        """Connects the loader: its calls while it waits for units, and with the micro-batches of a global batch."""
        training = self._training
        if group.units is not None:
            group.units.when_out_of_units(weakly(self._out_of_units.offer_rest, None))
            if training.asked is not None:
                group.units.while_waiting(weakly(self._leaving.look_while_waiting, None))
        if group.global_batch is not None:
            counted = training.counted
            self.micro_batches = MicroBatches(
                outer, training.inner, group, counted.take, counted.take_loss, weakly(training.set_back, False)
            )
            group.global_batch.attend(self.micro_batches)


def _log_joined(replica: str, life: int, committed: Committed, read: Resume | None) -> None:
    """Logs that a replica trains, and from where; for a later incarnation as a warning, since its predecessor has
    ended, and for one that has not gone on from the checkpoint that it has ``read``."""
    if read is not None and (version := read.newest[0].record.version) != committed.version:
        text = (
            "replica %s trains from the job's version %d, inner step %d on, which other replicas hold; of the "
            "checkpoint of version %d it has only its own state, if that is there: inner optimizer, generators and "
            "included objects"
        )
        _log.warning(text, replica, committed.version, committed.inner_step, version)
    elif life > 1:
        text = "replica %s is back as incarnation %d: it trains from the job's version %d, inner step %d on"
        _log.warning(text, replica, life, committed.version, committed.inner_step)
    else:
        text = "replica %s trains from version %d, inner step %d on"
        _log.info(text, replica, committed.version, committed.inner_step)
