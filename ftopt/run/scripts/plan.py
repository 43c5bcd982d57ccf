"""What ``ftopt launch`` starts: the command and the environment of each replica."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from ftopt.errors import UserError
from ftopt.sync.protocol.limits import wrong_name

_SHUTDOWN_S = 35
"""Longer than leaving in good order takes; torchrun then kills the rest."""
_MOST_BYTES = 200
"""Of a name from which file names are made."""
_OPTIONS = ("-n", "--restarts", "--ranks", "--join", "--bind", "--job", "--ids", "--folder", "--token-file")
LAUNCHED = "FTOPT_LEAVE_ON_SIGNALS"
"""The environment variable by which `ftopt.wrap` leaves on signals without being told to."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch.

    Args:
        script: the user's script, or with ``module`` the name of a module.
        words: the script's own arguments.
        n: number of replicas.
        ranks: processes of each replica, started by torchrun; 1: the script itself.
        job: the job's name.
        restarts: how often a replica that dies is started again.
        join: the coordinator of a running job; "": this launch starts one.
        ids: the beginning of the replicas' ids.
        bind: ``HOST:PORT`` on which the coordinator listens.
    """

    script: str
    words: tuple[str, ...] = ()
    module: bool = False
    n: int = 1
    ranks: int = 1
    job: str = "default"
    restarts: int = 0
    join: str = ""
    ids: str = ""
    bind: str = "127.0.0.1:0"

    def replicas(self) -> list[str]:
        """The replicas' ids: ``r0``, ``r1`` and so on, or with the host's name where a launch joins a job."""
        prefix = self.ids or (f"{socket.gethostname()}-r" if self.join else "r")
        return [f"{prefix}{number}" for number in range(self.n)]

    def check(self) -> None:
        """Raises UserError if the script is not there, or a name cannot be used."""
        if not self.module and not Path(self.script).is_file():
            raise UserError(f"{self.script!r}: no such file; give the script that each replica runs, or -m MODULE")
        for what, name in (("--job", self.job), ("--ids", self.replicas()[-1])):
            if wrong := wrong_name(name):
                raise UserError(f"{what} {name!r:.60}: {wrong}; give it a short name")
            if what == "--ids" and ("/" in name or name.startswith(".") or len(os.fsencode(name)) > _MOST_BYTES):
                raise UserError(f"--ids {self.ids!r:.60}; must be a short name without /, since it names files")

    @property
    def is_private(self) -> bool:
        """Whether the coordinator listens on this machine only."""
        return self.bind.rpartition(":")[0].strip("[]") in ("127.0.0.1", "localhost", "::1")

    def to_join(self, url: str) -> str:
        """The command line by which replicas of another machine join the job."""
        words = ["ftopt", "launch", "--join", url, "--token-file", "token", "--job", self.job]
        words += ["--ranks", str(self.ranks)] if self.ranks > 1 else []
        return shlex.join([*words, *(["-m"] if self.module else []), self.script, *self.words])

    def hint(self) -> str:
        """What to look at if no replica has joined a job."""
        option = next((word for word in self.words if word.partition("=")[0] in _OPTIONS), "")
        if option:
            return f": {option} follows SCRIPT, so it went to the script; options of ftopt come before SCRIPT"
        return f": does {self.script} call ftopt.wrap, and train with what it returns?"

    def command(self) -> list[str]:
        """The command line of a replica."""
        words = [*(["-m"] if self.module else []), self.script, *self.words]
        if self.ranks == 1:
            return [sys.executable, *words]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, *torchrun, "--max-restarts=0", f"--shutdown-timeout={_SHUTDOWN_S}", *words]

    def usual(self) -> dict[str, str]:
        """Variables for a replica, unless the user has set them: threads, so that the replicas share the processors."""
        threads = max(1, (os.cpu_count() or 1) // (self.n * self.ranks))
        return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1", LAUNCHED: "1"}

    def own(self, number: int, url: str, token: str, devices: Sequence[str]) -> dict[str, str]:
        """Variables for replica ``number``, in place of any that are set."""
        found = {"FTOPT_COORDINATOR": url, "FTOPT_REPLICA": self.replicas()[number], "FTOPT_JOB": self.job}
        if token:
            found["FTOPT_TOKEN"] = token
        if devices:
            mine = [devices[(number * self.ranks + rank) % len(devices)] for rank in range(self.ranks)]
            found["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(mine))
        return found


def devices_of(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs of this machine, as ``CUDA_VISIBLE_DEVICES`` names them; those that it names, if it is set. CUDA
    ignores an index that is negative, and all that follow it."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        return list(takewhile(lambda name: re.fullmatch(r"\d+|(GPU|MIG)-.+", name), names))
    found = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(number) for number in range(len(found))]  # in a container with some of them CUDA counts from 0, too
