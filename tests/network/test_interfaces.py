"""Two networks: control on one, payloads and states on the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import hosts
from tests.sync.processes.job import FAST, TinyJob, assert_nothing_lost, tiny_job

pytestmark = pytest.mark.slow

NAMES = ("coordinator", "r0", "r1", "r2")


def test_payloads_and_states_go_by_the_interface_that_is_named(tmp_path: Path) -> None:
    with hosts(NAMES) as net:
        net.second_network()
        namespaces = {name: net.namespace(name) for name in NAMES}
        environ = {name: {"FTOPT_INTERFACE": "eth1"} for name in NAMES[1:]}
        policy = replace(FAST, start_replicas=1)
        options = {"environ": environ, "policy": policy, "width": 20_000, "step_s": 0.02}
        with tiny_job(
            tmp_path, bind=net.address("coordinator"), namespaces=namespaces, steps=None, replicas=2, **options
        ) as job:
            job.start("r0")
            job.until("decide")
            job.start("r1")
            fetched = job.until("fetched", "r1")
            job.until("commit", "r1", count=3)
            payload = fetched["data"]["bytes"] // 2  # and the outer momentum
            eth0, eth1 = (net.sent("r0", device) for device in ("eth0", "eth1"))
            job.enough()
            summary = job.end()
    assert_nothing_lost(summary)
    assert eth1 > 3 * payload
    assert eth0 < payload


@pytest.mark.parametrize("how", ["cable", "device", "address"])
def test_who_is_off_the_second_network_is_missed_and_comes_back(tmp_path: Path, how: str) -> None:
    with hosts(NAMES) as net:
        net.second_network()
        namespaces = {name: net.namespace(name) for name in NAMES}
        environ = {name: {"FTOPT_INTERFACE": "eth1"} for name in NAMES[1:]}
        with tiny_job(
            tmp_path, bind=net.address("coordinator"), namespaces=namespaces, steps=None, environ=environ
        ) as job:
            job.start_all()
            job.until("decide", count=2)
            before = job.events("decide")[-1]
            net.leave_second("r1", how)
            job.wait_until(lambda: together(job, before, "r0", "r2"), "the others go on")
            net.join_second("r1")
            apart = job.events("decide")[-1]
            job.wait_until(lambda: together(job, apart, *NAMES[1:]), "all go on")
            job.enough()
            summary = job.end()
    assert_nothing_lost(summary)
    assert summary["deaths"] == []


def together(job: TinyJob, since: dict[str, Any], *members: str) -> bool:
    """Whether exactly these replicas' steps are in a version since."""
    later = [e for e in job.events("decide") if e["t_s"] > since["t_s"]]
    return any({m[0] for m in e["data"]["members"] if m[2] > 0} == set(members) for e in later)
