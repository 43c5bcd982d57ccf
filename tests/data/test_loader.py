"""The loader over a data set with positions: which samples, in which order, and what becomes of what was not used."""

from __future__ import annotations

import multiprocessing.connection
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ftopt.data.loader import DataLoader
from ftopt.data.order import Order
from ftopt.data.workers import Pool, WorkerDied
from ftopt.errors import UserError
from ftopt.sync.protocol.samples import Samples
from tests.data.units import Granted, Numbers, StandIn

WORKERS = [0, 1, 2]


class Noisy(Numbers):
    """Each sample draws from every generator."""

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def samples_of(batches: Iterator[torch.Tensor]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


class Ending(Numbers):
    """Its iterator has run out at sample 37."""

    def __getitem__(self, index: int) -> int:
        return index if index != 37 else int(next(iter([])))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_data_set_that_raises_stop_iteration_does_not_end_the_data(workers: int) -> None:
    with pytest.raises(RuntimeError, match=r"the data set raised StopIteration for one of its samples \[.*37.*, of 64"):
        list(DataLoader(Ending(64), 8, epochs=1, num_workers=workers))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_epoch_has_every_sample_once_in_the_job_s_order(workers: int, drop_last: bool) -> None:
    loader = DataLoader(Numbers(103), 10, seed=4, epochs=3, drop_last=drop_last, num_workers=workers)
    batches = [batch.tolist() for batch in loader]
    order = Order(103, seed=4)
    expected = []
    for epoch in range(3):
        whole = order.indices(epoch, range(103)).tolist()
        expected += [whole[start : start + 10] for start in range(0, 100 if drop_last else 103, 10)]
    assert batches == expected
    assert loader.epoch == 2


def test_the_job_s_ledger_is_told_what_it_hands_out() -> None:
    group = StandIn()
    DataLoader(Numbers(100), 8, group=group, seed=5, epochs=None, drop_last=True, accumulate=4)
    assert group.ledgers == [(Samples(samples=100, batch_size=8, seed=5, epochs=None, drop_last=True), 4)]


def test_two_replicas_share_an_epoch_without_an_overlap() -> None:
    groups = [StandIn(Granted(units, ended=True)) for units in ([0, 1, 2, 6, 7], [3, 4, 5, 8, 9, 10])]
    loaders = [DataLoader(Numbers(101), 10, group=group, num_workers=n) for n, group in enumerate(groups)]
    seen = Counter(index for loader in loaders for index in samples_of(iter(loader)))
    assert seen == Counter(range(101))
    assert [group.units.got for group in groups] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9, 10]]


@pytest.mark.parametrize("workers", WORKERS)
def test_only_what_the_loop_was_given_counts_as_drawn(workers: int) -> None:
    group = StandIn(Granted(range(20), ended=True))
    loader = DataLoader(Numbers(200), 10, group=group, num_workers=workers)
    batches = iter(loader)
    for count in range(1, 6):
        next(batches)
        assert group.units.got == list(range(count))
    if workers:
        assert len(group.units.taken) > 5
    again = iter(loader)  # leaving a loop and coming back goes on
    next(again)
    assert group.units.got == list(range(6))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_batch_is_handed_out_though_the_next_unit_is_granted_after_its_step_alone(workers: int) -> None:
    """The ledger grants at a commit, and the commit needs the step that this batch is for."""
    units = Granted([0])
    loader = DataLoader(Numbers(80), 8, group=StandIn(units), num_workers=workers)
    got = []
    for batch in loader:
        got.append(batch.tolist())
        units.grant([len(got)] if len(got) < 10 else [], ended=len(got) == 10)
    assert units.got == list(range(10))
    assert sorted(index for batch in got for index in batch) == list(range(80))
    assert units.waits <= 1


@pytest.mark.parametrize("workers", WORKERS)
def test_a_unit_that_is_another_s_by_now_is_not_trained_on(workers: int) -> None:
    units = Granted(range(6), ended=True)
    units.not_mine = {2, 3}
    loader = DataLoader(Numbers(60), 10, group=StandIn(units), num_workers=workers)
    assert len(samples_of(iter(loader))) == 40
    assert units.got == [0, 1, 4, 5]


