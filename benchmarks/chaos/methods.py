"""The methods of a campaign: each class as it is, but its outer step adds contributions up where it would average them.

So an inner step that adds 1 to an element adds 1 to it in the committed model, however many replicas were in the round,
and elements stay whole numbers. Contributions weigh alike (``uniform``): the mean of ``k`` of them times ``k`` is their
sum. Outer rates are 1, and there is no momentum. When a round is due, who is waited for, what is frozen, sent, rebased,
and the delay are the methods' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import ftopt
from ftopt.fragments import Named, Partition
from ftopt.methods import Method, OuterState, ReplicaView, Round
from ftopt.methods.sync_sgd import GRADIENT
from ftopt.methods.values import without_tensors

AnchorAndState = tuple[Tensor, dict[str, Tensor]]


def added(anchor: Tensor, mean: Tensor, round: Round) -> AnchorAndState:
    """``A - sum of Delta_m``, in whole numbers."""
    return anchor - torch.round(mean * len(round.shares)), {}


@dataclass(frozen=True, kw_only=True)
class Summed(Method):
    """What a method gets that sends displacements."""

    weights: str = "uniform"

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return {}

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return added(anchor, mean, round)


@dataclass(frozen=True, kw_only=True)
class Counted(Summed):
    """For methods without scalars: only those that have some learn the shares, and so the number of members."""

    @without_tensors
    def scalars(self, view: ReplicaView) -> tuple[float, ...]:
        return (1.0,)


@dataclass(frozen=True, kw_only=True)
class SummedDiLoCo(Counted, ftopt.DiLoCo):
    sync_every: int = 20


@dataclass(frozen=True, kw_only=True)
class SummedSlowMo(Summed, ftopt.SlowMo):
    sync_every: int = 12


@dataclass(frozen=True, kw_only=True)
class SummedStreaming(Counted, ftopt.StreamingDiLoCo):
    sync_every: int = 24
    delay: int = 2
    fragments: Partition = field(default_factory=lambda: parts(3))


@dataclass(frozen=True, kw_only=True)
class SummedDecoupled(Summed, ftopt.DecoupledDiLoCo):
    """The mean of directions is the method's own; embeddings, which keep the account, have none."""

    sync_every: int = 24
    delay: int = 2
    fragments: Partition = field(default_factory=lambda: parts(4))


@dataclass(frozen=True, kw_only=True)
class SummedLocalSGD(ftopt.LocalSGD):
    """Members send their parameters, not displacements."""

    sync_every: int = 10
    weights: str = "uniform"

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return added(anchor, anchor - mean, round)


@dataclass(frozen=True, kw_only=True)
class SummedSyncSGD(ftopt.SyncSGD):
    weights: str = "uniform"

    @without_tensors
    def scalars(self, view: ReplicaView) -> tuple[float, ...]:
        return (1.0,)

    def payload(self, view: ReplicaView, out: Tensor) -> Tensor:
        """The sum of the gradients that wait, not their mean."""
        return torch.neg(view.params, out=out)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return anchor, {GRADIENT: torch.round(mean * len(round.shares))}


@dataclass(frozen=True, kw_only=True)
class SummedPAFT(ftopt.PAFT):
    """Gradients are added up; parameters, which are alike, are averaged as they are."""

    sync_every: int = 5
    weights: str = "uniform"

    @property
    def gradients(self) -> Method:
        return SummedSyncSGD(verify_every=None)


def parts(n: int) -> Named:
    """A fragment for each part of `benchmarks.chaos.script.Account`."""
    return Named(patterns=[f"parts.{i}" for i in range(n)])


@dataclass(frozen=True)
class Way:
    """One method of a campaign.

    Args:
        make: the method.
        fragments: parts of the model.
        checkpoint_every: outer steps.
        live: all replicas take each step alike, and the model is nobody's anchor.
    """

    make: Callable[[], Method]
    fragments: int = 1
    checkpoint_every: int = 5
    live: bool = False


WAYS = {
    "DiLoCo": Way(SummedDiLoCo),
    "LocalSGD": Way(SummedLocalSGD, checkpoint_every=10),
    "SlowMo": Way(SummedSlowMo, checkpoint_every=10),
    "Streaming": Way(SummedStreaming, fragments=3),
    "Decoupled": Way(SummedDecoupled, fragments=4),
    "SyncSGD": Way(SummedSyncSGD, checkpoint_every=100, live=True),
    "PAFT": Way(SummedPAFT, checkpoint_every=100, live=True),
    "PAFT-1": Way(lambda: SummedPAFT(delay=1), checkpoint_every=100, live=True),
}
"""Name -> method."""
GLOBAL_BATCH = "SyncSGD-batch"
"""`ftopt.SyncSGD` as it is: the mean over a global batch is read at a rate of the batch's size."""
WAYS[GLOBAL_BATCH] = Way(ftopt.SyncSGD, checkpoint_every=50, live=True)
