from __future__ import annotations

import random
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from ftopt.errors import UserError
from ftopt.fragments import Balanced
from ftopt.methods import DiLoCo, LocalSGD, Method, StreamingDiLoCo
from ftopt.optimizer import wrap
from ftopt.outer import SGD
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.rebase import Rebase
from ftopt.step.outer.trigger_metrics import TriggerMetrics
from ftopt.sync.group import Contribution
from ftopt.triggers import AnyOf, LinearFDA, LocalCondition
from ftopt.undo import undo_step
from tests.optimizer.scripted import Scripted

SIZE = 40
DELAYED = StreamingDiLoCo(sync_every=4, fragments=Balanced(n=1), delay=2, outer=SGD(lr=1.0), wait_for_result_s=0.0)
TRIGGERED = LocalSGD(sync_every=6, trigger=AnyOf([LocalCondition(8.0, check_every=1), LinearFDA(1.0, check_every=2)]))
METHODS = [LocalSGD(sync_every=3), DiLoCo(sync_every=3, outer=SGD(lr=1.0)), DELAYED, TRIGGERED]


def _direction(step: int) -> Tensor:
    """The gradient of a linear loss at a step: sums of any subset of steps differ."""
    return torch.sin(torch.arange(1, SIZE + 1) * (0.37 * step + 0.11)) * 0.5


class _Trainer:
    """SGD on a linear loss: work is additive, so it can be summed up from outside."""

    def __init__(self, group: Scripted, method: Method, dtype: torch.dtype, *, undo: bool = False) -> None:
        self.model = nn.Linear(SIZE, 1, bias=False).to(dtype)
        nn.init.zeros_(self.model.weight)
        self.group = group
        inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = wrap(inner, self.model, method, group=group, undo=undo)
        self.steps = 0
        self.undone = 0

    def step(self) -> None:
        self.steps += 1
        # Eighths: exact in bf16 too, so that rounding does not blur the sums.
        move = (_direction(self.steps + 100 * self.undone) * 8).round() / 8
        self.group.work[self.steps] = -move
        self.model.weight.grad = move.reshape(1, -1).to(self.model.weight.dtype)
        self.optimizer.step()

    def undo(self) -> bool:
        try:
            undo_step(self.optimizer)
        except UserError:
            return False
        del self.group.work[self.steps]
        self.steps -= 1
        self.undone += 1
        return True

    def end(self) -> None:
        """It leaves: or the process would, at its end, for each of them."""
        self.group.quiet = True
        self.optimizer.close(flush=False)

    def params(self) -> Tensor:
        return self.model.weight.detach().double().reshape(-1)


