"""Ctrl-C while a replica starts, before any line of `Client.start`: of what was started nothing is left."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.sync.replica.client import Client
from tests.run.running import until

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


def test_a_spare_that_is_interrupted_in_its_goodbye_too_is_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (group,) = ftopt.local_groups(1)
    group.session.standby = True  # type: ignore[attr-defined]
    monkeypatch.setattr("ftopt.sync.replica.client.stand_by", interrupt)
    monkeypatch.setattr(group, "leave", interrupt)
    model = nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=group)
    with pytest.raises(KeyboardInterrupt):
        optimizer.__enter__()
    assert group.closed


def test_a_group_that_is_closed_ends_the_wait_of_its_replica_for_others() -> None:
    first, second = ftopt.local_groups(2, policy=ftopt.FaultPolicy(start_replicas=2, start_s=3600.0))
    model = nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=first)
    found: list[object] = []

    def start() -> None:
        try:
            optimizer.__enter__()
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    until(lambda: first.session.opened)  # type: ignore[attr-defined]
    first.close()
    thread.join(60.0)
    second.close()
    assert len(found) == 1 and "is closed" in str(found[0])
