"""A signal that terminals, Slurm and containers send to all processes of a group: a loader's workers get it, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from ftopt.data.workers import Pool, PoolSettings

PROGRAM = """
import sys, time
import torch
from torch import nn
import ftopt

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.ones(4)

if __name__ == "__main__":
    group, model = ftopt.solo(), nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    method = ftopt.DiLoCo(sync_every=100_000)
    optimizer = ftopt.wrap(inner, model, method, group=group, leave_on_signals=True)
    makes = {"ftopt": lambda d: ftopt.DataLoader(d, 2, num_workers=2, group=group),
             "torch": lambda d: torch.utils.data.DataLoader(d, 2, num_workers=2)}
    loader = makes[sys.argv[1]](Slow())
    try:
        with optimizer:
            for inputs in loader:
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                if optimizer.inner_step == 5:
                    print("trains", flush=True)
    finally:
        print("all" if optimizer.status.committed_step == optimizer.local_steps else "lost", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
@pytest.mark.parametrize("loader", ["ftopt", pytest.param("torch", marks=pytest.mark.long)])
def test_pending_steps_are_handed_in(loader: str, number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for _ in range(4):
        status, said, errors = _ended_by(number, tmp_path, loader)
        # Torch raises the death of its worker wherever this process is; a step may be half done, and is given up.
        if loader == "ftopt" or "    optimizer.step()\n" not in errors:
            break
    assert (status, said) == (0, "all\n"), errors


def _ended_by(number: signal.Signals, folder: Path, loader: str) -> tuple[int, str, str]:
    command = [sys.executable, str(folder / "program.py"), loader]
    errors = folder / "errors.txt"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "trains\n"
            os.killpg(process.pid, number)
            return process.wait(60), process.stdout.read(), errors.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_leave_both_signals_to_their_parent_and_end_with_the_pool() -> None:
    pool = Pool(Numbers(), PoolSettings(workers=2), seed=0, sampler=range(1000), batch_size=1)
    workers = list(pool._loader._iterator._workers)
    for _ in range(3):
        for worker in workers:
            os.kill(worker.pid, signal.SIGTERM)
            os.kill(worker.pid, signal.SIGINT)
        assert isinstance(pool.next(), torch.Tensor)
    pool.close()
    assert [worker.exitcode for worker in workers] == [0, 0]
