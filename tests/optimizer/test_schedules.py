"""Schedulers that count for themselves stand where the job is, in a replica that joins, comes back or resumes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import ftopt
from ftopt._connect import local_groups
from ftopt.integrations import advance
from ftopt.methods import Method
from ftopt.optimizer.schedules import Schedules, counted
from ftopt.optimizer.wrapper import ReplicaOptimizer
from ftopt.step.inner import Inner
from tests.optimizer.running import PATIENT, together
from tests.problems import problem

TASK = problem("mlp", "adamw")
AVERAGES = ftopt.LocalSGD(sync_every=2)
WATCHED = 2
"""Steps of a resumed replica that its schedulers are watched in before they are moved."""
FULL = TASK.inner(TASK.model(0).parameters()).param_groups[0]["lr"]
BEFORE, AFTER = 12, 10
"""Inner steps of the job until the replica joins, and of all replicas together from there on."""

Make = Callable[[ReplicaOptimizer], list[LRScheduler]]

SCHEDULERS: dict[str, Make] = {
    "cosine": lambda o: [lrs.CosineAnnealingLR(o, 40)],
    "step": lambda o: [lrs.StepLR(o, 5, gamma=0.5)],
    "multistep": lambda o: [lrs.MultiStepLR(o, [3, 9, 15, 18])],
    "linear": lambda o: [lrs.LinearLR(o, 0.1, total_iters=15)],
    "constant": lambda o: [lrs.ConstantLR(o, 0.3, total_iters=14)],
    "exponential": lambda o: [lrs.ExponentialLR(o, 0.9)],
    "polynomial": lambda o: [lrs.PolynomialLR(o, 40, power=2.0)],
    "lambda": lambda o: [lrs.LambdaLR(o, lambda at: 1 / (1 + at))],
    "multiplicative": lambda o: [lrs.MultiplicativeLR(o, lambda at: 0.9)],
    "restarts": lambda o: [lrs.CosineAnnealingWarmRestarts(o, 7)],
    "cyclic": lambda o: [lrs.CyclicLR(o, 1e-3, 1e-2, step_size_up=7, cycle_momentum=False)],
    "one cycle": lambda o: [lrs.OneCycleLR(o, 1e-2, total_steps=40)],
    "sequential": lambda o: [
        lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=6), lrs.CosineAnnealingLR(o, 30)], [6])
    ],
    "sequential before": lambda o: [
        lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=18), lrs.ExponentialLR(o, 0.9)], [18])
    ],
    "chained": lambda o: [
        lrs.ChainedScheduler([lrs.LinearLR(o, 0.1, total_iters=15), lrs.CosineAnnealingLR(o, 40)], o)
    ],
    "two in turns": lambda o: [lrs.LinearLR(o, 0.1, total_iters=15), lrs.ExponentialLR(o, 0.9)],
    "by the job's step": lambda o: [lrs.LambdaLR(o, lambda _: 1 / (1 + o.inner_step))],
}


class Loop:
    """A replica, and the rates and momenta that each of its steps was taken with, by the job's inner step."""

    def __init__(
        self,
        group: ftopt.ReplicaGroup,
        make: Make,
        folder: Path | None = None,
        method: Method = AVERAGES,
    ) -> None:
        self.model = TASK.model(0)
        self.optimizer = ftopt.wrap(TASK.inner(self.model.parameters()), self.model, method, group=group)
        self.checkpoints = None if folder is None else ftopt.Checkpoints(folder, self.optimizer, every=1)
        self.make = make
        self.schedulers: list[LRScheduler] = []
        self.taken: dict[int, tuple[float, float]] = {}

    def build(self, *, include: bool = False) -> None:
        self.schedulers = self.make(self.optimizer)
        if include and self.checkpoints is not None:
            self.checkpoints.include(**{f"scheduler{i}": each for i, each in enumerate(self.schedulers)})

    def step(self, calls: int = 1) -> None:
        """An inner step, and so many ``calls`` of each scheduler."""
        self.optimizer.zero_grad()
        TASK.backward(self.model, 0, self.optimizer.local_steps)
        steps = self.optimizer.local_steps
        at = self.optimizer.inner_step
        self.optimizer.step()
        group = self.optimizer.param_groups[0]
        if self.optimizer.local_steps > steps:
            self.taken.setdefault(at, (group["lr"], group["betas"][0]))
        for each in [*self.schedulers] * calls:
            each.step()
        if self.checkpoints is not None:
            self.checkpoints.step()


