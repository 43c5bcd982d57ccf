"""torchft 0.2.0 for comparison: its lighthouse, its manager and its DiLoCo, with all settings the benchmarks use."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.speed.crew import served


class NoPeerError(RuntimeError):
    """torchft is not installed."""


@dataclass(frozen=True, kw_only=True)
class TimeOuts:
    """How long it waits for whom. The values here are its defaults.

    Args:
        heartbeat_s: a replica that is silent for so long is dead (lighthouse).
        join_s: how long a quorum waits for those that send heartbeats, but do not ask for it (lighthouse).
        operation_s: of all else: collectives, quorums, votes, connections (manager, process group).
    """

    heartbeat_s: float = 5.0
    join_s: float = 60.0
    operation_s: float = 60.0


PATIENT = TimeOuts(join_s=2.0)
"""For what is measured without faults."""


@contextmanager
def lighthouse(size: int, times: TimeOuts = PATIENT) -> Iterator[str]:
    """Its server, from its own command, for quorums of ``size`` and more; the address.

    Raises:
        NoPeerError: there is none.
    """
    command = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if command is None:
        raise NoPeerError("torchft is not installed: pip install -e '.[bench]' -c constraints.txt")
    settings = {
        "bind": "127.0.0.1:0",
        "min_replicas": size,
        "join_timeout_ms": round(1000 * times.join_s),
        "heartbeat_timeout_ms": round(1000 * times.heartbeat_s),
    }
    arguments = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    with served([command, *arguments], r"http://\S+:\d+") as url:
        yield re.sub(r"//[^:/]+:", "//127.0.0.1:", url)


@contextmanager
def manager(
    rank: int,
    house: str,
    size: int,
    *,
    times: TimeOuts = PATIENT,
    load: Callable[[Any], None] = lambda state: None,
    save: Callable[[], Any] = dict,
) -> Iterator[Any]:
    """A replica of one rank, with Gloo.

    Args:
        rank: which one.
        house: the lighthouse.
        size: a quorum has at least so many.
        times: how long it waits.
        load: loads a peer's state.
        save: the state that a peer loads.
    """
    os.environ["RUST_LOG"] = "error"  # it tells of every message otherwise
    logging.disable(logging.INFO)
    from torch.distributed import TCPStore
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    operation = timedelta(seconds=times.operation_s)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = Manager(
        pg=ProcessGroupGloo(timeout=operation),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=size,
        use_async_quorum=False,  # its DiLoCo wants it so
        timeout=operation,
        quorum_timeout=operation,
        connect_timeout=operation,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=house,
        replica_id=f"theirs-{rank}",
        init_sync=False,  # all begin alike
    )
    try:
        yield made
    finally:
        made.shutdown(wait=False)


@contextmanager
def diloco(manager: Any, model: nn.Module, inner: torch.optim.Optimizer, sync_every: int) -> Iterator[None]:
    """Within, every so many steps of ``inner`` end in an outer step of the whole model."""
    from torchft.local_sgd import DiLoCo

    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [model], inner, outer, sync_every=sync_every):
        yield
