"""Who starts ranks, who is one, and what a rank's end is called."""

from __future__ import annotations

import signal

import pytest

from ftopt.cli.replica import _describe, _launches
from ftopt.config.loader import load
from ftopt.errors import UserError
from ftopt.run.ranks import ALONE, Ranks, meet


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert _launches(2)
    assert not _launches(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not _launches(2)


@pytest.mark.parametrize(("ranks", "started"), [(1, "4"), (2, "1"), (2, "4")])
def test_another_number_of_ranks_than_the_recipes_is_refused(
    ranks: int, started: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(UserError, match=rf"ranks={ranks}, and this process is one of {started} \(WORLD_SIZE\)"):
        meet(load("diloco_bytes", [f"ranks={ranks}"]))


def test_one_process_is_alone_also_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert meet(load("diloco_bytes")) is ALONE
    assert ALONE.leads and ALONE.agree("x") == "x" and ALONE.sum(1.5, 2) == [1.5, 2]
    assert not Ranks(1, 2).leads


def test_the_rank_that_was_killed_is_named_and_not_those_that_failed_since() -> None:
    assert _describe({0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}, 3).startswith("rank 1 of 3 has died (SIGKILL)")
    assert _describe({0: -signal.SIGTERM, 1: 1}, 2).startswith("rank 1 of 2 has died (exit status 1)")
