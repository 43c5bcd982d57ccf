"""Two members that cannot reach each other for long, while both reach the coordinator."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.roster.roster import Roster
from ftopt.sync.protocol.coordinator.rounds.partitions import PAUSES, Membership, Partitions
from ftopt.sync.protocol.replica import effects as r
from tests.simulation.knobs import Knobs
from tests.simulation.simulation import Simulation
from tests.sync.protocol.table import SETTINGS, Seat, Table

DEAD_AFTER_S = 3.0


def fail(table: Table, a: Seat, peer: str) -> None:
    """The attempt that waits in ``a``'s inbox fails since ``a`` cannot reach ``peer``."""
    a.take()
    attempt = a.pop(r.StartReduce).quorum.attempt
    a.do(a.machine.reduce_failed(0, attempt, reason="no piece for 3 s", peer=peer))
    table.wait(0.5)


def play_round(table: Table, seats: list[Seat], step: int) -> list[str]:
    """Everybody proposes, the members reduce, the others fetch; returns who was a member."""
    version = table.version
    for seat in seats:
        seat.propose(step)
    members = [seat for seat in seats if seat.got(m.Quorum)]
    for seat in members:
        seat.reduce()
    assert table.version == version + 1
    for seat in members:
        seat.take()
    for seat in [x for x in seats if x not in members]:
        seat.fetch(members[-1])
    return [seat.name for seat in members]


def unreachable() -> tuple[Table, list[Seat]]:
    """A job of A, B and C after a round in which A and B failed twice to reach each other; C was fine."""
    table = Table(start_replicas=3)
    a, b, c = seats = table.start("a", "b", "c")
    for seat in seats:
        seat.propose(5)
    fail(table, a, "b")
    fail(table, b, "a")
    a.reduce()
    c.reduce()
    a.take()
    c.take()
    b.fetch(c)
    assert a.record.counted == b.record.counted == (("a", 1, 5), ("c", 1, 5))
    return table, list(seats)


def test_a_pair_that_is_cut_takes_turns_and_fails_no_more() -> None:
    table, seats = unreachable()
    assert [play_round(table, seats, step) for step in (10, 15, 20)] == [["b", "c"], ["a", "c"], ["b", "c"]]
    assert len(table.events("abort")) == 2
    assert seats[0].record.counted == (("a", 1, 15), ("b", 1, 20), ("c", 1, 20))  # nothing is lost


def test_it_is_tried_again_and_forgotten_when_it_goes_through() -> None:
    table, seats = unreachable()
    table.tick(DEAD_AFTER_S)
    assert play_round(table, seats, 10) == ["a", "b", "c"]
    for seat in seats:
        seat.propose(15)
    fail(table, seats[0], "b")  # it counts from the beginning
    assert all(seat.got(m.Quorum)[-1].size == 3 for seat in seats)


def test_each_failure_makes_the_pause_before_the_next_try_longer() -> None:
    partitions, a, b, c = Partitions(), ("a", 1), ("b", 1), ("c", 1)
    now, pauses = 0.0, []
    partitions.failed(now, a, b, dead_after_s=DEAD_AFTER_S)
    for _ in range(8):
        assert not partitions.unreachable(now, [a, b, c])
        partitions.failed(now, a, b, dead_after_s=DEAD_AFTER_S)
        partitions.failed(now, b, a, dead_after_s=DEAD_AFTER_S)  # another fragment's attempt, begun before
        assert partitions.unreachable(now + 1e6, [a, b, c]), "nothing was made without one of them"
        partitions.released(now)
        since = now
        while partitions.unreachable(now, [a, b, c]):
            now += 0.5
        pauses.append((now - since) / DEAD_AFTER_S)
    assert pauses == [1, 2, 4, 8, 16, PAUSES, PAUSES, PAUSES]


