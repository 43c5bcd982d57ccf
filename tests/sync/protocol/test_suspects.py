"""A member whose reductions always fail: it sits out, keeps its steps, and the job goes on."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.rounds.suspects import PAUSES, Suspects
from ftopt.sync.protocol.replica import effects as r
from tests.sync.protocol.table import Seat, Table

DEAD_AFTER_S = 3.0
IDS = [(name, 1) for name in "abcdefgh"]


def fail(table: Table, seat: Seat, peer: str = "") -> None:
    """The attempt that waits in the seat's inbox fails there."""
    seat.take()
    attempt = seat.pop(r.StartReduce).quorum.attempt
    seat.do(seat.machine.reduce_failed(0, attempt, reason="out of memory", peer=peer))
    for other in list(table.seats_by_conn.values()):
        other.take()
    table.wait(2.1)


def job(names: str) -> tuple[Table, list[Seat]]:
    table = Table(start_replicas=len(names))
    seats = list(table.start(*names))
    for seat in seats:
        seat.propose(5)
    return table, seats


@pytest.mark.parametrize("peer", ["", "b"])
def test_who_fails_each_time_sits_out_after_two_attempts_and_its_name_is_in_all_logs(peer: str) -> None:
    """``peer``: it blames one that is well."""
    table, (a, b, c) = job("abc")
    for _ in range(2):
        fail(table, a, peer)
    assert [x.name for x in (a, b, c) if x.got(m.Quorum)] == ["b", "c"]
    for seat in (b, c):
        assert any("a: out of memory" in x.text for x in seat.asked if isinstance(x, r.Notice))
        seat.reduce()
    b.take(), c.take()
    assert table.version == 1
    a.take()
    assert b.record.counted == (("b", 1, 5), ("c", 1, 5)), "what it has done stays pending"
    (event,) = table.events("kept_out")
    assert "a" in event.data["replicas"] and event.data["seconds"] == DEAD_AFTER_S


def test_who_sits_out_with_all_the_weight_does_not_stand_still() -> None:
    """The others are at the end of their data, and hand in nothing."""
    table, (a, b, c) = job("abc")
    for _ in range(2):
        fail(table, a)
    b.reduce()
    c.reduce()
    b.take()
    c.take()
    a.fetch(b)
    a.take()
    a.propose(10)
    assert a.machine.fragments[0].outstanding
    for seat in (b, c):
        seat.propose(5)
    for seat in (a, b, c):
        seat.take()
    assert table.events("void") and not b.machine.fragments[0].outstanding
    assert a.machine.fragments[0].released


def test_of_two_the_one_that_fails_alone_too_leaves_the_other_one_in_peace() -> None:
    table, (a, b) = job("ab")
    for _ in range(2):
        fail(table, a)
    assert not a.got(m.Quorum)
    b.reduce()
    b.take()
    assert table.version == 1 and b.record.counted == (("b", 1, 5),)


def attempts_until_it_goes(bad: str, names: str, *, pick: int) -> int:
    """How many attempts fail until one is without ``bad``; nobody knows why, any member may report first."""
    table, seats = job(names)
    for count in range(50):
        inside = [x for x in seats if x.got(m.Quorum)]
        if bad not in [x.name for x in inside]:
            for seat in inside:
                seat.reduce()
            assert table.version == 1
            return count
        if len(inside) == 1:  # alone it makes a version, as anybody
            return count
        fail(table, inside[pick % len(inside)])
    raise AssertionError("the job stands still")


@pytest.mark.parametrize("pick", range(4))
@pytest.mark.parametrize("bad", "adh")
def test_where_nobody_can_tell_the_members_are_halved(bad: str, pick: int) -> None:
    assert attempts_until_it_goes(bad, "abcdefgh", pick=pick) <= 2 + 3


