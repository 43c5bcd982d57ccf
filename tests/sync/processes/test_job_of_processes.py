"""The outer-sync layer with real processes, sockets, Gloo and files: nobody who survives loses an inner step."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import ftopt
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import CALM, FAST, LIMIT_S, assert_nothing_lost, tiny_job


def test_three_replicas_train_to_one_anchor(tmp_path: Path) -> None:
    with tiny_job(tmp_path, method=ftopt.LocalSGD(sync_every=20), policy=CALM) as job:
        job.start_all()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["outer_steps"] == 6
    assert summary["attempts_aborted"] == 0
    assert summary["inner_steps_executed"] == 360
    assert summary["inner_steps_pending"] == 0


LONG = ("inner", "propose", "gather", "reduce", "reduce.after", "apply")


@pytest.mark.parametrize("point", ["prepare", "commit", *(pytest.param(p, marks=pytest.mark.long) for p in LONG)])
def test_a_replica_is_killed_at_any_point_and_comes_back(tmp_path: Path, point: str) -> None:
    faults = {"r1": [Fault(point=point, at_step=40, do="kill")]}
    with tiny_job(tmp_path, policy=CALM, faults=faults, steps=None) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.until("propose", "r1", incarnation=2)
        job.enough()
        summary = job.end()
        decided = [m for e in job.events("decide") for m in e["data"]["members"]]
    assert_nothing_lost(summary)
    assert len(summary["deaths"]) == 1
    assert len(summary["joins"]) == 4
    assert any(m[:2] == ["r1", 2] and m[2] > 0 for m in decided), "the newcomer contributed"


def test_an_aborted_attempt_is_retried_with_the_same_contributions(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=CALM, faults={"r1": [Fault(point="reduce", at_step=40, do="kill")]}) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        summary = job.end()
        aborted = job.events("abort")[0]
        first = next(e for e in job.events("quorum") if e["attempt"] == aborted["attempt"])
        (decided,) = (e for e in job.events("decide") if e["version"] == first["version"])
        retry = next(e for e in job.events("quorum") if e["attempt"] == decided["attempt"])
    assert_nothing_lost(summary)
    assert retry["data"]["retry"]
    steps = {m[0]: s for m, s in zip(first["data"]["members"], first["data"]["steps"], strict=True)}
    again = {m[0]: s for m, s in zip(retry["data"]["members"], retry["data"]["steps"], strict=True)}
    assert again == {name: steps[name] for name in ("r0", "r2")}


def test_the_successor_is_killed_in_its_fetch_and_the_next_one_takes_part(tmp_path: Path) -> None:
    faults = {
        "r1": [
            Fault(point="inner", at_step=30, do="kill"),
            Fault(point="fetch", at_step=0, do="kill", incarnation=2),
        ]
    }
    with tiny_job(tmp_path, faults=faults, steps=None) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.until("fault", "r1", count=2)
        job.died("r1")
        job.start("r1")
        job.until("propose", "r1", incarnation=3)
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert [j["incarnation"] for j in summary["joins"] if j["replica"] == "r1"] == [1, 2, 3]


@pytest.mark.parametrize("point", ["reduce", *(pytest.param(p, marks=pytest.mark.slow) for p in ("inner", "commit"))])
def test_a_stopped_replica_comes_back_with_its_work(tmp_path: Path, point: str) -> None:
    with tiny_job(tmp_path, faults={"r1": [Fault(point=point, at_step=50, do="stop", for_s=50.0)]}, steps=None) as job:
        job.start_all()
        job.until("fault", "r1")
        lost = job.until_away("r1")
        job.wake("r1")
        back = job.after(lost, "return", "r1")
        job.until("decide", at_step=back["inner_step"] + 40)
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []
    assert summary["dead_inner_steps_lost"] == 0


@pytest.mark.long
@pytest.mark.parametrize("point", ["inner", pytest.param("reduce", marks=pytest.mark.slow)])
def test_a_hung_training_thread_holds_nobody_up_for_long(tmp_path: Path, point: str) -> None:
    faults = {"r1": [Fault(point=point, at_step=50, do="hang", for_s=6.0)]}
    with tiny_job(tmp_path, policy=replace(FAST, dead_after_s=4.0), faults=faults, steps=None) as job:
        job.start_all()
        hung = job.until("fault", "r1")
        job.until("decide", at_step=hung["inner_step"] + 200)
        job.until("apply", "r1", at_step=hung["inner_step"] + 100)
        job.enough()
        lost = job.events("lost", "r1")
        summary = job.end()
    assert_nothing_lost(summary)
    assert not lost, "its heartbeat lives: it is not declared dead"
    assert summary["inner_steps_committed"] + summary["inner_steps_pending"] == summary["inner_steps_executed"]


@pytest.mark.parametrize("journal", ["journal.sqlite", ""])
def test_the_coordinator_is_killed_and_goes_on_from_its_journal_or_what_the_replicas_say(
    tmp_path: Path, journal: str
) -> None:
    with tiny_job(tmp_path, policy=CALM, steps=None, journal=journal) as job:
        job.start_all()
        applied = job.until("apply", at_step=60)
        job.kill("coordinator")
        job.start_coordinator()
        recovered = job.until("recover")
        job.enough(more=60)
        summary = job.end()
        joins = job.events("join")
    assert_nothing_lost(summary)
    assert recovered["version"] >= applied["version"] >= 3
    assert len(joins) == 3, "the same replicas live on"


@pytest.mark.parametrize("point", ["decide", pytest.param("quorum", marks=pytest.mark.long)])
def test_the_coordinator_dies_at_a_decision(tmp_path: Path, point: str) -> None:
    fault = Fault(replica="coordinator", point=point, at_step=60, do="kill", rejoin_s=0.1)
    with tiny_job(tmp_path, policy=CALM, steps=None, faults={"coordinator": [fault]}) as job:
        job.start_all()
        job.until("fault", "coordinator")
        job.died("coordinator")
        job.start_coordinator()
        job.until("recover")
        job.enough(more=60)
        summary = job.end()
    assert_nothing_lost(summary)


def test_a_replica_that_gets_sigterm_hands_its_steps_over_and_leaves(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=CALM, steps=None) as job:
        job.start_all()
        job.until("decide", at_step=40)
        pid = job.processes["r1"].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        job.until("leave", "r1")
        job.enough()
        summary = job.end()
        end = job.events("end", "r1")[0]["data"]
    assert_nothing_lost(summary)
    assert end["reason"] == "left"
    assert end["pending_steps"] == 0
    assert summary["dead_inner_steps_lost"] == 0


@pytest.mark.long
def test_a_slow_replica_takes_part_in_every_round_with_the_steps_it_has(tmp_path: Path) -> None:
    """Its rounds would take 12 s; the others call it in after 1.5 s, and wait for two of its steps then."""
    policy = replace(CALM, grace_s=1.5)
    with tiny_job(tmp_path, step_s={"r0": 0.005, "r1": 0.005, "r2": 0.6}, policy=policy, steps=60) as job:
        job.start_all()
        summary = job.end()
        members = [e["data"]["members"] for e in job.events("decide")]
        assert job.events("call_in", "r2")
    assert_nothing_lost(summary)
    assert all(len(m) == 3 and all(row[2] > 0 for row in m) for m in members)


def test_a_newcomer_joins_a_running_job_at_its_inner_step(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=CALM, steps=None) as job:
        job.start_all()
        job.until("decide", at_step=60)
        job.names.append("r3")
        job.start("r3")
        job.until("propose", "r3")
        job.enough()
        summary = job.end()
        members = [m for e in job.events("decide") for m in e["data"]["members"] if m[0] == "r3"]
    assert_nothing_lost(summary)
    assert members
    assert members[0][3] == members[0][2] > 0, "its first contribution starts at its first inner step"


def test_a_replica_with_another_method_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    with tiny_job(tmp_path, steps=None) as job:
        job.start_all()
        job.until("decide")
        stranger = job.start("r9", method=ftopt.DiLoCo(sync_every=20, outer=ftopt.outer.SGD(lr=0.3)))
        stranger.join(LIMIT_S)
        refused = job.events("refused", "r9")[0]["data"]["text"]
        del job.processes["r9"]
        job.enough()
        summary = job.end()
    assert stranger.exitcode == 2
    assert "outer.lr: 0.3 here, 1.0 in the job" in refused
    assert_nothing_lost(summary)


@pytest.mark.long
def test_a_second_process_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """It is told when the first one has been heard for ``dead_after_s`` beside it."""
    with tiny_job(tmp_path, policy=replace(CALM, dead_after_s=4.0), steps=None) as job:
        job.start_all()
        job.until("decide")
        first = job.processes["r1"]
        second = job.start("r1")
        second.join(LIMIT_S)
        refused = job.events("refused", "r1")[0]["data"]["text"]
        job.processes["r1"] = first
        job.enough()
        summary = job.end()
    assert second.exitcode == 2
    assert "must be unique" in refused
    assert_nothing_lost(summary)


@pytest.mark.slow
def test_a_coordinator_that_is_not_there_is_named(tmp_path: Path) -> None:
    with tiny_job(tmp_path) as job:
        job.kill("coordinator")
        lonely = job.start("r0")
        lonely.join(LIMIT_S)
        text = job.events("refused", "r0")[0]["data"]["text"]
    assert lonely.exitcode == 2
    assert "no coordinator answers" in text
    assert "ftopt coordinator" in text


STREAMING = ftopt.StreamingDiLoCo(sync_every=20, fragments=ftopt.fragments.Balanced(n=3), delay=5)


def test_a_kill_while_a_delayed_fragment_is_reduced_stops_nobody(tmp_path: Path) -> None:
    faults = {"r1": [Fault(point="reduce", at_step=40, do="kill")]}
    with tiny_job(tmp_path, steps=None, step_s=0.01, method=STREAMING, faults=faults) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.until("propose", "r1", incarnation=2)
        job.enough(more=60)
        summary = job.end()
        successor = [m for e in job.events("decide") for m in e["data"]["members"] if m[:2] == ["r1", 2]]
    assert_nothing_lost(summary)
    assert successor, "the successor contributes"


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "reduce",
        pytest.param("prepare", marks=pytest.mark.slow),
        pytest.param("commit", marks=pytest.mark.slow),
        "apply",
    ],
)
def test_gradients_are_averaged_through_a_kill_and_a_join(tmp_path: Path, point: str) -> None:
    faults = {"r1": [Fault(point=point, at_step=20, do="kill")]}
    with tiny_job(tmp_path, policy=CALM, steps=None, step_s=0.01, method=ftopt.SyncSGD(), faults=faults) as job:
        job.start_all()
        job.until("fault", "r1")
        job.died("r1")
        job.start("r1")
        job.until("propose", "r1", incarnation=2, count=5)
        job.enough(more=20)
        summary = job.end()
    assert_nothing_lost(summary)


@pytest.mark.long
def test_gradients_of_one_that_was_cut_off_go_into_the_next_round(tmp_path: Path) -> None:
    faults = {"r1": [Fault(point="propose", at_step=20, do="partition", for_s=50.0)]}
    with tiny_job(tmp_path, policy=CALM, steps=None, step_s=0.01, method=ftopt.SyncSGD(), faults=faults) as job:
        job.start_all()
        lost = job.until("lost", "r1")
        job.after(lost, "decide")
        job.wait_until(lambda: len(job.trained("r1", since=lost)) > 2, "r1 trains alone")
        job.heal("r1")
        job.until("return", "r1")
        job.enough(more=40)
        summary = job.end()
        steps = [m[2] for e in job.events("decide") for m in e["data"]["members"] if m[0] == "r1"]
    assert_nothing_lost(summary)
    assert max(steps) > 1, "what it has accumulated counts"