def test_random_augmentations_are_the_unit_s_whoever_loads_it() -> None:
    whole = [
        [torch.stack([part.double() for part in batch]) for batch in DataLoader(Noisy(40), 4, seed=1, num_workers=n)]
        for n in WORKERS
    ]
    for other in whole[1:]:
        assert all(torch.equal(a, b) for a, b in zip(whole[0], other, strict=True))
    late = StandIn(Granted([7], ended=True))
    (only,) = DataLoader(Noisy(40), 4, group=late, seed=1)
    assert torch.equal(torch.stack([part.double() for part in only]), whole[0][7])
    noise = torch.cat([batch[1:] for batch in whole[0]], dim=1)
    assert noise.unique().numel() == 120


@pytest.mark.parametrize("workers", WORKERS)
def test_loading_leaves_the_training_process_generators_alone(workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)

    seed()
    expected = [draw() for _ in range(3)]
    seed()
    batches = iter(DataLoader(Noisy(40), 4, num_workers=workers))
    assert [(next(batches), draw())[1] for _ in range(3)] == expected


def test_torch_s_own_data_sets_and_collate_functions_fit() -> None:
    dataset = TensorDataset(torch.arange(30).float().view(10, 3), torch.arange(10))
    for inputs, labels in DataLoader(dataset, 5):
        assert inputs.shape == (5, 3) and torch.equal(inputs[:, 0], 3 * labels.float())
    assert sorted(map(len, DataLoader(Numbers(7), 3, collate_fn=tuple))) == [1, 3, 3]


class Fails(Numbers):
    """Its sample 5 cannot be read until there is a file ``mended``."""

    def __init__(self, samples: int, mended: Path) -> None:
        super().__init__(samples)
        self._mended = mended

    def __getitem__(self, index: int) -> int:
        if index == 5 and not self._mended.exists():
            raise KeyError("sample 5")
        return index


