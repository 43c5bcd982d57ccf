"""Ctrl-C while a replica starts, before any line of `Client.start`: of what was started nothing is left."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.sync.replica.client import Client

START = Client.start.__code__


def interrupted(at: int) -> bool:
    """Starts a replica; whether it was interrupted before the ``at``-th line."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code is not START:
            return None
        lines += event == "line"
        if lines == at:
            raise KeyboardInterrupt
        return trace

    (group,) = ftopt.local_groups(1)
    model = nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=group)
    session = group.session  # type: ignore[attr-defined]
    traced = sys.gettrace()
    sys.settrace(trace)
    try:
        optimizer.__enter__()
    except KeyboardInterrupt:
        sys.settrace(traced)
        with suppress(UserError):  # nothing was begun, so that the network thread waits for its first user
            session.network.acquire(session.fail_network)
            session.network.release(session.fail_network)
        return True
    finally:
        sys.settrace(traced)
    optimizer.close()
    return False


def test_an_interrupt_at_any_line_of_the_start_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    turns = next(at for at in count(1) if not interrupted(at))
    assert turns > 10
    for thread in set(threading.enumerate()) - before:
        thread.join(60.0)
        assert not thread.is_alive(), thread.name
