"""A job starts anew, from the state of a replica that has held a later version: its optimizer takes up version 0."""

from __future__ import annotations

import threading

import torch
from torch import nn

import ftopt
from ftopt.sync.protocol import messages as m


def test_the_optimizer_holds_the_version_that_its_protocol_holds() -> None:
    """Else its contributions would be to a version that nobody knows: dropped, without a word."""
    (group,) = ftopt.local_groups(1)
    model = nn.Linear(2, 1)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=group)
    session = group.session  # type: ignore[attr-defined]
    with optimizer:
        for _ in range(4):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        assert optimizer.status.versions == (2,)
        digest = optimizer.digest()
        start = m.Start(m.Position(0, 0, "88a8daafb0426afd67b27cc6e066027c"), 4, ())
        session.act(lambda machine: machine.receive(start))
        done = threading.Event()
        session.network.soon(done.set)
        assert done.wait(30)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert session.machine.fragments[0].record.version == 0
        assert optimizer.status.versions == (0,)
        assert optimizer.digest() == digest
        assert optimizer.pending_steps == 1
        optimizer.close(flush=False)