def played(count: int, bad: int, seed: int, *, blames: bool, round_s: float) -> list[int]:
    """A hundred rounds with a member that no other one reaches: failed attempts in each round. It names others that are
    well, and fails alone, too, or its peers name it when an attempt has taken ``dead_after_s``."""
    chooser, partitions, roster, now = random.Random(seed), Partitions(), Roster(), 0.0
    ids, found = [(name, 1) for name in "abcdefgh"[:count]], list[int]()
    for incarnation_id in ids:
        roster.know(incarnation_id, now)
    membership, members = Membership(partitions, roster), [roster.members[name] for name, _ in ids]
    for _ in range(100):
        failures = 0
        while True:
            chosen = [x.incarnation_id for x in membership.choose(now, members)]
            if ids[bad] not in chosen or (len(chosen) == 1 and not blames):
                break
            began_s, now = now, now + (0.1 if blames else DEAD_AFTER_S + 1.0)
            failures += 1
            assert failures < 30
            if len(chosen) == 1:
                partitions.suspects.failed(
                    now, chosen, ids[bad], began_s=began_s, again=True, dead_after_s=DEAD_AFTER_S
                )
                continue
            other = chooser.choice([x for x in chosen if x != ids[bad]])
            pair = (ids[bad], other) if blames else (other, ids[bad])
            partitions.failed(now, *pair, dead_after_s=DEAD_AFTER_S)
            now += min(2.0, 0.05 * 2**failures)
        partitions.met(now, chosen)
        membership.taken(chosen, [x.replica for x in members])
        found.append(failures)
        now += round_s
    return found


@pytest.mark.parametrize("round_s", [0.1, 3.0])
@pytest.mark.parametrize("blames", [True, False])
@pytest.mark.parametrize(("count", "bad"), [(3, 0), (3, 2), (5, 0), (5, 4), (8, 0), (8, 7)])
def test_who_reaches_nobody_is_found_and_the_others_go_on(count: int, bad: int, blames: bool, round_s: float) -> None:
    for seed in range(5):
        failures = played(count, bad, seed, blames=blames, round_s=round_s)
        assert max(failures) <= 2 + 2 * math.ceil(math.log2(count)), (seed, failures)
        assert sum(failures) <= 25, (seed, failures)


def test_two_groups_that_do_not_reach_each_other_both_go_on() -> None:
    """A and B reach each other, so do C and D: all make versions, and nobody is alone for ever."""
    partitions, roster, now = Partitions(), Roster(), 0.0
    ids = [(name, 1) for name in "abcd"]
    for incarnation_id in ids:
        roster.know(incarnation_id, now)
    membership, members, versions = Membership(partitions, roster), list(roster.members.values()), Counter[str]()
    failed = 0
    for _ in range(200):
        while True:
            chosen = [x.incarnation_id for x in membership.choose(now, members)]
            cut = [(a, b) for a in chosen for b in chosen if a in ids[:2] and b in ids[2:]]
            if not cut:
                break
            now, failed = now + DEAD_AFTER_S, failed + 1
            partitions.failed(now, *cut[0], dead_after_s=DEAD_AFTER_S)
        partitions.met(now, chosen)
        membership.taken(chosen, [x.replica for x in members])
        versions.update(name for name, _ in chosen)
        now += 1.0
    assert min(versions[name] for name in "abcd") >= 20 and failed <= 60, (versions, failed)


def test_a_new_incarnation_is_tried_at_once() -> None:
    _, (a, b, c) = unreachable()
    again = b.die()
    again.connect()
    again.fetch(c)
    for seat, step in ((a, 10), (again, 3), (c, 10)):
        seat.propose(step)
    assert again.got(m.Quorum)[0].size == 3


def test_who_reaches_nobody_has_its_turn_and_stops_the_others_seldom() -> None:
    roster, partitions = Roster(), Partitions()
    incarnation_ids = [(name, 1) for name in "abcdef"]
    for incarnation_id in incarnation_ids:
        roster.know(incarnation_id, 0.0)
    for incarnation_id in incarnation_ids[1:]:
        for _ in range(2):
            partitions.failed(0.0, incarnation_ids[0], incarnation_id, dead_after_s=DEAD_AFTER_S)
    membership, members = Membership(partitions, roster), [roster.members[name] for name, _ in incarnation_ids]
    alone = 0
    for _ in range(30):
        chosen = [x.incarnation_id for x in membership.choose(1.0, members)]
        assert chosen in (incarnation_ids[:1], incarnation_ids[1:])
        alone += chosen == incarnation_ids[:1]
        membership.taken(chosen, [x.replica for x in members])
    assert 5 <= alone <= 7  # of thirty rounds; the five others share the rest


