"""What the benchmark `failure` compares ftopt with: plain DDP under ``torchrun --max-restarts``, and checkpoints.

One rank of it, started by torchrun: it trains until it is ended. Every ``EVERY`` steps rank 0 writes model, optimizer
and step to a file beside the checkpoint and renames it (the file is synced first, so that the checkpoint is whole
whatever happens); each start goes on from there. A batch's samples depend on step and rank alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ftopt.config.model_settings import GptConfig
from ftopt.config.models import Transformer
from ftopt.watch.jsonl import JsonLines

_PR_SET_PDEATHSIG = 1
BATCH, CONTEXT_BYTES, EVERY = 16, 64, 50
"""Windows of a rank's batch, bytes of one, steps between two checkpoints (ftopt: between two outer steps)."""


class Paced(Transformer):
    """The GPT of the recipes, whose training step takes ``step_s`` at least: processes that share a core then do not
    become faster when one of them is gone."""

    def __init__(self, step_s: float) -> None:
        super().__init__(GptConfig(layers=1, heads=2, width=32, context=CONTEXT_BYTES))
        self._step_s = step_s
        self._next = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            time.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._step_s
        return super().forward(tokens)


def train(folder: Path, corpus: Path, step_s: float, started: float) -> None:
    """Trains until it is ended; ``steps.jsonl`` has a line for each step of rank 0, ``starts.jsonl`` for each start."""
    # Killed with torchrun, which leaves ranks behind that it has just started.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Paced(step_s))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    step = restore(folder / "checkpoint.pt", model, optimizer)
    JsonLines(folder / "starts.jsonl", started).write({"rank": rank, "pid": os.getpid(), "step": step})
    lines = JsonLines(folder / "steps.jsonl", started)
    data = np.memmap(corpus, dtype=np.uint8, mode="r")
    while True:
        inputs, targets = batch(data, step, rank)
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            lines.write({"step": step})
            if step % EVERY == 0:
                save(folder / "checkpoint.pt", model, optimizer, step)


def batch(data: np.ndarray[tuple[int], np.dtype[np.uint8]], step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each (BATCH, CONTEXT_BYTES) int64."""
    starts = np.random.default_rng((step, rank)).integers(0, len(data) - CONTEXT_BYTES - 1, BATCH)
    windows = torch.from_numpy(np.stack([data[at : at + CONTEXT_BYTES + 1] for at in starts]).astype(np.int64))
    return windows[:, :-1], windows[:, 1:]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Writes a checkpoint: the new one, or the old one stays."""
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the checkpoint, if there is one; returns its step."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
