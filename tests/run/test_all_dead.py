"""All replicas of a job die, and are started again: the job goes on from its newest checkpoint by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftopt.checkpoint.reader import Checkpoint, whole
from ftopt.run.fault_spec import Fault
from tests.run.running import Start, events_of, summary_of, until
from tests.run.test_every_sample_once import as_override

_SETTINGS = ("method.sync_every=5", "checkpoint.every=1", "data.sampling=once", "data.epochs=1", "replicas=2")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rejoin_s", [(0.0, 0.0), (0.5, 3.0)])
def test_started_again_the_job_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, start: Start, rejoin_s: tuple[float, float]
) -> None:
    faults = [
        Fault(replica=index, at_step=at, point="inner", do="kill", rejoin_s=rejoin_s[index], incarnation=life)
        for life, at in ((1, 42), (2, 82))
        for index in range(2)
    ]
    run = start(tmp_path, *_SETTINGS, "train.inner_steps=1000000", as_override(faults), leave_out="replicas")
    status, error = run.wait(200)
    assert status == 0, error
    assert len(events_of(tmp_path, "death")) == 4
    restored = events_of(tmp_path, "restore")
    assert restored and all(event["version"] > 0 for event in restored)
    assert len(events_of(tmp_path, "start")) == 1, "a cold start"
    summary = summary_of(tmp_path)
    assert summary["survivor_inner_steps_lost"] == summary["inner_steps_counted_twice"] == 0
    assert summary["samples_duplicated"] == summary["samples_lost"] == 0
    assert summary["chain_conflicts"] == []


# By hand: the coordinator in one terminal, a script in the others.

_SCRIPT = """
import sys
import torch
from torch import nn
import ftopt

torch.manual_seed(0)
model = nn.Linear(4, 4)
group = ftopt.connect(sys.argv[1], sys.argv[2], policy=ftopt.FaultPolicy(start_replicas=2))
optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters()), model, ftopt.DiLoCo(sync_every=5), group=group)
checkpoints = ftopt.Checkpoints("checkpoints", optimizer, every=1)
with optimizer:
    checkpoints.include()
    print("began at", optimizer.start_step, flush=True)
    while optimizer.inner_step < int(sys.argv[3]):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.step()
    checkpoints.close()
"""
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Starts ``python ...`` in the test's folder; ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "FTOPT_TOKEN": "a-token-of-this-test-of-32-letters"}
        command = [sys.executable, *arguments]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _coordinator(spawn: Spawn, bind: str) -> tuple[subprocess.Popen[str], str]:
    """It, and its address."""
    process = spawn("-m", "ftopt", "coordinator", "--new", "--bind", bind, "--journal", "journal")
    return process, _line(process).split()[2].rstrip(";")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("coordinator", ["lives", "journal"])
def test_a_script_started_again_goes_on_from_its_newest_checkpoint(
    tmp_path: Path, spawn: Spawn, port: int, coordinator: str
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    head, url = _coordinator(spawn, f"127.0.0.1:{port}")
    first = [spawn("train.py", url, f"r{i}", "1000000") for i in range(2)]
    assert [_line(process) for process in first] == ["began at 0", "began at 0"]
    until(lambda: len(whole(tmp_path / "checkpoints")) > 1)
    for process in first:
        process.kill()
        process.wait()
    if coordinator == "journal":
        head.kill()
        head.wait()
        _coordinator(spawn, url.removeprefix("http://"))
    at = Checkpoint(whole(tmp_path / "checkpoints")[-1]).manifest.inner_step
    assert at > 0
    second = [spawn("train.py", url, f"r{i}", str(at + 20)) for i in range(2)]
    assert [_line(process) for process in second] == [f"began at {at}"] * 2
    assert [process.wait(60) for process in second] == [0, 0]
