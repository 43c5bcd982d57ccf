"""A replica whose own recipe ends before the job's inner step says why it trains nothing."""

from __future__ import annotations

import logging

import pytest

from ftopt.cli.main import main
from ftopt.errors import JobOver
from ftopt.events import Event
from ftopt.run.subscribers import OwnEnd


def fetched(version: int, at: int) -> Event:
    return Event("fetched", "s0", 1, 0, version, data={"bytes": 1, "seconds": 0.1, "committed_step": at})


def test_a_spare_says_once_that_the_job_goes_on_beyond_its_own_end(caplog: pytest.LogCaptureFixture) -> None:
    end = OwnEnd(600, standby=True)
    for version, at in ((11, 550), (12, 600)):
        end(fetched(version, at))
    assert not caplog.records, "a job may be at its end"
    for version in (13, 14):
        end(fetched(version, version * 50))
    (record,) = caplog.records
    assert "would train nothing: the job goes on at inner step 650, and ends at train.inner_steps=600" in record.message


def test_a_promoted_spare_at_its_own_end_says_so_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    end = OwnEnd(600, standby=True)
    end(Event("promoted", "s0", 1, data={"in_place_of": "r1"}))
    end(Event("started", "s0", 1, 0, 24, inner_step=1200, data={"start_step": 1200}))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "the job is at inner step 1200" in record.message


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_alone_says_that_a_spare_was_not_needed(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def over(*_: object, **__: object) -> None:
        raise JobOver("all have left")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("ftopt.run.replica_process.run_replica", over)
    command = ["replica", "diloco_bytes", "--coordinator", "http://127.0.0.1:1", "--id", "s0", "--standby", "--quiet"]
    assert main(command) == 0
    assert logging.getLogger("ftopt").level == logging.NOTSET, "as it was"
    assert ("has not trained: all have left" in capsys.readouterr().out) == (rank == "0")
