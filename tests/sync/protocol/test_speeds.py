"""Slow replicas: who is one, when rounds call it in, when they do without it, and when it is one no more."""

from __future__ import annotations

from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.replica.log.rounds import RoundsLog
from tests.sync.protocol.table import Seat, Table

ROUND_S = 40.0
STEPS = 40


class Job:
    """Replicas that take steps of so many seconds each, as their heartbeats say."""

    def __init__(self, count: int = 4, **settings: Any) -> None:
        names = [f"r{i}" for i in range(count)]
        self.table = Table(start_replicas=count, dead_after_s=100.0, **settings)
        self.seats = self.table.start(*names)
        self.step_s = dict.fromkeys(names, 1.0)
        self.steps = dict.fromkeys(names, 0)
        self.states = dict.fromkeys(names, "training")

    def __getitem__(self, index: int) -> Seat:
        return self.seats[index]

    def train(self, beats: int) -> None:
        """Heartbeats of all, each a second and a step after the one before."""
        for _ in range(beats):
            self.table.now += 1.0
            for seat in self.seats:
                self.steps[seat.name] += 1
                beat = m.Heartbeat(self.states[seat.name], self.steps[seat.name], self.step_s[seat.name])
                seat.say(beat)
            self.table.do(self.table.coordinator.tick(self.table.now))

    def commit(self, seats: list[Seat] | None = None) -> None:
        """These propose what they have, and commit."""
        seats = self.seats if seats is None else seats
        for seat in seats:
            self.propose(seat)
        self.decide(seats)

    def propose(self, seat: Seat) -> None:
        seat.propose(seat.machine.counted_step(seat.record) + STEPS)

    def decide(self, seats: list[Seat]) -> None:
        for seat in seats:
            seat.reduce()
        for seat in seats:
            seat.take()

    def rounds(self, count: int = 2) -> None:
        """Rounds in which nobody is slow."""
        for _ in range(count):
            self.train(int(ROUND_S))
            self.commit()

    def events(self, name: str) -> list[str]:
        return [x.replica for x in self.table.events(name)]

    def early(self) -> list[str]:
        return [x.replica for x in self.table.events("call_in") if x.data.get("early")]


def slowed(step_s: float = 5.0, **settings: Any) -> Job:
    """The last of four has become slow, early in a round."""
    job = Job(**settings)
    job.rounds()
    job.step_s["r3"] = step_s
    job.train(4)
    return job


def test_one_whose_steps_get_longer_is_slow_and_hears_of_it() -> None:
    job = slowed()
    assert job.events("slow") == ["r3"]
    told = job[3].got(m.Speed)
    assert [(x.slow, x.factor, x.step_s, x.usual_s, x.called_in) for x in told] == [(True, 5.0, 5.0, 1.0, True)]


def test_it_is_called_in_before_the_others_are_ready_and_nobody_waits() -> None:
    job = slowed()
    job.train(int(ROUND_S) - 4 - 8)
    assert job.early() == []
    job.train(1)  # seven and a half seconds before the others: one and a half steps
    assert job.early() == ["r3"]
    assert job[3].got(m.CallIn)
    job.propose(job[3])
    job.train(6)
    assert not job.table.events("quorum")[2:]  # its proposal opens no round
    assert not job[0].got(m.CallIn)
    job.commit(job.seats[:3])
    assert job.table.version == 2  # r3 has yet to say that it has prepared
    job.decide([job[3]])
    assert job.table.version == 3


def test_what_it_offers_opens_the_round_where_all_others_have_run_out_of_units() -> None:
    job = slowed()
    job.train(int(ROUND_S) - 4 - 7)
    assert job.early() == ["r3"]
    job.states |= dict.fromkeys(("r0", "r1", "r2"), "out_of_units")
    job.train(1)
    assert not job[0].got(m.CallIn)
    job.propose(job[3])
    assert job[0].got(m.CallIn)


def test_one_whose_step_is_long_for_a_round_is_not_waited_for_and_keeps_its_steps() -> None:
    job = slowed(step_s=15.0)
    job.train(int(ROUND_S) - 4)
    assert job.early() == ["r3"]
    job.commit(job.seats[:3])
    assert job.table.version == 3
    assert job.events("stalled") == []
    job[3].fetch(job[0])
    job.train(25)
    assert job.early() == ["r3", "r3"]
    job.propose(job[3])
    job.train(15)
    for seat in job.seats[:3]:
        job.propose(seat)
    job.decide(job.seats)
    assert job.table.version == 4
    assert job[3].machine.counted_step(job[3].record) == 3 * STEPS  # two rounds before, and what it had pending


def test_it_is_waited_for_where_the_user_says_so() -> None:
    job = slowed(stragglers="wait")
    assert job.events("slow") == ["r3"]
    assert not job[3].got(m.Speed)[0].called_in
    job.train(int(ROUND_S))
    for seat in job.seats[:3]:
        job.propose(seat)
    assert job.early() == []
    assert job.table.version == 2
    job.propose(job[3])
    job.decide(job.seats)
    assert job.table.version == 3


def test_it_is_up_to_speed_again_when_its_steps_are() -> None:
    job = slowed()
    job.step_s["r3"] = 1.1
    job.train(3)
    assert job.events("up_to_speed") == ["r3"]
    assert [x.slow for x in job[3].got(m.Speed)] == [True, False]
    job.train(int(ROUND_S))
    assert job.early() == []


