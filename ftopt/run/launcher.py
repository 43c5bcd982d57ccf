"""Starts the ranks of a replica by torchrun in this process, and ends when they do.

torchrun restarts nothing here (``--max-restarts=0``): when a rank dies, it ends the others, and this process ends. Its
parent, `ftopt.run.runner` or a supervisor, decides whether to restart it. So one place decides, and each incarnation
gets a key-value store of its own.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping, Sequence

from ftopt.errors import FtoptError

_SHUTDOWN_S = 35
"""Longer than leaving in good order takes; torchrun then kills the rest."""
WRONG = 2
"""Exit status of a rank that found the user's input wrong."""


class RankDied(FtoptError):
    """A rank has died. Exit status 1."""


def launches(ranks: int) -> bool:
    """Whether this process must start ``ranks`` ranks; not if it is one itself, by the environment that torchrun
    sets."""
    return ranks > 1 and "WORLD_SIZE" not in os.environ


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Runs ``python -m ftopt`` with ``arguments`` as each of ``ranks`` ranks on this machine until they end.

    SIGTERM, SIGINT, SIGHUP and SIGQUIT are passed on to the ranks, which leave in good order.

    Returns:
        The exit status: 0, or 2 if a rank has found the user's input wrong and has said so.

    Raises:
        RankDied: a rank has died, and the others were ended.
    """
    from torch.distributed import run as torchrun  # here, since it imports torch
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _keep_quiet()
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", f"--shutdown-timeout={_SHUTDOWN_S}"]
    try:
        torchrun.run(torchrun.parse_args([*options, "-m", "ftopt", *arguments]))  # type: ignore[no-untyped-call]
    except SignalException:
        return 0
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        if WRONG in statuses.values():
            return WRONG
        raise RankDied(_describe(statuses, ranks)) from None
    return 0


def _describe(statuses: Mapping[int, int], ranks: int) -> str:
    """Describes the rank that was killed, if any: its loss made the others fail, and torchrun has sent them SIGTERM."""
    rank, status = min(statuses.items(), key=lambda item: (item[1] == -signal.SIGTERM, item[1] > 0, item[0]))
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    return f"rank {rank} of {ranks} has died ({how}), and the replica with it"


def _keep_quiet() -> None:
    """Silences torchrun, which logs each signal that it sends and a rank's exit status; this process reports one
    line."""
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
