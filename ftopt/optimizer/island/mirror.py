"""The whole model of an island on its rank 0, and the inner optimizers as the outer step there sees them.

On rank 0 the outer step works on a *mirror*: whole tensors on the CPU under the model's own names. Before it looks at
the mirror, the parts of all ranks are brought together there (`Ranks.pull`); after it has changed something, each rank
gets its part back (`Ranks.push`). So everything that replicas exchange, compare and save is what a replica of one
process with this model has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.inner import Inner, device_of
from ftopt.optimizer.island.parts import Parts
from ftopt.optimizer.tensors.buffers import buffers
from ftopt.optimizer.tensors.flat import local, some, trainable, uncompiled
from ftopt.sync.group import Island

_log = logging.getLogger(__name__)

_PARAMS, _GRADS, _INNER, _BUFFERS = "params", "grads", "inner", "buffers"
Kinds = frozenset[str]
NOTHING: Kinds = frozenset()
PARAMS, GRADS, INNER, BUFFERS = (frozenset((kind,)) for kind in (_PARAMS, _GRADS, _INNER, _BUFFERS))


@dataclass(frozen=True)
class _Value:
    """A value of a parameter's inner state: a number, a tensor that lies like its parameter, or another one."""

    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    plain: Any = None


class Ranks:
    """The model and inner optimizers of this rank, and the exchange with rank 0. All ranks do the same in turn.

    Args:
        replica: the island's id, for messages.
    """

    def __init__(self, island: Island, model: nn.Module, inner: Inner, replica: str) -> None:
        self.island, self.model, self.inner = island, model, inner
        self._replica, self._said_apart = replica, False
        self._kept: dict[str, Tensor] = {}
        self._reshard()
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
        self._owners = {
            uncompiled(name): (p, optimizer, group)
            for name, p in self.trained.items()
            for optimizer in inner.optimizers
            for group in optimizer.param_groups
            if any(p is each for each in group["params"])
        }

    def _layout(self) -> object:
        """What trains, and in which groups: by name."""
        names = {id(p): name for name, p in self.trained.items()}
        groups = [
            [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.inner.optimizers
        ]
        return list(names.values()), groups

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers."""
        return buffers(self.model)

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
        self._reshard()
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
            self._tell_apart(self.parts.pull(self.trained, into))
        if _GRADS in kinds:
            grads = self.gradients()
            whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in self.trained.items() if name in grads}
            self.parts.pull(grads, whole)
            if mirror is not None:
                for name, parameter in mirror.trained.items():
                    parameter.grad = whole.get(name)
        if _INNER in kinds:
            self._pull_inner(mirror)
        if _BUFFERS in kinds and mirror is not None:
            for name, buffer in self.buffers().items():
                mirror.buffers[name].copy_(local(buffer))

    def push(self, kinds: Kinds, mirror: Mirror | None) -> None:
        """Gives each rank its part of rank 0's ``mirror``."""
        whole = mirror.whole if mirror is not None else {}
        if _PARAMS in kinds:
            self.parts.push(self.trained, whole)
            self._reshard()
        if _GRADS in kinds:
            self._push_gradients(mirror)
        if _INNER in kinds:
            self._push_inner(mirror)
        if _BUFFERS in kinds:
            for name, buffer in self.buffers().items():
                flat = mirror.buffers[name] if mirror is not None else torch.empty(buffer.shape, dtype=buffer.dtype)
                self._broadcast(flat)
                local(buffer).copy_(flat)

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

    def _pull_inner(self, mirror: Mirror | None) -> None:
        """Inner states are on all ranks under the same keys, since all have taken the same steps."""
        keys = list(dict.fromkeys(key for p, o, _ in self._owners.values() for key in o.state.get(p, {})))
        if mirror is not None:
            mirror.forget_inner()
        for key in keys:
            tensors = dict[str, Tensor]()
            for name, (parameter, optimizer, _) in self._owners.items():
                value = optimizer.state.get(parameter, {}).get(key)
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                    tensors[name] = value
                elif value is not None and mirror is not None:
                    mirror.put_inner(name, key, _alone(value, name, key))
            whole = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()} if mirror else {}
            self._tell_apart(self.parts.pull(tensors, whole))
            for name, tensor in whole.items():
                assert mirror is not None
                mirror.put_inner(name, key, tensor)

    def _push_inner(self, mirror: Mirror | None) -> None:
        if mirror is not None:
            described = mirror.describe_inner()
            self.island.say(described)
        else:
            described = self.island.hear()
        keys = dict.fromkeys(key for values in described.values() for key in values)
        for name, (parameter, optimizer, group) in self._owners.items():
            before, optimizer.state[parameter] = optimizer.state.get(parameter, {}), {}
            for key, value in described.get(name, {}).items():
                optimizer.state[parameter][key] = _made(value, key, before.get(key), parameter, group)
        for key in keys:
            there = {
                name: optimizer.state[parameter][key]
                for name, (parameter, optimizer, _) in self._owners.items()
                if key in described.get(name, {}) and described[name][key].shape
            }
            whole = {name: mirror.inner_of(name)[key] for name in there} if mirror is not None else {}
            self.parts.push(there, whole)

    def _tell_apart(self, names: list[str]) -> None:
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

    def _reshard(self) -> None:
        """FSDP2 may hold gathered parameters, as it does after a forward pass without a backward one: in the place of
        those that train; and when these have been written, they are old."""
        for module in self.model.modules():
            reshard = getattr(module, "reshard", None)
            if reshard is not None and hasattr(module, "unshard"):
                reshard()