def alone(make: Make, steps: int) -> dict[int, tuple[float, float]]:
    """The rates of a replica that is there from the start."""
    loop = Loop(local_groups(1, policy=PATIENT)[0], make)
    with loop.optimizer:
        loop.build()
        while loop.optimizer.inner_step < steps:
            loop.step()
    return loop.taken


USUAL = ("cosine", "sequential", "chained", "two in turns")
CASES = [
    *(pytest.param(kind, "before the join", AVERAGES, id=kind) for kind in USUAL),
    *(
        pytest.param(kind, "before the join", AVERAGES, id=kind, marks=pytest.mark.long)
        for kind in SCHEDULERS
        if kind not in USUAL
    ),
    *(
        pytest.param(kind, "after the join", AVERAGES, id=f"{kind}, later", marks=marks)
        for kind, marks in zip(USUAL, ([], [pytest.mark.long], [pytest.mark.long], []), strict=True)
    ),
    *(
        pytest.param("cosine", "before the join", method, id=method.name)
        for method in (ftopt.SyncSGD(), ftopt.PAFT(sync_every=4), ftopt.DiLoCo(sync_every=4))
    ),
]


@pytest.mark.parametrize(("kind", "made", "method"), CASES)
def test_a_newcomers_rates_are_the_others(kind: str, made: str, method: Method) -> None:
    make, loops = SCHEDULERS[kind], dict[int, Loop]()
    come, there = threading.Event(), threading.Event()
    groups = local_groups(
        2, policy=ftopt.FaultPolicy(grace_s=60.0, dead_after_s=60.0, stragglers="wait", start_replicas=1)
    )

    def replica(m: int) -> None:
        if m:
            come.wait(60)
        loop = loops[m] = Loop(groups[m], make, method=method)
        if made == "before the join":
            loop.build()
        with loop.optimizer:
            there.set() if m else None
            if made == "after the join":
                loop.build()
            while loop.optimizer.inner_step < BEFORE + AFTER:
                loop.step()
                if not m and loop.optimizer.inner_step == BEFORE:
                    come.set()
                    while not there.wait(0.01):
                        loop.optimizer.sync(
                            propose=False
                        )  # a method that exchanges gradients gives its state away within a call

    together([lambda m=m: replica(m) for m in range(2)])
    assert min(loops[1].taken) >= BEFORE
    whole = alone(make, BEFORE + AFTER + 2)
    for loop in loops.values():
        assert len(loop.taken) > WATCHED
        steps = [*loop.taken]
        for i, at in enumerate(steps):
            # Where the job has leapt while a step began, it is taken at the rate of before, and the next one follows.
            leapt = steps[i - 1] + 1 if i else at
            assert loop.taken[at] in [pytest.approx(whole[each], rel=1e-6) for each in (at, leapt)], at


def resumed() -> Iterator[ParameterSet]:
    """The usual kinds, one with each choice of the other two, and one with all; the other kinds are long."""
    for a, kind in enumerate([*USUAL, *(kind for kind in SCHEDULERS if kind not in USUAL)]):
        for b, (replica, included) in enumerate(itertools.product(("r0", "r1"), (False, True))):
            few = b == a or kind == "sequential"
            how = "included" if included else "built anew"
            if few or (kind not in USUAL and b == a % 4):
                marks = [] if few else [pytest.mark.long]
                yield pytest.param(kind, [replica], included, marks=marks, id=f"{kind}, {replica}, {how}")


