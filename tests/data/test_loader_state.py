"""state_dict and load_state_dict: the right position with any number of workers and replicas, or a clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftopt.data.loader import DataLoader
from ftopt.errors import UserError
from tests.data.units import Granted, Numbers, StandIn


class Counting(Numbers):
    """Keeps a state of its own: how many samples it has given."""

    given = 0

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.given += 1
        return index, self.given

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"]


def loader_of(workers: int, dataset: Any = None, **settings: Any) -> DataLoader:
    return DataLoader(dataset or Numbers(), 4, seed=3, epochs=2, num_workers=workers, **settings)


def plain(batches: list[Any]) -> list[Any]:
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in batches]


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("drawn", [0, 7, 15, 29])
def test_a_loader_without_a_group_goes_on_with_any_number_of_workers(before: int, after: int, drawn: int) -> None:
    whole = plain(list(loader_of(0)))
    first = loader_of(before)
    batches = iter(first)
    for _ in range(drawn):
        next(batches)
    state = first.state_dict()
    second = loader_of(after)
    second.load_state_dict(state)
    assert plain(list(second)) == whole[drawn:]


def test_a_loader_goes_back_to_an_earlier_state() -> None:
    loader = loader_of(2)
    batches = iter(loader)
    early = loader.state_dict()
    whole = plain(list(batches))
    loader.load_state_dict(early)
    assert plain(list(loader)) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_a_data_set_is_that_behind_the_last_batch_drawn(workers: int) -> None:
    whole = plain(list(loader_of(workers, Counting())))
    first = loader_of(workers, Counting())
    batches = iter(first)
    for _ in range(8):
        next(batches)
    second = loader_of(workers, Counting())
    second.load_state_dict(first.state_dict())
    assert plain(list(second)) == whole[8:]


def test_the_state_of_a_data_set_is_not_shared_out_among_other_workers() -> None:
    state = loader_of(2, Counting()).state_dict()
    with pytest.raises(UserError, match="num_workers=1, was 2: the data set keeps a state of its own"):
        loader_of(1, Counting()).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_job_the_position_is_the_ledger_s(workers: int) -> None:
    """What this replica had loaded ahead stays its own; what it gets after a resume is the ledger's to say."""
    group = StandIn(Granted(range(30), ended=True))
    loader = loader_of(workers, group=group)
    batches = iter(loader)
    got = [next(batches) for _ in range(5)]
    loader.load_state_dict(loader.state_dict())
    assert plain(got + list(loader)) == plain(list(loader_of(0)))
    resumed = loader_of(0, group=StandIn(Granted([29], ended=True)))
    resumed.load_state_dict(loader.state_dict())
    assert plain(list(resumed)) == plain(list(loader_of(0)))[29:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 5}, "batch_size=5, was 4"),
        ({"seed": 4}, "seed=4, was 3"),
        ({"epochs": 3}, "epochs=3, was 2"),
        ({"drop_last": True}, "drop_last=True, was False"),
        ({"dataset": Numbers(61)}, "samples=61, was 60"),
    ],
)
def test_the_state_of_other_data_is_refused(settings: dict[str, Any], message: str) -> None:
    state = loader_of(0).state_dict()
    given = {"dataset": Numbers(), "batch_size": 4, "seed": 3, "epochs": 2, **settings}
    with pytest.raises(UserError, match=message):
        DataLoader(**given).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_the_data_sets_own_is_refused_where_the_data_set_keeps_none(workers: int) -> None:
    counting = loader_of(workers, Counting())
    next(iter(counting))
    with pytest.raises(UserError, match="this data set keeps none"):
        loader_of(workers).load_state_dict(counting.state_dict())


def test_states_with_and_without_a_group_are_no_substitutes() -> None:
    alone, grouped = loader_of(0), loader_of(0, group=StandIn())
    with pytest.raises(UserError, match="resume the job"):
        grouped.load_state_dict(alone.state_dict())
    with pytest.raises(UserError, match="give it group="):
        alone.load_state_dict(grouped.state_dict())


def test_a_state_goes_through_torch_load(tmp_path: Any) -> None:
    torch.save(loader_of(2).state_dict(), tmp_path / "state.pt")
    loader_of(0).load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    with pytest.raises(UserError, match="needs units"):
        loader_of(0).load_state_dict({"model": 1})


def test_micro_batches_come_by_inner_step_and_the_last_step_has_what_is_left() -> None:
    loader = DataLoader(Numbers(50), 10, seed=1, accumulate=2)
    assert [len(batches) for batches in loader.steps()] == [2, 2, 1]


class Tail(Granted):
    """The end of a job's data: one unit is left, another replica's comes back when that is used."""

    unused = 0

    def take(self, timeout_s: float | None = None) -> int | None:
        return None if not self._queue and self.unused else super().take(timeout_s)

    def draw(self, unit: int) -> bool:
        self.unused += 1
        return super().draw(unit)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_of_fewer_micro_batches_is_taken_where_nothing_comes_until_it_is(workers: int) -> None:
    units = Tail([0, 1, 2])
    loader = DataLoader(Numbers(50), 10, group=StandIn(units), num_workers=workers, accumulate=2)
    sizes = []
    for batches in loader.steps():
        sizes.append(len(batches))
        units.unused = 0  # the step
        if len(sizes) == 2:
            units.grant([3, 4], ended=True)
    assert sizes == [2, 1, 2]
    assert units.got == [0, 1, 2, 3, 4]
