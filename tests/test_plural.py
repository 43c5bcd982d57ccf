"""Numbers with their nouns."""

from __future__ import annotations

from ftopt.common.plural import count, times


def test_one_is_singular() -> None:
    assert [count(number, "inner step") for number in (0, 1, 2)] == ["0 inner steps", "1 inner step", "2 inner steps"]
    assert count(1, "history", "histories") == "1 history"
    assert count(1234, "history", "histories") == "1,234 histories"


def test_a_factor_is_never_written_with_an_exponent() -> None:
    assert [times(x) for x in (1.5, 4.93, 12.3, 99.4, 99.6, 120.0, 1234.5)] == [
        "1.5 times", "4.9 times", "12 times", "99 times", "100 times", "120 times", "1,234 times",
    ]  # fmt: skip
