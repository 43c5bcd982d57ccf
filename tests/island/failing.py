"""Calls that fail on one rank of an island; by torchrun: ``python -m tests.island.failing``. Nobody waits for ever, and
each rank hears why."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ftopt
from ftopt.checkpoint.reader import whole
from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method
from tests.island.lasting import sharded, shared_folder, three, train, wrapped

LOCAL = ftopt.LocalSGD(sync_every=2)


class Included:
    """An object of the loop with that state dict."""

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Calls it."""
        return self.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


@dataclass
class Unsendable:
    """A state that cannot be pickled on rank 1."""

    rank: int

    def __reduce__(self) -> Any:
        if self.rank:
            raise ValueError("cannot be sent")
        return Unsendable, (0,)


def started(name: str, model: nn.Module, method: Method = LOCAL) -> ftopt.ReplicaOptimizer:
    """A job of this island alone."""
    return wrapped(name, model, torch.optim.SGD(model.parameters(), lr=0.01), method)


def interrupted(rank: int) -> Callable[[], dict[str, Any]]:
    """A state dict in which that rank gets a Ctrl-C, when it is captured."""
    calls: list[None] = []

    def state() -> dict[str, Any]:
        calls.append(None)  # it is looked at before
        if dist.get_rank() == rank and len(calls) > 1:
            raise KeyboardInterrupt("by hand")
        return {}

    return state


def ends_in_a_checkpoint(folder: Path) -> None:
    """Ctrl-C in the middle of a part that all ranks go through."""
    for rank in range(2):
        model = three()
        optimizer = started(f"interrupted-{rank}", model)
        checkpoints = ftopt.Checkpoints(folder / f"interrupted-{rank}", optimizer, every=1)
        error = KeyboardInterrupt if dist.get_rank() == rank else FtoptError
        with pytest.raises(error, match="by hand"), optimizer:
            checkpoints.include(own=Included(interrupted(rank)))
            train(model, optimizer, 2)
            checkpoints.step()


def ends_at_the_close(folder: Path) -> None:
    """A state that cannot be sent to rank 0, when the last version is saved."""
    model = three()
    optimizer = started("unsendable", model)
    checkpoints = ftopt.Checkpoints(folder / "unsendable", optimizer, every=1000)
    with pytest.raises(FtoptError, match="cannot be sent"), optimizer:
        checkpoints.include(own=Included(lambda: {"it": Unsendable(dist.get_rank())}))
        train(model, optimizer, 2)


def goes_on_without_a_folder(folder: Path) -> None:
    """A folder that takes no checkpoint."""
    model, where = three(), folder / "a file"
    optimizer = started("no-folder", model)
    checkpoints = ftopt.Checkpoints(where, optimizer, every=1)
    dist.barrier()
    if not dist.get_rank():
        where.write_text("")
    dist.barrier()
    with optimizer:
        for _ in range(3):
            train(model, optimizer, 2)
            checkpoints.step()
    assert optimizer.status.versions[0] >= 3


def ends_in_a_closure(folder: Path) -> None:
    """An error of the user that leaves a closure on one rank, also one that ftopt calls the user's, parts the ranks."""
    model = three()
    optimizer = started("closure", model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 7)).square().mean()
        loss.backward()
        if dist.get_rank() and optimizer.inner_step == 1:
            optimizer.log(tokens=-1)
        return loss

    said = re.escape("log(tokens=-1)")
    with pytest.raises(FtoptError, match=said), optimizer:
        optimizer.step(closure)
        if dist.get_rank():
            with pytest.raises(UserError, match=said):
                optimizer.step(closure)
        for _ in range(3):
            optimizer.step(closure)


def is_refused_on_all(folder: Path) -> None:
    """A checkpoint that rank 0 alone resumes; another method on rank 1."""
    model = three()
    optimizer = started("saved", model)
    with optimizer:
        checkpoints = ftopt.Checkpoints(folder / "saved", optimizer, every=1)
        train(model, optimizer, 2)
        checkpoints.last()
        checkpoints.close()
    model = three()
    optimizer = started("resumes", model)
    checkpoints = ftopt.Checkpoints(folder / "saved", optimizer, every=None)
    if not dist.get_rank():
        assert checkpoints.resume()
    text = r"rank 1 of this replica resumes no checkpoint, and rank 0 one"
    with pytest.raises(UserError, match=text), optimizer:
        pass
    model = three()
    optimizer = started("method", model, ftopt.LocalSGD(sync_every=2 + dist.get_rank()))
    with pytest.raises(UserError, match="sync_every is 3 on rank 1, and 2 on rank 0"), optimizer:
        pass


def ends_where_one_rank_exports(folder: Path) -> None:
    """Before the other ranks' next call, and around it."""
    for inside in (False, True):
        model = three()
        optimizer = started(f"export-{inside}", model)
        with pytest.raises(FtoptError, match=r"rank 0 was in export\(\) while rank 1 called "), optimizer:
            train(model, optimizer, 2)
            with optimizer.global_parameters() if inside else nullcontext():
                if not dist.get_rank():
                    optimizer.export(folder / "model.pt")
            train(model, optimizer, 1)


def goes_on_from_one_checkpoint(folder: Path) -> None:
    """No replica holds the job's state any more; each rank looks for the newest checkpoint in its folder."""
    for kind, said in (
        ("same", ""),
        ("older", "rank 1 of this replica goes on from another checkpoint than rank 0"),
        ("none", "rank 1: .* holds no complete checkpoint"),
    ):
        where = folder / kind
        first = started(kind, three())
        checkpoints = ftopt.Checkpoints(where, first, every=1)
        with pytest.raises(KeyboardInterrupt), first:
            for _ in range(2):
                train(first._core.model, first, 2)
                checkpoints.step()
                checkpoints._writer.wait(30.0)
            raise KeyboardInterrupt
        checkpoints.close()
        dist.barrier()
        older, newer = whole(where)
        if dist.get_rank() and said:
            where = folder / f"{kind}-1"
            where.mkdir()
            if kind == "older":
                shutil.copytree(older, where / older.name)
        dist.barrier()
        second = started(kind, three())
        checkpoints = ftopt.Checkpoints(where, second, every=1)
        with pytest.raises(UserError, match=said) if said else nullcontext(), second:
            assert second.start_step == 4, newer
        checkpoints.close()


def keeps_what_a_trigger_measures_along(folder: Path) -> None:
    """A resumed job measures along the same direction: each rank has its slice of it."""
    method = ftopt.LocalSGD(sync_every=2, trigger=ftopt.triggers.LinearFDA(1e9, check_every=1))
    found: list[torch.Tensor | None] = []
    for life in range(2):
        model = sharded()
        optimizer = started(f"fda-{life}", model, method)
        checkpoints = ftopt.Checkpoints(folder / "fda", optimizer, every=1)
        assert checkpoints.resume() == bool(life)
        with optimizer:
            checkpoints.include()
            if life:
                found.append(optimizer._core.training.started().fragments[0].trigger_metrics.direction)
                break
            train(model, optimizer, 1)
            optimizer.sync()
            train(model, optimizer, 1)
        checkpoints.close()
        found.append(optimizer._core.training.started().fragments[0].trigger_metrics.direction)
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])


def main() -> None:
    """One rank."""
    dist.init_process_group("gloo")
    with shared_folder() as folder:
        for each in (
            ends_in_a_checkpoint, ends_at_the_close, goes_on_without_a_folder, ends_in_a_closure, is_refused_on_all,
            ends_where_one_rank_exports, goes_on_from_one_checkpoint, keeps_what_a_trigger_measures_along,
        ):  # fmt: skip
            each(folder)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
