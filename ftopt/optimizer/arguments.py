"""Checks of the arguments of `ftopt.wrap`, before anything is made from them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from ftopt import methods
from ftopt.errors import UserError, check_bool
from ftopt.methods import Method

if TYPE_CHECKING:
    from ftopt.sync.group import ReplicaGroup

_METHODS: tuple[type[Method], ...] = (
    methods.DiLoCo, methods.SparseLoCo, methods.StreamingDiLoCo, methods.DecoupledDiLoCo, methods.LocalSGD,
    methods.SlowMo, methods.SyncSGD, methods.PAFT,
)  # fmt: skip
CALL = "ftopt.wrap(optimizer, model, ftopt.DiLoCo(sync_every=500), group=ftopt.connect(url))"


def check_inner(inner: Optimizer | Sequence[Optimizer], model: nn.Module, wrapped: type[Optimizer]) -> list[Optimizer]:
    """The inner optimizers as a list. UserError: they are not optimizers, or are ``wrapped`` already."""
    if isinstance(inner, nn.Module) and isinstance(model, Optimizer):
        raise UserError(f"inner is a {type(inner).__name__} and model a {type(model).__name__}; swap them: {CALL}")
    several = isinstance(inner, Iterable) and not isinstance(inner, nn.Module)
    optimizers: list[Optimizer] = list(inner) if several else [inner]  # type: ignore[arg-type, list-item]
    if not optimizers:
        raise UserError("inner is an empty list; give at least one torch.optim.Optimizer")
    for optimizer in optimizers:
        if isinstance(optimizer, wrapped):
            raise UserError("inner is wrapped already; wrap the inner optimizer once")
        if not isinstance(optimizer, Optimizer):
            raise UserError(
                f"inner is a {_kind(optimizer)}; must be a torch.optim.Optimizer or a list of them, as in {CALL}"
            )
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise UserError("inner names an optimizer twice, which would then step twice; name each once")
    return optimizers


def check_rest(
    model: object, method: object, group: object, state_dir: object, undo: object, leave_on_signals: object
) -> None:
    """Raises UserError if an argument has the wrong type."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {_kind(model)}; must be the torch.nn.Module that inner trains, as in {CALL}")
    if not isinstance(method, Method):
        raise UserError(f"method={method!r:.80}; must be a method of ftopt; {_meant(method)}")
    if not isinstance(getattr(group, "replica", None), str):
        raise UserError(
            f"group={group!r:.80}; must be one group; use {_connected()}, ftopt.solo(), or one of ftopt.local_groups(n)"
        )
    if state_dir is not None and not isinstance(state_dir, str | os.PathLike):
        raise UserError(f"state_dir={state_dir!r:.80}; must be the path of a folder on a local disk, or None for RAM")
    check_bool("undo", undo)
    check_bool("leave_on_signals", leave_on_signals)
    if undo and method.gradients is not None:
        raise UserError(
            f"wrap(undo=True) with method {method.name}: its replicas take each inner step together, and one alone "
            "cannot undo it; leave undo out, or use a method that exchanges parameters, as ftopt.LocalSGD"
        )


def _connected() -> str:
    """The call that gives this process its group; a launched process has the coordinator's address in its
    environment."""
    return "ftopt.connect()" if os.environ.get("FTOPT_COORDINATOR") else "ftopt.connect(url)"


def check_dense(model: nn.Module, method: Method) -> None:
    """Raises UserError if a module makes sparse gradients and ``method`` exchanges gradients. (A gradient that is
    sparse for another reason is refused at the step.)"""
    if method.gradients is None:
        return
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{name or 'the model'} is {type(module).__name__}(sparse=True), and {method.name} exchanges "
                "gradients, all of them and as dense ones; use sparse=False, or a method that exchanges parameters, as "
                "ftopt.LocalSGD"
            )


def check_whole_tensors(model: nn.Module) -> None:
    """Raises UserError if a parameter is sharded over several ranks but this process is a replica by itself: its part
    of the model would be averaged with different parts."""
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.size() > 1:
            raise UserError(
                f"{name} is a DTensor on a mesh of {mesh.size()} ranks, and the group is of this process alone; the "
                "ranks that share a model are one replica: on each of them, ftopt.connect(url, replica, mesh=mesh), "
                "with the same id"
            )


def check_for_island(group: ReplicaGroup, optimizers: Sequence[Optimizer], undo: bool) -> None:
    """Raises UserError for features that a replica of several ranks does not have."""
    for optimizer in optimizers:
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            raise UserError(
                "inner is a ZeroRedundancyOptimizer, which keeps the inner state where it can be neither saved nor "
                "averaged; use the optimizer that it wraps, with FSDP2 (fully_shard) to spread its state over the ranks"
            )
    if undo:
        raise UserError("wrap(undo=True) in a replica of several ranks is not supported; leave undo out")
    island = group.island
    if island is not None and island.leads and group.policy.recover == "replay":
        raise UserError(
            "FaultPolicy(recover='replay') with replicas of several ranks is not supported; use recover='drop'"
        )


def _meant(method: object) -> str:
    if isinstance(method, type) and issubclass(method, Method):
        return f"that is the class: use {method.__name__}(...) with its settings, as in ftopt.DiLoCo(sync_every=500)"
    if isinstance(method, str):
        names = {word: kind for kind in _METHODS for word in (kind.name, kind.__name__.lower())}
        near = difflib.get_close_matches(method.lower(), names, n=1)
        return f"use ftopt.{names[near[0]].__name__ if near else 'DiLoCo'}(sync_every=500)"
    return "use ftopt.DiLoCo(sync_every=500)"


def _kind(given: object) -> str:
    return f"class ({given.__name__})" if isinstance(given, type) else type(given).__name__
