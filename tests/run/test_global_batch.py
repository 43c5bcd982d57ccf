"""``ftopt run`` of a recipe with a global batch: what a killed replica had is computed by the others, once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ftopt.config.loader import load
from ftopt.errors import UserError
from tests.run.running import CALM, Start, events_of, summary_of, until

TOGETHER = ("data.global_batch=24", "data.split=2", "train.clip_norm=null")
SYNC_SGD = "method={name: sync_sgd, sync_every: 1}"


@pytest.mark.long
@pytest.mark.parametrize("method", ["{name: sync_sgd, sync_every: 1, clip_norm: 1.0}", "{name: paft, sync_every: 5}"])
def test_a_killed_replica_costs_its_own_micro_batches(tmp_path: Path, start: Start, method: str) -> None:
    """With ``min_replicas=3`` the job's end waits for the one that comes back, however slow this machine is."""
    fault = "{replica: 1, at_step: 10, point: inner, do: kill, rejoin_s: 0}"
    calm = (*CALM, "policy.min_replicas=3")
    settings = (f"method={method}", "train.inner_steps=30", f"faults=[{fault}]", *TOGETHER, *calm)
    status, error = start(tmp_path, *settings, leave_out="method.").wait()
    assert status == 0, error
    got = summary_of(tmp_path)
    assert got["survivor_inner_steps_lost"] == 0
    assert got["inner_steps_counted_twice"] == 0
    assert got["chain_conflicts"] == []
    assert [(death["replica"], death["status"]) for death in got["deaths"]] == [("r1", "SIGKILL")]
    assert len(set(got["anchor_digests"].values())) == 1
    assert got["val_loss_final"] < got["val_loss_initial"]
    decided = [event["data"] for event in events_of(tmp_path, "decide") if not event["fragment"]]
    parts = [[part for ranges in data["ranges"].values() for part in ranges] for data in decided]
    units = [sorted(unit for start, stop in each for unit in range(start, stop)) for each in parts]
    assert units == [list(range(12 * version, 12 * version + 12)) for version in range(30)]
    assert events_of(tmp_path, "left_out") == []
    kept = [event["data"]["samples"] for event in events_of(tmp_path, "micro_batch") if event["data"]["kept"]]
    again = sum(kept) - 30 * 24
    assert 0 <= again <= 8, "the dead one's share at most was computed a second time"


@pytest.mark.long
def test_the_data_end_and_all_say_so(tmp_path: Path, start: Start) -> None:
    settings = (
        "method={name: sync_sgd, sync_every: 1}",
        "train.inner_steps=100000",
        "data.epochs=1",
        "data.workers=1",
        *TOGETHER,
    )
    status, error = start(tmp_path, *settings, leave_out="method.").wait()
    assert status == 0, error
    assert summary_of(tmp_path)["survivor_inner_steps_lost"] == 0
    assert len(events_of(tmp_path, "data_ended")) == 1


@pytest.mark.long
def test_an_interrupted_run_leaves_in_good_order(tmp_path: Path, start: Start) -> None:
    settings = (SYNC_SGD, "train.inner_steps=100000", *TOGETHER, "policy.grace_s=3", "policy.dead_after_s=5")
    run = start(tmp_path, *settings, leave_out="method.")
    until(lambda: any(tmp_path.glob("runs/*")) and len(events_of(tmp_path, "decide")) > 2)
    run.signal(signal.SIGINT)
    status, error = run.wait()
    assert status == 130
    assert "interrupted" in error and "Traceback" not in error
    assert summary_of(tmp_path)["survivor_inner_steps_lost"] == 0
    ends = [event["t_s"] for event in events_of(tmp_path, "end")]
    assert len(ends) == 3 and max(ends) - min(ends) < 30, "not as long as one that leaves may wait"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.split=5"], "data.split=5 with data.batch_size=16"),
        (["data.global_batch=null"], "data.split=4 with data.batch_size=16, data.global_batch=None"),
        (["data.global_batch=66"], "must be a multiple of 4, which is data.split, such as 64"),
        (["data.sampling=random"], "data.global_batch=64 has no effect with data.sampling=random"),
        (["method.sync_every=2"], "use method.name=sync_sgd with sync_every=1, or paft"),
        (["method={name: local_sgd, sync_every: 5}"], "use method.name=sync_sgd with sync_every=1, or paft"),
        (["train.accumulate=2"], "use train.accumulate=1"),
        (["train.clip_norm=1.0"], "use method.clip_norm, and train.clip_norm=null"),
    ],
)
def test_what_does_not_go_with_it_is_told(settings: list[str], says: str) -> None:
    with pytest.raises(UserError) as caught:
        load("globalbatch_bytes", settings)
    assert says in str(caught.value)
