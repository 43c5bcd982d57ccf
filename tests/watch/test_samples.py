"""Samples of a run, recounted from its events."""

from __future__ import annotations

from typing import Any

from ftopt.watch.samples import Entry
from tests.recounted import recounted

SETTINGS = {"samples": 10, "batch_size": 4, "seed": 0, "drop_last": False, "epochs": None}  # units of 4, 4, 2


def begin(event: str = "start", version: int = 0, done: list[list[int]] | None = None) -> dict[str, Any]:
    return {"event": event, "version": version, "data": {"samples": SETTINGS, "done": done or []}}


def decide(
    version: int, ranges: dict[str, list[list[int]]], done_to: int = 0, *, finite: bool = True
) -> dict[str, Any]:
    members = [[replica, 1, 1, 1, float(finite), finite] for replica in ranges]
    data = {"members": members, "ranges": ranges, "done_to": done_to}
    return {"event": "decide", "version": version, "fragment": 0, "data": data}


def counts(*events: dict[str, Any]) -> tuple[int | None, ...]:
    got = recounted(events).figures()
    return tuple(got[f"samples_{name}"] for name in ("committed", "duplicated", "lost", "discarded"))


def test_units_are_samples_and_the_last_of_an_epoch_is_short() -> None:
    events = [begin(), decide(1, {"a": [[0, 2]], "b": [[3, 4]]}, 2), decide(2, {"b": [[2, 3]]}, 4)]
    assert recounted(events).entries() == [Entry(0, 4, 1)]
    assert counts(*events) == (14, 0, 0, 0)


def test_a_run_without_a_ledger_has_no_samples_to_count() -> None:
    events = [{"event": "start", "version": 0, "data": {}}, {"event": "decide", "version": 1, "data": {"members": []}}]
    assert counts(*events) == (None, None, None, None)
    assert recounted(events).entries() == []


def test_what_is_in_two_commits_is_found_and_what_counts_as_done_and_is_in_none() -> None:
    events = [begin(), decide(1, {"a": [[0, 2]]}, 2), decide(2, {"b": [[1, 2], [4, 5]]}, 5)]
    assert recounted(events).entries() == [Entry(0, 1, 1), Entry(1, 2, 2), Entry(4, 5, 1)]
    assert counts(*events) == (12, 4, 6, 0)
    assert counts(*events, {"event": "used_twice", "data": {"ranges": [[0, 1]]}})[1] == 8


def test_a_decision_that_was_rolled_back_is_not_counted_and_one_that_nobody_told_is() -> None:
    lost = [begin(), decide(1, {"a": [[0, 1]]}, 1), decide(2, {"a": [[1, 2]]}, 2)]
    back = [*lost, begin("recover", 1, [[0, 1]]), decide(2, {"b": [[1, 3]]}, 3)]
    assert recounted(back).entries() == [Entry(0, 3, 1)]
    untold = [*lost[:2], begin("recover", 2, [[0, 3]]), decide(3, {"b": [[3, 4]]}, 4)]
    assert recounted(untold).entries() == [Entry(0, 4, 1)]
    assert counts(*untold) == (14, 0, 0, 0)


def test_samples_of_contributions_that_were_not_finite_are_committed_and_discarded() -> None:
    assert counts(begin(), decide(1, {"a": [[0, 3]]}, 3, finite=False)) == (10, 0, 0, 10)
