"""The training script of a campaign, as a user would write it. The model's parameters are its account.

Each inner step adds 1 to the element of this process' life in every fragment, and 1 to the element of each sample of
its batch, in fragment 0. What the process itself knows (the steps it began and finished, its longest waits) it writes
to a file that survives it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from benchmarks.chaos import broken
from benchmarks.chaos.methods import GLOBAL_BATCH, WAYS
from ftopt.errors import FtoptError
from tests.forkserver import die_with_parent

LIVES = 1024
"""Processes of a campaign, at most."""
MICRO_BATCH, BATCH = 4, 48
"""Samples of a micro-batch and of a step, with a global batch."""
LONG_S = 0.2
"""Waits from here on are written down."""
_LOOK_S = 0.5
_RECORD = "<qq"
_ROOM_BYTES = 1 << 20
"""A disk with less is full."""


@dataclass(frozen=True)
class Life:
    """What a process is started with.

    Args:
        url: the coordinator.
        replica: its id.
        number: of the life, unique in the campaign.
        way: the method's name.
        samples: of the data set that the job shares out; 0: every replica trains until ``stop`` exists.
        step_s: seconds of an inner step.
        folder: of the campaign.
        policy: settings.
        resume: call `ftopt.Checkpoints.resume`.
        accumulate: units of the ledger an inner step.
    """

    url: str
    replica: str
    number: int
    way: str
    samples: int
    step_s: float
    folder: str
    policy: Mapping[str, Any]
    resume: bool = False
    accumulate: int = 1

    @property
    def name(self) -> str:
        return f"{self.replica}.{self.number}"


class Part(nn.Module):
    """A fragment: steps by life, samples, and one element that every step counts in."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.steps = nn.Embedding(LIVES, 1)
        self.samples = nn.Embedding(samples, 1) if samples else None
        self.all = nn.Parameter(torch.zeros(3))
        for p in self.parameters():
            nn.init.zeros_(p)


class Account(nn.Module):
    """The model."""

    def __init__(self, fragments: int, samples: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(samples if not i else 0) for i in range(fragments))

    def forward(self, life: int, samples: Tensor | None) -> Tensor:
        """A loss whose gradient is -1 where a step is counted."""
        total = sum(part.steps.weight[life, 0] + part.all.sum() for part in self.parts)
        if samples is not None:
            total = total + self.parts[0].samples(samples).sum()
        return -total

    def read(self) -> dict[str, Any]:
        """The account in plain numbers."""
        first = self.parts[0].samples
        return {
            "steps": [part.steps.weight[:, 0].tolist() for part in self.parts],
            "samples": None if first is None else first.weight[:, 0].tolist(),
        }


class Samples:
    """A data set whose samples are their own numbers."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class Record:
    """Steps begun and finished, in memory that survives a SIGKILL; waits and what was looked at, in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.steps"
        path.write_bytes(bytes(struct.calcsize(_RECORD)))
        with path.open("r+b") as handle:
            self._map = mmap.mmap(handle.fileno(), 0)
        self._lines = (folder / f"{name}.jsonl").open("a", buffering=1)
        self.begun = self.finished = 0

    def begin(self) -> None:
        self.begun += 1
        self._write()

    def finish(self) -> None:
        self.finished += 1
        self._write()

    def line(self, what: str, **data: Any) -> None:
        self._lines.write(json.dumps({"what": what, "at": time.time(), **data}) + "\n")

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        if (took := time.monotonic() - began) > LONG_S:
            self.line("wait", of=what, seconds=took)

    def _write(self) -> None:
        struct.pack_into(_RECORD, self._map, 0, self.begun, self.finished)


def steps_of(path: Path) -> tuple[int, int]:
    """Steps that a life began and finished; one that was killed before its record was written has begun none. OSError:
    its disk is full, and it could not write one."""
    record = path.read_bytes()
    if len(record) == struct.calcsize(_RECORD):
        begun, finished = struct.unpack(_RECORD, record)
        return begun, finished
    if (free_bytes := shutil.disk_usage(path.parent).free) < _ROOM_BYTES:
        text = f"the disk is full ({free_bytes:,} bytes free), and a process could not write how many steps it takes; "
        raise OSError(errno.ENOSPC, text + "make room, or name a folder elsewhere by TMPDIR or --keep", str(path))
    return 0, 0


