"""`undo_step` on sharded parameters (DTensor), whose foreach operations count no versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

import ftopt
from ftopt.errors import UserError
from tests.optimizer.undo.test_undo_half_applied import broken_off
from tests.optimizer.undo.undoing import KINDS, parameters


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def _made(mesh: DeviceMesh, cls: type[Optimizer], kind: dict[str, Any], steps: int) -> tuple[Optimizer, list[Tensor]]:
    torch.manual_seed(5)
    own = [torch.nn.Parameter(distribute_tensor(torch.randn(6, 3), mesh, [Shard(0)])) for _ in range(4)]
    more = {"momentum": 0.9} if cls is SGD else {}
    groups = [{"params": own[:2]}, {"params": own[2:], "lr": 0.05}]
    made = ftopt.undo.undoable(cls(groups, lr=0.1, weight_decay=0.1, **more, **kind))  # type: ignore[call-arg]
    for _ in range(steps):
        _gradients(made, mesh)
        made.step()
    _gradients(made, mesh)
    return made, _shards(made)


def _gradients(made: Optimizer, mesh: DeviceMesh) -> None:
    for p in parameters(made):
        p.grad = distribute_tensor(torch.randn(p.shape), mesh, [Shard(0)])


def _shards(made: Optimizer) -> list[Tensor]:
    return [p.to_local().detach().clone() for p in parameters(made)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [*KINDS.values(), {}], ids=[*KINDS, "default"])
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_shards_come_back_or_the_step_is_refused(mesh: DeviceMesh, cls: type[Optimizer], kind: dict[str, Any]) -> None:
    if cls is SGD and "fused" in kind:
        return  # torch has no such operation on DTensors
    for steps in (0, 2):
        made, before = _made(mesh, cls, kind, steps)
        made.step()
        assert ftopt.undo.undo_step(made).reverted == 4
        torch.testing.assert_close(_shards(made), before, rtol=1e-6, atol=1e-6)
        repaired = at = 0
        while True:
            made, before = _made(mesh, cls, kind, steps)
            if not broken_off(made, at):
                break
            held = _shards(made)
            try:
                ftopt.undo.undo_step(made)
            except UserError as error:
                assert "it can be repaired between groups" in str(error)
                assert all(map(torch.equal, _shards(made), held))
            else:
                repaired += 1
                torch.testing.assert_close(_shards(made), before, rtol=1e-6, atol=1e-6)
            at += 1
        assert repaired == at if kind.get("foreach") is False or "fused" in kind else repaired >= 2
