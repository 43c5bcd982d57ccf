"""The optimizer of each group: a group is one replica's membership in one job, and has one optimizer.

The start also refuses a second one. But two models that train in turn (a GAN's) may have connected everything before.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.training import Training
from ftopt.sync.group import ReplicaGroup

_owners: weakref.WeakKeyDictionary[ReplicaGroup, tuple[weakref.ref[Optimizer], weakref.ref[Training]]]
_owners = weakref.WeakKeyDictionary()


def take(group: ReplicaGroup, optimizer: Optimizer, training: Training) -> None:
    """Assigns the group to ``optimizer`` and ``training``."""
    _owners[group] = weakref.ref(optimizer), weakref.ref(training)


def check_free(group: ReplicaGroup, model: nn.Module) -> None:
    """Raises UserError if the group belongs to another optimizer. An optimizer that has not started is replaced if it
    trains the same model (a notebook cell that is run again), or if nobody holds it any more."""
    owner = _owners.get(group)
    if owner is None or (training := owner[1]()) is None:
        return
    if training.outer is None and not training.closed:
        former = () if training.model is None else training.model.parameters()
        own = {id(parameter) for parameter in model.parameters()}
        if owner[0]() is None or any(id(parameter) in own for parameter in former):
            return
    raise UserError(
        f"the group of replica {group.replica!r} is in use by another optimizer, or was closed; a group is for one "
        "ftopt.wrap(): connect once for each model, with a job of its own, as ftopt.connect(url, job='critic'), and "
        "again for an optimizer that replaces one; give several inner optimizers of one model as a list"
    )