def played(count: int, bad: int, seed: int, *, quiet: bool) -> tuple[int, Counter[str]]:
    """Forty rounds with one broken member. A quiet one says nothing, and works alone; of the others any complains.
    Returns how many attempts have failed in a round at most, and in how many versions each has been."""
    chooser, suspects, now, most = random.Random(seed), Suspects(), 0.0, 0
    ids, versions = IDS[:count], Counter[str]()
    for _ in range(40):
        failures = 0
        while True:
            members = [x for x in ids if not suspects.rest_s(now, x)]
            members = members or sorted(ids, key=suspects.since_s)[:1]
            if ids[bad] not in members or (quiet and len(members) == 1):
                suspects.met(now, members)
                break
            began_s, now = now, now + (6.0 if quiet else 0.1)
            reporter = chooser.choice([x for x in members if x != ids[bad]]) if quiet else ids[bad]
            suspects.failed(now, members, reporter, began_s=began_s, again=failures > 0, dead_after_s=DEAD_AFTER_S)
            failures += 1
            assert failures < 20
        most, now = max(most, failures), now + 1.0
        versions.update(name for name, _ in members)
    return most, versions


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize(("count", "bad"), [(3, 0), (3, 2), (4, 1), (8, 0), (8, 7)])
def test_the_broken_member_is_found_and_the_others_go_on(count: int, bad: int, quiet: bool, seed: int) -> None:
    most, versions = played(count, bad, seed, quiet=quiet)
    assert most <= 2 + 2 * math.ceil(math.log2(count))
    assert all(versions[name] >= 30 for number, (name, _) in enumerate(IDS[:count]) if number != bad)
    assert versions[IDS[bad][0]] <= 5


@pytest.mark.parametrize("seed", range(5))
def test_of_two_each_has_its_turn_where_nobody_knows_which_is_broken(seed: int) -> None:
    _, versions = played(2, 0, seed, quiet=True)
    assert min(versions.values()) >= 15


def test_the_pause_grows_and_a_success_with_others_ends_it() -> None:
    suspects, now, pauses = Suspects(), 0.0, []
    suspects.failed(now, IDS[:3], IDS[0], began_s=now, again=False, dead_after_s=DEAD_AFTER_S)
    for _ in range(7):
        out = suspects.failed(now, IDS[:3], IDS[0], began_s=now, again=True, dead_after_s=DEAD_AFTER_S)
        assert out.keys() == {IDS[0]}
        pauses.append(out[IDS[0]] / DEAD_AFTER_S)
        assert suspects.failed(now, IDS[:3], IDS[0], began_s=now - 1, again=True, dead_after_s=DEAD_AFTER_S) == {}
        now += 100.0
        assert suspects.rest_s(now, IDS[0]), "nothing was made without it"
        suspects.met(now, IDS[1:3])
        assert suspects.rest_s(now, IDS[0]) == out[IDS[0]]
        now += out[IDS[0]]
        assert not suspects.rest_s(now, IDS[0])
    assert pauses == [1, 2, 4, 8, 16, PAUSES, PAUSES]
    suspects.met(now, IDS[:1])
    assert suspects
    suspects.met(now, IDS[:2])
    assert not suspects


def test_a_result_that_all_doubt_once_keeps_nobody_out() -> None:
    """A jump that is large and right, as at a new phase of training: it is taken the second time."""
    table, seats = job("abc")
    for seat in seats:
        seat.take()
        attempt = seat.pop(r.StartReduce).quorum.attempt
        seat.do(seat.machine.reduce_failed(0, attempt, reason="far more than before", cause="values"))
        for other in seats:
            other.take()
        table.wait(2.1)
    for seat in seats:
        assert seat.reduce().quorum.size == 3
    assert table.version == 1 and not table.events("kept_out")


def test_one_failure_keeps_nobody_out() -> None:
    """A peer that dies makes the survivors fail once, and some of them cannot name it."""
    table, (a, b, c) = job("abc")
    fail(table, a)
    assert all(x.got(m.Quorum)[-1].size == 3 for x in (a, b, c))
    assert not table.events("kept_out")
