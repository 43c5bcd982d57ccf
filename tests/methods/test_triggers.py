"""Each trigger against its formula; the bounds against the divergence that they bound."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ftopt.methods import PAFT, DecoupledDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo, SyncSGD
from ftopt.methods.adaptive import bound
from ftopt.methods.method import settings_of
from ftopt.methods.triggers import MeanMeasurements, Measurement, Measurements, MemberStats, RoundStats
from ftopt.step.outer.trigger_metrics import dot
from ftopt.triggers import (
    QSR,
    AdaComm,
    AnyOf,
    Due,
    Every,
    EverySeconds,
    LinearFDA,
    LocalCondition,
    PAFTRatio,
    Progress,
    SignalToNoise,
    Trigger,
)
from tests.optimizer.running import train_and_look
from tests.problems import problem
from tests.reference.local_sgd import local_sgd
from tests.reference.qsr import qsr

AT = Progress(fragment=0, steps=0, pending_steps=0, local_steps=0, inner_step=0)
NO, YES, NOW = Due.NO, Due.YES, Due.NOW


def _after(steps: int, inner_step: int | None = None, **known: Any) -> Progress:
    return replace(AT, steps=steps, inner_step=steps if inner_step is None else inner_step, **known)


def _own(square: float, steps: int = 10) -> Progress:
    return _after(steps, own=Measurements(square))


def _means(square: float, along: float | None, *, steps: int = 10, count: int = 3) -> Progress:
    return _after(steps, means=MeanMeasurements(count, Measurements(square, along)))


# ---------------------------------------------------------------- by steps and seconds


def test_every_is_due_from_its_step_on_and_needs_nothing() -> None:
    trigger = Every(5)
    assert [trigger.due(_after(steps)) for steps in (0, 4, 5, 6)] == [NO, NO, YES, YES]
    assert trigger.uses is trigger.needs(_after(5)) is Measurement.NONE


def test_every_seconds_goes_by_the_clock() -> None:
    trigger = EverySeconds(1.5)
    assert [trigger.due(_after(3, seconds=s)) for s in (0.0, 1.4, 1.5, 9.0)] == [NO, NO, YES, YES]


# ---------------------------------------------------------------- by the inner rate


def _rate(step: int) -> float:
    """Warms up, stays, falls to exactly 0."""
    return 0.05 * min(1.0, (step + 1) / 8) * max(0.0, min(1.0, (79 - step) / 60))


def test_the_quadratic_rule_equals_its_loop_bit_for_bit() -> None:
    rule = {"alpha": 0.1, "least": 2, "warmup": 8}
    meets = qsr(_rate, steps=99, most=16, **rule)  # type: ignore[arg-type]
    periods = [b - a for a, b in pairwise([0, *meets])]
    assert periods[:4] == [2] * 4, "the warm-up's small rates ask for nothing"
    assert periods[4] == 4 and max(periods) == 16 and periods == sorted(periods), "4 = (0.1 / 0.05)^2"
    task = problem("mlp", "sgd")
    expected = local_sgd(task, replicas=2, sync_every=16, steps=99, rate=_rate, meets=meets)
    method = LocalSGD(sync_every=16, trigger=QSR(**rule))  # type: ignore[arg-type]
    for trained in train_and_look(task, method, replicas=2, steps=99, rate=_rate):
        assert all(torch.equal(a, b) for a, b in zip(trained.params, expected, strict=True))


def test_the_quadratic_rule_asks_at_a_rate_for_its_period() -> None:
    trigger = QSR(alpha=0.0175)
    assert [trigger.due(_after(steps, rate=0.008)) for steps in (3, 4)] == [NO, YES], "ViT-B: floor(4.785)"
    assert [trigger.due(_after(steps, rate=0.00175)) for steps in (99, 100)] == [NO, YES]
    assert trigger.due(_after(10**6, rate=0.0)) is trigger.due(_after(10**6)) is NO
    assert trigger.uses is Measurement.RATE and trigger.needs(_after(5)) is Measurement.NONE


# ---------------------------------------------------------------- joined


def test_any_of_says_the_most_urgent() -> None:
    parts = [Every(5), LocalCondition(1.0, check_every=1)]
    table = {(4, 0.5): NO, (5, 0.5): YES, (4, 2.0): NOW, (5, 2.0): NOW}
    for (steps, square), expected in table.items():
        assert AnyOf(parts).due(_own(square, steps)) == expected, (steps, square)


def test_what_is_joined_asks_for_what_its_parts_ask_for() -> None:
    nested = AnyOf([Every(7), AnyOf([LocalCondition(1.0, check_every=2), LinearFDA(1.0, check_every=3)]), AdaComm()])
    assert nested.uses == Measurement.SQUARE | Measurement.ALONG | Measurement.LOSS
    wanted = [nested.needs(_after(steps)) for steps in range(7)]
    both = Measurement.SQUARE | Measurement.ALONG
    assert wanted == [
        Measurement.NONE,
        Measurement.NONE,
        Measurement.SQUARE,
        both,
        Measurement.SQUARE,
        Measurement.NONE,
        both,
    ]
    assert nested.shares and not AnyOf([Every(1), LocalCondition(1.0)]).shares
    assert AnyOf([Every(7), Every(3), EverySeconds(1)]).longest == 3
    assert AnyOf([EverySeconds(1)]).longest is None


# ---------------------------------------------------------------- divergence, between outer steps


def _replicas(generator: torch.Generator, *, drift: float, noise: float) -> tuple[Tensor, Tensor]:
    """A unit direction, and five replicas' movements: ``drift`` times it, and noise each of its own; fp64."""
    direction = torch.randn(2000, generator=generator, dtype=torch.float64)
    direction /= direction.norm()
    apart = torch.randn(5, 2000, generator=generator, dtype=torch.float64)
    return direction, drift * direction + noise * apart


