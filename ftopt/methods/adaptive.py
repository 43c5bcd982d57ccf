"""Triggers by measurements.

Symbols as in ``triggers.py``; ``M`` is the number of members, ``F`` the mean loss of the steps
that the outer step counted; index 0 marks the first outer step.

`LocalCondition` and `LinearFDA` measure between two outer steps how far the replicas have moved. They bound the
divergence from above without a collective:

    Var = mean|u_m|^2 - |mean u_m|^2
       <= mean|u_m|^2 - (mean <xi, u_m>)^2        LinearFDA: |mean u|^2 >= <xi, mean u>^2 for a unit vector xi
       <= mean|u_m|^2  <=  max|u_m|^2             LocalCondition

Their result holds for one replica, or for the last heartbeat, so the others are called in (`Due.NOW`).

`QSR` goes by the inner rate, which all replicas take from the same schedule.

The other triggers set the next period at each outer step, from statistics that its members exchange. These
(`RoundStats`) are part of the committed state: the period is the same on every replica, also on one that has just
fetched the state, and no replica is called in.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from ftopt.errors import UserError, check_number, check_whole
from ftopt.methods.triggers import Due, Measurement, Progress, RoundStats, Trigger


@dataclass(frozen=True)
class _Watch(Trigger):
    """Measures the parameters every ``check_every`` steps."""

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

    While it is due on no replica, ``Var <= Theta``. Nothing is sent, but it also counts movement common to all
    replicas, which is not divergence: when they move in the same direction, it fires long before `LinearFDA`.

    Args:
        threshold: ``Theta``, a squared L2 norm over a fragment's elements, > 0.
        check_every: inner steps between two checks; a check is one sweep over the parameters. Default 10.

    Source: arXiv 1807.03210, the local condition with the anchor as reference.
    """

    uses = Measurement.SQUARE

    def due(self, progress: Progress) -> Due:
        square = progress.own.square
        return Due.NOW if square is not None and square > self.threshold else Due.NO


