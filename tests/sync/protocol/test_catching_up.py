"""Who joins, or comes back, while the others train on: the rounds that it is waited for, and those that go on."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.fragments import Strided
from ftopt.methods import LocalSGD, Method, StreamingDiLoCo
from ftopt.optimizer import wrap
from ftopt.sync.local import LocalState
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.replica import effects as r
from tests.optimizer.running import together
from tests.problems import problem
from tests.sync.protocol.table import Seat, Table

GRACE_S = 2.0
"""Of the table."""
LIMIT_S = 30.0


def commit(*seats: Seat, step: int) -> None:
    """These make the next version."""
    for seat in seats:
        seat.propose(step)
    for seat in seats:
        seat.reduce()
    for seat in seats:
        seat.take()


def overtaken(fetch_s: float) -> tuple[Table, Seat, Seat, Seat]:
    """C has fetched version 0 in ``fetch_s``, while A and B have made version 1; it fetches that now."""
    table = Table()
    a, b = table.start("a", "b")
    c = Seat(table, "c", "random")
    c.open()
    c.take()
    c.pop(r.Fetch)
    served = a.machine.fragments[0].serves()
    assert served is not None
    table.tick(fetch_s / 2)
    commit(a, b, step=5)
    table.tick(fetch_s / 2)
    c.take()
    assert c.end_fetch(served)
    assert c.pop(r.Fetch).position.version == 1
    return table, a, b, c


def test_a_newcomer_has_half_a_second_from_when_it_holds_the_version() -> None:
    """It has said last that it was fetching; the round is open for longer than that."""
    table, a, b, c = overtaken(2.0)
    a.propose(10)
    b.propose(10)
    c.say(m.Heartbeat("fetching", 0, 0.0))
    table.wait(1.9)
    c.end_fetch(a.record)
    assert c.machine.fragments[0].called_in
    table.wait(0.4)
    assert not a.got(m.Quorum)
    c.propose(1)
    assert a.got(m.Quorum)[0].size == 3


def test_a_round_is_held_open_for_a_fetch_that_takes_longer_than_the_grace_and_the_others_train_on() -> None:
    fetch_s = 10.0
    table, a, b, c = overtaken(fetch_s)
    a.propose(10)
    assert not a.got(m.TrainOn)  # B may be as fast
    b.propose(10)
    a.take()
    b.take()
    assert a.machine.fragments[0].released
    assert b.machine.fragments[0].released
    table.tick(fetch_s)
    assert not table.events("quorum")[1:]
    c.end_fetch(a.record)
    c.propose(1)
    for seat in (a, b, c):
        assert seat.reduce().quorum.size == 3
        assert not seat.machine.fragments[0].released
    assert [tell.data for tell in table.events("held_open")] == [{"for": ["c"]}]


@pytest.mark.parametrize("proposes", [False, True])
def test_who_comes_to_hold_a_version_while_the_next_one_is_reduced_is_waited_for_in_the_round_after(
    proposes: bool,
) -> None:
    fetch_s = 10.0
    table, a, b, c = overtaken(fetch_s)
    a.propose(10)
    b.propose(10)
    table.tick(2 * fetch_s)  # it takes longer than it was waited for
    c.end_fetch(a.record)
    if proposes:
        c.propose(1)
    for seat in (a, b):
        assert seat.reduce().quorum.size == 2
    for seat in (a, b, c):
        seat.take()
    table.tick(1.0)
    a.propose(15)
    b.propose(15)
    assert not a.got(m.Quorum)
    assert a.got(m.TrainOn)
    c.fetch(a)
    c.propose(2)
    assert a.got(m.Quorum)[0].size == 3


def test_nobody_stands_still_for_a_fetch_that_takes_longer_than_it_should() -> None:
    table, a, b, _ = overtaken(1.0)
    table.tick(2.0)
    a.propose(10)
    b.propose(10)
    assert not a.got(m.TrainOn)
    table.wait(0.1)
    assert a.got(m.TrainOn)
    assert b.got(m.TrainOn)


def test_a_round_that_is_held_open_is_not_so_for_ever() -> None:
    fetch_s = 10.0
    table, a, b, _ = overtaken(fetch_s)
    a.propose(10)
    b.propose(10)
    table.tick(2 * fetch_s - 1.0)
    assert not a.got(m.Quorum)
    table.tick(1.0)
    assert a.got(m.Quorum)[0].size == 2
    for seat in (a, b):
        seat.reduce()
    for seat in (a, b):
        seat.take()
    a.propose(15)  # nor the next one, while that fetch lasts
    b.propose(15)
    table.tick(GRACE_S)
    assert a.got(m.Quorum)[0].size == 2


@pytest.mark.parametrize("ends", ["is lost", "fails"])
def test_a_round_is_held_open_for_nobody_whose_fetch_has_ended(ends: str) -> None:
    table, a, b, c = overtaken(10.0)
    a.propose(10)
    b.propose(10)
    table.tick(GRACE_S + 1.0)
    assert not a.got(m.Quorum)
    if ends == "is lost":
        c.cut()
    else:
        c.do(c.machine.fetch_failed(0))
    assert a.got(m.Quorum)[0].size == 2


def test_a_round_is_not_held_open_for_longer_than_the_grace_when_somebody_wants_to_leave() -> None:
    table, a, b, _ = overtaken(10.0)
    a.do(a.machine.say(m.Leaving()))
    a.propose(10)
    b.propose(10)
    table.tick(GRACE_S)
    assert a.got(m.Quorum)[0].size == 2


def test_the_last_steps_of_leavers_wait_no_longer_than_the_grace_for_a_replica_that_fetches() -> None:
    """It cannot open their round before it holds the version, which may take minutes."""
    table, a, b, _ = overtaken(10.0)
    for seat in (a, b):
        seat.do(seat.machine.say(m.Leaving()))
        seat.propose(10)
    table.tick(GRACE_S / 2)
    assert not a.got(m.Quorum)
    table.tick(GRACE_S / 2)
    assert a.got(m.Quorum)[0].size == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [LocalSGD(sync_every=20), StreamingDiLoCo(sync_every=40, delay=4, fragments=Strided(n=2))],
    ids=["one fragment", "two fragments"],
)
def test_a_transfer_that_takes_three_rounds_gets_its_replica_in_and_the_others_train_on(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real clients and a real coordinator, in one process."""
    policy = FaultPolicy(grace_s=0.4, heartbeat_s=0.1, dead_after_s=10.0, start_replicas=2)
    versions: list[int] = []
    members: list[list[str]] = []
    fetched: list[int | None] = []
    steps, held_open = [0, 0, 0], list[list[int]]()
    done, started = threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        if event.event == "decide":
            assert event.version is not None
            versions.append(event.version)
            members.append([each[0] for each in event.data["members"]])
            started.set()
            if len(members[-1]) == 3:
                done.set()
        elif event.event == "held_open":
            held_open.append(list(steps))
        elif event.event == "fetched" and event.replica == "r2":
            fetched.append(event.fragment)

    fetch = LocalState.fetch

    async def slowly(self: LocalState, *arguments: Any, **rest: Any) -> Any:
        """The source keeps what it began with."""
        found, began_s, began = await fetch(self, *arguments, **rest), time.monotonic(), len(versions)
        again = bool(fetched)

        def lasts() -> bool:
            if not again:
                return time.monotonic() < began_s + 1.0 or (not fetched and len(versions) < began + 3)
            trained_on = bool(held_open) and steps[0] > held_open[0][0] + 20
            return time.monotonic() < began_s + (1.0 if trained_on else 20.0)

        if self._address.startswith("r2 "):
            while lasts():
                await asyncio.sleep(0.01)
        return found

    monkeypatch.setattr(LocalState, "fetch", slowly)
    groups = local_groups(3, policy=policy, on_event=on_event)
    task = problem("mlp", "sgd")
    models = [task.model(0) for _ in groups]

    def replica(index: int) -> None:
        if index == 2:
            assert started.wait(LIMIT_S)
        model = models[index]
        with wrap(task.inner(model.parameters()), model, method, group=groups[index]) as optimizer:
            while not done.wait(0.002):
                optimizer.zero_grad()
                task.backward(model, index, steps[index])
                optimizer.step()
                steps[index] += 1

    together([lambda index=index: replica(index) for index in range(3)])  # type: ignore[misc]
    assert max(fetched.count(f) for f in fetched) > 1  # the first one was overtaken
    assert held_open[0][:2] < [step - 20 for step in steps[:2]]