def _variance(u: Tensor) -> float:
    return float((u - u.mean(0)).square().sum(1).mean())


def _bound(u: Tensor, xi: Tensor | None) -> float:
    along = None if xi is None else float((u @ xi).mean())
    return bound(float(u.square().sum(1).mean()), along)


@pytest.mark.parametrize("seed", range(20))
def test_linear_fda_bounds_the_divergence_whatever_xi_is(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    direction, u = _replicas(generator, drift=10.0 * seed, noise=0.1)
    other = torch.randn(2000, generator=generator, dtype=torch.float64)
    for xi in (direction, -direction, other / other.norm(), None):
        assert _bound(u, xi) >= _variance(u) * (1 - 1e-12)
    assert max(float(x.square().sum()) for x in u) >= _variance(u), "the local condition bounds it, too"


def test_the_bound_is_close_when_xi_points_where_the_replicas_walk_and_useless_when_it_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    direction, u = _replicas(generator, drift=300.0, noise=0.1)
    other = torch.randn(2000, generator=generator, dtype=torch.float64)
    assert _variance(u) == pytest.approx(16, rel=0.1)
    assert _bound(u, direction) == pytest.approx(_variance(u), rel=0.3)  # the noise has a mean, 1/5 of it
    assert _bound(u, other / other.norm()) > 1000 * _variance(u)


def test_a_dominant_common_drift_leaves_the_small_difference_its_digits() -> None:
    generator = torch.Generator().manual_seed(1)
    direction, u = _replicas(generator, drift=3000.0, noise=0.01)
    xi, moved = direction.float(), u.float()
    xi /= xi.norm()
    squares, alongs = [dot(x, x) for x in moved], [dot(x, xi) for x in moved]
    true = _variance(moved.double())
    ours = bound(sum(squares) / 5, sum(alongs) / 5)
    # xi is fp32: its rounding alone turns it by an angle of 1e-7, which is 1e-14 of |u|^2, 1e-7 here.
    assert ours == pytest.approx(true, rel=0.5) and ours >= true * 0.99
    naive = float((moved * moved).sum(1).mean() - ((moved @ xi).mean()) ** 2)
    assert abs(naive - true) > 2 * true, "fp32 sums would have lost it"


def test_the_local_condition_looks_every_so_many_steps() -> None:
    trigger = LocalCondition(4.0, check_every=3)
    assert [trigger.needs(_after(steps)) for steps in range(4)] == [Measurement.NONE] * 3 + [Measurement.SQUARE]
    assert [trigger.due(_own(x)) for x in (3.9, 4.0, 4.1)] == [NO, NO, NOW]
    assert trigger.due(_after(3)) is NO, "what was not measured is no reason"


def test_linear_fda_goes_by_the_means_at_its_own_steps() -> None:
    trigger = LinearFDA(4.0, check_every=5)
    assert [trigger.due(_means(square, 3.0)) for square in (12.9, 13.1)] == [NO, NOW]
    assert trigger.due(_means(4.1, None)) is NOW
    assert trigger.due(_means(99.0, 0.0, steps=4)) is NO
    assert trigger.due(_means(99.0, 0.0, count=1)) is NO, "alone nobody diverges"
    assert trigger.due(_own(99.0)) is NO


# ---------------------------------------------------------------- periods set at the outer steps


def _agreed(**known: float) -> Progress:
    return _after(1, agreed=RoundStats(**{"members": 4.0, **known}))


def _period(trigger: AdaComm | SignalToNoise | PAFTRatio, **known: float) -> int:
    progress = _agreed(**known)
    period = trigger.period(progress.agreed)
    assert [trigger.due(replace(progress, steps=n)) for n in (period - 1, period)] == [NO, YES]
    return period


def test_adacomm_equals_its_formula() -> None:
    paper = AdaComm(initial=20, most=40)
    assert _period(paper, loss=2.0, first_loss=2.0) == 20
    assert _period(paper, loss=0.5, first_loss=2.0) == 10
    assert _period(paper, loss=0.51, first_loss=2.0) == math.ceil(math.sqrt(0.51 / 2.0) * 20) == 11
    assert _period(paper, loss=200.0, first_loss=2.0) == 40
    assert _period(paper) == _period(paper, loss=-1.0, first_loss=2.0) == 20


def _drifted(workers: int, steps: int, *, signal: float, noise: float, seed: int = 0) -> RoundStats:
    """After steps of ``signal`` in one direction, and noise of this length of each replica's own."""
    generator, d = torch.Generator().manual_seed(seed), 20_000
    u = torch.randn(workers, d, generator=generator, dtype=torch.float64) * (noise * math.sqrt(steps / d))
    u[:, 0] += signal * steps
    distances = (u - u.mean(0)).square().sum(1).tolist()
    moved = float(u.mean(0).square().sum())
    rows = [MemberStats(1.0, distance=x, displacement=moved) for x in distances]
    return RoundStats().after(rows)


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("noise", [2.0, 8.0])
def test_signal_to_noise_comes_to_rest_where_the_drift_is_the_signal_of_the_longest_period(
    workers: int, noise: float
) -> None:
    trigger, steps = SignalToNoise(most=32), [8]
    for seed in range(12):
        steps.append(trigger.period(_drifted(workers, steps[-1], signal=1.0, noise=noise, seed=seed)))
    wanted = min((32 / noise) ** 2, 32)
    assert steps[-1] == pytest.approx(wanted, abs=1 + 0.1 * wanted), steps
    assert all(abs(math.log(b / wanted)) <= abs(math.log(a / wanted)) + 0.15 for a, b in pairwise(steps)), "no swing"


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_the_share_of_the_noise_that_moves_the_mean_is_no_signal(workers: int) -> None:
    agreed = _drifted(workers, 8, signal=0.0, noise=1.0)
    assert agreed.displacement == pytest.approx(8 / workers, rel=0.1)
    assert SignalToNoise(most=20).period(agreed) <= 3


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e30])
def test_signal_to_noise_is_a_ratio_of_lengths(scale: float) -> None:
    trigger = SignalToNoise(most=40)
    assert _period(trigger, divergence=3.0 * scale, displacement=2.0 * scale) == 20  # sqrt((2 - 3 / 3) / 4) * 40