@dataclass(frozen=True)
class LinearFDA(_Watch):
    """Due when ``mean|u|^2 - (mean <xi, u>)^2 > Theta``: a bound on the divergence from two numbers per replica.

    ``xi`` is the normalised difference of the last two anchors. The better it matches the direction in which the
    replicas move, the tighter the bound. With an unrelated ``xi`` and a dominant common drift the bound is a hundred
    times too large, but never too small. While a replica does not know ``xi`` (before the second anchor; a newcomer,
    before its first round), the bound is ``mean|u|^2``.

    The means travel with the heartbeats and are up to two heartbeats old: ``policy.heartbeat_s`` should be well below
    the time between two outer steps. All replicas count equally in them, whatever their weights.

    Args:
        threshold: ``Theta``, a squared L2 norm over a fragment's elements, > 0.
        check_every: inner steps between two checks; a check is two sweeps over the parameters. Default 10.

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
    """``mean|u|^2 - (mean <xi, u>)^2``, but at least 0: rounding could make it negative."""
    return max(0.0, square - (along or 0.0) ** 2)


@dataclass(frozen=True, kw_only=True)
class QSR(Trigger):
    """The quadratic synchronization rule: the smaller the inner rate, the less often replicas synchronize:

        H <- max(least, floor((alpha / lr)^2))

    ``lr`` is the mean of the rates of the round's steps so far (of the largest rate of the groups at each), where the
    paper takes the rate at the round's start. The method's ``sync_every`` is the maximum: a schedule that ends in 0
    would otherwise never synchronize again.

    Args:
        alpha: > 0, in units of the rate: at ``lr = alpha / sqrt(H)`` the period is H. The paper's ViT-B has 0.0175 at a
            peak rate of 0.008 (AdamW).
        least: the minimum period, >= 1. Default 4, that ViT-B's.
        warmup: inner steps of the job, >= 0: a round that begins before them has ``least`` steps. Default 0. Set it
            to the schedule's warm-up, whose small rates would ask for long periods.

    Source: arXiv 2310.14423.
    """

    alpha: float
    least: int = 4
    warmup: int = 0
    uses = Measurement.RATE

    def __post_init__(self) -> None:
        check_number("trigger.alpha", self.alpha, "(0, inf)", hint="the peak rate times the root of its period")
        check_whole("trigger.least", self.least, 1, of="inner steps")
        check_whole("trigger.warmup", self.warmup, 0, of="inner steps")

    def due(self, progress: Progress) -> Due:
        rate, warms = progress.rate, progress.inner_step - progress.steps < self.warmup
        if progress.steps < self.least or rate is None:
            return Due.NO
        return Due.YES if warms or (rate > 0 and progress.steps >= math.floor((self.alpha / rate) ** 2)) else Due.NO


@dataclass(frozen=True, kw_only=True)
class _Period(Trigger):
    """Due after `period` steps, or ``initial`` before any statistics are known."""

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
        """``H``, from ``least`` to ``most``, from the statistics of the last outer step."""
        wanted = self._wanted(agreed)
        if wanted is None:
            return self.initial
        return int(min(max(wanted, self.least), self.most))

    @abstractmethod
    def _wanted(self, agreed: RoundStats) -> float | None:
        """``H`` before clipping, a whole number or infinite; None: the statistics are unknown."""

    @property
    def longest(self) -> int:
        return self.most


@dataclass(frozen=True, kw_only=True)
class AdaComm(_Period):
    """The lower the loss, the more often replicas synchronize:

        H <- ceil(sqrt(F / F_0) * H_0)

    Args:
        initial: ``H_0``. Default 8.
        least: the minimum period. Default 1.
        most: the maximum period. Default 16, Paddle's.

    Losses must be counted (by ``optimizer.log(loss=...)`` or a closure). ``F_0`` is the mean over the steps of the
    first outer step, where the paper takes the loss before the first step. If a loss is not positive, H is ``H_0``.

    Source: arXiv 1810.08313, which sets H at fixed intervals of time; this sets it at each outer step.
    """

    uses = Measurement.LOSS

    def _wanted(self, agreed: RoundStats) -> float | None:
        loss, first_loss = agreed.loss, agreed.first_loss
        if loss is None or first_loss is None or loss <= 0 or first_loss <= 0:
            return None
        return math.ceil(math.sqrt(loss / first_loss) * self.initial)


@dataclass(frozen=True, kw_only=True)
class SignalToNoise(_Period):
    """For `PAFT`: the more replicas drift apart by noise, relative to their common movement, the sooner they average:

        signal^2 = |mean u|^2 - Var / (M - 1)       grows as steps^2: the common part of the steps adds up
        drift^2  = Var * M / (M - 1)                grows as steps: noise that is new in each step
        H       <- round(most * signal / drift)

    Both are lengths in parameter space, over the steps since the last average, of replicas that would be equal without
    the noise. With ``s = signal / steps``, the displacement per step, and ``sigma = drift / sqrt(steps)``, the drift
    per root step, the period converges to ``sigma * sqrt(H) = s * most``: between two averages noise moves a replica as
    far as the signal moves all replicas in ``most`` steps, the longest period. That is ``H = (most * s / sigma)^2``.
    Each update goes half the way there (on a logarithmic scale), so that H does not oscillate where the signal does not
    add up either, because of noisy batches or at a minimum.

    Factors that scale both lengths cancel: the loss's units, the rate, momentum, Adam's normalisation. Multiplying the
    loss by a number does not change H with AdamW (but for its ``eps``), nor with SGD of any momentum if the rate is
    divided by that number. At an unchanged rate SGD takes different steps, and H fits those.

    It assumes that the noise is independent between replicas and of equal size, and that members have equal weights.
    Then ``Var`` holds ``(M - 1) / M`` of the noise, and the mean moves by the rest, ``Var / (M - 1)``, which is not
    signal. If no signal is left, H is ``least``. A bias in one replica grows as ``steps^2``; H is then
    ``most * signal / drift`` at once. Noise common to all replicas, such as that of their batches, counts as signal.

    Args:
        initial: the period before the first outer step, and while there is only one member. Default 8.
        least: the minimum period. Default 1.
        most: the maximum period, and the unit of the tolerated drift: twice as large, twice as far. Default 16. Also
            the period when replicas do not drift.

    Cost: four sweeps over the parameters, a flat tensor, and an exchange of six numbers, at each outer step.

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
    """PAFT-Dyn's published ratio, the gradient over the drift, as a period:

        H <- round(all-reduce(|g_m| / |theta_bar - theta_m|))

    Its units do not match: with plain SGD it is ``1 / eta`` times a ratio of lengths, and with Adam it changes with the
    units of the loss. It also falls with the number of steps over which the drift was measured. `SignalToNoise` has
    neither problem; `PAFTRatio` is for comparison with the paper, which leaves open:

    - the reduction: here the members' mean norm over the root of their mean squared distance, so that a member that
      happens to be close to the mean does not dominate;
    - which gradient: here the agreed gradient at the snapshot, as corrupted in the replica;
    - a normalisation by the number of elements or steps: here none;
    - the first period, and limits: here the settings.

    Args:
        initial: the period before the first outer step, and while there is only one member. Default 8.
        least: the minimum period. Default 1.
        most: the maximum period. Default 16. Also the period when replicas do not drift.

    Cost: three sweeps over the parameters, a flat tensor, and an exchange of six numbers, at each outer step.

    Source: OpenReview cPZepCZlFW (PAFT-Dyn).
    """

    uses = Measurement.DISTANCE | Measurement.GRADIENT

    def _wanted(self, agreed: RoundStats) -> float | None:
        if agreed.members < 2 or agreed.divergence is None or agreed.gradient_norm is None:
            return None
        if not agreed.divergence:
            return math.inf
        return round(min(agreed.gradient_norm / math.sqrt(agreed.divergence), self.most))
