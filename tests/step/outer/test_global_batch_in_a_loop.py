"""A global batch in a loop of one's own: exceptions that are caught, micro-batches that are split, workers, habits."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import local_groups, solo
from ftopt.data.batches import Batches
from ftopt.data.shared import ToCome
from ftopt.errors import FtoptError, UserError
from ftopt.events import Event
from ftopt.sync.group import Ranges, ReplicaGroup, Samples
from tests.optimizer.running import together
from tests.step.outer.test_global_batch import FAST, Points, inner, model, plain, same
from tests.step.outer.test_global_batch import even_shares as even_shares
from tests.sync.protocol.batch_table import batch as units_of

SAMPLES = Samples(samples=48, batch_size=4, global_batch=24, epochs=2)
"""Four batches of six units."""


class OutOfMemory(Exception):
    """As a device raises it in a backward."""


def mean_without(samples: Samples, version: int, unit: int) -> nn.Module:
    """The same with one model and each global batch at once, but for the unit that is left out in one version."""
    module, batches = model(), Batches(Points(samples.samples), samples)
    optimizer = inner(module)
    for made in range(1, 5):
        units = [u for start, stop in units_of(samples, made) for u in range(start, stop)]
        parts = [batches[u] for u in units if (made, u) != (version, unit)]
        x, y = (torch.cat([part[side] for part in parts]) for side in (0, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
    return module


class Loop:
    """What is alike in the loops of these tests."""

    def __init__(self, group: ReplicaGroup, samples: Samples = SAMPLES, **settings: Any) -> None:
        self.module = model()
        self.optimizer = ftopt.wrap(inner(self.module), self.module, ftopt.SyncSGD(), group=group)
        given = {"batch_size": samples.batch_size, "epochs": samples.epochs, "global_batch": samples.global_batch}
        self.loader = ftopt.DataLoader(Points(samples.samples), group=group, **(given | settings))

    def backward(self, x: Tensor, y: Tensor) -> None:
        nn.functional.mse_loss(self.module(x), y).backward()

    def batches(self) -> Iterator[Iterator[Any]]:
        return self.loader.global_batches()


def units_named(events: list[Event], name: str) -> list[int]:
    parts = [part for e in events if e.event == name for part in e.data["units"]]
    return sorted(unit for start, stop in parts for unit in range(start, stop))


def test_a_micro_batch_that_the_loop_skips_is_left_out_of_the_mean_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """As after an out-of-memory: parts of its gradients are there, and cleared."""
    events: list[Event] = []

    def train(group: ReplicaGroup, clumsy: bool) -> nn.Module:
        loop = Loop(group)
        with loop.optimizer:
            for step, micro_batches in enumerate(loop.batches()):
                for place, (x, y) in enumerate(micro_batches):
                    try:
                        loop.backward(x, y)
                        if clumsy and (step, place) == (1, 0):
                            raise OutOfMemory
                    except OutOfMemory:
                        loop.optimizer.zero_grad(set_to_none=False)
                        continue
                loop.optimizer.step()
        return loop.module

    groups = local_groups(2, policy=FAST, on_event=events.append)
    with caplog.at_level(logging.WARNING):
        found = together([lambda: train(groups[0], False), lambda: train(groups[1], True)])
    (unit,) = units_named(events, "left_out")
    for ours in found:
        same(ours, mean_without(SAMPLES, 2, unit))
    assert "4 samples is left out of its global batch" in caplog.text


def test_a_loop_that_is_broken_off_goes_on_with_what_is_left_of_the_batch() -> None:
    events: list[Event] = []
    failures = iter([(1, 1)])

    def train(group: ReplicaGroup, failing: tuple[int, int] | None) -> nn.Module:
        loop, step = Loop(group), 0
        with loop.optimizer:
            for micro_batches in loop.batches():
                try:
                    for place, (x, y) in enumerate(micro_batches):
                        loop.backward(x, y)
                        if (step, place) == failing:
                            failing = None
                            raise OutOfMemory
                except OutOfMemory:
                    continue
                loop.optimizer.step()
                step += 1
        return loop.module

    groups = local_groups(2, policy=FAST, on_event=events.append)
    for ours in together([lambda: train(groups[0], None), lambda: train(groups[1], next(failures))]):
        same(ours, plain(SAMPLES))
    assert units_named(events, "left_out") == []
    assert units_named(events, "micro_batch") == list(range(24))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_micro_batch_that_fails_each_time_is_left_out_and_nobody_waits_for_ever(replicas: int) -> None:
    events: list[Event] = []

    def train(group: ReplicaGroup) -> nn.Module:
        loop = Loop(group)
        bad = Batches(Points(48), SAMPLES)[8][0]
        with loop.optimizer:
            for micro_batches in loop.batches():
                try:
                    for x, y in micro_batches:
                        loop.backward(x, y)
                        if torch.equal(x, bad):
                            raise OutOfMemory
                except OutOfMemory:
                    continue
                loop.optimizer.step()
        return loop.module

    groups = local_groups(replicas, policy=FAST, on_event=events.append)
    for ours in together([lambda group=group: train(group) for group in groups]):
        same(ours, mean_without(SAMPLES, 2, 8))
    assert units_named(events, "left_out") == [8]


class Flaky(Points):
    """Its sample 7 cannot be read while there is a file ``broken``."""

    def __init__(self, samples: int, broken: Path) -> None:
        super().__init__(samples)
        self._broken = broken

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 7 and self._broken.exists():
            raise OSError("the disk is away")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_whose_loading_fails_is_loaded_again(workers: int, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    module = model()
    group = solo()
    optimizer = ftopt.wrap(inner(module), module, ftopt.SyncSGD(), group=group)
    loader = ftopt.DataLoader(Flaky(48, broken), 4, group=group, epochs=2, global_batch=24, num_workers=workers)
    failed = 0
    with optimizer:
        for micro_batches in loader.global_batches():
            try:
                for x, y in micro_batches:
                    nn.functional.mse_loss(module(x), y).backward()
            except OSError:
                failed += 1
                broken.unlink()
                continue
            optimizer.step()
    assert failed == 1
    same(module, plain(SAMPLES))


def test_a_batch_all_of_whose_micro_batches_are_skipped_moves_nothing_and_the_job_goes_on() -> None:
    events: list[Event] = []
    (group,) = local_groups(1, policy=FAST, on_event=events.append)
    loop = Loop(group)
    with loop.optimizer:
        for step, micro_batches in enumerate(loop.batches()):
            for x, y in micro_batches:
                if step:
                    loop.backward(x, y)
            before = [p.detach().clone() for p in loop.module.parameters()]
            loop.optimizer.step()
            moved = any(not torch.equal(p, q) for p, q in zip(loop.module.parameters(), before, strict=True))
            assert moved == (step > 0)
    assert loop.optimizer.status.versions == (4,)
    assert units_named(events, "left_out") == list(range(6))


@pytest.mark.long
def test_a_worker_that_dies_loses_nothing() -> None:
    others = set(multiprocessing.active_children())  # of loaders that are not collected yet
    loop = Loop(solo(), num_workers=1, prefetch_factor=1)
    workers = set(multiprocessing.active_children()) - others
    died = 0
    with loop.optimizer:
        for micro_batches in loop.batches():
            try:
                for x, y in micro_batches:
                    loop.backward(x, y)
                    if not died:
                        for worker in workers:
                            worker.kill()
            except FtoptError as error:
                assert "a worker process of the data loader died" in str(error)
                died += 1
                continue
            loop.optimizer.step()
    assert died == 1
    same(loop.module, plain(SAMPLES))


def dies_at(
    groups: list[ReplicaGroup],
    step: int,
    samples: Samples = SAMPLES,
    *,
    when: Callable[[], object] = lambda: None,
    **settings: Any,
) -> tuple[list[nn.Module], set[int]]:
    """The last replica is gone in the middle of a step; the samples of its micro-batch."""
    of_the_dead: set[int] = set()

    def train(group: ReplicaGroup, dies: bool) -> nn.Module | None:
        loop = Loop(group, samples, **settings)
        with loop.optimizer:
            for made, micro_batches in enumerate(loop.batches()):
                for x, y in micro_batches:
                    loop.backward(x, y)
                    if dies and made == step:
                        of_the_dead.add(len(x))
                        when()
                        group.close()
                        return None
                loop.optimizer.step()
        return loop.module

    tasks: list[Callable[[], Any]] = [lambda i=i: train(groups[i], i == len(groups) - 1) for i in range(len(groups))]
    return [module for module in together(tasks) if module is not None], of_the_dead


@pytest.mark.usefixtures("even_shares")
def test_a_micro_batch_of_one_that_dies_is_split_among_the_others() -> None:
    """Three replicas have 8 samples each, at once; of the dead one's each of the others computes 4."""
    events: list[Event] = []
    handed_in = threading.Semaphore(0)

    def listen(event: Event) -> None:
        events.append(event)
        if event.event == "gather" and event.version == 2:
            handed_in.release()

    groups = local_groups(3, policy=FAST, on_event=listen)
    both = partial(all, (handed_in.acquire(timeout=60) for _ in range(2)))
    found, at_once = dies_at(groups, 1, when=both, batch_size=8, split=4)
    assert len(found) == 2 and at_once == {8}
    for ours in found:
        same(ours, plain(SAMPLES))
    sizes = [(e.replica, e.data["samples"]) for e in events if e.event == "micro_batch" and e.version == 2]
    assert sorted(sizes) == [("r0", 4), ("r0", 8), ("r1", 4), ("r1", 8)]


