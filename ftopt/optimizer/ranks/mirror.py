"""The whole model of an island on its rank 0, and the inner optimizers as the outer step there sees them.

On rank 0 the outer step works on a *mirror*: whole tensors on the CPU under the model's own names. Before it looks at
the mirror, the parts of all ranks are brought together there (`RankModel.pull`); after it has changed something, each
rank gets its part back (`RankModel.push`). So everything that replicas exchange, compare and save is what a replica of one
process with this model has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.common.tree import PLAIN, rebuilt, refusal
from ftopt.errors import UserError
from ftopt.optimizer.ranks.parts import Parts
from ftopt.optimizer.ranks.states import InnerStates, States
from ftopt.step.inner import Inner, beside, put_beside
from ftopt.step.tensors.buffers import kept, put
from ftopt.step.tensors.flat import local, places, some, trainable, uncompiled
from ftopt.sync.group import Island

_log = logging.getLogger(__name__)

_PARAMS, _GRADS, _INNER, _BUFFERS = "params", "grads", "inner", "buffers"
Kinds = frozenset[str]
NOTHING: Kinds = frozenset()
PARAMS, GRADS, INNER, BUFFERS = (frozenset((kind,)) for kind in (_PARAMS, _GRADS, _INNER, _BUFFERS))


class RankModel:
    """The model and inner optimizers of this rank, and the exchange with rank 0. All ranks do the same in turn.

    Args:
        replica: the island's id, for messages.

    Attributes:
        states: the inner states.
    """

    def __init__(self, island: Island, model: nn.Module, inner: Inner, replica: str) -> None:
        self.island, self.model, self.inner = island, model, inner
        self._replica, self._said_apart = replica, False
        self._kept: dict[str, Tensor] = {}
        self.reshard()
        self.trained = dict(trainable(model))
        if not self.trained:
            raise UserError("the model has no parameter that trains; nothing to wrap")
        names = island.gather(self._layout())
        wrong = [rank for rank, each in enumerate(names) if each != names[0]]
        if island.leads:
            island.say(wrong)
        elif wrong := island.hear():
            pass
        if wrong:
            raise UserError(
                f"rank {wrong[0]} of replica {replica} trains other parameters than its rank 0, or has them in other "
                "groups; all ranks of an island must have the same model (pipeline stages on ranks of their own are "
                "not supported) and make their optimizers alike"
            )
        self.parts = Parts(island, self.trained)
        names_kept = list(kept(model))
        self._places = dict(zip(names_kept, places(model, names_kept), strict=True))
        owners = {
            uncompiled(name): (p, optimizer, group)
            for name, p in self.trained.items()
            for optimizer in inner.optimizers
            for group in optimizer.param_groups
            if any(p is each for each in group["params"])
        }
        self.states = InnerStates(island, self.parts, owners, replica)

    def _layout(self) -> object:
        """What trains, and in which groups: by name."""
        names = {id(p): name for name, p in self.trained.items()}
        groups = [
            [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.inner.optimizers
        ]
        return list(names.values()), groups

    def gradients(self) -> dict[str, Tensor]:
        """This rank's gradients, of parameters that have one."""
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    def keep_gradients(self) -> None:
        """Keeps the gradients at hand aside, until `put_gradients`."""
        self._kept = self.gradients()
        for parameter in self.trained.values():
            parameter.grad = None

    def put_gradients(self) -> None:
        """Puts them back."""
        for name, parameter in self.trained.items():
            parameter.grad = self._kept.get(name)
        self._kept = {}

    def check_trained(self) -> None:
        """UserError: other parameters train than at the start."""
        self.reshard()
        now = dict(trainable(self.model))
        if new := [name for name, p in now.items() if self.trained.get(name) is not p]:
            raise UserError(
                f"{some(new)} train now, and did not when training started; the replicas have agreed on what trains: "
                "freeze them with requires_grad_(False), and go on; what shall train later must be there at the start"
            )

    # Exchange.

    def pull(self, kinds: Kinds, mirror: Mirror | None) -> None:
        """Brings what is asked for together in rank 0's ``mirror``."""
        into = mirror.whole if mirror is not None else {}
        if _PARAMS in kinds:
            self.tell_apart(self.parts.pull(self.trained, into))
        if _GRADS in kinds:
            grads = self.gradients()
            there = self.island.share(self.island.gather(list(grads)))
            names = set().union(*there)
            whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in self.trained.items() if name in names}
            self.parts.pull(grads, whole, there)
            if mirror is not None:
                for name, parameter in mirror.trained.items():
                    parameter.grad = whole.get(name)
        if _INNER in kinds:
            state, apart = self.states.pull()
            self.tell_apart(apart)
            if mirror is not None:
                mirror.inner = state
                for shadow, optimizer in zip(mirror.optimizers, self.inner.optimizers, strict=True):
                    put_beside(shadow, beside(optimizer.state))
        if _BUFFERS in kinds and mirror is not None:
            put(mirror.model, {name: local(place()) for name, place in self._places.items()})

    def push(self, kinds: Kinds, mirror: Mirror | None) -> None:
        """Gives each rank its part of rank 0's ``mirror``."""
        whole = mirror.whole if mirror is not None else {}
        if _PARAMS in kinds:
            self.parts.push(self.trained, whole)
            self.reshard()
        if _GRADS in kinds:
            self._push_gradients(mirror)
        if _INNER in kinds:
            self.states.push(mirror.inner if mirror is not None else {})
            shadows = mirror.optimizers if mirror is not None else []
            given = self.island.share([beside(shadow.state) for shadow in shadows])
            for optimizer, values in zip(self.inner.optimizers, given, strict=True):
                put_beside(optimizer, values)
        if _BUFFERS in kinds:
            there = kept(mirror.model) if mirror is not None else {}
            put(self.model, {n: self._given(local(place()), there.get(n)) for n, place in self._places.items()})

    def _given(self, buffer: Tensor, whole: Tensor | None) -> Tensor:
        """Rank 0's ``whole`` buffer, on all ranks."""
        if buffer.layout != torch.strided or buffer.dtype not in PLAIN or type(buffer) is not Tensor:
            odd: Tensor = self.island.share(whole)
            return odd
        flat = whole if whole is not None else torch.empty(buffer.shape, dtype=buffer.dtype)
        self._broadcast(flat)
        return flat

    def _broadcast(self, tensor: Tensor) -> None:
        island = self.island
        for rank in range(1, island.size):
            if island.leads:
                island.send(tensor.contiguous(), rank)
            elif island.rank == rank:
                island.receive(tensor, 0)

    def _push_gradients(self, mirror: Mirror | None) -> None:
        there: list[str]
        if mirror is not None:
            there = [name for name, p in mirror.trained.items() if p.grad is not None]
            self.island.say(there)
        else:
            there = self.island.hear()
        for name, parameter in self.trained.items():
            if name not in there:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        whole = {n: p.grad for n, p in mirror.trained.items() if p.grad is not None} if mirror is not None else {}
        self.parts.push(self.gradients(), whole)

    def tell_apart(self, names: list[str]) -> None:
        """Warns, once, of tensors that ranks should hold alike and do not."""
        if names and not self._said_apart:
            self._said_apart = True
            _log.warning(
                "replica %s: ranks that hold the same tensors do not hold them alike: %s; rank 0's are taken, and "
                "given "
                "to the others with the next outer step; look for what differs between the ranks (seeds, dropout of "
                "parameters that DDP ignores, memory)",
                self._replica,
                some(names),
            )

    def reshard(self) -> None:
        """FSDP2 may hold gathered parameters, as it does after a forward pass without a backward one: in the place of
        those that train; and when these have been written, they are old."""
        for module in self.model.modules():
            reshard = getattr(module, "reshard", None)
            if reshard is not None and hasattr(module, "unshard"):
                reshard()


