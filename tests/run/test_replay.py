"""`policy.recover: replay` in a run of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.watch.jsonl import read_lines
from tests.run.running import CALM, Start, events_of, folder_of, summary_of


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_steps_of_a_killed_replica_are_done_again_bit_for_bit(tmp_path: Path, start: Start) -> None:
    """Dropout and all. A quorum needs all three, so that the round stays open until the replacement is there."""
    status, error = start(
        tmp_path,
        "policy.recover=replay",
        "policy.min_replicas=3",
        "model.dropout=0.2",
        "data.sampling=once",
        "data.epochs=null",
        "train.inner_steps=100",
        "faults=[{replica: 1, at_step: 57, point: inner, do: kill, rejoin_s: 0.1}]",
    ).wait()
    assert status == 0, error
    first, second = [], []
    for line in read_lines(folder_of(tmp_path).steps("r1")):
        (first if line["incarnation"] == 1 else second).append((line["inner_step"], line["loss"], line["lr"]))
    done = first[40:]
    assert len(done) == 16 and second[: len(done)] == done
    (replay,) = events_of(tmp_path, "replay")
    summary = summary_of(tmp_path)
    costs = summary["replay"]
    assert (costs["replicas"], costs["steps"]) == (1, replay["data"]["steps"])
    assert 0 <= costs["steps"] <= len(done)  # as far as it had told
    assert costs["copies"] >= 12 and costs["copy_bytes"] > 12 * 10_000
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    assert summary["samples_duplicated"] == summary["samples_lost"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_killed_between_two_copies_of_a_round_loses_what_came_after_the_last(
    tmp_path: Path, start: Start
) -> None:
    status, error = start(
        tmp_path,
        "policy.recover=replay",
        "policy.copy_every=4",
        "policy.min_replicas=3",
        *CALM,
        "data.sampling=once",
        "data.epochs=null",
        "train.inner_steps=100",
        "faults=[{replica: 1, at_step: 50, point: inner, do: hang, for_s: 3},"  # until a copy is kept
        "{replica: 1, at_step: 57, point: inner, do: kill, rejoin_s: 0.1}]",
    ).wait()
    assert status == 0, error
    first, second = [], []
    for line in read_lines(folder_of(tmp_path).steps("r1")):
        (first if line["incarnation"] == 1 else second).append((line["inner_step"], line["loss"], line["lr"]))
    (replay,) = events_of(tmp_path, "replay")
    (pending,) = replay["data"]["pending_by_fragment"]
    assert 0 < pending <= 16
    again = first[40 + pending :]
    assert second[: len(again)] == again  # what the copy did not have, and nothing else
    summary = summary_of(tmp_path)
    assert summary["inner_steps_inherited"] == pending
    assert summary["dead_inner_steps_lost"] - pending == len(again)
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    assert summary["samples_duplicated"] == summary["samples_lost"] == 0