def test_replicas_may_compute_unlike_numbers_of_samples_at_once() -> None:
    def train(group: ReplicaGroup, batch_size: int) -> tuple[nn.Module, set[int]]:
        loop, sizes = Loop(group, batch_size=batch_size, split=4), set[int]()
        with loop.optimizer:
            for micro_batches in loop.batches():
                for x, y in micro_batches:
                    sizes.add(len(x))
                    loop.backward(x, y)
                loop.optimizer.step()
        return loop.module, sizes

    groups = local_groups(2, policy=FAST)
    found = together([lambda: train(groups[0], 4), lambda: train(groups[1], 12)])
    assert [max(sizes) for _, sizes in found] == [4, 12]
    for ours, _ in found:
        same(ours, plain(SAMPLES))


@pytest.mark.long
def test_workers_load_ahead_and_what_is_inherited() -> None:
    samples = Samples(samples=120, batch_size=4, global_batch=24, epochs=1)
    groups = local_groups(2, policy=FAST)
    found, _ = dies_at(groups, 2, samples, num_workers=1)
    assert len(found) == 1
    same(found[0], plain(samples))


def test_workers_load_what_comes_if_the_shares_stay_as_they_are() -> None:
    class Known:
        at_once = 2

        def expected(self) -> tuple[Ranges, Ranges]:
            return ((2, 3),), ((0, 3),)

    expected = list(ToCome(SAMPLES, Known(), versions=8))
    assert expected == [(2,), (6, 7), (8,), (12, 13), (14,), (18, 19), (20,)], "to the end of the data"