def _alone(value: Any, name: str, key: str) -> Any:
    """A value that is no tensor like its parameter, as rank 0 has it."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) or value.numel() != 1:
        raise UserError(
            f"the inner optimizer's state {key!r} of {name} is {tuple(value.shape)}, which is neither a number nor "
            "placed like its parameter; such a state cannot be brought together from several ranks"
        )
    return value.detach().clone()


def _made(value: _Value, key: str, before: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A value of the inner state on this rank; what lies like its parameter is filled afterwards."""
    if value.dtype is None:
        return value.plain
    if value.shape:
        kept = isinstance(before, Tensor) and before.shape == parameter.shape and before.dtype == value.dtype
        return before if kept else torch.zeros_like(parameter, dtype=value.dtype)
    return value.plain.to(device_of(key, value.plain, parameter, group), copy=True)


class Mirror:
    """Rank 0's whole model: the parameters that train, and the buffers.

    Attributes:
        model: a module without a forward pass; names, shapes and dtypes are the model's.
        trained: its parameters, by name; ``whole``: their memory.
        buffers: by name.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in ranks.trained.items()}
        self.trained = {name: nn.Parameter(tensor) for name, tensor in self.whole.items()}
        self.whole = {name: p.detach() for name, p in self.trained.items()}
        self.model = _skeleton(ranks.model, {id(p): self.trained[name] for name, p in ranks.trained.items()})
        self.buffers = buffers(self.model)
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
            values = [value for o in self.optimizers for each in o.state.values() for value in each.values()]
            return [x for v in values for x in (id(v), v._version if isinstance(v, Tensor) else 0)]
        if kind == _BUFFERS:
            return [buffer._version for buffer in self.buffers.values()]
        return [p._version for p in self.trained.values()] if kind == _PARAMS else []

    def forget_inner(self) -> None:
        """Before it is brought together anew."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def put_inner(self, name: str, key: str, value: Any) -> None:
        """A value of the inner state."""
        parameter = self.trained[name]
        self._place[id(parameter)].state[parameter][key] = value

    def inner_of(self, name: str) -> Mapping[str, Any]:
        """The inner state of a parameter."""
        parameter = self.trained[name]
        return dict(self._place[id(parameter)].state.get(parameter, {})) if id(parameter) in self._place else {}

    def describe_inner(self) -> dict[str, dict[str, _Value]]:
        """What the inner state consists of; numbers by value."""
        return {
            name: {key: _described(value, parameter) for key, value in values.items()}
            for name, parameter in self.trained.items()
            if (values := self.inner_of(name))
        }


def _described(value: Any, parameter: Tensor) -> _Value:
    if not isinstance(value, Tensor):
        return _Value(None, plain=value)
    if value.shape == parameter.shape and value.dim():
        return _Value(value.dtype, tuple(value.shape))
    return _Value(value.dtype, plain=value.detach().clone())


def _skeleton(model: nn.Module, mirrored: Mapping[int, nn.Parameter]) -> nn.Module:
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
            if buffer is not None:
                new._buffers[name] = local(buffer).detach().to("cpu", copy=True)
        new._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = of(child)
        return new

    return of(model)
