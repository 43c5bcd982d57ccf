"""A replica that comes to its end while no coordinator answers."""

from __future__ import annotations

import logging
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ftopt
from ftopt.optimizer import wrapper
from ftopt.sync.server.coordinator import CoordinatorServer
from tests.forkserver import die_with_parent
from tests.test_examples import heard, started


def _coordinator(tells: Connection) -> None:
    die_with_parent()
    CoordinatorServer("127.0.0.1", 0, new=True, start_replicas=1).run(ready=tells.send)


def test_it_keeps_its_steps_in_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wrapper, "TIMEOUT_S", 2.2)
    caplog.set_level(logging.WARNING)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    with started((_coordinator,)) as ((process, tells),):
        group = ftopt.connect(heard(tells), replica="r0")
        optimizer = ftopt.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=5), group=group
        )
        last = {}
        for _ in optimizer.steps(20):
            if optimizer.inner_step == 12:
                process.kill()
                process.join()
            model(torch.randn(4, 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            last = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    optimizer.export(tmp_path / "model.safetensors")
    assert not torch.equal(load_file(tmp_path / "model.safetensors")["weight"], last["weight"])
    said = caplog.text
    assert "replica r0 is done, with 10 inner steps pending: no coordinator answers; it waits 2 s at most" in said
    assert "its own parameters stay in its model, and export() writes those of version 2, inner step 10" in said