def test_signal_to_noise_without_noise_or_without_peers() -> None:
    trigger = SignalToNoise(initial=3, least=2, most=50)
    assert _period(trigger, divergence=0.0, displacement=1.0) == 50
    assert _period(trigger, divergence=0.0, displacement=0.0) == 50
    assert _period(trigger, divergence=5e-324, displacement=1.0) == 50
    assert _period(trigger, divergence=1e9, displacement=1.0) == 2
    assert _period(trigger, divergence=1e9, displacement=0.0) == 2
    assert _period(trigger, members=1.0, divergence=0.0, displacement=1.0) == 3
    assert _period(trigger, divergence=1.0) == _period(trigger, displacement=1.0) == 3


def test_the_ratio_of_the_paper_is_the_gradient_over_the_drift() -> None:
    trigger = PAFTRatio(initial=3, least=2, most=50)
    assert _period(trigger, divergence=4.0, gradient_norm=20.0) == 10
    assert _period(trigger, divergence=4e-6, gradient_norm=20.0) == 50
    assert _period(trigger, divergence=4e6, gradient_norm=20.0) == 2
    assert _period(trigger, divergence=0.0, gradient_norm=20.0) == 50
    assert _period(trigger, members=1.0, divergence=0.0, gradient_norm=20.0) == 3
    assert _period(trigger, divergence=1.0) == 3


def test_what_members_agree_on_are_weighted_means_over_those_who_know() -> None:
    a = MemberStats(4.0, loss=2.0, distance=8.0)
    b = MemberStats(12.0, distance=4.0)
    first = RoundStats().after([a, b])
    assert (first.members, first.divergence) == (2.0, 5.0)
    assert (first.loss, first.first_loss) == (2.0, 2.0)
    assert first.gradient_norm is None
    second = first.after([replace(b, loss=1.0)])
    assert (second.loss, second.first_loss) == (1.0, 2.0)
    assert RoundStats().after([replace(a, loss=math.inf)]).loss is None
    assert first.pace is None
    assert first.after([replace(a, pace=2.0), replace(b, pace=4.0), b]).pace == 9.0, "a sum, of all three"
    assert RoundStats().after([replace(a, weight=7.0, loss=7.0)] * 3).loss == 7, "not a bit less or more"