def _check(trainer: _Trainer, group: Scripted, tolerance: float) -> None:
    optimizer = trainer.optimizer
    optimizer._core.started().apply()
    done = set(group.counted) | set(group.dropped)
    assert len(group.counted) == len(set(group.counted)), "a step was counted twice"
    assert not set(group.counted) & set(group.dropped), "a counted step was dropped as well"
    pending = [step for step in range(1, trainer.steps + 1) if step not in done]
    assert optimizer.pending_steps == len(pending)
    assert not (group.reborn_pending and pending), "a replica that was given up kept its pending steps"
    group.reborn_pending = False
    (fragment,) = optimizer._core.started().fragments
    torch.testing.assert_close(fragment.state.anchor.double(), group.anchor, rtol=0, atol=tolerance)
    work = sum((group.work[step].double() for step in pending), torch.zeros(SIZE, dtype=torch.float64))
    torch.testing.assert_close(trainer.params(), group.anchor + work, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "seeds"),
    [
        (torch.bfloat16, range(10)),
        pytest.param(torch.bfloat16, range(10, 110), marks=pytest.mark.slow),
        pytest.param(torch.float32, range(80), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", METHODS, ids=["local_sgd", "diloco", "delayed", "triggered"])
def test_whatever_happens_between_threads_each_step_is_counted_once(
    method: Method, dtype: torch.dtype, seeds: range
) -> None:
    happened: dict[str, int] = {}
    for seed in seeds:
        print(f"seed={seed}")  # noqa: T201 - Shown when it fails; run it again with range(seed, seed + 1).
        chance = random.Random(seed)
        group = Scripted(chance, SIZE)
        trainer = _Trainer(group, method, dtype)
        for _ in range(40):
            trainer.step()
            if chance.random() < 0.1:
                trainer.optimizer.sync()
            if method.overlap.delay and chance.random() < 0.7:
                group.reborn_pending = False  # what is pending at the next check may be later work
                continue  # a check applies what waits for its delay
            group.quiet = True
            _check(trainer, group, 1e-5)
            group.quiet = False
        trainer.end()
        for what, times in group.happened.items():
            happened[what] = happened.get(what, 0) + times
    print(happened)  # noqa: T201
    missing = {"commit", "abort", "fail", "overtaken", "uncounted", "foreign", "reset", "propose too late"}
    least = 1 if method.overlap.delay else len(seeds) // 8
    assert all(happened.get(what, 0) >= least for what in missing), happened


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=["local_sgd", "diloco", "delayed", "triggered"])
def test_steps_that_are_undone_are_counted_nowhere(method: Method) -> None:
    undone = refused = 0
    for seed in range(12):
        print(f"seed={seed}")  # noqa: T201
        chance = random.Random(seed)
        group = Scripted(chance, SIZE)
        trainer = _Trainer(group, method, torch.float32, undo=True)
        for _ in range(40):
            trainer.step()
            if chance.random() < 0.4:
                done = trainer.undo()
                undone, refused = undone + done, refused + (not done)
            if method.overlap.delay and chance.random() < 0.7:
                group.reborn_pending = False
                continue
            group.quiet = True
            _check(trainer, group, 1e-5)
            group.quiet = False
        trainer.end()
    assert undone >= 25, undone
    assert refused >= 25, refused


def _interrupts(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "name"),
    [(Rebase, "_move"), (TriggerMetrics, "moved"), (Fragment, "apply")],
    ids=["not moved", "moved", "moved, and not noted"],
)
def test_an_interrupted_apply_goes_on_before_the_next_step(
    place: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parameters differ by from the old anchor is not only work in between."""
    group = Scripted(random.Random(0), SIZE)
    trainer = _Trainer(group, LocalSGD(sync_every=20), torch.float32)
    for _ in range(3):
        trainer.step()
    group.anchor += 1.0
    group.foreign()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, _interrupts)
        trainer.step()
    for _ in range(2):
        trainer.step()
    assert group.dropped == [] and trainer.optimizer.pending_steps == 6
    _check(trainer, group, 1e-5)
    trainer.end()


class _Threaded(Scripted):
    """The network side on a thread of its own, as fast as it can."""

    def __init__(self, chance: random.Random, size: int) -> None:
        super().__init__(chance, size)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._play)

    def maybe(self) -> None:
        """Not on the training thread."""

    def _play(self) -> None:
        while not self.over.is_set():
            with self.lock:
                act = self.chance.choice([self.commit, self.abort, self.overtaken, self.overtaken_uncounted])
                act()
                if self.chance.random() < 0.001:
                    self.foreign()

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        with self.lock:
            super().propose(contribution, now=now)


@pytest.mark.slow
def test_real_threads_count_each_step_once_too() -> None:
    group = _Threaded(random.Random(1), SIZE)
    trainer = _Trainer(group, LocalSGD(sync_every=2), torch.float32)
    trainer.step()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # Threads change places in the middle of everything.
    group.thread.start()
    try:
        while min(group.happened.get(what, 0) for what in ("commit", "overtaken", "uncounted")) < 30:
            trainer.step()
    finally:
        group.over.set()
        group.thread.join()
        sys.setswitchinterval(interval_s)
    _check(trainer, group, 1e-3)
    trainer.end()


@pytest.mark.parametrize("reason", ["nan", "inf"])
def test_nonfinite_work_is_dropped_and_training_goes_on(reason: str) -> None:
    group = Scripted(random.Random(0), SIZE)
    trainer = _Trainer(group, LocalSGD(sync_every=3), torch.float32)
    for _ in range(2):
        trainer.step()
    with torch.no_grad():
        trainer.model.weight[0, 7] = float(reason)
    trainer.step()
    assert group._outstanding is not None and not group._outstanding.finite
    assert (group._outstanding.weight, group._outstanding.steps) == (0.0, 3)
    assert group.dropped == [1, 2, 3]
    assert trainer.optimizer.pending_steps == 0
    assert torch.equal(trainer.params(), torch.zeros(SIZE, dtype=torch.float64))
    trainer.step()
    assert trainer.optimizer.pending_steps == 1
    torch.testing.assert_close(trainer.params(), group.work[4].double())
    trainer.end()


def test_who_was_given_up_reads_in_the_log_how_many_steps_that_has_cost(caplog: pytest.LogCaptureFixture) -> None:
    group = Scripted(random.Random(0), SIZE)
    trainer = _Trainer(group, LocalSGD(sync_every=100), torch.float32)
    for _ in range(3):
        trainer.step()
    group.reset()
    _check(trainer, group, 1e-5)
    assert "replica r0: 3 pending steps dropped: it starts again from the job's state" in caplog.text
    trainer.end()