class Trainer:
    """One life."""

    def __init__(self, life: Life) -> None:
        self.life, self.folder = life, Path(life.folder)
        self.record = Record(self.folder, life.name)
        self.leaving = False
        self._look_at = 0.0
        way = WAYS[life.way]
        self.model = Account(way.fragments, life.samples)
        self.group = ftopt.connect(life.url, life.replica, policy=ftopt.FaultPolicy(**life.policy), connect_s=120.0)
        batch = life.way == GLOBAL_BATCH
        self.loader = self._loader(batch) if life.samples else None
        inner = torch.optim.SGD(self.model.parameters(), lr=float(BATCH) if batch else 1.0)
        self.optimizer = ftopt.wrap(inner, self.model, way.make(), group=self.group)
        self.checkpoints = ftopt.Checkpoints(self.folder / "checkpoints", self.optimizer, every=way.checkpoint_every)
        self.alike = not way.live

    def _loader(self, batch: bool) -> ftopt.DataLoader:
        data = Samples(self.life.samples)
        if batch:
            return ftopt.DataLoader(data, MICRO_BATCH, global_batch=BATCH, group=self.group)
        return ftopt.DataLoader(data, 1, group=self.group, accumulate=self.life.accumulate)

    def train(self) -> None:
        if self.life.resume:
            self.checkpoints.resume()
        with self.optimizer:
            self.record.line("joined", incarnation=self.group.incarnation)
            if self.loader is None:
                while not (self.folder / "stop").exists():
                    self.step([None])
                    if self.leaving:
                        break
            elif self.life.way == GLOBAL_BATCH:
                self.share()
            else:
                self.draw(self.loader)
            self.checkpoints.close()
            self.record.line("leaves", pending=self.optimizer.status.pending_steps)
            if self.leaving:  # else the job would be at its end
                self.optimizer.close(early=True)
        self.checkpoints.close()

    def draw(self, loader: ftopt.DataLoader) -> None:
        steps = loader.steps()
        while not self.leaving:
            with self.record.timed("data"):
                batches = next(steps, None)
            if batches is None:
                self.record.line("data ended")
                return
            self.step(batches)

    def share(self) -> None:
        assert self.loader is not None
        for micro_batches in self.loader.global_batches():
            self.record.begin()
            while True:
                with self.record.timed("step"):  # the others' part of the batch, too
                    samples = next(micro_batches, None)
                if samples is None:
                    break
                # The mean over the micro-batch.
                (self.model(self.life.number, samples) / len(samples)).backward()
                time.sleep(self.life.step_s)
            with self.record.timed("step"):
                self.optimizer.step()
            self.record.finish()
            self.checkpoints.step()
            self.look()
            if self.leaving:
                return
        self.record.line("data ended")

    def step(self, batches: list[Any]) -> None:
        self.record.begin()
        samples = None if batches[0] is None else torch.cat(batches)
        self.model(self.life.number, samples).backward()
        time.sleep(self.life.step_s * random.uniform(0.5, 1.5))
        with self.record.timed("step"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.record.finish()
        self.checkpoints.step()
        self.look()

    def look(self) -> None:
        """Now and then: the anchor, to be compared with the others' of the same versions."""
        if not self.alike or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        versions = self.optimizer.status.versions
        with self.optimizer.global_parameters():
            if self.optimizer.status.versions == versions:  # else it is not known whose these parameters are
                digest = hashlib.sha256(json.dumps(self.model.read()).encode()).hexdigest()[:16]
                self.record.line("anchor", versions=versions, digest=digest)

    def tell(self, how: str) -> None:
        """The end: the model as it is, and what this process says is not in it."""
        end = {
            "how": how,
            "at": time.time(),
            "begun": self.record.begun,
            "finished": self.record.finished,
            "versions": self.optimizer.status.versions,
            "pending": self.optimizer.status.pending_steps,
            "model": self.model.read(),
        }
        path = self.folder / f"{self.life.name}.end"
        path.with_suffix(".part").write_text(json.dumps(end))
        path.with_suffix(".part").rename(path)


def main(life: Life) -> None:
    """A process of the campaign."""
    trainer = None
    try:
        _become_own(Path(life.folder) / f"{life.name}.log")
        broken.install(Path(life.folder), life.name)
        trainer = Trainer(life)
        signal.signal(signal.SIGTERM, lambda *_: setattr(trainer, "leaving", True))
        trainer.train()
    except KeyboardInterrupt:
        logging.warning("interrupted")
        if trainer is not None:
            trainer.tell("interrupted")
        sys.exit(130)
    except FtoptError as error:
        logging.error("%s: %s", type(error).__name__, error)
        if trainer is not None:
            trainer.tell("refused")
        sys.exit(2)
    trainer.tell("left" if trainer.leaving else "done")


def _become_own(log: Path) -> None:
    """Its own log, killed with its parent, and its stacks on SIGUSR1."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # of the fork server,
    die_with_parent()  # which lives as long as its children do: and with the campaign
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.captureWarnings(True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
