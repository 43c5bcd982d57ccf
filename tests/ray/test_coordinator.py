"""The coordinator's actor, without a cluster: where ranks meet, and what it says when it cannot start."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")
from ftopt.ray import coordinator
from ftopt.ray.coordinator import Island

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


def test_ranks_meet_when_all_are_there_and_again_in_their_next_lives() -> None:
    island = Island()
    for life in ("a", "b"):
        assert island.meet(2, 1, f"1{life}", None) is None
        assert island.meet(2, 0, f"0{life}", f"host {life}") == f"host {life}"
        assert island.meet(2, 1, f"1{life}", None) == f"host {life}"
        assert island.meet(2, 0, f"0{life}", f"host {life}") == f"host {life}"


def test_a_rank_that_died_while_it_waited_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: now_s)
    island = Island()
    assert island.meet(2, 0, "0a", "host a") is None
    now_s += 10.0
    assert island.meet(2, 1, "1a", None) is None
    assert island.meet(2, 0, "0b", "host b") == "host b"
    assert island.meet(2, 1, "1a", None) == "host b"


def test_the_next_life_of_a_waiting_rank_takes_its_place() -> None:
    island = Island()
    assert island.meet(2, 0, "0a", "host a") is None
    assert island.meet(2, 0, "0b", "host b") is None
    assert island.meet(2, 1, "1a", None) == "host b"


def test_a_port_that_stays_in_use_is_told() -> None:
    code = """
import os, socket
from ftopt.ray import coordinator
coordinator._TAKEN_S = 0.0
taken = socket.create_server(("127.0.0.1", 0))
made = coordinator.Coordinator("127.0.0.1", taken.getsockname()[1], None, "x" * 32, "run", 0.0)
try:
    made.ready()
except ValueError as error:
    print(error, flush=True)
os._exit(0)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert "cannot listen on 127.0.0.1" in got.stdout, got.stderr


def test_it_knows_that_workers_come_too_late_for_the_job() -> None:
    """Ray would start them again, to be turned away each time, as often as max_failures allows."""
    code = """
import os
from ftopt.events import Event
from ftopt.ray import coordinator
made = coordinator.Coordinator("127.0.0.1", 0, None, "x" * 32, "run", 0.0)
told = [made.job_ended()]
for event, reason in (("refuse", "another model"), ("refuse", "the job has ended at version 3"), ("start", "")):
    made._on_event(Event(event, "r1", data={"kind": "final", "reason": reason}))
    told.append(made.job_ended())
print(told, flush=True)
os._exit(0)
"""
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert got.stdout.strip() == str(["", "", "the job has ended at version 3", ""]), got.stderr
