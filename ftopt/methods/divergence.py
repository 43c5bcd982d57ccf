"""Triggers by how far the replicas have moved, looked at between two outer steps. Letters as in ``triggers.py``.

Both bound the divergence from above without a collective::

    Var = mean|u_m|^2 - |mean u_m|^2
       <= mean|u_m|^2 - (mean <xi, u_m>)^2        LinearFDA: |mean u|^2 >= <xi, mean u>^2 for a unit vector xi
       <= mean|u_m|^2  <=  max|u_m|^2             LocalCondition

What is found is true of one replica, or was true a heartbeat ago: the others are called in (`Due.NOW`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.methods.triggers import Due, Measurement, Progress, Trigger, check_count, check_positive


@dataclass(frozen=True)
class _Watch(Trigger):
    """A look at the parameters every ``check_every`` steps."""

    threshold: float
    check_every: int = 10

    def __post_init__(self) -> None:
        check_positive("threshold", self.threshold)
        check_count("check_every", self.check_every)

    def needs(self, progress: Progress) -> Measurement:
        """All that it uses, every ``check_every`` steps."""
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

    def due(self, progress: Progress) -> Due:
        """``|u|^2 > Theta``."""
        square = progress.own.square
        return Due.NOW if square is not None and square > self.threshold else Due.NO

    @property
    def uses(self) -> Measurement:
        """``|u|^2``."""
        return Measurement.SQUARE


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

    def due(self, progress: Progress) -> Due:
        """The bound is above ``Theta``, looked at every ``check_every`` steps."""
        means = progress.means
        if not self.needs(progress) or means is None or means.count < 2 or means.numbers.square is None:
            return Due.NO
        return Due.NOW if bound(means.numbers.square, means.numbers.along) > self.threshold else Due.NO

    @property
    def uses(self) -> Measurement:
        """``|u|^2`` and ``<xi, u>``."""
        return Measurement.SQUARE | Measurement.ALONG

    @property
    def shares(self) -> bool:
        """The two numbers."""
        return True


def bound(square: float, along: float | None) -> float:
    """``mean|u|^2 - (mean <xi, u>)^2``, not below 0, where rounding may put it."""
    return max(0.0, square - (along or 0.0) ** 2)
