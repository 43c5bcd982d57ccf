"""Learning rate schedules that count for themselves go where the job goes.

A replica that joins a job under way, or comes back, begins at the job's inner step, and a version may contain more
steps than a replica has taken. A scheduler of torch counts the calls of its `step`, and would stay behind.
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from ftopt.optimizer.inner import Inner
from ftopt.sync.group import ReplicaGroup

_log = logging.getLogger(__name__)

_NO_STEPS = (ReduceLROnPlateau, SWALR)
"""What they count is evaluations and epochs."""
_JUDGED = 3
"""After so many inner steps it is known how often a loop steps its schedulers."""


class Scheduled(Protocol):
    """An optimizer's core, as far as its schedules need it."""

    inner: Inner

    @property
    def group(self) -> ReplicaGroup | None:
        """None in a copy."""


@dataclass(frozen=True)
class _Assumed:
    """A scheduler that was brought forward though nothing has shown yet that it counts inner steps."""

    scheduler: weakref.ref[LRScheduler]
    before: dict[str, Any]
    counted: int
    at: int


class Schedules:
    """A replica's schedulers, those made on the wrapped optimizer or on an inner one.

    At a join each one is brought to the job's inner step. One that the loop then does not step with each inner step
    counts something else, and is put back. From then on those whose count is the job's inner step follow its jumps.

    Attributes:
        due: the job's inner step may have changed by more than a step of this replica.
    """

    def __init__(self) -> None:
        self.due = True
        self._off = self._looked = False
        self._ahead = 0
        self._known: list[weakref.ref[LRScheduler]] | None = None
        self._assumed: list[_Assumed] = []
        self._rates: list[list[dict[str, Any]]] = []

    def leave_alone(self) -> None:
        """A trainer's callback does this."""
        self._off = True

    def follow(self, core: Scheduled, *, start_step: int, local_steps: int, inner_step: int) -> None:
        """Before a step: ``inner_step`` is the one that the rates are for."""
        self.due = False
        if self._off or core.group is None:
            return
        if self._assumed:
            self._judge(core, local_steps, inner_step)
        ahead = inner_step - start_step - local_steps
        if not self._looked:
            self._looked, self._ahead = True, ahead
            if inner_step - local_steps > 0:
                self._join(core, local_steps, inner_step)
        elif ahead > self._ahead:
            own, self._ahead = inner_step - ahead + self._ahead, ahead
            if self._known is None:
                self._known = [weakref.ref(scheduler) for scheduler in schedulers_of(core)]
            found = [s for each in self._known if (s := each()) is not None and not isinstance(s, _NO_STEPS)]
            # One more where the loop steps them before the optimizer, or where a first step was left out.
            _forward([s for s in found if counted(s) - own in (0, 1)], inner_step)
        self.due = bool(self._assumed)

    def _join(self, core: Scheduled, local_steps: int, inner_step: int) -> None:
        assert core.group is not None
        found, replica = schedulers_of(core), core.group.replica
        for scheduler in found:
            if isinstance(scheduler, _NO_STEPS) and counted(scheduler) <= 0:
                _log.warning(
                    "replica %s: %s does not count inner steps and begins anew here, while the job is at inner step "
                    "%d; set it to where those of the other replicas are",
                    replica, type(scheduler).__name__, inner_step,
                )  # fmt: skip
        behind = [s for s in found if not isinstance(s, _NO_STEPS) and counted(s) < inner_step]
        self._rates = [[_values(group) for group in optimizer.param_groups] for optimizer in core.inner.optimizers]
        before = {id(s): (copy.deepcopy(s.state_dict()), counted(s)) for s in behind}
        _forward(behind, inner_step)
        for scheduler in behind:
            name, (state, was) = type(scheduler).__name__, before[id(scheduler)]
            if counted(scheduler) < inner_step:
                _log.warning(
                    "replica %s: %s ends at its step %d, and the job is at inner step %d",
                    replica, name, counted(scheduler), inner_step,
                )  # fmt: skip
                continue
            _log.info("replica %s: %s goes on at the job's inner step %d; it was at %d", replica, name, inner_step, was)
            self._assumed.append(_Assumed(weakref.ref(scheduler), state, inner_step, local_steps))

    def _judge(self, core: Scheduled, local_steps: int, inner_step: int) -> None:
        assert core.group is not None
        undecided, wrong = list[_Assumed](), list[LRScheduler]()
        for each in self._assumed:
            scheduler, steps = each.scheduler(), local_steps - each.at
            if scheduler is None:
                continue
            calls, name = counted(scheduler) - each.counted, type(scheduler).__name__
            if steps <= 0 or (calls > 0 and steps < _JUDGED):
                undecided.append(each)
            elif calls <= 0:
                scheduler.load_state_dict(each.before)
                wrong.append(scheduler)
                _log.warning(
                    "replica %s: %s does not count inner steps, and is put back to its step %d; the job is at inner "
                    "step %d: bring it to where those of the other replicas are with "
                    "ftopt.integrations.advance(scheduler, step)",
                    core.group.replica, name, counted(scheduler), inner_step,
                )  # fmt: skip
            elif calls >= 2 * steps and calls % steps == 0:
                _log.warning(
                    "replica %s: %s is stepped %d times for each inner step, and was brought to the job's inner step; "
                    "with ftopt.integrations.advance(scheduler, %d * optimizer.start_step) before the first step it "
                    "is where those of the other replicas are",
                    core.group.replica, name, calls // steps, calls // steps,
                )  # fmt: skip
        if wrong and len(wrong) == len(schedulers_of(core)):  # else the rates are another scheduler's, too
            for optimizer, groups in zip(core.inner.optimizers, self._rates, strict=True):
                for group, values in zip(optimizer.param_groups, groups, strict=False):
                    _restore(group, values)
        self._assumed = undecided


