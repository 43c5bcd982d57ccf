"""The ranks of this process' replica: how they meet, share the model, and agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ftopt.config.schema import Recipe
from ftopt.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process' place among the ranks of its replica; all ranks make the same calls of `agree` and `sum`."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone talks to the job and writes the run's files."""
        return self.rank == 0

    def agree(self, value: T) -> T:
        """Rank 0's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def sum(self, *values: float) -> list[float]:
        """Each value's sum over the ranks; whole numbers are exact up to 2^53."""
        if self.size == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(totals)
        return totals.tolist()


ALONE = Ranks()


def meet(recipe: Recipe) -> Ranks:
    """Finds the other ranks through torchrun's environment.

    Raises:
        UserError: the environment has another number of ranks than the recipe.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if started != str(recipe.ranks):
        raise UserError(
            f"ranks={recipe.ranks}, and this process is one of {started} (WORLD_SIZE); start as many ranks as the "
            f"recipe says, or give ranks={started}; `ftopt replica` starts them itself where neither torchrun nor the "
            "environment has set WORLD_SIZE"
        )
    if recipe.ranks == 1:
        return ALONE
    dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def spread(model: nn.Module, parallel: str, ranks: Ranks) -> nn.Module:
    """Makes the ranks train ``model`` together; returns the module to call.

    Args:
        model: equal on all ranks. With ``fsdp`` its parameters become DTensors, of which each rank has a part.
        parallel: ``fsdp`` (FSDP2) or ``ddp``.

    Raises:
        UserError: the model cannot be spread.
    """
    if ranks.size == 1:
        return model
    try:
        if parallel == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.size,)))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        other = "ddp" if parallel == "fsdp" else "fsdp"
        raise UserError(
            f"parallel={parallel} with this model: {type(error).__name__}: {error}; use parallel={other}, or ranks=1"
        ) from error
    return model
