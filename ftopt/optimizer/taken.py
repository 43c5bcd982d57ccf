"""Which optimizer a group belongs to: a group is one replica's membership in one job, and has one optimizer.

The start refuses a second one, too. But two models that train in turn (a GAN's) may have connected everything by then.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.sync.group import ReplicaGroup


class _Started(Protocol):
    @property
    def started(self) -> bool: ...


class Owner(Protocol):
    """The core of the optimizer that a group belongs to."""

    closed: bool

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """Its model, and the replica."""

    def standing(self) -> _Started:
        """Whether it has started."""


_owners: weakref.WeakKeyDictionary[ReplicaGroup, tuple[weakref.ref[Optimizer], weakref.ref[Owner]]]
_owners = weakref.WeakKeyDictionary()


def take(group: ReplicaGroup, optimizer: Optimizer, core: Owner) -> None:
    """The group is ``optimizer``'s from now on, and ``core``'s."""
    _owners[group] = weakref.ref(optimizer), weakref.ref(core)


def check_free(group: ReplicaGroup, model: nn.Module) -> None:
    """UserError: the group is another optimizer's. One that has not started is replaced, if it trains the same model (a
    notebook's cell that is run again), or if nobody holds it any more."""
    owner = _owners.get(group)
    if owner is None or (core := owner[1]()) is None:
        return
    optimizer = owner[0]()
    if not (core.standing().started or core.closed):
        former = core.trains[0]
        own = {id(parameter) for parameter in model.parameters()}
        if optimizer is None or (former is not None and any(id(p) in own for p in former.parameters())):
            return
    raise UserError(
        f"the group of replica {group.replica!r} is in use by another optimizer, or was closed; a group is for one "
        "ftopt.wrap(): connect once for each model, with a job of its own, as ftopt.connect(url, job='critic'), and "
        "again for an optimizer that replaces one; give several inner optimizers of one model as a list"
    )
