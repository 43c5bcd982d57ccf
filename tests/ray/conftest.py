"""Ray clusters on this machine, of which nothing is left."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftopt.watch.jsonl import read_lines

LIMIT_S = 900.0
"""A run of a few seconds takes minutes beside processes that compute."""


def _descendants() -> set[int]:
    """All processes that this one, or one that it has started, has started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # gone
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return found - {os.getpid()}


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """A cluster of one node, the driver's, with 2 processors. Its processes end with the tests, whatever happens."""
    ray = pytest.importorskip("ray", reason="needs the extra `ray`")
    from ray.cluster_utils import Cluster

    before = _descendants()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: what loses its parent becomes our child
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(LIMIT_S)  # 60 otherwise
    cluster = None
    try:
        try:
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        except Exception as error:
            pytest.fail(
                f"Ray did not start its node: {error} A raylet gives its agents 15 s to start, and ends itself without "
                "a setting for it (https://github.com/ray-project/ray/issues/65983): these tests need a machine with "
                f"less other work; its load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
                pytrace=False,
            )
        ray.init(address=cluster.address, log_to_driver=True)
        yield cluster
    finally:
        try:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
        finally:
            for pid in _descendants() - before:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def wait_until(so: Callable[[], bool], why: str) -> None:
    """Until something is so."""
    end_s = time.monotonic() + LIMIT_S
    while not so():
        assert time.monotonic() < end_s, why
        time.sleep(0.05)


class Job:
    """A ``TorchTrainer`` that runs on a thread, and what its workers tell."""

    def __init__(self, folder: Path, config: dict[str, Any], fit: Callable[[], Any]) -> None:
        self.folder = folder
        self.result: Any = None
        self.error: BaseException | None = None
        self._fit = fit
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._fit()
        except BaseException as error:
            self.error = error

    def told(self, replica: str, what: str) -> list[dict[str, Any]]:
        """The lines of a replica."""
        return [line for line in read_lines(self.folder / f"{replica}.jsonl") if line["what"] == what]

    def wait(self, until: Callable[[], bool], why: str) -> None:
        """Until something is so; fails with the trainer's error when it has ended."""

        def so() -> bool:
            if self.error is not None:
                raise self.error
            return until() or not self._thread.is_alive()

        wait_until(so, why)
        assert until(), f"the trainer has ended: {why}"

    def wait_for_steps(self, more: int, replicas: Sequence[str]) -> None:
        """Until each of them has taken so many more steps, in the life that it has now or a later one."""
        begin = {replica: self.last(replica) for replica in replicas}
        for replica in replicas:
            self.wait(lambda r=replica: self.last(r) >= begin[r] + more, f"{replica} takes no steps")  # type: ignore[misc]

    def last(self, replica: str) -> int:
        """Its newest step."""
        return max((line["step"] for line in self.told(replica, "step")), default=0)

    def end(self) -> Any:
        """Lets the loops end, soon, and at one step; the trainer's result."""
        self.stop_at(max(self.last(file.stem) for file in self.folder.glob("r*.jsonl")) // 10 * 10 + 60)
        return self.end_by_itself()

    def stop_at(self, step: int) -> None:
        """Lets the loops end at a step."""
        written = self.folder / "stopping"
        written.write_text(str(step))
        written.rename(self.folder / "stop")

    def join(self, timeout_s: float) -> None:
        """Waits for the trainer's end."""
        self._thread.join(timeout_s)

    def end_by_itself(self) -> Any:
        """The trainer's result, when it is there."""
        self.join(LIMIT_S)
        assert not self._thread.is_alive(), "the trainer does not end"
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a trainer."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from ftopt.ray import FtoptConfig
    from tests.ray.training import train

    jobs: list[Job] = []

    def start(
        workers: int, *, ranks: int = 1, loop: Any = train, max_failures: int = -1, cpus: float = 0.5, **config: Any
    ) -> Job:
        trainer = TorchTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path), "replicas": workers // ranks, **config},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus}),
            torch_config=FtoptConfig(ranks=ranks),
            run_config=RunConfig(
                name="run", storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=max_failures)
            ),
        )
        jobs.append(Job(tmp_path, config, trainer.fit))
        return jobs[-1]

    yield start
    for job in jobs:
        job.stop_at(0)
        job.join(30.0)
