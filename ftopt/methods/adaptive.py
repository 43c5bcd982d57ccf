"""Triggers by what is measured. Letters as in ``triggers.py``; ``M`` members, ``eta`` the inner rate, ``F`` the mean
loss of the steps that the outer step counted, index 0 the first one's.

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
        return Due.YES if progress.steps >= self.period(progress.agreed) else Due.NO

    def period(self, agreed: RoundStats) -> int:
        """``H``, from ``least`` to ``most``; ``agreed`` is of the last outer step."""
        wanted = self._wanted(agreed)
        if wanted is None:
            return self.initial
        return int(min(max(wanted, self.least), self.most))

    @abstractmethod
    def _wanted(self, agreed: RoundStats) -> float | None:
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

    def _wanted(self, agreed: RoundStats) -> float | None:
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

    ``eta`` is the largest rate of the groups at the last step of a round, and ``eta_0`` that of the first outer step: a
    rate that moves within rounds, as with warm restarts, moves H with it.

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

    def _wanted(self, agreed: RoundStats) -> float | None:
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
    """For `PAFT`: the further noise takes replicas apart, beside what they move together, the sooner they average::

        signal^2 = |mean u|^2 - Var / (M - 1)       grows as steps^2: what the steps have in common adds up
        drift^2  = Var * M / (M - 1)                grows as steps: noise that is new in each step
        H       <- round(most * signal / drift)

    Both are lengths in the space of parameters, over the steps since the last average, of replicas that would be
    alike without the noise. With ``s = signal / steps``, the displacement a step, and ``sigma = drift / sqrt(steps)``,
    the drift a root step, the period comes to rest where ``sigma * sqrt(H) = s * most``: between two averages noise
    takes a replica as far as the signal takes all of them in ``most`` steps, the longest period, and no further. That
    is at ``H = (most * s / sigma)^2``. The formula goes half the way there (on a scale of logarithms) each time, so
    that it does not swing where the signal does not add up either: because batches are noisy, or at a minimum.

    What scales both lengths cancels: the loss's units, the rate, momentum, Adam's normalisation. Multiplying the loss
    by a number leaves H as it is, with AdamW (but for its ``eps``), and with SGD of any momentum when the rate is
    divided by it. With the same rate SGD takes other steps, and H is what suits those.

    It assumes that the noise is independent from replica to replica and of one size, and that members weigh the same:
    then ``Var`` holds ``(M - 1) / M`` of the noise, and the mean moves by the rest, ``Var / (M - 1)``, which is no
    signal. Where nothing else is left, H is ``least``. A bias in one replica grows as ``steps^2``; H is then
    ``most * signal / drift`` at once. Noise that all replicas have in common, as of their batches, counts as signal.

    Args:
        initial: the period before the first outer step, and as long as there is one member. Default 8.
        least: of the period. Default 1.
        most: of the period, and the measure of the drift that is borne: twice as many, and it is twice as far. Default
            16. Also the period when replicas do not drift.

    Cost: four sweeps over the parameters, a flat tensor, and an exchange of eight numbers, at each outer step.

    Source: OpenReview cPZepCZlFW (PAFT-Dyn) for the idea; for its formula see `PAFTRatio`.
    """

    uses = Measurement.DISTANCE | Measurement.DISPLACEMENT

    def _wanted(self, agreed: RoundStats) -> float | None:
        m, var, moved = agreed.members, agreed.divergence, agreed.displacement
        if m < 2 or var is None or moved is None:
            return None
        if not var:
            return math.inf
        signal_square, drift_square = max(0.0, moved - var / (m - 1)), var * m / (m - 1)
        return round(min(self.most * math.sqrt(signal_square / drift_square), self.most))


@dataclass(frozen=True, kw_only=True)
class PAFTRatio(_Period):
    """The ratio that PAFT-Dyn publishes, as a period: the gradient over the drift::

        H <- round(all-reduce(|g_m| / |theta_bar - theta_m|))

    It is a ratio of unlike units: with plain SGD it is ``1 / eta`` times one of lengths, and with Adam it changes with
    the units of the loss. It also falls with the steps that the drift was measured over. `SignalToNoise` does neither;
    this one is for comparing with the paper, which leaves open:

    - the reduction: here the members' mean norm over the root of their mean squared distance, so that one member that
      happens to be close to the mean does not decide;
    - which gradient: here the agreed one as it was corrupted in the replica, at the snapshot;
    - a normalisation by the number of elements or steps: here none;
    - the first period, and limits: here the settings.

    Args:
        initial: the period before the first outer step, and as long as there is one member. Default 8.
        least: of the period. Default 1.
        most: of the period. Default 16. Also the period when replicas do not drift.

    Cost: three sweeps over the parameters, a flat tensor, and an exchange of eight numbers, at each outer step.

    Source: OpenReview cPZepCZlFW (PAFT-Dyn).
    """

    uses = Measurement.DISTANCE | Measurement.GRADIENT

    def _wanted(self, agreed: RoundStats) -> float | None:
        if agreed.members < 2 or agreed.divergence is None or agreed.gradient_norm is None:
            return None
        if not agreed.divergence:
            return math.inf
        return round(min(agreed.gradient_norm / math.sqrt(agreed.divergence), self.most))
