"""The states of a replica over time, from its events."""

from __future__ import annotations

import pytest

from ftopt.watch.lanes import Lane
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.timeline import Timeline, _Underway


def test_a_script_that_comes_back_from_a_checkpoint_trains() -> None:
    """Its first event of the coordinator's is a return, and its own record has no start."""
    own = _Underway(Steps(), 10.0, ("end", "leave"), Lane(100), 100)
    for t_s, name in ((0.5, "spawn"), (2.0, "return"), (9.0, "leave")):
        own.add({"t_s": t_s, "event": name, "replica": "r0", "incarnation": 1})
    spans = {(span.state, span.start) for span in own.close()}
    assert ("starting", 0.5) in spans and ("training", 2.0) in spans


@pytest.mark.parametrize("waits", [True, False])
def test_a_script_waits_from_its_proposal_until_the_decision_unless_it_trains_meanwhile(*, waits: bool) -> None:
    timeline = Timeline({}, ["r0"], ["r0"], {("r0", 1): waits}, 10.0)
    at = {"replica": "coordinator", "incarnation": 0, "fragment": 0, "version": 1}
    join, leave = (
        {"t_s": t_s, "event": name, "replica": "r0", "incarnation": 1} for t_s, name in ((0.0, "join"), (9.0, "leave"))
    )
    data = {"members": [["r0", 1], ["r9", 1]], "retry": False, "waited": [1.0, 0.0], "for": "r9"}
    timeline.add(join)
    timeline.add({**at, "t_s": 3.0, "event": "quorum", "attempt": 1, "data": data})
    timeline.add({**at, "t_s": 3.5, "event": "abort", "attempt": 1})
    timeline.add({**at, "t_s": 4.0, "event": "quorum", "attempt": 2, "data": {**data, "waited": [2.0, 1.0]}})
    timeline.add({**at, "t_s": 5.0, "event": "decide", "attempt": 2})
    timeline.add(leave)
    spans = [(x.state, x.start, x.stop) for x in timeline.close()["r0"]]
    other, reducing = ("waiting", "syncing") if waits else ("training", "overlapped")
    middle = [(reducing, 3.0, 3.5), (other, 3.5, 4.0), (reducing, 4.0, 5.0)]
    ends = [("training", 0.0, 2.0), ("waiting", 2.0, 3.0)] if waits else [("training", 0.0, 3.0)]
    assert spans == [*ends, *middle, ("training", 5.0, 9.0)]


def test_the_waits_of_a_script_are_held_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftopt.watch.report.timeline._UNCUT", 100)
    timeline = Timeline({}, ["r0"], ["r0"], {("r0", 1): True}, 400.0)
    timeline.add({"t_s": 0.0, "event": "join", "replica": "r0", "incarnation": 1})
    data, most = {"members": [["r0", 1]], "retry": False, "waited": [0.5]}, 0
    for n in range(1, 400):
        at = {"replica": "coordinator", "incarnation": 0, "fragment": 0, "version": n, "attempt": n}
        timeline.add({**at, "t_s": n - 0.25, "event": "quorum", "data": data})
        timeline.add({**at, "t_s": float(n), "event": "decide"})
        most = max(most, len(timeline._of["r0"]._spans))
    assert most <= 110
    lasted = timeline.close()["r0"].seconds
    assert lasted == {"training": 400 - 0.75 * 399, "waiting": 0.5 * 399, "syncing": 0.25 * 399}