class Mirror:
    """Rank 0's whole model: the parameters that train, and the buffers.

    Attributes:
        model: a module without a forward pass; names, shapes and dtypes are the model's.
        trained: its parameters, by name; ``whole``: their memory.
    """

    def __init__(self, ranks: RankModel) -> None:
        self._ranks = ranks
        self.whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in ranks.trained.items()}
        self.trained = {name: nn.Parameter(tensor) for name, tensor in self.whole.items()}
        self.whole = {name: p.detach() for name, p in self.trained.items()}
        self.model = skeleton(ranks.model, {id(p): self.trained[name] for name, p in ranks.trained.items()})
        self.optimizers = [self._shadow(optimizer) for optimizer in ranks.inner.optimizers]
        self._place = {
            id(p): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    def _shadow(self, optimizer: Optimizer) -> Optimizer:
        """An optimizer of the same class name, with the same groups of the mirror's parameters. It takes no step."""
        names = {id(p): name for name, p in self._ranks.trained.items()}
        groups = [
            {**group, "params": [self.trained[names[id(p)]] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        kind = type(type(optimizer).__name__, (Optimizer,), {})
        made: Optimizer = kind(
            [{"params": group["params"]} for group in groups if group["params"]] or [{"params": []}],
            dict(optimizer.defaults),
        )
        made.param_groups = groups
        return made

    # What changes.

    def state(self, kind: str) -> list[int]:
        """Changes whenever something of this kind is written."""
        if kind == _INNER:
            values: list[Any] = []
            for optimizer in self.optimizers:
                rebuilt(dict(optimizer.state), lambda value, where: values.append(value), leaves=object)
            return [x for v in values for x in (id(v), v._version if isinstance(v, Tensor) else 0)]
        if kind == _BUFFERS:
            there = (buffer for module in self.model.modules() for buffer in module._buffers.values())
            return [x for buffer in there if buffer is not None for x in (id(buffer), buffer._version)]
        return [p._version for p in self.trained.values()] if kind == _PARAMS else []

    @property
    def inner(self) -> States:
        """The inner state, by parameter."""
        found = {}
        for name, parameter in self.trained.items():
            if id(parameter) in self._place and (values := self._place[id(parameter)].state.get(parameter)):
                found[name] = dict(values)
        return found

    @inner.setter
    def inner(self, state: States) -> None:
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for name, values in state.items():
            if values:
                parameter = self.trained[name]
                self._place[id(parameter)].state[parameter] = dict(values)


def skeleton(model: nn.Module, mirrored: Mapping[int, nn.Parameter]) -> nn.Module:
    """Modules of the same names, with the mirrored parameters, also tied ones, and buffers of their own."""
    made: dict[int, nn.Module] = {}

    def of(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        kind = nn.Embedding if isinstance(module, nn.Embedding) and id(module.weight) in mirrored else nn.Module
        new: nn.Module = kind.__new__(kind)
        nn.Module.__init__(new)
        made[id(module)] = new
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in mirrored:
                new._parameters[name] = mirrored[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and not refusal(local(buffer)):
                new._buffers[name] = local(buffer).detach().to("cpu", copy=True)
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = of(child)
        return new

    return of(model)