@pytest.mark.parametrize(("kind", "replicas", "included"), list(resumed()))
def test_a_resumed_replicas_rates_go_on(kind: str, replicas: list[str], included: bool, tmp_path: Path) -> None:
    """``r1`` was not there: the job goes on with other replicas than it had."""
    make = SCHEDULERS[kind]
    whole = alone(make, BEFORE + AFTER)
    for names in (["r0"], replicas):
        loop = Loop(local_groups(1, names=names, policy=PATIENT)[0], make, tmp_path)
        assert loop.checkpoints is not None
        until = BEFORE + AFTER if loop.checkpoints.resume(replicas=names) else BEFORE
        with loop.optimizer:
            loop.build(include=included)
            while loop.optimizer.inner_step < until:
                loop.step()
        loop.checkpoints.close()
    assert set(loop.taken) == set(range(BEFORE, BEFORE + AFTER))
    for at, rates in [*loop.taken.items()][0 if included and replicas == ["r0"] else WATCHED :]:
        assert rates == pytest.approx(whole[at], rel=1e-6), at


@pytest.mark.parametrize("kind", ["chained", "two in turns"])
def test_advance_after_a_resume_gives_the_jobs_rate_to_the_first_step(kind: str, tmp_path: Path) -> None:
    make = SCHEDULERS[kind]
    whole = alone(make, BEFORE + 2)
    for until in (BEFORE, BEFORE + 2):
        loop = Loop(local_groups(1, policy=PATIENT)[0], make, tmp_path)
        assert loop.checkpoints is not None
        loop.checkpoints.resume()
        loop.build()
        with loop.optimizer:
            for each in loop.schedulers:
                advance(each, loop.optimizer.start_step)
            while loop.optimizer.inner_step < until:
                loop.step()
        loop.checkpoints.close()
    assert set(loop.taken) == {BEFORE, BEFORE + 1}
    for at, rates in loop.taken.items():
        assert rates == pytest.approx(whole[at], rel=1e-6), at


