"""What logs say of results that differ and should not, and of contributions that are equal and should not be."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.rounds.alike import EqualContributions
from tests.sync.protocol.table import Table


def test_each_members_log_names_a_mismatch_of_digests() -> None:
    table = Table()
    a, b = table.start("a", "b")
    a.propose(5)
    b.propose(5)
    a.reduce("one")
    b.reduce("another")
    for seat in (a, b):
        (told,) = seat.got(m.Hold)
        assert told.text.startswith("a mismatch of digests: the result for version 1 is not the same on all replicas")
        assert " on a; " in told.text and " on b)" in told.text and "set_flush_denormal" in told.text


def contribution(norm: float, *, peak: float = 0.5, weight: float = 5.0) -> m.Contribution:
    return m.Contribution(0, 0, 5, 5, weight, norm=norm, peak=peak)


def told(*rounds: dict[str, m.Contribution]) -> list[tuple[str, ...]]:
    equal = EqualContributions()
    return [equal.look(version, each)[0] for version, each in enumerate(rounds, 1)]


def test_replicas_that_contribute_the_same_three_times_in_a_row_are_told_once() -> None:
    same = [{"a": contribution(float(n)), "b": contribution(float(n)), "c": contribution(9.0 + n)} for n in range(1, 9)]
    assert told(*same) == [(), (), ("a", "b"), (), (), (), (), ()]


@pytest.mark.parametrize(
    "round",
    [
        {"a": contribution(1.0)},
        {"a": contribution(1.0), "b": contribution(1.0000000000000002)},
        {"a": contribution(1.0), "b": contribution(1.0, peak=0.25)},
        {"a": contribution(0.0), "b": contribution(0.0)},  # at rate 0
        {"a": contribution(1.0), "b": contribution(1.0, weight=0.0)},
    ],
)
def test_honest_replicas_are_told_nothing(round: dict[str, m.Contribution]) -> None:
    assert told(*[round] * 9) == [()] * 9


def test_what_happens_now_and_then_is_chance() -> None:
    same = {"a": contribution(1.0), "b": contribution(1.0)}
    other = {"a": contribution(1.0), "b": contribution(2.0)}
    assert not any(told(same, same, other, same, same, other, same, same))
