"""Numbers with their nouns."""

from __future__ import annotations

from ftopt.plural import count


def test_one_is_singular() -> None:
    assert [count(number, "inner step") for number in (0, 1, 2)] == ["0 inner steps", "1 inner step", "2 inner steps"]
    assert count(1, "history", "histories") == "1 history"
    assert count(1234, "history", "histories") == "1,234 histories"
