"""Silent corruption in real processes: it is found, told, and healed; nobody who survives loses a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ftopt
from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import CALM, TinyJob, assert_nothing_lost, tiny_job

FOUND_WITHIN = 8
"""Outer steps."""


def digests_of(mismatch: dict[str, Any]) -> dict[str, str]:
    digests: dict[str, str] = mismatch["data"]["digests"]
    return digests


def takes_part_again(job: TinyJob, replica: str, since: dict[str, Any]) -> None:
    """Waits until ``replica`` is a contributing member of a decision after ``since``."""

    def does() -> bool:
        later = [e for e in job.events("decide") if e["t_s"] > since["t_s"]]
        return any(m[0] == replica and m[2] > 0 for e in later for m in e["data"]["members"])

    job.wait_until(does, f"{replica} contributes again")


@pytest.mark.slow
def test_a_flipped_bit_in_a_reduced_result_is_a_mismatch_and_the_attempt_is_retried(tmp_path: Path) -> None:
    fault = Fault(point="reduce.after", do="corrupt", at_step=40)
    with tiny_job(tmp_path, policy=CALM, faults={"r1": [fault]}) as job:
        job.start_all()
        summary = job.end()
        (mismatch,) = job.events("mismatch")
        retry = next(e for e in job.events("quorum") if e["attempt"] > mismatch["attempt"])
    digests = digests_of(mismatch)
    assert digests["r0"] == digests["r2"] != digests["r1"]
    assert (mismatch["fragment"], mismatch["version"]) == (0, retry["version"])
    assert [m[0] for m in retry["data"]["members"]] == ["r0", "r1", "r2"], "once is an accident"
    assert summary["attempts_aborted"] == 1
    assert_nothing_lost(summary)


def test_a_repeat_offender_is_put_out_heals_and_comes_back(tmp_path: Path) -> None:
    fault = Fault(point="reduce.after", do="corrupt", at_step=40, times=2)
    with tiny_job(tmp_path, policy=CALM, faults={"r1": [fault]}, steps=None) as job:
        job.start_all()
        second = job.until("mismatch", count=2)
        healed = job.after(second, "fetched", "r1")
        takes_part_again(job, "r1", healed)
        job.enough()
        summary = job.end()
        without = next(e for e in job.events("decide") if e["t_s"] > second["t_s"])
        (told,) = job.events("evicted")
    assert [m[0] for m in without["data"]["members"]] == ["r0", "r2"]
    assert (told["replica"], told["fragment"], told["version"]) == ("r1", 0, second["version"])
    assert_nothing_lost(summary)


@pytest.mark.parametrize("replica", ["r0", pytest.param("r1", marks=pytest.mark.slow)])
def test_two_members_that_disagree_both_compute_again(tmp_path: Path, replica: str) -> None:
    fault = Fault(point="reduce.after", do="corrupt", at_step=40)
    with tiny_job(tmp_path, replicas=2, policy=replace(CALM, start_replicas=2), faults={replica: [fault]}) as job:
        job.start_all()
        summary = job.end()
        (mismatch,) = job.events("mismatch")
    assert len(digests_of(mismatch)) == 2
    assert_nothing_lost(summary)


@pytest.mark.slow
def test_two_members_that_always_disagree_take_the_first_ones_result(tmp_path: Path) -> None:
    fault = Fault(point="reduce.after", do="corrupt", at_step=40, times=2)
    with tiny_job(tmp_path, replicas=2, policy=replace(CALM, start_replicas=2), faults={"r1": [fault]}) as job:
        job.start_all()
        summary = job.end()
        mismatches = job.events("mismatch")
        decided = {e["version"]: e["data"]["digest"] for e in job.events("decide")}
    assert decided[mismatches[1]["version"]] == digests_of(mismatches[1])["r0"]
    assert_nothing_lost(summary)


@pytest.mark.parametrize(
    ("point", "what"),
    [
        ("inner", "anchor"),
        pytest.param("inner", "outer", marks=pytest.mark.slow),
        pytest.param("apply", "anchor", marks=pytest.mark.slow),
        pytest.param("prepare", "result", marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_the_committed_state_is_found_and_the_minority_heals(
    tmp_path: Path, point: str, what: str
) -> None:
    faults = {"r1": [Fault(point=point, do="corrupt", what=what, at_step=50)]}
    with tiny_job(tmp_path, policy=CALM, faults=faults, steps=None) as job:
        job.start_all()
        struck = job.until("fault", "r1")
        mismatch = job.after(struck, "mismatch")
        damaged = job.after(mismatch, "damaged", "r1")
        healed = job.after(mismatch, "fetched", "r1")
        takes_part_again(job, "r1", healed)
        job.enough()
        summary = job.end()
        versions = [e["version"] for e in job.events("decide") if e["t_s"] < struck["t_s"]]
    digests = digests_of(mismatch)
    assert digests["r0"] == digests["r2"] != digests["r1"]
    assert mismatch["version"] - max(versions, default=0) <= FOUND_WITHIN
    (block,) = damaged["data"]["blocks"]
    assert block.startswith("anchor" if what == "result" else what)
    assert_nothing_lost(summary)


@pytest.mark.slow
def test_of_two_members_the_one_that_finds_its_own_memory_changed_heals(tmp_path: Path) -> None:
    fault = Fault(point="inner", do="corrupt", what="anchor", at_step=50)
    policy = replace(CALM, start_replicas=2)
    with tiny_job(tmp_path, replicas=2, policy=policy, faults={"r0": [fault]}, steps=None) as job:
        job.start_all()
        mismatch = job.until("mismatch")
        damaged = job.after(mismatch, "damaged", "r0")
        healed = job.after(damaged, "fetched", "r0")
        takes_part_again(job, "r0", healed)
        job.enough()
        summary = job.end()
        alone = next(e for e in job.events("decide") if e["t_s"] > damaged["t_s"])
    assert [m[0] for m in alone["data"]["members"]] == ["r1"], "the damaged one's contribution is not in it"
    assert_nothing_lost(summary)


@pytest.mark.parametrize("what", ["params", pytest.param("grads", marks=pytest.mark.slow)])
def test_a_nan_is_a_member_of_weight_zero_that_starts_from_the_anchor(tmp_path: Path, what: str) -> None:
    faults = {"r1": [Fault(point="inner", do="nan", what=what, at_step=50)]}
    with tiny_job(tmp_path, policy=CALM, faults=faults) as job:
        job.start_all()
        summary = job.end()
        (told,) = job.events("discarded", "r1")
        rows = [m for e in job.events("decide") for m in e["data"]["members"] if m[0] == "r1"]
    assert told["data"]["reason"] == "nonfinite"
    assert (told["fragment"], told["incarnation"]) == (0, 1)
    assert summary["inner_steps_discarded"]["nonfinite"] == told["data"]["steps"] > 0
    assert [row[4] for row in rows if not row[5]] == [0.0], "weight zero, once"
    assert rows[-1][4] > 0
    assert_nothing_lost(summary)


def test_a_norm_out_of_line_weighs_nothing_and_after_the_second_time_its_steps_are_dropped(tmp_path: Path) -> None:
    with tiny_job(tmp_path, steps=None, policy=replace(CALM, outlier_ratio=20.0)) as job:
        job.start("r0")
        job.start("r1")
        job.start("r2", lr=10.0)
        told = job.until("outlier", "r2")
        dropped = job.until("discarded", "r2")
        job.enough()
        summary = job.end()
        decided = [e for e in job.events("decide") if e["t_s"] <= dropped["t_s"]]
        rows = [m for e in decided for m in e["data"]["members"]]
    assert "policy.outlier_ratio" in told["data"]["reason"]
    assert told["version"] >= 1
    assert all(row[2] == 0 and row[4] == 0.0 for row in rows if row[0] == "r2")
    assert dropped["data"]["reason"] == "outlier"
    assert dropped["data"]["steps"] >= 40, "what was not taken the first time was still there"
    assert summary["inner_steps_discarded"]["outlier"] >= dropped["data"]["steps"]
    assert_nothing_lost(summary)


def test_a_damaged_state_is_refused_by_its_digest_and_fetched_elsewhere(tmp_path: Path) -> None:
    fault = Fault(point="serve", do="corrupt", what="anchor", at_step=0)
    method = ftopt.DiLoCo(sync_every=60)
    with tiny_job(tmp_path, policy=CALM, faults={"r0": [fault]}, steps=None, method=method) as job:
        job.start_all()
        job.until("decide", count=2)
        job.names.append("r3")
        job.start("r3")
        refused = job.until("fetch_failed", "r3")
        fetched = job.until("fetched", "r3")
        takes_part_again(job, "r3", fetched)
        job.enough(more=120)
        summary = job.end()
    assert "digest" in refused["data"]["reason"]
    assert (refused["fragment"], refused["version"] > 0) == (0, True)
    assert_nothing_lost(summary)


ALIKE = ftopt.SyncSGD(verify_every=10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "bit"),
    [
        ("params", 22),
        pytest.param("inner", 28, marks=pytest.mark.slow),
        pytest.param("params", 30, marks=pytest.mark.slow),
    ],
)
def test_a_flipped_bit_in_a_live_model_is_found_while_replicas_die_and_join(
    tmp_path: Path, what: str, bit: int
) -> None:
    fault = Fault(point="inner", do="corrupt", what=what, bit=bit, at_step=25)
    with tiny_job(tmp_path, replicas=4, policy=CALM, faults={"r1": [fault]}, steps=None, method=ALIKE) as job:
        job.start_all()
        struck = job.until("fault", "r1")
        job.kill("r3")
        job.start("r3")
        diverged = job.after(struck, "diverged")
        healed = job.after(diverged, "fetched", "r1")
        takes_part_again(job, "r1", healed)
        job.enough()
        summary = job.end()
        named = {e["replica"] for e in job.events("diverged")}
        alarms = [e for e in job.events() if e["event"] in ("mismatch", "evicted", "fork")]
    assert diverged["replica"] == "r1" and "r1" in named
    assert not alarms
    assert_nothing_lost(summary)  # and all who are done hold the same model and inner state


def test_one_whose_every_reduction_fails_sits_out_and_stops_nobody(tmp_path: Path) -> None:
    """A device that always computes wrong: the result is implausible, and names nobody."""
    wrong = Fault(point="reduce.after", do="corrupt", what="sum", bit=30, times=None, at_step=40)
    with tiny_job(tmp_path, policy=CALM, faults={"r1": [wrong]}, steps=None) as job:
        job.start_all()
        struck = job.until("fault", "r1")
        out = job.until("kept_out")

        def goes_on() -> bool:
            late = [e for e in job.events("decide") if e["t_s"] > out["t_s"]]
            return len(late) >= 10 and all({"r0", "r2"} <= {m[0] for m in e["data"]["members"]} for e in late)

        job.wait_until(goes_on, "ten versions without r1")
        aborts = [e for e in job.events("abort") if struck["t_s"] <= e["t_s"] <= out["t_s"]]
        failed = [e for e in aborts if e["data"]["reason"].startswith("r1:")]  # else its digest differed: it is evicted
        job.enough()
        summary = job.end()
    assert out["data"]["replicas"] == ["r1"] and "far more than its contributions" in out["data"]["reason"]
    assert len(failed) <= 3, "it may doubt once, and fail twice"
    assert summary["survivor_inner_steps_lost"] == 0 and summary["inner_steps_counted_twice"] == 0
