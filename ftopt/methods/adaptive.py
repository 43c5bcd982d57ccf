"""Triggers by what is measured. Letters as in ``triggers.py``; ``M`` members, ``d`` elements, ``eta`` the inner rate,
``F`` the mean loss of the steps that the outer step counted, index 0 the first one's.

`LocalCondition` and `LinearFDA` look between two outer steps at how far the replicas have moved. They bound the
divergence from above without a collective::

    Var = mean|u_m|^2 - |mean u_m|^2
       <= mean|u_m|^2 - (mean <xi, u_m>)^2        LinearFDA: |mean u|^2 >= <xi, mean u>^2 for a unit vector xi
       <= mean|u_m|^2  <=  max|u_m|^2             LocalCondition

What is found is true of one replica, or was true a heartbeat ago: the others are called in (`Due.NOW`).

The others set the next period at each outer step, from the statistics that its members exchange in it. These
(`RoundStats`) are part of the committed state: the period is the same on every replica, also on one that has just
fetched the state, and no replica is called in.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from ftopt.errors import UserError, check_choice, check_number, check_whole
from ftopt.methods.triggers import Due, Measurement, Progress, RoundStats, Trigger

FORMULAS = ("loss", "loss_and_rate")


@dataclass(frozen=True)
class _Watch(Trigger):
    """A look at the parameters every ``check_every`` steps."""

    threshold: float
    check_every: int = 10

    def __post_init__(self) -> None:
        check_number("trigger.threshold", self.threshold, "(0, inf)")
        check_whole("trigger.check_every", self.check_every, 1, of="inner steps")

    def needs(self, progress: Progress) -> Measurement:
        return self.uses if progress.steps and progress.steps % self.check_every == 0 else Measurement.NONE


@dataclass(frozen=True)
class LocalCondition(_Watch):
    """Due when this replica alone has moved too far: ``|u|^2 > Theta``.

    As long as it is due nowhere, ``Var <= Theta``. Nothing is sent, but it counts movement that the replicas have in
    common, which is no divergence: it fires long before `LinearFDA` when they all walk the same way.

    Args:
        threshold: ``Theta``, a squared L2 norm over a fragment's elements, > 0.
        check_every: inner steps between two looks; a look is one sweep over the parameters. Default 10.

    Source: arXiv 1807.03210, the local condition with the anchor as reference.
    """

    uses = Measurement.SQUARE

    def due(self, progress: Progress) -> Due:
        square = progress.own.square
        return Due.NOW if square is not None and square > self.threshold else Due.NO


@dataclass(frozen=True)
class LinearFDA(_Watch):
    """Due when ``mean|u|^2 - (mean <xi, u>)^2 > Theta``: a bound on the divergence from two numbers a replica.

    ``xi`` is the normalised difference of the last two anchors. The better it points where the replicas walk, the
    closer the bound; with an unrelated one and a dominant common drift it reads a hundred times too much, never too
    little. As long as a replica does not know ``xi`` (before the second anchor, and a newcomer before its first round),
    the bound is ``mean|u|^2``.

    The means go with the heartbeats and are up to two of them old: ``sync.heartbeat_s`` should be well below the time
    between two outer steps. They count replicas alike, whatever their weights.

    Args:
        threshold: ``Theta``, a squared L2 norm over a fragment's elements, > 0.
        check_every: inner steps between two looks; a look is two sweeps over the parameters. Default 10.

    Source: arXiv 2405.20988 (LinearFDA). The paper shares the two numbers in an all-reduce after every step.
    """

    uses = Measurement.SQUARE | Measurement.ALONG
    shares = True

    def due(self, progress: Progress) -> Due:
        means = progress.means
        if not self.needs(progress) or means is None or means.count < 2 or means.numbers.square is None:
            return Due.NO
        return Due.NOW if bound(means.numbers.square, means.numbers.along) > self.threshold else Due.NO


def bound(square: float, along: float | None) -> float:
    """``mean|u|^2 - (mean <xi, u>)^2``, not below 0, where rounding may put it."""
    return max(0.0, square - (along or 0.0) ** 2)


@dataclass(frozen=True, kw_only=True)
class _Period(Trigger):
    """Due after `period` steps, ``initial`` as long as nothing is known."""

    initial: int = 8
    least: int = 1
    most: int = 16

    def __post_init__(self) -> None:
        for name in ("initial", "least", "most"):
            check_whole(f"trigger.{name}", getattr(self, name), 1, of="inner steps")
        if not self.least <= self.initial <= self.most:
            raise UserError(
                f"trigger.initial={self.initial} with least={self.least} and most={self.most}; must lie between them"
            )

    def due(self, progress: Progress) -> Due:
        return Due.YES if progress.steps >= self.period(progress.agreed, progress.elements) else Due.NO

    def period(self, agreed: RoundStats, elements: int) -> int:
        """``H``, from ``least`` to ``most``.

        Args:
            agreed: of the last outer step.
            elements: ``d``.
        """
        wanted = self._wanted(agreed, elements)
        if wanted is None:
            return self.initial
        return int(min(max(wanted, self.least), self.most))

    @abstractmethod
    def _wanted(self, agreed: RoundStats, elements: int) -> float | None:
        """``H`` before it is clipped, a whole number or infinite; None: nothing is known."""

    @property
    def longest(self) -> int:
        return self.most


@dataclass(frozen=True, kw_only=True)
class ExactDivergence(_Period):
    """The period after which the divergence comes to ``threshold``, from the exact divergence at the last outer step::

        H <- floor(steps * sqrt(Theta / Var))

    ``Var`` needs the mean of the parameters, so it can only be exact where that is made: each member measures its
    distance from the mean, without any cancellation, and they exchange it. Between two outer steps `LinearFDA` and
    `LocalCondition` bound it. The square root is the law of replicas that walk apart steadily (``Var`` grows as
    ``steps^2``); under independent noise (``Var`` grows as ``steps``) the period still converges to the right one, half
    the way each time, while a linear rule would swing for ever under the steady law.

    Args:
        threshold: ``Theta``, a squared L2 norm over a fragment's elements, > 0.
        initial: the period before the first outer step. Default 8.
        least: of the period. Default 1.
        most: of the period. Default 16. Also the period when ``Var`` is 0.

    Cost: two sweeps over the parameters, a flat tensor, and an exchange of eight numbers, at each outer step.

    Source: arXiv 2405.20988 for the condition; setting the period from it is ours.
    """

    uses = Measurement.DISTANCE
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("trigger.threshold", self.threshold, "(0, inf)")

    def _wanted(self, agreed: RoundStats, elements: int) -> float | None:
        if agreed.members < 2 or agreed.divergence is None or agreed.steps is None:
            return None
        if not agreed.divergence:
            return math.inf
        return math.floor(agreed.steps * math.sqrt(self.threshold / agreed.divergence))


@dataclass(frozen=True, kw_only=True)
class AdaComm(_Period):
    """The better the loss, the more often replicas meet::

        H <- ceil(sqrt(F / F_0) * H_0)                        formula = loss, the paper's
        H <- ceil(sqrt(eta_0 * F / (eta * F_0) * H_0))        formula = loss_and_rate, Paddle's

    Args:
        initial: ``H_0``. Default 8.
        formula: ``loss`` (default) or ``loss_and_rate``, for a rate that falls: longer periods as it does.
        least: of the period. Default 1.
        most: of the period. Default 16, Paddle's. Also the period at a rate of 0.

    Losses must be counted (``optimizer.count(loss=...)``, or a closure's). ``F_0`` is the mean over the steps of the
    first outer step, where the paper takes the loss before the first step. Where a loss, or ``eta_0`` (as a warm-up
    begins), is not positive, ``H_0`` stays.

    Source: arXiv 1810.08313, which sets H at fixed intervals of time; this sets it at each outer step; the second
    formula is that of Paddle's ``AdaptiveLocalSGD``.
    """

    uses = Measurement.LOSS
    formula: str = "loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("trigger.formula", self.formula, FORMULAS)

    def _wanted(self, agreed: RoundStats, elements: int) -> float | None:
        loss, first_loss, lr, first_lr = agreed.loss, agreed.first_loss, agreed.lr, agreed.first_lr
        if loss is None or first_loss is None or loss <= 0 or first_loss <= 0:
            return None
        if self.formula == "loss":
            return math.ceil(math.sqrt(loss / first_loss) * self.initial)
        if lr is None or not first_lr:
            return None
        return math.ceil(math.sqrt(first_lr / lr * loss / first_loss * self.initial)) if lr else math.inf


@dataclass(frozen=True, kw_only=True)
class SignalToNoise(_Period):
    """PAFT's: the noisier the gradients that replicas have applied, the more often they average their parameters::

        sigma^2 = Var / (drift * d * ((M - 1) / M) * sum eta^2)
        H      <- round(|g| / (sigma * sqrt(d)))

    For replicas that should not drift at all: their gradients are averaged at each step and corrupted on the way, each
    in its own way. The law ``Var = ((M - 1) / M) * d * sigma^2 * sum eta^2`` is plain SGD's. ``sum eta^2`` goes over
    the steps since the last outer step, ``|g|`` is the mean of the members' gradient norms at their snapshots.

    Args:
        initial: the period before the first outer step. Default 8.
        least: of the period. Default 1.
        most: of the period. Default 16. Also the period when there is no noise.
        drift: how far the inner optimizer drifts under noise, as a multiple of plain SGD's variance. Default 1; with
            momentum ``beta`` 1 / (1 - beta)^2 in the long run (0.9: 72 was measured), AdamW 0.24.

    Source: OpenReview cPZepCZlFW (PAFT-Dyn). The paper writes ``all-reduce(|g_m| / |theta_bar - theta_m|)``, which
    depends on eta and H and is not clipped; the estimate of sigma, the mean as the reduction, and the limits are ours.
    """

    uses = Measurement.DISTANCE | Measurement.GRADIENT
    drift: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("trigger.drift", self.drift, "(0, inf)")

    def _wanted(self, agreed: RoundStats, elements: int) -> float | None:
        m, rates = agreed.members, agreed.rates_square
        if m < 2 or agreed.divergence is None or agreed.gradient_norm is None or not rates:
            return None
        sigma = math.sqrt(agreed.divergence / (self.drift * elements * ((m - 1) / m) * rates))
        noise = sigma * math.sqrt(elements)
        return round(agreed.gradient_norm / noise) if noise else math.inf
