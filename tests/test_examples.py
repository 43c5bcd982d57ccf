"""The programs in ``examples/`` run as they stand there, in processes of their own."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import ftopt
from ftopt.sync.server.coordinator import CoordinatorServer
from tests.forkserver import CONTEXT, Flag, die_with_parent
from tests.island.running import Torchrun, coordinator

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT_S = 100.0


def _coordinator(tells: Connection, start_replicas: int) -> None:
    die_with_parent()
    CoordinatorServer("127.0.0.1", 0, start_replicas=start_replicas).run(ready=tells.send)


def _example(tells: Connection, name: str, replica: str, url: str) -> None:
    """What the program prints, line by line, and what its ``main`` returns."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "FTOPT_COORDINATOR": url}
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    main.__globals__["print"] = lambda text, **_: tells.send(text)
    tells.send(main(1))


def _bandit(tells: Connection, name: str, replica: str, url: str, folder: Path, returned: Flag) -> None:
    """Tells what a function of ``rollouts.py`` prints and returns; r0 waits at step 40 until ``returned``."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "FTOPT_COORDINATOR": url, "FOLDER": str(folder), "STEP_S": "0.05"}
    sys.path.insert(0, str(EXAMPLES))

    def tell(text: str, **_: Any) -> None:
        tells.send(text)
        if text == "r0: step 40":
            returned.wait(LIMIT_S)

    function = runpy.run_path(str(EXAMPLES / "rollouts.py"))[name]
    function.__globals__["print"] = tell
    tells.send(function())


@contextmanager
def started(*targets: tuple[Any, ...]) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Processes, and what each tells; gone when the block ends."""
    pipes = [CONTEXT.Pipe(duplex=False) for _ in targets]
    processes = [
        CONTEXT.Process(target=target[0], args=(tells, *target[1:]))
        for target, (_, tells) in zip(targets, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        yield [(process, hears) for process, (hears, _) in zip(processes, pipes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join(LIMIT_S)


def heard(hears: Connection) -> Any:
    """The next thing told."""
    assert hears.poll(LIMIT_S), "nothing was told"
    return hears.recv()


@pytest.mark.long
def test_a_global_batch_in_a_plain_loop_survives_a_kill() -> None:
    with started((_coordinator, 3)) as ((_, tells_url),):
        url = heard(tells_url)
        replicas = [(_example, "global_batch.py", name, url) for name in ("r0", "r1", "r2")]
        with started(*replicas) as ((_, r0), (killed, _), (_, r2)):
            while int(heard(r0).rpartition(" ")[2]) < 20:
                pass
            killed.kill()
            ended = []
            for hears in (r0, r2):
                while isinstance(told := heard(hears), str):
                    pass
                ended.append(told)
    assert ended[0] == ended[1], "the same to the bit"


def last(hears: Connection) -> tuple[list[str], Any]:
    """All that is printed from now on, and what is returned."""
    printed: list[str] = []
    while isinstance(told := heard(hears), str):
        printed.append(told)
    return printed, told


@pytest.mark.long
def test_rollouts_follow_the_weights_of_a_job_in_which_a_replica_dies_and_comes_back(tmp_path: Path) -> None:
    returned = CONTEXT.Event()
    with started((_coordinator, 2)) as ((_, tells_url),):
        rest = heard(tells_url), tmp_path, returned
        all_three = [(_bandit, *who, *rest) for who in (("roll", ""), ("main", "r0"), ("main", "r1"))]
        with started(*all_three) as ((_, rolls), (_, r0), (killed, r1)):
            while heard(r1) != "r1: step 23":
                pass
            killed.kill()
            with started((_bandit, "main", "r1", *rest)) as ((_, again),):
                heard(again)
                returned.set()
                ended = [last(hears)[1] for hears in (r0, again)]
                printed, reward = last(rolls)
    assert ended[0] == ended[1] and ended[0][0] == 60
    versions = [int(line.split()[1].rstrip(",")) for line in printed]
    assert versions == sorted(set(versions)) and versions[-1] >= 6
    assert reward > 0.5 > 1 / 4, "of four actions one is right"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_islands_survive_a_killed_rank(tmp_path: Path) -> None:
    with coordinator(tmp_path, "--start-replicas", "2") as url, ExitStack() as ends:
        runs = [
            Torchrun(tmp_path, url, f"r{i}", 2, str(EXAMPLES / "islands.py"), options=("--max-restarts=2",))
            for i in range(2)
        ]
        for run in runs:
            ends.callback(run.end)
        while "step 60" not in runs[1].said():
            time.sleep(0.05)
        parent = runs[1].process.pid
        ranks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        for run in runs:
            assert run.wait() == 0, run.said()
        digests = [line for run in runs for line in run.said().splitlines() if "digest" in line]
    assert len({line.split()[-1] for line in digests}) == 1


@pytest.mark.long
@pytest.mark.timeout(300)
def test_islands_pretrain_and_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    script = EXAMPLES / "pretrain_islands.py"

    def launched(steps: int) -> list[str]:
        words = ["-m", "ftopt", "launch", "-n", "2", "--ranks", "2", str(script), "--steps", str(steps), "--every", "1"]
        got = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
        assert got.returncode == 0, got.stdout + got.stderr
        return [line.split()[-1] for line in (got.stdout + got.stderr).splitlines() if " | digest " in line]

    follower = ftopt.follow(tmp_path / "runs" / "pretrained")
    for steps in 20, 40:
        one, other = launched(steps)
        assert one == other, "the same to the bit"
        weights = follower.newer()
        assert weights is not None and weights.inner_step == steps
    names = runpy.run_path(str(script))
    config = names["Config"]()
    model, whole = names["Transformer"](config), names["windows"](config)
    inputs, targets = (torch.stack(part) for part in zip(*(whole[i] for i in range(32)), strict=True))
    with torch.no_grad():
        before = names["loss_of"](model, inputs, targets)
        model.load_state_dict(weights.state_dict)
        assert names["loss_of"](model, inputs, targets) < 0.7 * before