def test_three_that_reach_nobody_take_turns() -> None:
    roster, partitions = Roster(), Partitions()
    incarnation_ids = [(name, 1) for name in "abc"]
    for incarnation_id in incarnation_ids:
        roster.know(incarnation_id, 0.0)
    for pair in ((0, 1), (0, 2), (1, 2)):
        for _ in range(2):
            partitions.failed(0.0, incarnation_ids[pair[0]], incarnation_ids[pair[1]], dead_after_s=DEAD_AFTER_S)
    membership, members = Membership(partitions, roster), [roster.members[name] for name, _ in incarnation_ids]
    order = []
    for _ in range(6):
        (member,) = membership.choose(1.0, members)
        order.append(member.replica)
        membership.taken([member.incarnation_id], [x.replica for x in members])
    assert order == ["c", "b", "a"] * 2, "first the one that has complained least"


def play(count: int, seconds: float, *, cut: bool) -> Simulation:
    """A job of ``count`` replicas with steps of 0.4 s, 5 a round; r0 and r1 cut from each other, or not."""
    settings = SETTINGS | {"start_replicas": count}
    world = Simulation(5, Knobs(settings=settings, sync_every=5))
    for index in range(count):
        process = world.add_process(f"r{index}", initial="init", step_s=0.4)
        world.at(0.0, process.spawn)
    world.server.start()
    if cut:
        world.cuts[frozenset(("r0", "r1"))] = ""
    world.run(world.now + seconds)
    return world


@pytest.mark.parametrize("count", [3, 5])
def test_a_cut_of_two_minutes_costs_a_few_failed_attempts_and_not_two_a_round(count: int) -> None:
    """When it was found anew in each round, 8 rounds (of three replicas) and 5 (of five) were left of 52."""
    whole, cut = play(count, 120.0, cut=False), play(count, 120.0, cut=True)
    rounds = [world.server.machine.rounds[0] for world in (whole, cut) if world.server.machine is not None]
    assert rounds[0].at.version >= 50
    assert rounds[1].at.version >= 35
    assert rounds[1].decide.aborted <= 2 + 7  # twice to learn it; then after 3, 6, 12, 24, 48 and 60 s
    at = rounds[1].at
    counted = cut.checks.versions[(0, at.chain)].content.steps
    behind = {p.name: p.local_steps - counted[p.incarnation_id] for p in cut.processes.values()}
    assert max(behind.values()) <= 15, behind  # nobody starves: three rounds


def test_with_too_few_others_a_member_that_nobody_reaches_does_not_stop_the_job_for_its_pauses() -> None:
    """Two of three are to be in each version: where the third one has its turn, all are taken, and it fails again."""
    table = Table(start_replicas=3, min_replicas=2, dead_after_s=10.0, evict_after_s=6000.0)
    a, b, x = table.start("a", "b", "x")
    seats, step, last_s, longest_s = (a, b, x), 0, table.now, 0.0
    end_s = table.now + 900.0
    while table.now < end_s:
        step += 5
        for seat in seats:
            seat.take()
            if seat.machine.fragments[0].contribution is None:
                seat.propose(step)
        version = table.version
        while table.version == version and table.now < end_s:
            for seat in seats:
                seat.take()
            attempt = table.coordinator.rounds[0].attempt
            if attempt is None:
                table.tick(1.0)
            elif len(attempt.members) > 1 and "x" in [member for member, _ in attempt.members]:
                table.tick(10.0)
                reporter = next(y for y in (a, b) if (y.name, 1) in attempt.members)
                reporter.take()
                start = reporter.pop(r.StartReduce)
                reporter.do(reporter.machine.reduce_failed(0, start.quorum.attempt, reason="no piece", peer="x"))
            else:
                for seat in [y for y in seats if (y.name, 1) in attempt.members]:
                    seat.reduce()
        for seat in seats:
            seat.take()
        holder = next((y for y in seats if y.record.version == table.version), None)
        for seat in seats:
            while holder is not None and any(isinstance(y, r.Fetch) for y in seat.asked):
                if seat.record.version == table.version:
                    break
                seat.fetch(holder)
        longest_s, last_s = max(longest_s, table.now - last_s), table.now
        table.tick(5.0)
    assert longest_s < 60.0 and table.version > 50, (longest_s, table.version)
