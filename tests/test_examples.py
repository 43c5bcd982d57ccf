"""The programs in ``examples/`` run as they stand there, in processes of their own."""

from __future__ import annotations

import os
import runpy
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from ftopt.sync.server.coordinator import CoordinatorServer
from tests.forkserver import CONTEXT, die_with_parent
from tests.island.running import Torchrun, coordinator

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT_S = 100.0


def _coordinator(tells: Connection) -> None:
    die_with_parent()
    CoordinatorServer("127.0.0.1", 0, start_replicas=3).run(ready=tells.send)


def _example(tells: Connection, name: str, replica: str, url: str) -> None:
    """What the program prints, line by line, and what its ``main`` returns."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"FTOPT_REPLICA": replica, "FTOPT_COORDINATOR": url}
    main = runpy.run_path(str(EXAMPLES / name))["main"]
    main.__globals__["print"] = lambda text, **_: tells.send(text)
    tells.send(main(1))


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
    with started((_coordinator,)) as ((_, tells_url),):
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
