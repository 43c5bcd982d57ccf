"""A replica's part in `recover: replay`: it copies itself, or does a dead one's steps again. Training thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.recovery.replay import Replay, copy_of, take_up
from ftopt.optimizer.tensors.pool import CopyPool
from ftopt.sync.group import ReplicaGroup


class Replays:
    """Of one replica.

    Args:
        inner: its inner optimizers.
        model: its model.
        group: who takes part.
        method: what is computed.
        clock: seconds, monotonic.

    Raises:
        UserError: steps could not be done again.
    """

    def __init__(
        self, inner: Inner, model: nn.Module, group: ReplicaGroup, method: Method, *, clock: Callable[[], float]
    ) -> None:
        if method.gradients is not None:
            raise UserError(
                f"sync.recover=replay with method {method.name}, whose replicas exchange gradients in each step; "
                "use sync.recover=drop"
            )
        if group.units is None:
            raise UserError(
                "sync.recover=replay needs a sample ledger, to know what a dead replica has trained on; draw batches "
                "from ftopt.DataLoader(..., group=group) (data.sampling=once in a recipe), made before `with "
                "optimizer:`, or use sync.recover=drop"
            )
        self.under_way: Replay | None = None
        self._inner = inner
        self._model = model
        self._group = group
        self._units = group.units
        self._clock = clock
        self._began_s = 0.0
        self._copies: CopyPool | None = CopyPool()

    def copy(self, outer: OuterStep) -> None:
        """A round begins: offers a copy of what this replica is."""
        if self._copies is None:
            return
        began_s = self._clock()
        self._copies.recycle()
        try:
            text, tensors = copy_of(outer, self._inner, self._model, self._copies)
        except UserError as error:
            warnings.warn(f"sync.recover=replay: no copy of this replica can be made: {error}", stacklevel=5)
            self._copies = None
            return
        self._group.offer_copy(tuple(f.taken.meta.version for f in outer.fragments), text, tensors)
        size = len(text) + sum(t.numel() * t.element_size() for t in tensors.values())
        data = {"bytes": size, "stall_s": self._clock() - began_s}
        self._group.emit("copied", inner_step=outer.inner_step(), data=data)

    def inherit(self, outer: OuterStep) -> bool:
        """At the start: goes on in the place of a replica that has died. False: there is nothing to go on from."""
        inherited = self._group.inherited()
        if inherited is None:
            return False
        incarnation_id, used = list(inherited.copy.incarnation_id), inherited.copy.used
        try:
            replay = take_up(outer, self._inner, self._model, inherited)
        except ValueError as error:
            self._group.emit("replay_failed", data={"of": incarnation_id, "reason": str(error)})
            return False
        if any(replay.pending):
            self._units.spend(used)
        size = sum(t.numel() * t.element_size() for t in inherited.copy.tensors.values())
        data = {"of": incarnation_id, "steps": replay.steps, "pending_by_fragment": list(replay.pending), "bytes": size}
        self._group.emit("replay", inner_step=outer.inner_step(), data={**data, "fetch_s": inherited.fetch_s})
        self.under_way, self._began_s = replay, self._clock()
        return True

    def stepped(self, outer: OuterStep) -> None:
        """An inner step has been taken; the last one of those that are done again?"""
        replay = self.under_way
        if replay is not None and outer.inner_step() >= replay.until:
            self.under_way = None
            data = {"of": list(replay.of), "steps": replay.steps, "seconds": self._clock() - self._began_s}
            self._group.emit("replayed", data=data)