def test_one_that_is_slower_by_nature_is_slow_when_a_round_has_waited_for_it() -> None:
    job = Job(grace_s=10.0)
    job.step_s["r3"] = 2.0
    job.rounds()  # it is as early as the others are: its rounds are shorter
    job.train(int(ROUND_S))
    assert job.events("slow") == []
    for seat in job.seats[:3]:
        job.propose(seat)
    job.train(4)
    job.propose(job[3])
    job.decide(job.seats)
    job.train(3)
    assert job.events("slow") == ["r3"]


@pytest.mark.parametrize("state", ["evaluating", "waiting", "fetching", "out_of_units"])
def test_what_it_says_while_it_does_not_train_counts_for_nothing(state: str) -> None:
    job = Job()
    job.rounds()
    job.step_s["r3"], job.states["r3"] = 60.0, state
    job.train(20)
    assert job.events("slow") == []


def test_a_long_step_counts_once_however_many_heartbeats_it_lasts() -> None:
    job = Job()
    job.rounds()
    for _ in range(20):
        job[3].say(m.Heartbeat("training", 1000, 60.0))
    job.train(5)
    assert job.events("slow") == []


def test_one_whose_short_steps_are_long_for_some_seconds_is_not_slow_before_that_has_cost_five() -> None:
    job = Job()
    job.step_s = dict.fromkeys(job.step_s, 0.02)
    job.rounds()
    job.step_s["r3"] = 0.04
    job.train(8)
    job.step_s["r3"] = 0.02
    job.train(2)
    job.step_s["r3"] = 0.04
    job.train(10)
    assert job.events("slow") == []
    job.train(1)
    assert job.events("slow") == ["r3"]


def test_when_all_are_slow_nobody_is() -> None:
    job = Job()
    job.rounds()
    job.step_s = dict.fromkeys(job.step_s, 5.0)
    job.train(20)
    assert job.events("slow") == []


def test_of_two_the_one_whose_steps_get_longer_is_slow() -> None:
    job = Job(2)
    job.rounds()
    job.step_s["r1"] = 5.0
    job.train(4)
    assert job.events("slow") == ["r1"]


def test_one_that_says_it_is_faster_than_possible_makes_nobody_of_many_slow() -> None:
    job = Job()
    job.rounds()
    job.step_s["r0"] = 1e-9
    job.train(20)
    assert job.events("slow") == []


def test_of_two_one_that_says_its_steps_take_nothing_does_no_other_harm() -> None:
    job = Job(2)
    job.rounds()
    job.step_s["r0"] = 5e-324
    job.train(20)
    assert job.events("slow") == ["r1"]
    job.rounds()  # what they are told can be sent
    assert job.table.version == 4


def test_rounds_of_few_steps_and_of_gradients_wait_for_everybody() -> None:
    for change in ({"steps": 2}, {"gradients": True}, {"at_step": 7}):
        job = Job()
        job.rounds()
        contribution = m.Contribution(0, 2, **({"steps": STEPS, "last_step": 3 * STEPS, "weight": 1.0} | change))
        assert not job.table.coordinator.members.speeds.finished(0, {"r0": contribution}), change


def test_only_slow_ones_are_left_and_the_job_goes_on() -> None:
    job = slowed()
    for seat in job.seats[:3]:
        seat.cut()
    job.seats = job.seats[3:]
    job.table.tick(10.0)
    job.commit()
    assert job.table.version == 3


def test_a_slow_one_that_is_left_alone_is_up_to_speed_and_its_rounds_keep_their_length() -> None:
    job = slowed()
    for seat in job.seats[:3]:
        seat.cut()
    job.seats = job.seats[3:]
    job.train(4)
    assert job.events("up_to_speed") == ["r3"]
    job.commit()
    before = len(job.early())
    for _ in range(3):
        job.train(3 * int(ROUND_S))
        job.commit()
    assert len(job.early()) == before
    assert job.table.coordinator.members.speeds.slow() == []


def test_one_that_trains_alone_from_the_start_is_no_measure_for_itself() -> None:
    job = Job(1)
    job.rounds()
    assert job.events("slow") == job.events("up_to_speed") == []
    assert job.table.coordinator.roster.members["r0"].speed.reports == 0


def test_a_replica_that_is_slow_for_a_moment_says_nothing_in_its_own_log(caplog: pytest.LogCaptureFixture) -> None:
    told = RoundsLog("r3")
    told.speed(m.Speed(True, 4.9, 5.02, 1.02, 1.1, 4.0, True), 100.0)
    told.look(110.9)
    told.speed(m.Speed(False, 1.1, 1.1, 1.0, 1.1, 90.0, False), 111.0)
    told.look(200.0)
    assert not caplog.records
    told.speed(m.Speed(True, 4.9, 5.02, 1.02, 1.1, 4.0, True), 300.0)
    for now_s in (310.9, 311.0, 312.0):
        told.look(now_s)
    (line,) = (x.getMessage() for x in caplog.records)
    assert line.startswith("replica r3 has been slow for 15 s: ")


def test_a_replica_says_in_its_own_log_that_it_is_slow_and_what_follows(caplog: pytest.LogCaptureFixture) -> None:
    told = RoundsLog("r3")
    told.speed(m.Speed(True, 4.9, 5.02, 1.02, 1.1, 16.0, True), 0.0)
    told.speed(m.Speed(True, 4.9, 5.02, 1.02, 0.0, 16.0, False), 0.0)
    told.speed(m.Speed(False, 1.1, 1.1, 1.0, 1.1, 90.0, False), 90.0)
    first, second, third = (x.getMessage() for x in caplog.records)
    assert first.startswith(
        "replica r3 has been slow for 16 s: a step takes 5.02 s, 1.02 s are usual in the job, 4.9 times"
    )
    assert "call it in early" in first
    assert "rounds wait for it" in second
    assert third.startswith("replica r3 is up to speed again: a step takes 1.1 s")