def test_schedules_that_cannot_begin_anew_on_a_checkpoints_rates_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that counts epochs has changed the rates, too: nobody knows which part of them is whose."""
    for _ in range(2):
        loop = Loop(local_groups(1, policy=PATIENT)[0], lambda o: [lrs.LinearLR(o, 0.1), lrs.StepLR(o, 1)], tmp_path)
        assert loop.checkpoints is not None
        loop.checkpoints.resume()
        with loop.optimizer:
            loop.build()
            epochs = loop.schedulers.pop()
            for _ in range(BEFORE):
                loop.step()
            epochs.step()
        loop.checkpoints.close()
    assert caplog.text.count("replica r0: LinearLR began anew at the checkpoint's rates") == 1
    assert "checkpoints.include(scheduler=scheduler)" in caplog.text


def newcomer(make: Make, folder: Path, calls: list[int]) -> Loop:
    """Joins at inner step ``BEFORE``; its loop calls its schedulers so often after each of its steps."""
    first = Loop(local_groups(1, policy=PATIENT)[0], lambda o: [], folder)
    loop = Loop(local_groups(1, names=["r1"], policy=PATIENT)[0], make, folder)
    with first.optimizer:
        while first.optimizer.inner_step < BEFORE:
            first.step()
    assert first.checkpoints is not None and loop.checkpoints is not None
    first.checkpoints.close()
    assert loop.checkpoints.resume(replicas=["r1"])
    with loop.optimizer:
        loop.build()
        for each in calls:
            loop.step(each)
    loop.checkpoints.close()
    return loop


def rates_of(loop: Loop) -> list[float]:
    return [rate for rate, _ in loop.taken.values()]


@pytest.mark.parametrize(
    "calls", [[0, 0, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0, 0]], ids=["later", "with the first step"]
)
def test_a_scheduler_of_epochs_is_moved_for_two_steps_alone_and_named(
    calls: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = newcomer(lambda o: [lrs.StepLR(o, 1, gamma=0.5)], tmp_path, calls)
    assert counted(loop.schedulers[0]) == 2
    assert all(0 < rate < FULL for rate in rates_of(loop)[:WATCHED])
    halved = [sum(calls[:at]) for at in range(WATCHED, len(calls))]
    assert rates_of(loop)[WATCHED:] == pytest.approx([FULL / 2**times for times in halved])
    assert caplog.text.count("r1: StepLR does not count inner steps") == 1


@pytest.mark.parametrize("factor", [lambda at: 1 - at / 4, lambda at: 1.0 + at], ids=["negative", "above its peak"])
def test_a_rate_that_no_schedule_of_steps_has_is_not_tried(factor: Callable[[int], float], tmp_path: Path) -> None:
    loop = newcomer(lambda o: [lrs.LambdaLR(o, factor)], tmp_path, [0, 0, 0, 1, 0])
    assert counted(loop.schedulers[0]) == 1
    assert rates_of(loop) == pytest.approx([FULL] * 4 + [FULL * factor(1)])


def test_a_scheduler_that_the_user_has_placed_is_not_tried(tmp_path: Path) -> None:
    """By `advance`, or by its own state."""

    def placed(o: ReplicaOptimizer) -> list[LRScheduler]:
        first, second = lrs.StepLR(o, 2, gamma=0.5), lrs.StepLR(o, 10)
        advance(first, 3)
        second.load_state_dict(second.state_dict() | {"last_epoch": 3})
        return [first, second]

    loop = newcomer(placed, tmp_path, [0, 0, 0, 1])
    assert [counted(each) for each in loop.schedulers] == [4, 4]
    assert rates_of(loop) == pytest.approx([FULL / 2] * 4)


def test_a_scheduler_that_was_called_at_the_step_that_joined_follows(tmp_path: Path) -> None:
    """That step, with a gradient of other parameters, is none."""
    first = Loop(local_groups(1, policy=PATIENT)[0], lambda o: [], tmp_path)
    with first.optimizer:
        while first.optimizer.inner_step < BEFORE:
            first.step()
    assert first.checkpoints is not None
    first.checkpoints.close()
    loop = Loop(local_groups(1, names=["r1"], policy=PATIENT)[0], SCHEDULERS["lambda"], tmp_path)
    assert loop.checkpoints is not None and loop.checkpoints.resume(replicas=["r1"])
    loop.build()
    for _ in range(5):
        loop.step()
    loop.optimizer.close()
    loop.checkpoints.close()
    assert (loop.optimizer.local_steps, counted(loop.schedulers[0])) == (4, BEFORE + 4)
    assert rates_of(loop) == pytest.approx([FULL / (1 + BEFORE + i) for i in range(4)])


def test_one_that_counts_steps_follows_beside_one_that_counts_epochs(tmp_path: Path) -> None:
    steps, epochs = lrs.LinearLR, lrs.ExponentialLR
    first = Loop(local_groups(1, policy=PATIENT)[0], lambda o: [], tmp_path)
    with first.optimizer:
        while first.optimizer.inner_step < BEFORE:
            first.step()
    assert first.checkpoints is not None
    first.checkpoints.close()
    make: Make = lambda o: [steps(o, 0.1, total_iters=4), epochs(o, 0.1)]  # noqa: E731
    loop = Loop(local_groups(1, names=["r1"], policy=PATIENT)[0], make, tmp_path)
    assert loop.checkpoints is not None and loop.checkpoints.resume(replicas=["r1"])
    with loop.optimizer:
        loop.build()
        full = loop.optimizer.param_groups[0]["lr"] / 0.1
        by_step, by_epoch = loop.schedulers
        loop.schedulers = [by_step]
        for _ in range(5):
            loop.step()
    loop.checkpoints.close()
    assert (counted(by_step), counted(by_epoch)) == (BEFORE + 5, 0)
    assert rates_of(loop)[WATCHED:] == pytest.approx([full] * 3)


def test_a_scheduler_that_is_stepped_several_times_a_step_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newcomer(lambda o: [lrs.StepLR(o, 100)], tmp_path, [4] * 17)
    assert caplog.text.count("r1: StepLR does not count inner steps (64 calls in 16 inner steps)") == 1


def test_one_that_is_ahead_of_the_job_by_its_own_count_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two calls a step, restored at 16 where the job has come to inner step 12 and the others' count to 24."""
    make: Make = lambda o: [lrs.CosineAnnealingLR(o, 80)]  # noqa: E731
    schedules, inner = Schedules(), TASK.inner(TASK.model(0).parameters())
    schedules.wrapper = lambda: inner
    (scheduler,) = make(inner)  # type: ignore[arg-type]
    inner.step()
    for _ in range(16):
        scheduler.step()
    for step in range(20):
        schedules.follow(object(), Inner([inner]), "r2", start_step=12, local_steps=8 + step, inner_step=12 + step)
        scheduler.step()
        scheduler.step()
    assert caplog.text.count("r2: CosineAnnealingLR does not count inner steps (32 calls in 16 inner steps)") == 1
    assert "while the job is at inner step 28" in caplog.text


