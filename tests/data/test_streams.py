"""Data without positions: each replica has its shard, and says so; a state fits the same workers and shards."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from ftopt.data.loader import DataLoader
from ftopt.data.workers import WorkerDied
from ftopt.errors import UserError
from ftopt.sync.protocol.policy import FaultPolicy
from tests.data.units import StandIn

pytestmark = pytest.mark.filterwarnings("ignore:the data set is iterable")


class Lines(IterableDataset[int]):
    """0, 1, 2, ..., split among the workers as torch asks for."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self._samples, step))


class Remembering(Lines):
    """Knows where it is; counts what it reads."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        while first + self._at * step < self._samples:
            self._at += 1
            yield first + (self._at - 1) * step
        self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._at = state_dict["at"]


def samples_of(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Lines, Remembering])
def test_shards_are_apart_and_together_everything_in_each_epoch(workers: int, kind: type[Lines]) -> None:
    seen = [samples_of(DataLoader(kind(100), 8, shard=(index, 3), epochs=2, num_workers=workers)) for index in range(3)]
    assert Counter(index for part in seen for index in part) == Counter(dict.fromkeys(range(100), 2))
    assert all(not set(one) & set(other) for one in seen for other in seen if one is not other)


def test_a_replica_takes_its_number_s_shard_and_says_so_once() -> None:
    group = StandIn(replica="node-2", policy=FaultPolicy(start_replicas=4))
    with pytest.warns(UserWarning, match="keeps shard 2 of 4; the job does not account for its samples"):
        loader = DataLoader(Lines(100), 5, group=group)
    assert samples_of(loader) == list(range(2, 100, 4))
    ((event, data),) = group.events
    assert (event, data["shard"], data["shards"]) == ("sharded", 2, 4)


@pytest.mark.parametrize(("replica", "count"), [("r4", 4), ("left", 4), ("r0", None)])
def test_a_replica_whose_shard_is_unknown_is_asked_for_it(replica: str, count: int | None) -> None:
    with pytest.raises(UserError, match=r"give shard="):
        DataLoader(Lines(100), group=StandIn(replica=replica, policy=FaultPolicy(start_replicas=count)))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Neither dataset nor iter")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Lines, Remembering])
@pytest.mark.parametrize("drawn", [0, 3, 9])
def test_a_stream_goes_on_from_its_state(workers: int, kind: type[Lines], drawn: int) -> None:
    def make() -> DataLoader:
        return DataLoader(kind(100), 4, shard=(1, 3), epochs=2, num_workers=workers)

    whole = [batch.tolist() for batch in make()]
    first = make()
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(drawn)] == whole[:drawn]
    second = make()
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == whole[drawn:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 1}, "workers=1, was 0"),
        ({"shard": (0, 2)}, "shard=0, was 1; shards=2, was 3"),
        ({"batch_size": 5}, "batch_size=5, was 4"),
        ({"seed": 1}, "seed=1, was 0"),
    ],
)
def test_a_state_of_other_workers_or_shards_is_refused(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"batch_size": 4, "shard": (1, 3)}
    state = DataLoader(Lines(100), **given).state_dict()
    with pytest.raises(UserError, match=message):
        DataLoader(Lines(100), **{**given, **settings}).load_state_dict(state)


def test_a_stream_that_gives_nothing_is_told_and_not_waited_for() -> None:
    with pytest.raises(UserError, match="gave no batch in epoch 0"):
        next(iter(DataLoader(Lines(2), shard=(2, 3), epochs=None)))
    once = iter([1, 2, 3])
    with pytest.raises(UserError, match=r"gave no batch in epoch 1.*that can be read again"):
        samples_of(DataLoader(once, epochs=None))


def test_a_second_pass_over_a_stream_gets_nothing() -> None:
    loader = DataLoader(Lines(10), 5)
    assert len(samples_of(loader)) == 10
    assert samples_of(loader) == []


class Deadly(Remembering):
    """The process that reads sample 30 dies, once."""

    def __init__(self, samples: int, mark: str) -> None:
        super().__init__(samples)
        self._mark = mark

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if index == 30 and not os.path.exists(self._mark):  # noqa: PTH110
                with open(self._mark, "w"):  # noqa: PTH123
                    os.kill(os.getpid(), signal.SIGKILL)
            yield index


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stream_goes_on_behind_the_last_batch_when_a_worker_has_died(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftopt.data.workers._ENDING_S", 60.0)  # batches of its may fail before its end is known
    loader = DataLoader(Deadly(80, str(tmp_path / "mark")), 4, num_workers=2)
    got = []
    with pytest.raises(WorkerDied):
        for batch in loader:
            got.append(batch.tolist())
    got += [batch.tolist() for batch in loader]
    assert got == [batch.tolist() for batch in DataLoader(Remembering(80), 4, num_workers=2)]
