"""One rank of several is never taken for a replica by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftopt
from ftopt.errors import UserError

URL = "http://127.0.0.1:1"


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """As rank 0 of two sees the world; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_a_rank_under_torchrun_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match=r"this process is rank 1 of 2 .* torch\.distributed is not initialized: if the"
    ):
        ftopt.connect(URL, "r0")
    ftopt.connect(URL, "r0", mesh=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    ftopt.connect(URL, "r0")


@pytest.mark.parametrize("mesh", ["cpu", True, 2, object()])
def test_a_mesh_is_one(mesh: object) -> None:
    with pytest.raises(UserError, match=r"and no process group; call torch\.distributed\.init_process_group"):
        ftopt.connect(URL, "r0", mesh=mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", ["cpu", True, 2, object()])
def test_a_mesh_is_a_mesh(two_ranks: None, mesh: object) -> None:
    with pytest.raises(UserError, match="must be the DeviceMesh or the process group of this island's ranks"):
        ftopt.connect(URL, "r0", mesh=mesh)  # type: ignore[arg-type]


def test_parameters_that_are_spread_over_ranks_are_no_replica(two_ranks: None) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for group in (ftopt.solo(), ftopt.connect(URL, "r0", mesh=False)):
        with pytest.raises(UserError, match=r"weight is a DTensor on a mesh of 2 ranks, and the group is of this proc"):
            ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=2), group=group)
