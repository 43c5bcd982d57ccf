"""Islands in processes of their own, under torchrun, with a coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ftopt
from tests.island.training import Case, train
from tests.optimizer.running import together

SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Else a restarted island finds its former life's addresses in torchrun's store."""


@contextmanager
def coordinator(folder: Path, *options: str) -> Iterator[str]:
    """A coordinator of its own; its address."""
    command = [sys.executable, "-m", "ftopt", "coordinator", "--bind", "127.0.0.1:0", "--new", *options]
    with (folder / "coordinator.txt").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if word.startswith("http://")).rstrip(";,:")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Torchrun:
    """``torchrun`` of one island, in a session of its own."""

    def __init__(
        self, folder: Path, url: str, replica: str, ranks: int, *arguments: str, options: Sequence[str] = ()
    ) -> None:
        self.out = folder / f"{replica}.txt"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            *options, *arguments,
        ]  # fmt: skip
        settings = {"FTOPT_COORDINATOR": url, "FTOPT_REPLICA": replica, "OMP_NUM_THREADS": "1"} | SETTINGS
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, timeout_s: float = 200.0) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)

    def said(self) -> str:
        """All its output: the ranks' and torchrun's."""
        return self.out.read_text(encoding="utf-8")

    def end(self) -> None:
        """Ends it with all its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def islands(folder: Path, ranks: Sequence[int], cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Runs all cases, one after the other; what each island found, by case."""
    with coordinator(folder) as url:
        lines = [case.line() for case in cases]
        runs = [
            Torchrun(folder, url, f"r{i}", n, "-m", "tests.island.training", str(folder / f"{i}.json"), *lines)
            for i, n in enumerate(ranks)
        ]
        try:
            for run in runs:
                status = run.wait()
                assert not status, run.said()
        finally:
            for run in runs:
                run.end()
    return [json.loads((folder / f"{i}.json").read_text()) for i in range(len(ranks))]


def plain(case: Case) -> list[dict[str, Any]]:
    """The same job with replicas of one process, as threads."""
    policy = ftopt.FaultPolicy(grace_s=60.0, dead_after_s=60.0, stragglers="wait")
    groups = ftopt.local_groups(len(case.layouts), policy=policy)
    return together([lambda i=i: train(case, i, groups[i], "plain") for i in range(len(case.layouts))])  # type: ignore[misc]
