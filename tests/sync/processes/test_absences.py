"""A replica that was away learns what became of its contribution; the others go on; real processes throughout."""

from __future__ import annotations

import itertools
import json
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftopt.run.fault_spec import Fault
from tests.sync.processes.job import CALM, FAST, NOW, TinyJob, assert_nothing_lost, tiny_job


def contributes_again(job: TinyJob, since: dict[str, Any], *names: str) -> None:
    """Waits for decisions after ``since`` with steps of each of ``names``."""

    def do() -> bool:
        late = [e for e in job.events("decide") if e["t_s"] > since["t_s"]]
        return set(names) <= {m[0] for e in late for m in e["data"]["members"] if m[2] > 0}

    job.wait_until(do, f"{names} contribute again")


STOP = Fault(point="prepare", do="stop", for_s=100.0)


def decided_without(job: TinyJob, replica: str) -> dict[str, Any]:
    """``replica`` is cut off when it has prepared, and the others decide; returns the decision that counts it. The
    replica stays away until it is healed."""
    frozen = held_open(job)
    job.order(replica, Fault(point=NOW, do="partition", for_s=100.0))
    lost = job.until("lost", replica)
    job.wake("r2")
    decided = job.after(lost, "decide")
    assert decided["attempt"] == frozen["attempt"]
    return decided


def held_open(job: TinyJob) -> dict[str, Any]:
    """Waits until r2 stands still, and the coordinator knows that all others have prepared; returns the fault. A
    process that is stopped may have kept what others need to prepare: that attempt fails, and the next one is held."""

    def state(attempt: int) -> str:
        with urllib.request.urlopen(f"{job.url}/status", timeout=60) as answer:
            now = json.load(answer)["jobs"][0]["fragments"][0]
        return "over" if now["attempt"] != attempt else "held" if now["waits_for"] == ["r2"] else ""

    for number in itertools.count(1):
        frozen = job.until("fault", "r2", count=number)
        job.wait_until(partial(state, frozen["attempt"]), "all others have prepared")
        if state(frozen["attempt"]) == "held":
            return frozen
        job.order("r2", STOP)
        job.wake("r2")
    raise AssertionError


PATIENT = replace(CALM, dead_after_s=120.0, evict_after_s=600.0)
"""r2, which stands still, is not given up before it is woken."""
HOLD_IT_OPEN = {"r2": [replace(STOP, at_step=40)]}


def test_cut_off_between_prepare_and_commit_it_learns_the_decision(tmp_path: Path) -> None:
    with tiny_job(tmp_path, policy=PATIENT, faults=HOLD_IT_OPEN, steps=None) as job:
        job.start_all()
        decided = decided_without(job, "r1")
        job.heal("r1")
        back = job.after(decided, "return", "r1")
        contributes_again(job, back, "r0", "r1", "r2")
        job.enough()
        summary = job.end()
    assert decided["data"]["away"] == ["r1"]
    assert ["r1", 1] in [m[:2] for m in decided["data"]["members"]], "its work counts"
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["journal.sqlite", ""])
def test_so_it_does_from_a_coordinator_that_has_been_replaced_meanwhile(tmp_path: Path, journal: str) -> None:
    with tiny_job(tmp_path, policy=PATIENT, faults=HOLD_IT_OPEN, steps=None, journal=journal) as job:
        job.start_all()
        decided = decided_without(job, "r1")
        job.kill("coordinator")
        job.start_coordinator()
        job.heal("r1")
        recovered = job.until("recover")
        contributes_again(job, recovered, "r0", "r1", "r2")
        job.enough()
        summary = job.end()
    assert decided["data"]["away"] == ["r1"]
    assert recovered["version"] >= decided["version"]
    assert_nothing_lost(summary)


@pytest.mark.parametrize("point", ["prepare", *(pytest.param(p, marks=pytest.mark.slow) for p in ("gather", "reduce"))])
def test_cut_off_before_it_has_prepared_it_keeps_its_steps(tmp_path: Path, point: str) -> None:
    fault = Fault(point=point, do="partition", for_s=1.0, at_step=40)
    with tiny_job(tmp_path, faults={"r1": [fault]}, steps=None) as job:
        job.start_all()
        struck = job.until("fault", "r1")  # on a busy machine it may have been lost before, too
        back = job.after(struck, "return", "r1")
        contributes_again(job, back, "r0", "r1", "r2")
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []
    assert summary["inner_steps_committed"] + summary["inner_steps_pending"] == summary["inner_steps_executed"]


def test_all_but_one_die_and_the_last_one_goes_on(tmp_path: Path) -> None:
    faults = {name: [Fault(point="reduce", do="kill", at_step=40)] for name in ("r1", "r2")}
    with tiny_job(tmp_path, faults=faults, steps=None) as job:
        job.start_all()
        for name in ("r1", "r2"):
            struck = job.until("fault", name)
            job.died(name)
        contributes_again(job, struck, "r0")
        job.enough()
        summary = job.end()
        alone = [e for e in job.events("decide") if e["t_s"] > struck["t_s"]]
    assert [m[0] for m in alone[-1]["data"]["members"]] == ["r0"]
    assert len(summary["deaths"]) == 2
    assert_nothing_lost(summary)


@pytest.mark.slow
def test_the_coordinator_cut_off_from_all_stops_nobody_from_training(tmp_path: Path) -> None:
    fault = Fault(replica="coordinator", point="quorum", do="partition", for_s=1.0, at_step=40)
    with tiny_job(tmp_path, faults={"coordinator": [fault]}, steps=None) as job:
        job.start_all()
        struck = job.until("fault", "coordinator")
        job.after(struck, "return", count=3)
        contributes_again(job, struck, "r0", "r1", "r2")
        job.enough()
        summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


@pytest.mark.slow
def test_one_jobs_faults_do_not_touch_the_other_job_of_the_same_coordinator(tmp_path: Path) -> None:
    faults = {
        "a0": [Fault(point="prepare", do="partition", for_s=0.5, at_step=60)],
        "a1": [Fault(point="reduce", do="kill", at_step=40)],
        "a2": [Fault(point="reduce.after", do="corrupt", times=2, at_step=80)],
    }
    with (
        tiny_job(tmp_path, job="a", faults=faults, steps=None) as struck,
        tiny_job(
            tmp_path, job="b", beside=struck, steps=None, replicas=2, policy=replace(FAST, start_replicas=2)
        ) as calm,
    ):
        struck.start_all()
        calm.start_all()
        struck.until("fault", "a1")
        struck.died("a1")
        struck.start("a1")
        last = struck.until("fault", "a2", count=2)
        contributes_again(struck, last, "a0", "a1", "a2")
        contributes_again(calm, last, "b0", "b1")
        struck.enough()
        calm.enough()
        one, other = struck.end(), calm.end()
        touched = [e for e in calm.events() if e["replica"] in ("b0", "b1") and e["event"] in ("disconnected", "fetch")]
    assert_nothing_lost(one)
    assert_nothing_lost(other)
    assert one["deaths"] and not other["deaths"]
    assert touched == []
    assert set(one["anchor_digests"]) == {"a0", "a1", "a2"}
    assert other["inner_steps_executed"] == other["inner_steps_committed"] + other["inner_steps_pending"]
