"""What the ranks of an island give to a checkpoint; by torchrun: ``python -m tests.island.including FOLDER LIFE``.

``LIFE`` is "first", "second" (resumes, with as many ranks), or "other" (with another number of ranks).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ftopt
from ftopt.errors import FtoptError, UserError
from tests.island.lasting import sharded, three, train, wrapped

STEPS = 4


class Average:
    """A moving average of sharded parameters; its state dict needs all ranks."""

    def __init__(self, model: nn.Module, *, gathers: bool) -> None:
        self._model, self._gathers = model, gathers
        self.average = [p.detach().clone() for p in model.parameters()]

    def update(self) -> None:
        """After a step."""
        for mean, p in zip(self.average, self._model.parameters(), strict=True):
            mean.mul_(0.5).add_(p.detach(), alpha=0.5)

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors, or this rank's parts; by reference."""
        return {"average": [t.full_tensor() if self._gathers else t for t in self.average]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse."""
        for mean, saved in zip(self.average, state_dict["average"], strict=True):
            if self._gathers:
                mean.copy_(torch.distributed.tensor.distribute_tensor(saved, mean.device_mesh, mean.placements))
            else:
                mean.copy_(saved)


class Position:
    """A loader's, of this rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        """Plain."""
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The reverse."""
        self.at = state_dict["at"]


class Bad(Position):
    """An object whose state dict fails on one rank."""

    def state_dict(self) -> dict[str, int]:
        """Raises."""
        if self.at == dist.get_rank():
            raise ValueError("the loader is closed")
        return {}


def averages_of(model: nn.Module, steps: int) -> list[Tensor]:
    """What the average is after an uninterrupted training."""
    optimizer = wrapped(f"whole-{steps}", model, torch.optim.SGD(model.parameters(), lr=0.1), METHOD)
    average = Average(model, gathers=False)
    with optimizer:
        for _ in range(steps):
            train(model, optimizer, 1)
            average.update()
    return average.average


METHOD = ftopt.LocalSGD(sync_every=2)


def life(folder: Path, which: str) -> None:
    """One life of the training."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded()
    optimizer = wrapped(which, model, torch.optim.SGD(model.parameters(), lr=0.1), METHOD)
    checkpoints = ftopt.Checkpoints(folder, optimizer, every=1)
    assert checkpoints.resume() == (which != "first")
    torch.manual_seed(10 + rank)
    parts, gathered = Average(model, gathers=False), Average(model, gathers=True)
    alike, own = Position(7 if which == "first" else 0), Position(100 * rank if which == "first" else 0)
    with optimizer:
        if which == "other":
            checkpoints.include(alike=alike, gathered=gathered)
            assert alike.at == 7
            return
        checkpoints.include(parts=parts, gathered=gathered, alike=alike, own=own)
        for _ in range(STEPS):
            train(model, optimizer, 1)
            parts.update()
            gathered.update()
            own.at += 1
            torch.rand(1 + rank)
            checkpoints.step()
            checkpoints._writer.wait(30.0)
            with torch.no_grad():
                for each in parts.average:  # at once: what is written is a copy
                    each.add_(1.0).sub_(1.0)
        checkpoints.last()
        checkpoints.close()
    assert (alike.at, own.at) == (7, 100 * rank + STEPS * (1 + (which == "second")))
    if which == "second":
        torch_now = torch.rand(1)
        torch.manual_seed(10 + rank)
        for _ in range(2 * STEPS):
            torch.rand(1 + rank)
        assert torch.equal(torch_now, torch.rand(1))
        expected = averages_of(sharded(), 2 * STEPS)
        for average in (parts, gathered):
            for found, mean in zip(average.average, expected, strict=True):
                assert torch.allclose(found.to_local(), mean.to_local(), atol=1e-5), (rank, size)


def refused(folder: Path) -> None:
    """What cannot be resumed with other ranks, and what ranks do not include alike, is told on all of them."""
    model = sharded()
    optimizer = wrapped("refused", model, torch.optim.SGD(model.parameters(), lr=0.1), METHOD)
    checkpoints = ftopt.Checkpoints(folder, optimizer, every=1)
    assert checkpoints.resume()
    with (
        optimizer,
        pytest.raises(UserError, match="a state of 'own' for each of 2 ranks; here are 3; start replica r0"),
    ):
        checkpoints.include(own=Position(0))


def differ(folder: Path) -> None:
    """Ranks that include other objects, or have no checkpoints."""
    leads = dist.get_rank() == 0
    called = r"rank 0 was in checkpoints.step\(\) while rank \d called step"
    for name, text in (
        ("one", r"include\(\) got other on rank \d, and mine on rank 0"),
        ("none", rf"rank \d of this replica is gone: .*{called}" if leads else called),
    ):
        model = three()
        optimizer = wrapped(f"differ-{name}", model, torch.optim.SGD(model.parameters(), lr=0.1), METHOD)
        with pytest.raises(FtoptError, match=text), optimizer:
            if leads or name == "one":
                checkpoints = ftopt.Checkpoints(folder / f"differ-{name}", optimizer, every=1)
                checkpoints.include(**{"mine" if leads else "other": Position(0)})
            for _ in range(4):
                train(model, optimizer, 1)
                if leads or name == "one":
                    checkpoints.step()


def fails(folder: Path) -> None:
    """A state dict that raises on one rank: all are told."""
    for rank in range(dist.get_world_size()):
        model = three()
        optimizer = wrapped(f"fails-{rank}", model, torch.optim.SGD(model.parameters(), lr=0.1), METHOD)
        checkpoints = ftopt.Checkpoints(folder / f"fails-{rank}", optimizer, every=1)
        with optimizer:
            checkpoints.include(bad=Bad(rank))
            train(model, optimizer, 2)
            with pytest.raises((ValueError, FtoptError), match="the loader is closed"):
                checkpoints.step()
            train(model, optimizer, 2)  # and it may go on


def main(folder: Path, which: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    if which == "other":
        refused(folder)
        differ(folder)
        fails(folder)
    life(folder, which)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
