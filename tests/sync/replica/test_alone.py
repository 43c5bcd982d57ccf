"""A replica whose coordinator is lost: the log says once that it trains alone, and once that it does not any more."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ftopt.sync.replica.log import alone
from ftopt.sync.replica.log.alone import Alone
from tests.sync.processes.job import CALM, FAST, tiny_job

_AWAY = "replica r0: waits to start, and no coordinator answers since "
_BACK = "replica r0: the coordinator is back after "


def test_the_log_says_once_that_it_trains_alone_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = [100.0]
    monkeypatch.setattr(alone.time, "monotonic", lambda: now_s[0])
    pending = [340]
    watch = Alone("r0", lambda: pending[0], 3.0)
    before, there, away = [(3, False)] * 3, [(1, True)] * 2, [(2, False), *[(3, False)] * 6]
    for seconds, welcomed in [*before, *there, *away]:
        now_s[0] += seconds
        watch.look(welcomed=welcomed, reached=welcomed, begun=welcomed)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("replica r0: training alone since ")
    assert "340 inner steps pending" in caplog.messages[0]
    assert caplog.records[0].levelno == logging.WARNING
    pending[0] = 0  # a round was made before it looks again
    for _ in range(2):
        watch.look(welcomed=True, reached=True, begun=True)
    assert len(caplog.messages) == 2
    assert (
        caplog.messages[1]
        == "replica r0: the coordinator is back after 20 s; 340 pending inner steps go into the next round"
    )


def test_a_spare_has_no_steps_to_tell_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(alone.time, "monotonic", lambda: now_s[0])
    watch = Alone("s0", lambda: None, 3.0)
    for seconds, welcomed in ((0, True), (2, False), (2, False), (12, False), (1, True)):
        now_s[0] += seconds
        watch.look(welcomed=welcomed, reached=welcomed, begun=welcomed)
    away, held_up, back = caplog.messages
    assert away.startswith("replica s0: standing by alone since ")
    assert away.endswith(": no coordinator answers; still trying")
    assert held_up == "replica s0: this process was held up for 12 s (stopped, or the machine is overloaded)"
    assert back == "replica s0: the coordinator is back after 17 s"


def test_what_is_over_at_once_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    watch = Alone("r0", lambda: 0, 1e6)
    for welcomed in (True, False, True, False):
        watch.look(welcomed=welcomed, reached=welcomed, begun=welcomed)
    assert caplog.messages == []


def test_a_process_that_was_stopped_says_so_when_it_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(alone.time, "monotonic", lambda: now_s[0])
    watch = Alone("r0", lambda: 340, 3.0)
    for seconds, welcomed in ((0, True), (1, True), (12, True), (1, False), (1, True)):
        now_s[0] += seconds
        watch.look(welcomed=welcomed, reached=welcomed, begun=welcomed)
    (said,) = caplog.messages
    assert said.startswith("replica r0: this process was held up for 12 s (stopped, or the machine is overloaded)")


def test_a_replica_that_waits_to_start_has_no_steps_to_tell_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(alone.time, "monotonic", lambda: now_s[0])
    watch = Alone("r0", lambda: 0, 3.0)
    for welcomed, reached in [*[(False, True)] * 3, *[(False, False)] * 4, (True, True), *[(False, False)] * 3]:
        now_s[0] += 2
        watch.look(welcomed=welcomed, reached=reached, begun=welcomed)
    away, back, trains = caplog.messages
    assert away.startswith(_AWAY)
    assert back == "replica r0: the coordinator is back after 10 s"
    assert trains.startswith("replica r0: training alone since ")


@pytest.mark.long
def test_a_replica_that_waits_to_start_says_that_its_coordinator_is_dead_and_is_back(tmp_path: Path) -> None:
    log = tmp_path / "log-r0"
    with tiny_job(tmp_path, policy=replace(FAST, dead_after_s=0.5), logs=True) as job:
        job.start("r0")
        job.until("hold", "r0")
        job.kill("coordinator")
        job.wait_until(
            lambda: f"WARNING:ftopt.sync.replica.log.alone:{_AWAY}" in log.read_text(), "r0 says that it is away"
        )
        job.start_coordinator()
        job.wait_until(lambda: _BACK in log.read_text(), "r0 says that it is back")
        assert log.read_text().count(_AWAY) == log.read_text().count(_BACK) == 1
        assert "training alone" not in log.read_text()


@pytest.mark.long
def test_replicas_of_a_dead_coordinator_say_so(tmp_path: Path) -> None:
    policy = replace(CALM, dead_after_s=5.0)  # after so long they say it
    with tiny_job(tmp_path, policy=policy, steps=None, logs=True) as job:
        job.start_all()
        job.until("decide", count=2)
        job.kill("coordinator")

        def said(name: str) -> int:
            return (tmp_path / f"log-{name}").read_text().count(f"replica {name}: training alone since ")

        job.wait_until(lambda: all(map(said, job.names)), "all say that they train alone")
        job.start_coordinator()
        job.after(job.until("recover"), "decide", count=2)
        job.enough()
        job.end()
        assert list(map(said, job.names)) == [1, 1, 1]