# ---------------------------------------------------------------- as a setting


def test_a_method_is_due_by_its_trigger_and_at_the_latest_after_sync_every() -> None:
    method = LocalSGD(sync_every=8, trigger=LocalCondition(1.0, check_every=2))
    assert [method.timing.due(_own(x, steps)) for x, steps in ((0.5, 4), (2.0, 4), (0.5, 8), (2.0, 8))] == [
        NO,
        NOW,
        YES,
        YES,
    ]
    assert [method.timing.needs(_after(steps)) for steps in (3, 4)] == [Measurement.NONE, Measurement.SQUARE]
    assert LocalSGD(sync_every=8).timing.uses is LocalSGD(sync_every=8).timing.needs(_after(4)) is Measurement.NONE


def test_until_the_outer_start_step_every_step_is_due() -> None:
    method = LocalSGD(sync_every=50, trigger=Every(10), average_until_step=3)
    assert [method.timing.due(_after(1, inner_step)) for inner_step in (1, 3, 4)] == [YES, YES, NO]


def test_every_method_takes_a_trigger_that_replicas_must_agree_on() -> None:
    trigger = AnyOf([Every(20), LinearFDA(0.5)])
    for method in (LocalSGD(sync_every=50, trigger=trigger), DiLoCo(trigger=trigger), StreamingDiLoCo(trigger=trigger)):
        found = {key: value for key, value in settings_of(method).items() if key.startswith("trigger")}
        assert found == {
            "trigger": "AnyOf",
            "trigger.triggers.0": "Every",
            "trigger.triggers.1": "LinearFDA",
            "trigger.triggers.1.threshold": "0.5",
            "trigger.triggers.1.check_every": "10",
        }


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: Every(0), "trigger.steps=0; must be a whole number"),
        (lambda: EverySeconds(0), "trigger.seconds=0; must be a number above 0"),
        (lambda: LocalCondition(-1.0), "trigger.threshold=-1.0"),
        (lambda: LinearFDA(1.0, check_every=0), "trigger.check_every=0"),
        (lambda: AdaComm(initial=99), "trigger.initial=99 with least=1 and most=16"),
        (lambda: SignalToNoise(least=0), "trigger.least=0"),
        (lambda: QSR(alpha=0), "trigger.alpha=0; must be a number above 0; the peak rate times"),
        (lambda: QSR(alpha=1.0, least=0), "trigger.least=0; must be a whole number"),
        (lambda: QSR(alpha=1.0, warmup=-1), "trigger.warmup=-1; must be a whole number"),
        (lambda: PAFTRatio(most=2.5), "trigger.most=2.5"),
        (lambda: AnyOf([]), "an empty list; must be triggers"),
        (lambda: AnyOf([3]), "got 3; must be triggers"),  # type: ignore[list-item]
        (lambda: LocalSGD(sync_every=5, trigger=7), "use ftopt.triggers.Every"),  # type: ignore[arg-type]
        (lambda: LocalSGD(sync_every=5, trigger=Every(6)), "use sync_every=6 or more"),
        (lambda: DiLoCo(sync_every=10, trigger=AdaComm()), "use sync_every=16 or more"),
        (lambda: DecoupledDiLoCo(trigger=AnyOf([SignalToNoise()])), "use linear_fda"),
    ],
)
def test_a_wrong_trigger_is_refused_with_what_is_allowed(make: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        make()


def test_a_trigger_of_ones_own_is_a_subclass() -> None:
    class Odd(Trigger):
        def due(self, progress: Progress) -> Due:
            return Due(progress.steps % 2)

    class Nothing(Trigger):
        """Does not say when."""

    with pytest.raises(TypeError, match="due"):
        Nothing()  # type: ignore[abstract]
    method = LocalSGD(sync_every=9, trigger=Odd())
    assert [method.timing.due(_after(steps)) for steps in (1, 2, 3)] == [YES, NO, YES]


def test_gradients_take_no_trigger_and_paft_takes_one_for_its_parameters() -> None:
    with pytest.raises(ValueError, match="paft takes one for its parameters"):
        SyncSGD(sync_every=4, trigger=Every(2))
    assert PAFT(sync_every=16, trigger=SignalToNoise()).gradients.trigger is None