@pytest.mark.parametrize("workers", WORKERS)
def test_after_an_error_of_the_data_set_no_unit_is_lost(workers: int, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    loader = DataLoader(Fails(60, mended), 4, seed=1, num_workers=workers)
    got: list[int] = []
    with pytest.raises(KeyError, match="sample 5"):
        for batch in loader:
            got += batch.tolist()
    mended.touch()
    got += samples_of(iter(loader))
    assert got == samples_of(iter(DataLoader(Numbers(60), 4, seed=1)))


class Deadly(Numbers):
    """The process that loads sample 5 dies, once."""

    def __init__(self, samples: int, mark: str) -> None:
        super().__init__(samples)
        self._mark = mark

    def __getitem__(self, index: int) -> int:
        if index == 5 and not os.path.exists(self._mark):  # noqa: PTH110
            with open(self._mark, "w"):  # noqa: PTH123
                os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch looks for free files then
def test_a_worker_process_that_dies_is_told_clearly_and_no_unit_is_lost(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.data.workers._ENDING_S", 60.0)  # batches of its may fail before its end is known
    group = StandIn(Granted(range(20), ended=True))
    loader = DataLoader(Deadly(80, str(tmp_path / "mark")), 4, seed=1, group=group, num_workers=2)
    before = signal.getsignal(signal.SIGCHLD)
    got: list[int] = []
    with pytest.raises(WorkerDied, match=r"died \(pid \d+, exit code -9\)\. Nothing is lost: iterate over"):
        for batch in loader:
            got += batch.tolist()
            assert signal.getsignal(signal.SIGCHLD) is before  # no step is torn in two by torch's handler
    drawn = len(group.units.got)
    assert len(got) == 4 * drawn and drawn < 20
    got += samples_of(iter(loader))
    assert got == samples_of(iter(DataLoader(Numbers(80), 4, seed=1)))
    assert group.units.got == list(range(20))


class Dying:
    """A worker whose end is known late, and the batches that it would have loaded."""

    exitcode: int | None = None

    def __init__(self, error: Exception) -> None:
        self.sentinel, self.end = multiprocessing.Pipe(duplex=False)
        self.pid, self._workers, self._error = 7, [self], error

    def __next__(self) -> Any:
        raise self._error

    def join(self, limit_s: float) -> None:
        self.exitcode = -9


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionResetError("Connection reset by peer"), WorkerDied),
        (EOFError(), WorkerDied),
        (
            ConnectionError("Caught ConnectionError in DataLoader worker process 0."),
            ConnectionError,
        ),  # a data set's own
    ],
)
def test_a_broken_connection_waits_for_how_the_worker_has_ended(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, pool = Dying(error), Pool.__new__(Pool)
    pool._batches = batches  # type: ignore[assignment]

    def wait(sentinels: list[Any], timeout: float) -> list[Any]:
        if timeout > 1.0:
            batches.end.close()
        return multiprocessing.connection.wait(sentinels, timeout)

    monkeypatch.setattr("ftopt.data.workers.wait", wait)
    with pytest.raises(told, match=r"exit code -9|Caught"):
        pool.next()


def test_batches_are_drawn_by_who_has_joined_only() -> None:
    loader = DataLoader(Numbers(10), group=StandIn(incarnation=0))
    with pytest.raises(UserError, match=r"no optimizer has been wrapped with this loader's group"):
        next(iter(loader))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_loop_after_the_end_of_the_data_gets_nothing(ahead: int, caplog: pytest.LogCaptureFixture) -> None:
    for loader in DataLoader(Numbers(10), 5), DataLoader(Numbers(10), 5, group=StandIn(Granted([0, 1], ended=True))):
        loader.asked_ahead(ahead)
        assert len(list(loader)) == 2 and loader.ended and not caplog.records
        assert list(loader) == list(loader.steps()) == []
        assert len(caplog.records) == 1
        caplog.clear()


def test_what_a_trainer_has_asked_for_ahead_counts_as_drawn_one_batch_later_and_at_the_end() -> None:
    group = StandIn(Granted(range(4), ended=True))
    loader = DataLoader(Numbers(40), 10, group=group)
    loader.asked_ahead(1)
    batches, got = iter(loader), []
    for _ in range(4):
        next(batches)
        got.append(len(group.units.got))
    assert got == [0, 1, 2, 3]
    assert next(batches, None) is None
    assert group.units.got == [0, 1, 2, 3]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_asked_for_ahead_and_left_unused_comes_again(ahead: int, workers: int) -> None:
    group = StandIn(Granted(range(9), ended=True))
    loader = DataLoader(Numbers(90), 10, group=group, num_workers=workers)
    loader.asked_ahead(ahead)
    trained: list[list[int]] = []
    while len(trained) < 9:
        batches, held = iter(loader), []
        for _ in range(3 + ahead):  # a loop that is left after three steps, as with limit_train_batches=3
            if (batch := next(batches, None)) is not None:
                held.append(batch.tolist())
        trained += held[:3]
        assert group.units.got == list(range(len(trained)))
    assert sorted(index for batch in trained for index in batch) == list(range(90))


def test_a_trainer_that_asks_ahead_may_say_so_after_its_first_batch() -> None:
    group = StandIn(Granted(range(4), ended=True))
    loader = DataLoader(Numbers(40), 10, group=group)
    batches, got = iter(loader), []
    for count in range(4):
        next(batches)
        got.append(len(group.units.got))
        if not count:
            loader.asked_ahead(1)
    assert got == [1, 1, 2, 3]
    assert next(batches, None) is None and group.units.got == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"accumulate": 0}, "accumulate=0; must be a whole number, at least 1"),
        ({"num_workers": -1}, "num_workers=-1; must be a whole number, at least 0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"pin_memory": True}, "needs worker processes"),
        ({"batch_size": 11, "drop_last": True}, "leaves no batch at all"),
        ({"shard": (0, 2)}, "that has positions"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DataLoader(Numbers(10), **arguments)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(UserError, match="the data set is empty"):
        DataLoader(Numbers(0))


def test_workers_of_which_one_dies_as_it_starts_are_started_once_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there, died = torch.utils.data.DataLoader.__iter__, list[bool]()

    def dies(self: Any) -> Any:
        if not died:
            died.append(True)
            raise RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly")
        return there(self)

    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", dies)
    loader = DataLoader(list(range(8)), 2, epochs=1, num_workers=1)
    assert sorted(x for batch in loader for x in batch.tolist()) == list(range(8))
    assert "4711" in caplog.text and "once more" in caplog.text
