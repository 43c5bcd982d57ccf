"""``TorchTrainer`` with `FtoptConfig`: workers, nodes and the coordinator are lost, and the job goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
from ftopt.watch.jsonl import read_lines  # noqa: E402
from tests.ray.conftest import Job, wait_until  # noqa: E402
from tests.ray.training import alone  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]
Start = Callable[..., Job]


def committed(folder: Path, replica: str) -> int:
    """Steps of a replica, of all its lives, that outer steps contain."""
    decided = [line["data"]["members"] for line in read_lines(folder / "events.jsonl") if line["event"] == "decide"]
    return sum(steps for members in decided for name, _, steps, *_ in members if name == replica)


def assert_whole(job: Job, replicas: int, survivors: Sequence[str]) -> None:
    """Replicas of one version hold the same; survivors have one life, and all of its steps are committed."""
    ends = {f"r{i}": next(end for end in job.told(f"r{i}", "done") if end["rank"] == 0) for i in range(replicas)}
    held = {(*end["versions"], end["digest"]) for end in ends.values()}
    assert len(held) == len({version for version, _ in held})
    for replica in survivors:
        assert ends[replica]["life"] == 1
        assert ends[replica]["pending_steps"] == 0
        assert committed(job.folder / "ray" / "run", replica) == ends[replica]["local_steps"]


def test_a_worker_and_the_coordinator_are_killed_and_survivors_lose_no_step(start: Start, tmp_path: Path) -> None:
    job = start(3, kill_in_a_round="r1")
    job.wait(lambda: len(job.told("r1", "begin")) == 2, "r1 does not come back")
    job.wait_for_steps(20, ("r0", "r1", "r2"))
    (named,) = [name for name in ray.util.list_named_actors() if name.startswith("ftopt coordinator of run")]
    ray.kill(ray.get_actor(named), no_restart=False)
    job.wait_for_steps(50, ("r0", "r1", "r2"))
    events = tmp_path / "ray" / "run" / "events.jsonl"
    job.wait(
        lambda: any(line["event"] == "return" and line["replica"] == "r0" for line in read_lines(events)),
        "nobody is back",
    )
    job.wait_for_steps(30, ("r0", "r1", "r2"))
    job.end()
    assert_whole(job, 3, survivors=("r0", "r2"))


def test_where_a_loss_ends_the_job_the_run_ends_with_its_message_however_many_failures_are_allowed(
    start: Start,
) -> None:
    job = start(2, kill_in_a_round="r1", on_loss="fail", max_failures=-1)
    with pytest.raises(Exception, match=r"the job has failed, since replica r1 was lost \(policy.on_loss=fail\)"):
        job.end_by_itself()


def test_an_island_of_two_workers_comes_back_as_a_whole(start: Start) -> None:
    job = start(4, ranks=2)
    job.wait_for_steps(20, ("r0", "r1"))
    (rank_1,) = [line for line in job.told("r1", "begin") if line["rank"] == 1]
    os.kill(rank_1["pid"], signal.SIGKILL)
    job.wait(lambda: len(job.told("r1", "begin")) == 4, "r1 does not come back")
    job.wait_for_steps(20, ("r0", "r1"))
    job.end()
    assert_whole(job, 2, survivors=("r0",))


def test_a_node_is_lost_and_a_new_one_takes_its_place(start: Start, cluster: Any) -> None:
    lost = cluster.add_node(num_cpus=2)
    job, replicas = start(4, cpus=1.0), ("r0", "r1", "r2", "r3")  # two of them on that node
    job.wait_for_steps(20, replicas)
    nodes = {replica: job.told(replica, "begin")[0]["node"] for replica in replicas}
    stay = [replica for replica in replicas if nodes[replica] == ray.get_runtime_context().get_node_id()]
    assert len(stay) == 2
    cluster.remove_node(lost, allow_graceful=False)
    job.wait_for_steps(50, stay)
    new = cluster.add_node(num_cpus=2)
    try:
        for replica in {*replicas} - {*stay}:
            job.wait(lambda r=replica: len(job.told(r, "begin")) == 2, f"{replica} does not come back")  # type: ignore[misc]
        job.wait_for_steps(20, replicas)
        job.end()
        assert_whole(job, 4, survivors=stay)
    finally:
        cluster.remove_node(new)


def test_the_same_name_again_resumes_from_the_newest_checkpoint(start: Start) -> None:
    start(2, steps=60).end_by_itself()
    job = start(2, steps=100)
    job.end_by_itself()
    begins = [line["step"] for line in job.told("r0", "begin")]
    assert begins == [0, 60]
    assert job.last("r0") == 100


def test_an_error_in_one_worker_ends_the_run_where_no_failure_is_allowed(start: Start) -> None:
    job = start(2, max_failures=0, raises="r1")
    with pytest.raises(Exception, match="a mistake in the loop"):
        job.end_by_itself()


def test_workers_that_make_no_whole_islands_are_refused_and_leave_their_place(start: Start) -> None:
    job = start(3, ranks=2)
    with pytest.raises(Exception, match=r"num_workers=3.*ranks=2.*use a multiple of 2"):
        job.end_by_itself()
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"], "a place is taken")


def test_a_loop_that_never_connects_is_told_so(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    job, said = start(1, loop=alone), ""
    job.end_by_itself()
    while "r0 has never been in a job: it has trained alone" not in said:
        said += capfd.readouterr().err


def test_the_program_of_the_page_runs(cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
    program = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(program.replace("/shared/runs", str(tmp_path)), {"__name__": "__main__"})
    assert float(capsys.readouterr().out) < 0.1
