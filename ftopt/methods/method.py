"""What every method is: settings and equations, tensors in and tensors out.

Legend, the same letters in all methods' files:

=========  ==========================================================================================
``A``      the anchor, flat fp32
``a``      ``cast(A)``: the anchor rounded to the parameters' dtypes; what replicas start from
``p``      this replica's parameters at its snapshot, flat fp32 (exact for bf16 and fp16 too)
``Delta``  the outer gradient ``a - p``, a direction of descent: outer optimizers *subtract* it
``w``      this replica's weight, ``W`` the sum of all members' weights; ``w / W`` is its share
``H``      inner steps between two outer steps of a fragment, ``sync_every``
``tau``    inner steps between a contribution's snapshot and its take-over, ``delay``
=========  ==========================================================================================

``a`` and not ``A`` in ``Delta``: with ``A - p`` a bf16 replica re-counts its own rounding in every round, and
four such replicas made 12 % of the true progress.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftopt.methods.fragments import Layout, Parameter
from ftopt.methods.triggers import LOCAL as LOCAL
from ftopt.methods.triggers import Due, Measurement, MemberStats, Progress, Trigger, check_sync_every

OuterState = Mapping[str, Tensor]
"""Outer optimizer state of one fragment: name -> flat fp32 tensor of its length, or a scalar (no dimensions)."""

WEIGHTS = ("steps", "uniform", "tokens", "tokens_per_step")
BUFFERS = ("local", "mean")


@dataclass(frozen=True, slots=True)
class ContributionStats:
    """What a contribution holds, for its weight.

    Args:
        steps: inner steps.
        tokens: tokens, as counted by ``optimizer.count``; 0 when nobody counts.
        staleness: outer steps that were committed without this replica since its oldest step in here.
    """

    steps: int
    tokens: int
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica's own side of a round: what it sends is computed from this.

    Args:
        anchor: ``A``, flat fp32.
        start: ``a``, flat fp32; the same tensor as ``anchor`` when all parameters are fp32.
        params: ``p``, flat fp32.
        layout: where each parameter lies in the flat tensors.
        steps: inner steps in it.
        lr: the inner optimizer's largest rate at the snapshot.
        alone: no other member has a positive weight: the mean is this replica's payload.
        lossy: the payload goes through a codec that rounds: send differences, which it can represent.
        averages: the round only averages, it is before ``average_until_step``.
    """

    anchor: Tensor
    start: Tensor
    params: Tensor
    layout: Layout
    steps: int = 1
    lr: float = 0.0
    alone: bool = False
    lossy: bool = False
    averages: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """What all members of a quorum know alike of the outer step that they compute.

    Args:
        fragment: the fragment.
        version: the version that it makes, 1 for the first: the outer optimizer's step.
        inner_step: the fragment's committed inner step before this outer step (fragment 0's is the job's).
        layout: where each parameter lies in the flat tensors.
        shares: ``w / W`` of the members of positive weight, in rank order.
        scalars: what `Method.scalars` gave at each of them.
        lossy: see `ReplicaView`.
        seen: what they told each other for the trigger, in rank order; empty when it asks for nothing.
    """

    fragment: int
    version: int
    inner_step: int
    layout: Layout
    shares: tuple[float, ...] = (1.0,)
    scalars: tuple[tuple[float, ...], ...] = ((),)
    lossy: bool = False
    seen: tuple[MemberStats, ...] = ()

    def mean(self, index: int) -> float:
        """The weighted mean of the ``index``-th scalar; rounded once, so that all Pythons agree."""
        # Not sum(): Pythons differ in how it adds up.
        return math.fsum(share * row[index] for share, row in zip(self.shares, self.scalars, strict=True))


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A semi-synchronous method. Subclasses are frozen dataclasses: their fields are their settings and their recipe.

    `outer_step` must be given; the rest has a plain method's answers: one fragment, no overlap, due
    every ``sync_every`` inner steps. No state, no I/O. `outer_step` must give the same bits on every member of a quorum
    that gives it the same tensors.

    Args:
        sync_every: ``H``, >= 1. May differ between replicas. With a ``trigger``: at the latest. `LocalSGD` and `DiLoCo`
            also take ``balanced``, see ``by_speed.py``.
        trigger: when to propose before ``sync_every`` steps have passed. Default: never.
        weights: what a contribution weighs in the mean: its inner ``steps`` (default), ``uniform`` (1, the papers'),
            its ``tokens`` (needs ``optimizer.count``), or ``tokens_per_step``: tokens times tokens a step (a step that
            nobody counts is a token).
        staleness_discount: a contribution whose oldest step is ``n`` outer steps old weighs this to the power ``n``.
            In (0, 1]. Default 1: no discount.
        average_until_step: until the job's committed inner step reaches this, replicas average their parameters after
            every inner step (post-local SGD, arXiv 1808.07217). Default 0.
        buffers: what becomes of buffers that training changes, such as BatchNorm's statistics: each replica keeps its
            own (``local``, default), or floating-point buffers of the model's state dict are averaged with the
            parameters, plainly and without the outer optimizer (``mean``).

    Raises:
        ValueError: a setting is out of range; the message says what is allowed.
    """

    name: ClassVar[str]
    """The recipe's name for it, one lower-case word."""

    sync_every: int | str = field(metadata=LOCAL)
    trigger: Trigger | None = None
    weights: str = "steps"
    staleness_discount: float = 1.0
    average_until_step: int = 0
    buffers: str = "local"

    def __post_init__(self) -> None:
        self._check_period()
        self._check_trigger()
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r}; allowed: {', '.join(WEIGHTS)}; use steps")
        if self.buffers not in BUFFERS:
            raise ValueError(
                f"buffers={self.buffers!r}; allowed: {', '.join(BUFFERS)}; use mean to average BatchNorm's statistics"
            )
        if not 0 < self.staleness_discount <= 1:
            raise ValueError(
                f"staleness_discount={self.staleness_discount!r}; must be above 0 and at most 1; use 1 for no discount"
            )
        if isinstance(self.average_until_step, bool) or self.average_until_step < 0:
            raise ValueError(f"average_until_step={self.average_until_step!r}; must be an inner step, 0 or more")

    def _check_period(self) -> None:
        check_sync_every(self.sync_every)

    def _check_trigger(self) -> None:
        trigger, period = self.trigger, self.period
        if trigger is None:
            return
        if not isinstance(trigger, Trigger):
            raise ValueError(f"trigger={trigger!r}; must be a trigger of ftopt; use ftopt.triggers.Every(100)")
        if trigger.longest is not None and period is not None and trigger.longest > period:
            raise ValueError(
                f"trigger={type(trigger).__name__} may wait {trigger.longest} steps, but sync_every={period} "
                f"comes before that; use sync_every={trigger.longest} or more"
            )

    # Which parameters, and when.

    @property
    def gradients(self) -> Method | None:
        """What is done with gradients, as a fragment of its own before all others; None: they are not exchanged."""
        return None

    def partition(self, parameters: Sequence[Parameter]) -> list[list[str]]:
        """The names of each fragment's parameters. Here: one fragment of all.

        Args:
            parameters: all that train, in the model's order.

        Raises:
            ValueError: the model cannot be cut as the settings want it; says how it can.
        """
        return [[parameter.name for parameter in parameters]]

    def phase(self, fragment: int, fragments: int, inner_step: int) -> int:
        """How many of its ``sync_every`` steps a fragment that starts at ``inner_step`` has behind it already."""
        return 0

    @property
    def tau(self) -> int:
        """Inner steps from the snapshot to the take-over; 0: the training thread waits for the outer step."""
        return 0

    @property
    def patience(self) -> float:
        """Seconds that the training thread waits ``tau`` steps after the snapshot for what is not decided yet."""
        return 0.0

    @property
    def inner_state(self) -> str:
        """What becomes of the inner optimizer's state when a round that counted this replica is taken up.

        ``keep``: nothing. ``reset``: it is as before its first step. ``average``: its moments are averaged with the
        parameters (methods of one fragment).
        """
        return "keep"

    @property
    def adaptive_grace(self) -> float:
        """gamma of the adaptive grace, >= 0: the share of the time, hidden behind ``tau`` steps and not needed by the
        round itself, that the others are waited for. 0: they are waited for as long as the job's settings say."""
        return 0.0

    @property
    def mix(self) -> float | None:
        """alpha: ``params <- alpha * params + (1 - alpha) * A`` at the take-over; None: rebase, nothing is lost."""
        return None

    @property
    def period(self) -> int | None:
        """``H``; None when it changes from round to round."""
        return int(self.sync_every)

    @property
    def is_plain(self) -> bool:
        """Whether it is due every `period` steps and `due` goes by nothing else: it need not be asked at each step."""
        return self._is_plain(Method.steps_until_due)

    def _is_plain(self, steps_until_due: object) -> bool:
        """`is_plain`, with a `steps_until_due` that is known to be `period` where there is one."""
        own = type(self).due is not Method.due or type(self).steps_until_due is not steps_until_due
        return not own and self.trigger is None and not self.average_until_step and bool(self.period)

    def steps_until_due(self, progress: Progress) -> int:
        """Inner steps from one proposal to the next, at the latest. Here: ``sync_every``."""
        return int(self.sync_every)

    def due(self, progress: Progress) -> Due:
        """Is it time for this replica to propose a contribution? At the latest after `steps_until_due`."""
        if self._is_overdue(progress):
            return Due.YES
        return self.trigger.due(progress) if self.trigger is not None else Due.NO

    def needs(self, progress: Progress) -> Measurement:
        """Which numbers `due` wants measured at this step."""
        if self.trigger is None or self._is_overdue(progress):
            return Measurement.NONE
        return self.trigger.needs(progress)

    def _is_overdue(self, progress: Progress) -> bool:
        averages = 0 < progress.inner_step <= self.average_until_step
        return progress.steps >= (1 if averages else self.steps_until_due(progress))

    @property
    def uses(self) -> Measurement:
        """All numbers that the trigger ever wants."""
        return self.trigger.uses if self.trigger is not None else Measurement.NONE

    @property
    def shares(self) -> bool:
        """Whether the trigger goes by the other replicas' numbers, too."""
        return self.trigger is not None and self.trigger.shares

    # What is sent.

    def weight(self, work: ContributionStats) -> float:
        """``w``, >= 0."""
        if not work.steps:
            return 0.0
        tokens = work.tokens or work.steps
        weight = {
            "steps": float(work.steps),
            "uniform": 1.0,
            "tokens": float(work.tokens),
            "tokens_per_step": tokens * (tokens / work.steps),
        }[self.weights]
        return weight * self.staleness_discount**work.staleness

    def scalars(self, mine: ReplicaView) -> tuple[float, ...]:
        """A few numbers that the outer step needs of every member; the same count on all. Here: none."""
        return ()

    def payload(self, mine: ReplicaView, out: Tensor) -> Tensor:
        """What this replica sends, before it is multiplied by its share ``w / W``. Here: ``Delta = a - p``.

        Args:
            mine: its side of the round.
            out: flat fp32, overwritten.

        Returns:
            ``out``.
        """
        return torch.sub(mine.start, mine.params, out=out)

    @property
    def looks_at_whole(self) -> bool:
        """Whether `scalars` or `units` look at tensors: these are then copied, to be there as a whole. Here: whether
        the class has its own."""
        return type(self).scalars is not Method.scalars or type(self).units is not Method.units

    # What the agreed mean does.

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """The outer state at version 0. Here: none."""
        return {}

    def units(self, mine: ReplicaView) -> str:
        """What the payload's values mean, in a word: error feedback goes from one payload to the next of these. The
        same on all members of a round. Here: always the same."""
        return ""

    def aggregate(self, mean: Tensor, round: Round) -> Tensor:
        """What `outer_step` gets as ``mean``, from the weighted mean of the payloads. May overwrite ``mean``.

        Here: the mean itself. Not called in a round that only averages.
        """
        return mean

    @property
    def on_shares(self) -> bool:
        """`outer_step` may give other bits on other machines: each element is computed by one member, and gathered.

        It must then treat every element alike and apart from the others; scalars of the outer state are rank 0's.
        """
        return False

    @abstractmethod
    def outer_step(
        self, anchor: Tensor, state: OuterState, mean: Tensor, round: Round
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and outer state from the weighted mean of the payloads, or what `aggregate` made of it.

        ``mean`` may be overwritten and may be returned as the anchor. ``anchor`` and ``state`` are left as
        they are, and nothing returned shares memory with them.
        """

    @property
    def elementwise(self) -> bool:
        """Whether `payload` and `outer_step` treat every element alike and apart from the others: they are then called
        for a piece after the other, whose scalars of the outer state must all be the same. Here: not known."""
        return False

    def average(self, anchor: Tensor, mean: Tensor, round: Round) -> Tensor:
        """Plain averaging, what happens before ``average_until_step``: ``A - mean(Delta)``. May overwrite ``mean``."""
        return torch.sub(anchor, mean, out=mean)

    def settings(self) -> dict[str, str]:
        """What must agree among the replicas of a job, besides the name: setting -> value."""
        return _flat(self, "")


def _flat(instance: Any, prefix: str) -> dict[str, str]:
    """The fields of nested dataclasses, ``a.b``; of an inner one also its class, under the field's own name."""
    found: dict[str, str] = {}
    for f in dataclasses.fields(instance):
        value, key = getattr(instance, f.name), prefix + f.name
        if f.metadata.get("local"):
            continue
        parts = value if isinstance(value, tuple) else [value]
        for place, part in enumerate(parts):
            where = f"{key}.{place}" if isinstance(value, tuple) else key
            if dataclasses.is_dataclass(part):
                found[where] = type(part).__name__
                found |= _flat(part, f"{where}.")
            else:
                found[where] = repr(float(part)) if isinstance(part, float) else str(part)
    return found
