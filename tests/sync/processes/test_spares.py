"""A spare trains in the place of a replica that was killed; real processes throughout."""

from __future__ import annotations

from pathlib import Path

from ftopt.sync.protocol.samples import Samples
from tests.sync.processes.job import CALM, LIMIT_S, assert_nothing_lost, tiny_job


def test_a_spare_takes_the_place_of_a_killed_replica_and_the_next_one_is_sent_home(tmp_path: Path) -> None:
    samples = Samples(samples=8, batch_size=1)
    with tiny_job(tmp_path, policy=CALM, steps=None, samples=samples) as job:
        job.start_all()
        job.until("decide", count=2)
        job.names += ["s0", "s1"]
        for name in ("s0", "s1"):
            job.start(name, standby=True)
        for name in ("s0", "s1"):
            job.until("fetched", name)
        job.kill("r1")
        promoted = job.until("promoted")  # the one with the newer state, which may be either
        trains, stays = sorted(("s0", "s1"), key=lambda name: name != promoted["replica"])
        job.wait_until(lambda: bool(job.trained(trains, since=promoted)), "the promoted spare trains")
        contributes = job.after(promoted, "decide", count=3)
        job.enough()
        waits = job.processes.pop(stays)
        summary = job.end()
        waits.join(LIMIT_S)
        assert waits.exitcode == 0
        over = job.until("over", stays)
    assert promoted["data"]["in_place_of"] == "r1"
    members = {m[0] for e in job.events("decide") if e["t_s"] > contributes["t_s"] for m in e["data"]["members"]}
    assert {"r0", "r2", trains} <= members
    assert not job.events("promoted", stays) and "not needed" in over["data"]["reason"]
    assert_nothing_lost(summary)
    assert [x["replica"] for x in summary["deaths"]] == ["r1"]