def test_a_step_after_a_loop_that_was_left_is_refused_also_where_others_have_done_the_rest() -> None:
    group = solo()
    loop = Loop(group)
    with loop.optimizer:
        for micro_batches in loop.batches():
            for x, y in micro_batches:
                loop.backward(x, y)
                break
            with pytest.raises(UserError, match=r"go on with the next of `loader\.global_batches"):
                loop.optimizer.step()
            break
        for micro_batches in loop.batches():
            for x, y in micro_batches:
                loop.backward(x, y)
            loop.optimizer.step()
    same(loop.module, plain(SAMPLES))


def clipped(loop: Loop) -> None:
    nn.utils.clip_grad_norm_(loop.module.parameters(), 1.0)


def regularized(loop: Loop) -> None:
    sum(p.square().sum() for p in loop.module.parameters()).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [clipped, regularized])
def test_gradients_that_are_changed_before_the_step_are_told(change: Callable[[Loop], None]) -> None:
    """The step would not use them: each replica's would be another."""
    loop = Loop(solo())
    with loop.optimizer:
        for micro_batches in loop.batches():
            for x, y in micro_batches:
                loop.backward(x, y)
            change(loop)
            with pytest.raises(UserError, match=r"clip with ftopt.SyncSGD\(clip_norm=...\)"):
                loop.optimizer.step()
            break


def test_the_gradient_of_the_whole_batch_is_there_to_look_at_before_the_step() -> None:
    loop = Loop(solo(), step := Samples(samples=24, batch_size=4, global_batch=24, epochs=1))
    whole, (x, y) = model(), Batches(Points(24), step).together(range(6))
    nn.functional.mse_loss(whole(x), y).backward()
    with loop.optimizer:
        for micro_batches in loop.batches():
            for one in micro_batches:
                loop.backward(*one)
            for ours, theirs in zip(loop.module.parameters(), whole.parameters(), strict=True):
                assert ours.grad is not None and theirs.grad is not None
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
            loop.optimizer.zero_grad()  # out of habit: it changes nothing
            loop.optimizer.step()
    same(loop.module, plain(step))


def test_weights_that_are_loaded_in_between_are_told_and_set_back() -> None:
    loop = Loop(solo())
    best = {name: torch.zeros_like(value) for name, value in loop.module.state_dict().items()}
    with loop.optimizer:
        for step, micro_batches in enumerate(loop.batches()):
            for x, y in micro_batches:
                loop.backward(x, y)
            loop.optimizer.step()
            if step == 1:
                loop.module.load_state_dict(best)
                told = pytest.warns(UserWarning, match="weights were loaded into the model")
                told.__enter__()
    told.__exit__(None, None, None)
    same(loop.module, plain(SAMPLES))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"global_batch": 24, "split": 3}, "a split that divides batch_size"),
        ({"split": 4}, "give one, and a split"),
        ({"global_batch": 24, "accumulate": 2}, "leave accumulate out"),
    ],
)
def test_settings_that_contradict_each_other_are_told(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        ftopt.DataLoader(Points(48), 8, group=solo(), **settings)


def test_data_without_positions_are_told_what_to_do() -> None:
    with pytest.raises(UserError, match="what one replica cannot finish another one computes"):
        ftopt.DataLoader(iter([1, 2]), 8, group=solo(), global_batch=24)