def schedulers_of(core: Scheduled) -> list[LRScheduler]:
    """Torch's schedulers on a core's optimizers, but for those that another one of them steps. A pass over all objects
    of the process: torch has no list of them."""
    found = [x for x in gc.get_objects() if issubclass(type(x), LRScheduler)]
    own = [s for s in found if _steps(getattr(s, "optimizer", None), core)]
    led = {id(child) for s in own for child in getattr(s, "_schedulers", ())}
    return [s for s in own if id(s) not in led]


def counted(scheduler: LRScheduler) -> int:
    """How far a scheduler has counted."""
    counts: Any = scheduler
    while not hasattr(counts, "last_epoch"):  # ChainedScheduler
        counts = counts._schedulers[0]
    return int(counts.last_epoch)


def advance(scheduler: LRScheduler, step: int) -> None:
    """Brings a scheduler, of any kind but `ReduceLROnPlateau`, forward to ``step``; never back. ::

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)  # which the loop steps at the end of each epoch
        with optimizer:
            advance(scheduler, optimizer.start_step // STEPS_OF_AN_EPOCH)

    A scheduler that the loop steps with each inner step needs no call: a replica that joins brings it to where the job
    is, before its first step.

    Args:
        scheduler: one of torch's, or a subclass.
        step: the count that it shall have.
    """
    if not isinstance(scheduler, _NO_STEPS):
        with _quiet():
            while counted(scheduler) < step:
                scheduler.step()


def _forward(schedulers: Sequence[LRScheduler], step: int) -> None:
    """Steps them in turns, as a loop does: some compute a rate from the one that they find."""
    with _quiet():
        while behind := [s for s in schedulers if counted(s) < step]:
            for scheduler in behind:
                try:
                    scheduler.step()
                except ValueError:  # OneCycleLR, which has counted already, beyond its last step
                    scheduler.last_epoch -= 1
                    schedulers = [s for s in schedulers if s is not scheduler]


def _quiet() -> warnings.catch_warnings[None]:
    """Torch warns of steps of a scheduler before the first one of the optimizer."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _steps(optimizer: Any, core: Scheduled) -> bool:
    """Whether it is, or leads to, one of the core's: trainers put optimizers of their own around it."""
    for _ in range(4):
        if getattr(optimizer, "_core", None) is core or any(optimizer is each for each in core.inner.optimizers):
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False


def _values(group: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in group.items() if key != "params"}
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in found.items()}


def _restore(group: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
