"""The model and inner optimizers of one rank, and the ranks' exchange of their data besides the parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ftopt.common.tree import PLAIN, refusal
from ftopt.errors import UserError
from ftopt.optimizer.ranks.parts import Parts
from ftopt.optimizer.ranks.states import InnerStates
from ftopt.step.inner import Inner
from ftopt.step.tensors.buffers import kept, put
from ftopt.step.tensors.flat import Together, local, places, some, trainable, uncompiled
from ftopt.step.tensors.gradients import check_dense_gradients
from ftopt.step.tensors.place import Place
from ftopt.sync.group import Island

_log = logging.getLogger(__name__)


class RankModel:
    """This rank's model and inner optimizers. Methods are collective unless said otherwise.

    Args:
        replica: the island's id, for messages.

    Attributes:
        trained: the parameters that train, by name.
        parts: the place of each rank's part of them.
        states: the inner states.
    """

    def __init__(self, island: Island, model: nn.Module, inner: Inner, replica: str) -> None:
        self.island, self.model, self.inner = island, model, inner
        self._replica, self._warned_unlike = replica, False
        self.reshard()
        self.trained = dict(trainable(model))
        if not self.trained:
            raise UserError("the model has no parameter that trains; nothing to wrap")
        names = island.gather(self._layout())
        wrong = island.share([rank for rank, each in enumerate(names) if each != names[0]])
        if wrong:
            raise UserError(
                f"rank {wrong[0]} of replica {replica} trains other parameters than its rank 0, or has them in other "
                "groups; all ranks of an island must have the same model (pipeline stages on ranks of their own are "
                "not supported) and make their optimizers alike"
            )
        self.parts = Parts(island, self.trained)
        owners = {
            uncompiled(name): (p, optimizer, group)
            for name, p in self.trained.items()
            for optimizer in inner.optimizers
            for group in optimizer.param_groups
            if any(p is each for each in group["params"])
        }
        self.states = InnerStates(island, self.parts, owners, replica)

    def _layout(self) -> object:
        """The names of trained parameters, and their groups."""
        names = {id(p): name for name, p in self.trained.items()}
        groups = [
            [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.inner.optimizers
        ]
        return list(names.values()), groups

    def check_trained(self) -> None:
        """Raises UserError if different parameters train than at the start. Of this rank alone."""
        self.reshard()
        now = dict(trainable(self.model))
        if new := [name for name, p in now.items() if self.trained.get(name) is not p]:
            raise UserError(
                f"{some(new)} train now, and did not when training started; the replicas have agreed on what trains: "
                "freeze them with requires_grad_(False), and go on; what shall train later must be there at the start"
            )

    # Gradients.

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    def pull_gradients(self, whole: Mapping[str, nn.Parameter]) -> None:
        """Gives rank 0's ``whole`` parameters all ranks' gradients; None where no rank has one."""
        mine = self._gradients()
        check_dense_gradients(mine.values())
        there = self.island.share(self.island.gather(list(mine)))
        names = set().union(*there)
        found = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in self.trained.items() if name in names}
        self.parts.pull(mine, found, there)
        for name, parameter in whole.items() if self.island.leads else ():
            parameter.grad = found.get(name)

    def push_gradients(self, whole: Mapping[str, nn.Parameter]) -> None:
        """Gives each rank its part of the gradients of rank 0's ``whole`` parameters."""
        given = {name: p.grad for name, p in whole.items() if p.grad is not None} if self.island.leads else {}
        there = self.island.share(list(given))
        for name, parameter in self.trained.items():
            if name not in there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.parts.push(self._gradients(), given)

    def gradient_norm(self, names: Collection[str], together: Together) -> float | None:
        """The L2 norm of the gradients of these parameters; None: no rank has any."""
        rank = self.island.rank
        mine = [
            local(p.grad).float()
            for name, p in self.trained.items()
            if name in names and p.grad is not None and self.parts.first(rank, name) == rank
        ]
        filled = [gradient for gradient in mine if gradient.numel()]
        norms = torch._foreach_norm(filled) if filled else ()  # torch refuses an empty list
        found = together((len(mine), sum(float(norm) ** 2 for norm in norms)))
        return math.sqrt(math.fsum(square for _, square in found)) if any(count for count, _ in found) else None

    # Buffers.

    def pull_buffers(self, model: nn.Module) -> None:
        """Puts rank 0's buffers into ``model``. Of rank 0 alone."""
        put(model, {name: local(place()) for name, place in self._places().items()})

    def push_buffers(self, model: nn.Module) -> None:
        """Gives all ranks the buffers of rank 0's ``model``."""
        given = kept(model) if self.island.leads else {}
        put(self.model, {n: self._given(local(place()), given.get(n)) for n, place in self._places().items()})

    def _places(self) -> Mapping[str, Place]:
        names = list(kept(self.model))
        return dict(zip(names, places(self.model, names), strict=True))

    def _given(self, buffer: Tensor, whole: Tensor | None) -> Tensor:
        """Rank 0's ``whole`` buffer, on all ranks."""
        island = self.island
        if buffer.layout != torch.strided or buffer.dtype not in PLAIN or type(buffer) is not Tensor:
            odd: Tensor = island.share(whole)
            return odd
        flat = whole if whole is not None else torch.empty(buffer.shape, dtype=buffer.dtype)
        for rank in range(1, island.size):
            if island.leads:
                island.send(flat.contiguous(), rank)
            elif island.rank == rank:
                island.receive(flat, 0)
        return flat

    # Of this rank alone.

    def warn_unlike(self, names: Sequence[str]) -> None:
        """Warns, once, of tensors that should be equal on several ranks and are not."""
        if names and not self._warned_unlike:
            self._warned_unlike = True
            _log.warning(
                "replica %s: ranks that hold the same tensors do not hold them alike: %s; those of one rank are taken, "
                "and given to the others with the next outer step; look for what differs between the ranks (seeds, "
                "dropout of parameters that DDP ignores, memory)",
                self._replica,
                some(names),
            )

    def reshard(self) -> None:
        """Reshards FSDP2 modules. After a forward pass without a backward pass they hold gathered parameters in place
        of the trained ones, and these are stale once the trained ones are written."""
        for module in self.model.modules():
            reshard = getattr(module, "reshard", None)
            if reshard is not None and hasattr(module, "unshard"):
                reshard()


def skeleton(model: nn.Module, pieces: Mapping[int, nn.Parameter]) -> nn.Module:
    """A model with the same module names, with ``pieces`` in place of parameters, also of tied ones, and its own
    buffers on the CPU. It has no forward pass."""
    made: dict[int, nn.Module] = {}

    def of(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        kind = nn.Embedding if isinstance(module, nn.Embedding) and id(module.weight) in pieces else nn.Module
        new: nn.Module = kind.__new__(kind)
        nn.Module.__init__(new)
        made[id(module)] = new
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in pieces:
                new._parameters[name] = pieces[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not refusal(local(buffer)):
                new._buffers[name] = local(buffer).detach().to("cpu", copy=True)
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = of(child)
        return new

    return of(model)
