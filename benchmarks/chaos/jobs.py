"""The processes of a campaign: a coordinator as ``ftopt coordinator`` starts it, replicas that run the training script.

Signals are all that reaches them, and cuts of the link to the coordinator. Whatever was started is gone when the block
ends, and when this process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.chaos.broken import file_of
from benchmarks.chaos.relay import Link, Relays
from benchmarks.chaos.script import Life, main
from benchmarks.meter import Sizes, sizes_of
from tests.forkserver import CONTEXT

COORDINATOR = "coordinator"
_OTHER = Path(__file__).with_name("other.py")
"""A program by its file: this package imports torch, which takes seconds."""


@dataclass
class Run:
    """A replica's process, as the campaign knows it.

    Args:
        began: when, in seconds since 1970, as are all times.
        ended: when it was seen to have ended.
        joined: it has begun to train; from then on it is measured.
        fate: ``kill``, ``term``, ``int``, what it was struck with to end; else empty.
        link: what it reaches the coordinator through; None: it reaches it directly.
        stops: when it was stopped.
        sizes: what it held, every second.
        starved: moments, and the seconds that its threads had waited for a processor until then.
    """

    life: Life
    process: BaseProcess
    began: float
    ended: float = 0.0
    fate: str = ""
    joined: bool = False
    link: Link | None = None
    stops: list[tuple[float, float]] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)
    starved: list[tuple[float, float]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None

    @property
    def is_up(self) -> bool:
        """Whether the script has begun: before that a signal is Python's."""
        return (Path(self.life.folder) / f"{self.life.name}.log").exists()


class Processes:
    """All processes of one campaign.

    Args:
        folder: of the campaign.
        options: of every `Life`.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        self.folder, self.options = folder, dict(options)
        self.started = time.time()
        self.runs: list[Run] = []
        self.coordinator_sizes: list[Sizes] = []
        self._stopped: dict[int, float] = {}
        self._coordinator: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.relays = Relays(port)

    # The coordinator.

    def start_coordinator(self, *, new: bool = False) -> None:
        """Starts it (then the job is ``new``), or its successor, at the same address."""
        arguments = ["--journal", str(self.journal), "--folder", str(self.folder / "run")]
        arguments += ["--started", str(self.started), *(["--new"] if new else [])]
        self._serve(["-m", "ftopt", "coordinator"], arguments, "coordinator.log")

    def start_other(self, how: str, *, journal: Path) -> Path:
        """Starts a coordinator at that address that is not this job's; the file that it
        makes when it has taken the place."""
        (taken := self.folder / "other.taken").unlink(missing_ok=True)
        arguments = ["--journal", str(journal), *(["--new"] if how == "job" else [])]
        self._serve([str(_OTHER), how, str(taken)], arguments, "other.log")
        return taken

    def _serve(self, program: list[str], arguments: list[str], log: str) -> None:
        command = [sys.executable, *program, "--bind", self.address, *arguments]
        with (self.folder / log).open("ab") as lines:
            self._coordinator = subprocess.Popen(command, stdout=lines, stderr=lines, preexec_fn=_die_with_parent)
        self.coordinator_sizes = []

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()
        self._coordinator = None

    @property
    def journal(self) -> Path:
        return self.folder / "journal"

    @property
    def refused(self) -> bool:
        """The coordinator has ended by itself, as when it is given a journal that it cannot use."""
        return self._coordinator is not None and self._coordinator.poll() == 2

    @property
    def coordinator_pid(self) -> int | None:
        """None: it has been killed, or has ended."""
        alive = self._coordinator is not None and self._coordinator.poll() is None
        return self._coordinator.pid if self._coordinator is not None and alive else None

    # Replicas.

    def start(self, replica: str, **options: Any) -> Run:
        """Starts one more process. Every second one reaches the coordinator through a link that can be cut."""
        number = len(self.runs)
        link = self.relays.open() if number % 2 else None
        address = f"127.0.0.1:{link.port}" if link else self.address
        life = Life(f"http://{address}", replica, number, **{**self.options, **options})
        process = CONTEXT.Process(target=main, args=(life,), name=life.name)
        process.start()
        run = Run(life, process, time.time(), link=link)
        self.runs.append(run)
        return run

    @property
    def alive(self) -> list[Run]:
        return [run for run in self.runs if run.alive]

    def end(self, run: Run, how: str) -> None:
        """``kill``, ``term`` or ``int``; of two the first is its fate, unless it is killed."""
        if not run.alive or run.fate == "kill":  # one that is being killed may live for a moment
            return
        run.fate = how if how == "kill" else run.fate or how
        self.signal(run.pid, {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[how])

    def stop(self, run: Run) -> None:
        self.signal(run.pid, signal.SIGSTOP)
        self._stopped[run.pid] = time.time()

    def thaw(self, run: Run) -> None:
        if (since := self._stopped.pop(run.pid, None)) is not None:
            self.signal(run.pid, signal.SIGCONT)
            run.stops.append((since, time.time()))

    def is_stopped(self, run: Run) -> bool:
        return run.pid in self._stopped

    def break_down(self, run: Run, how: str) -> None:
        """From now on its reductions fail (`benchmarks.chaos.broken`)."""
        path = file_of(self.folder, run.life.name)
        (part := path.with_suffix(".part")).write_text(how)
        part.rename(path)

    def repair(self, run: Run) -> None:
        file_of(self.folder, run.life.name).unlink(missing_ok=True)

    def is_broken(self, run: Run) -> bool:
        return file_of(self.folder, run.life.name).exists()

    @staticmethod
    def signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    # All.

    def look(self) -> None:
        """Who has ended; what the others hold."""
        for run in self.runs:
            if not run.ended and not run.alive:
                run.ended = time.time()
            if run.alive:
                run.starved.append((time.time(), _starved_s(run.pid)))
            if not run.joined:
                path = self.folder / f"{run.life.name}.jsonl"
                run.joined = path.exists() and '"joined"' in path.read_text()
            elif not run.ended and (sizes := sizes_of(run.pid)) is not None:
                run.sizes.append(sizes)
        pid = self.coordinator_pid
        if pid is not None and (sizes := sizes_of(pid)) is not None:
            self.coordinator_sizes.append(sizes)

    def close(self) -> None:
        """Ends whatever still lives."""
        for run in self.alive:
            run.process.kill()
        for run in self.runs:
            run.process.join(10)
        if self.coordinator_pid is not None:
            self.kill_coordinator()
        self.relays.close()


@contextmanager
def processes(folder: Path, options: Mapping[str, Any]) -> Iterator[Processes]:
    """Processes that are gone when the block ends."""
    made = Processes(folder, options)
    try:
        yield made
    finally:
        made.close()


def _starved_s(pid: int) -> float:
    """Seconds that the threads of a process have waited for a processor, in all."""
    waited = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            waited += int(path.read_text().split()[1])
    return waited / 1e9


_prctl = ctypes.CDLL(None).prctl
"""Looked up before a fork: other threads run here."""


def _die_with_parent() -> None:
    _prctl(1, signal.SIGKILL)
