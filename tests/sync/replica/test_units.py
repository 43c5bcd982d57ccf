"""The units of the sample ledger from end to end: replicas of one process, with real clients and optimizers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt._connect import local_groups, solo
from ftopt.errors import UserError
from ftopt.sync.group import FaultPolicy, ReplicaGroup, Samples
from ftopt.sync.replica.units import SPARE, Units
from tests.ledger import with_ledger
from tests.notes import Notes

FAST = FaultPolicy(grace_s=0.2, heartbeat_s=0.05, dead_after_s=60.0)
LIMIT_S = 60.0


def train(
    group: ReplicaGroup, used: list[int], *, sync_every: int = 5, step: Callable[[int], Any] = lambda n: None
) -> None:
    """An epoch, or as many as there are; ``step``: called before each."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), 0.01), model, ftopt.DiLoCo(sync_every=sync_every), group=group
    )
    assert group.units is not None
    with optimizer:
        while not group.units.ended:
            unit = group.units.take(timeout_s=LIMIT_S)
            if unit is None:
                continue
            assert group.units.draw(unit)
            model(torch.full((2, 4), float(unit % 7))).square().mean().backward()
            step(len(used))
            used.append(unit)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.pending_steps == 0


def together(groups: list[ReplicaGroup], **options: Any) -> list[list[int]]:
    """All of them train; returns what each has used."""
    used: list[list[int]] = [[] for _ in groups]
    threads = [
        threading.Thread(target=train, args=(group, mine), kwargs=options, daemon=True)
        for group, mine in zip(groups, used, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return used


def test_a_period_without_end_asks_for_no_more_than_a_message_may_name() -> None:
    """A user's way to say that something else asks for the rounds."""
    model, group = nn.Linear(4, 4), with_ledger([solo()], Samples(samples=1 << 20, batch_size=1))[0]
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), 0.01), model, ftopt.LocalSGD(sync_every=1 << 40), group=group
    )
    assert group.units is not None
    with optimizer:
        for _ in range(3):
            unit = group.units.take(timeout_s=LIMIT_S)
            assert unit is not None and group.units.draw(unit)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def test_alone_every_unit_is_used_and_committed_once() -> None:
    notes = Notes()
    (used,) = together(with_ledger([solo(on_event=notes)], Samples(samples=70, batch_size=2, epochs=2)))
    assert used == list(range(70))
    assert notes.committed() == Counter(range(70))
    assert [event.data["epoch"] for event in notes.of("epoch_done")] == [0, 1]
    assert len(notes.of("data_ended")) == 1


def test_three_replicas_commit_each_unit_once_and_wait_for_one_another_at_the_end() -> None:
    notes = Notes()
    samples = Samples(samples=401, batch_size=2, epochs=1)
    used = together(with_ledger(local_groups(3, policy=FAST, on_event=notes), samples))
    assert notes.committed() == Counter(range(201))
    assert sorted(unit for mine in used for unit in mine) == list(range(201))


def test_two_runs_grant_the_same_units_to_the_same_replicas() -> None:
    patient = FaultPolicy(grace_s=20.0, heartbeat_s=0.1, dead_after_s=20.0)
    granted: list[list[list[int]]] = []
    for _ in range(2):
        groups = with_ledger(local_groups(3, policy=patient), Samples(samples=100, batch_size=1))
        used: list[list[int]] = [[] for _ in groups]
        stop = threading.Barrier(3)

        def halt(steps: int, stop: threading.Barrier = stop) -> None:
            if steps == 60:
                stop.wait(LIMIT_S)
                raise EOFError

        def run(group: ReplicaGroup, mine: list[int], halt: Callable[[int], None] = halt) -> None:
            with pytest.raises(EOFError):
                train(group, mine, step=halt)

        threads = [threading.Thread(target=run, args=x) for x in zip(groups, used, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        granted.append(used)
    assert granted[0] == granted[1]
    assert sorted(granted[0][1][:31]) == list(range(31, 62))  # the first grant: three rounds of 5, and SPARE
    assert 3 * 5 + SPARE == 31


def test_whoever_is_cut_off_uses_what_it_holds_and_no_more() -> None:
    units = solo().keep_ledger(Samples(samples=100, batch_size=1))
    with pytest.raises(UserError, match="inside `with optimizer:`"):
        units.take()
    units.begin(lambda: None, round_units=4)
    units.grant(((0, 3),), out_of_units=False)
    assert [units.take(0.0) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError, match="no unit was granted within 0 s"):
        units.take(0.0)


def test_a_loader_does_not_wait_for_more_while_its_batches_wait_for_their_step() -> None:
    units = Units(Samples(samples=100, batch_size=1, epochs=1))
    units.begin(lambda: None, round_units=4)
    units.grant(((0, 2),), out_of_units=False)
    assert (units.take(), units.take()) == (0, 1)
    units.grant((), out_of_units=True)
    assert units.take() is None
    assert not units.ended
    assert units.draw(0) and units.draw(1)
    assert units.take() is None
    units.use()
    with pytest.raises(TimeoutError):
        units.take(0.0)
    units.reset()
    assert not units.draw(1)
    assert units.settle(((0, 100),), ()) == ()
    assert units.take() is None
    assert units.ended
