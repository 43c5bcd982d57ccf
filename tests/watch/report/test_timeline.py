"""The states of a replica over time, from its events."""

from __future__ import annotations

from ftopt.watch.lanes import Lane
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.timeline import _Underway


def test_a_script_that_comes_back_from_a_checkpoint_trains() -> None:
    """Its first event of the coordinator's is a return, and its own record has no start."""
    own = _Underway(Steps(), 10.0, ("end", "leave"), Lane(100), 100)
    for t_s, name in ((0.5, "spawn"), (2.0, "return"), (9.0, "leave")):
        own.add({"t_s": t_s, "event": name, "replica": "r0", "incarnation": 1})
    spans = {(span.state, span.start) for span in own.close()}
    assert ("starting", 0.5) in spans and ("training", 2.0) in spans
