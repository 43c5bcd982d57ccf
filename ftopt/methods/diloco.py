"""DiLoCo: many local steps of an inner optimizer, then one step of an outer optimizer on the mean
displacement.

Equations, with the symbols of ``method.py``:

    Delta_m = a - p_m                               a = cast(A)
    Delta   = sum_m (w_m / W) * Delta_m
    A      <- OuterOpt(A, Delta)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ftopt.codecs.codec import Codec
from ftopt.errors import UserError, check_number
from ftopt.methods.method import Method, Paced
from ftopt.methods.outer_optimizers import SGD, Adam, OuterOptimizer
from ftopt.methods.short_runs import AUTO
from ftopt.methods.torch_optimizers import as_rule
from ftopt.methods.triggers import LOCAL
from ftopt.methods.values import AnchorAndState, Execution, OuterState, Round

if TYPE_CHECKING:
    from torch import Tensor

ALIAS: dict[str, Any] = {"alias": True, **LOCAL}
"""Metadata of a setting that sets a part of another one; it is None afterwards."""


@dataclass(frozen=True, kw_only=True)
class OuterOptimized(Method):
    """The equations of `DiLoCo`.

    Args:
        outer: the outer optimizer, of `ftopt.outer`, or a class of torch with its arguments, as in
            ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``; or a word. ``auto`` (default)
            is ``SGD(lr=1, momentum=0.25, nesterov=True)``, which is good in short runs and needs no inner rate of its
            own (`ftopt.methods.short_runs`); ``paper`` is what the method's paper has; ``sgd`` and ``adam`` have the
            defaults of their classes.
        outer_lr: the rate of ``outer``, an `SGD`, in place of its own. > 0. Default None: its own.
        outer_momentum: its momentum, in [0, 1), with Nesterov's form unless it is 0. Default None: its own.
    """

    paper: ClassVar[SGD] = SGD(lr=0.7, momentum=0.9, nesterov=True)

    outer: OuterOptimizer | str = field(default_factory=lambda: AUTO)
    outer_lr: float | None = field(default=None, repr=False, metadata=ALIAS)
    outer_momentum: float | None = field(default=None, repr=False, metadata=ALIAS)

    def __post_init__(self) -> None:
        super().__post_init__()
        words = {"auto": AUTO, "paper": self.paper, "sgd": SGD(), "adam": Adam()}
        outer = as_rule(words.get(self.outer, self.outer) if isinstance(self.outer, str) else self.outer)
        given: dict[str, Any] = {}
        if self.outer_lr is not None:
            given["lr"] = check_number("outer_lr", self.outer_lr, "(0, inf)", hint="use outer_lr=1")
        if self.outer_momentum is not None:
            momentum = check_number("outer_momentum", self.outer_momentum, "[0, 1)", hint="use outer_momentum=0.25")
            given |= {"momentum": momentum, "nesterov": momentum > 0}
        if given and not isinstance(outer, SGD):
            raise UserError(
                f"outer_lr and outer_momentum are of outer.SGD, and outer is {type(outer).__name__}; give it its rate "
                "itself, or leave outer out"
            )
        if isinstance(outer, SGD):
            outer = replace(outer, **given)
        for name, value in (("outer", outer), ("outer_lr", None), ("outer_momentum", None)):
            object.__setattr__(self, name, value)  # both ways to write a method make equal ones

    @property
    def _rule(self) -> OuterOptimizer:
        return cast("OuterOptimizer", self.outer)  # a word is replaced when the method is made

    @property
    def execution(self) -> Execution:
        return self._rule.execution

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        return self._rule.init(anchor)

    def outer_step(self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round) -> AnchorAndState:
        return self._rule.step(anchor, state, mean)


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Paced, OuterOptimized):
    """Distributed Low-Communication training: an outer optimizer on the mean of the replicas' displacements.

    Each replica keeps its inner optimizer's state (exchanging it gained nothing in the paper).

    Args:
        sync_every: inner steps between two outer steps (the paper's H), >= 1. Default 500, the paper's. 30 to
            100 costs less in quality.
        outer: the outer optimizer: a word, a rule of `ftopt.outer`, or your own. Default ``auto``:
            ``SGD(lr=1, momentum=0.25, nesterov=True)``; ``paper``: ``SGD(lr=0.7, momentum=0.9, nesterov=True)``.
        others: see `Paced` and `Method`.

    Source: arXiv 2311.08105, algorithm 1. Ours weights by the inner steps that a replica contributes (the paper's
        replicas all contribute H; for data of different sizes it weights by those sizes), and casts the anchor to the
        parameters' dtype first.
    """

    name: ClassVar[str] = "diloco"

    sync_every: int = field(default=500, metadata=LOCAL)


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(DiLoCo):
    """`DiLoCo` for slow links: few values of each outer gradient, in two bits; the rest is kept for later:

        v_m <- beta * e_m + Delta_m        e_m <- v_m - C(v_m)        A <- A - eta * sum_m (w_m / W) * C(v_m)

    An outer momentum would repeat what error feedback already delays. It needs many outer steps: a value that is not
    among the largest of its 4096 waits for its turn.

    Args:
        sync_every: inner steps between two outer steps, >= 1. Default 30.
        outer: default ``paper``: ``SGD(lr=1)``. With ``schedule=LinearRate(steps=..., floor=0.4)`` the rate falls as in
            the 72B run.
        codec: C, default ``top_k:0.015625:2``: 64 of 4096 values, 2 bits each.
        error_feedback: beta. Default 0.95.
        others: see `DiLoCo`.

    Source: arXiv 2508.15706, and the settings of its run of a 72B model (``hparams.json`` of ``templar``). There a
        chunk is a tile of 64 by 64 elements of a matrix, here it is 4096 consecutive elements; its 4 levels are means
        of bins over 6 deviations, ours the smallest and the largest magnitude kept; it scales each payload to the
        members' median norm, here `FaultPolicy`'s ``outlier_ratio`` leaves out what is out of line.
    """

    name: ClassVar[str] = "sparse_loco"
    paper: ClassVar[SGD] = SGD(lr=1.0)

    sync_every: int = field(default=30, metadata=LOCAL)
    outer: OuterOptimizer | str = "paper"
    codec: str | Codec = "top_k:0.015625:2"
    error_feedback: float = 0.95