@pytest.mark.parametrize("how", ["included", "advanced"])
def test_a_scheduler_of_epochs_that_stands_where_the_others_do_is_not_named(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for until in (BEFORE, BEFORE + 20):
        name = "r1" if how == "advanced" and until > BEFORE else "r0"
        loop = Loop(local_groups(1, names=[name], policy=PATIENT)[0], lambda o: [lrs.StepLR(o, 2)], tmp_path)
        assert loop.checkpoints is not None
        assert loop.checkpoints.resume(replicas=[name]) == (until > BEFORE)
        with loop.optimizer:
            loop.build(include=how == "included")
            if how == "advanced" and until > BEFORE:
                advance(loop.schedulers[0], BEFORE // 4)
            while loop.optimizer.inner_step < until:
                loop.step(calls=int(loop.optimizer.inner_step % 4 == 3))
        loop.checkpoints.close()
        assert counted(loop.schedulers[0]) == until // 4
    assert "does not count inner steps" not in caplog.text


def test_steps_that_a_scaler_leaves_out_do_not_matter(tmp_path: Path) -> None:
    loop = newcomer(lambda o: [lrs.StepLR(o, 100)], tmp_path, [4, 1, 1] + [1] * 15)
    assert counted(loop.schedulers[0]) == BEFORE + 18 + 3


@pytest.mark.parametrize("kind", [lrs.ReduceLROnPlateau, lambda o: SWALR(o, 1e-3)])
def test_what_does_not_count_steps_is_left_alone_and_named(
    kind: Callable[[ReplicaOptimizer], LRScheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = newcomer(lambda o: [kind(o)], tmp_path, [0])
    assert counted(loop.schedulers[0]) == 0
    assert caplog.text.count("does not count inner steps and begins anew here") == 1


class Strange(LRScheduler):
    """As some users write them."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.lock = optimizer, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def step(self) -> None:  # type: ignore[override]
        """Nothing."""


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lrs.OneCycleLR(o, 1e-2, total_steps=BEFORE - 2),
        lambda o: lrs.LambdaLR(o, lambda at: [1.0, 0.5, 0.1, 0.1][at]),
        lambda o: lrs.ChainedScheduler([lrs.OneCycleLR(o, 1e-2, total_steps=BEFORE - 2)]),
    ],
)
def test_a_scheduler_that_cannot_follow_is_named_and_ends_nothing(
    make: Callable[[ReplicaOptimizer], LRScheduler], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = newcomer(lambda o: [make(o)], tmp_path, [1, 1, 0])
    assert loop.optimizer.local_steps == 3
    assert "behind the job: its step() raised" in caplog.text


def test_schedulers_of_any_kind_end_nothing(tmp_path: Path) -> None:
    assert newcomer(lambda o: [Strange(o)], tmp_path, [1, 1, 1]).optimizer.local_steps == 3


def test_schedules_on_the_inner_optimizer_follow_too_and_advance_takes_any(tmp_path: Path) -> None:
    loop = newcomer(lambda o: [lrs.ExponentialLR(o._core.inner.optimizers[0], 0.9)], tmp_path, [1, 1, 1])
    assert counted(loop.schedulers[0]) == BEFORE + 3
    chained = lrs.ChainedScheduler([lrs.ExponentialLR(loop.optimizer, 0.9)])
    advance(chained, 5)
    assert counted(chained) == 5
    plateau = lrs.ReduceLROnPlateau(loop.optimizer)
    advance(plateau, 5)
    assert counted(plateau) == 0
