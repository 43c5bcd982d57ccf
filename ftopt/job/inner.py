"""The inner optimizers that a recipe names, with the parameters that each of them trains."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ftopt.config import own
from ftopt.config.inner import AdamConfig, AdamWConfig, InnerConfig, MuonConfig, SgdConfig, TorchConfig
from ftopt.errors import UserError
from ftopt.plural import count

NamedParameters = dict[str, nn.Parameter]


def inner_optimizers(sections: Sequence[InnerConfig], model: nn.Module) -> list[Optimizer]:
    """One optimizer a section, over the parameters of ``model`` that train.

    A section takes what its ``params`` says of what the sections before it have left.

    Raises:
        UserError: a section finds no parameter, parameters are left over, or a class is not there or does not take its
            arguments or parameters.
    """
    left: NamedParameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    optimizers = []
    for index, section in enumerate(sections):
        where = f"inner[{index}]" if len(sections) > 1 else "inner"
        taken = {name: p for name, p in left.items() if _wants(section.params, name, p, id(p) in embeddings)}
        if not taken:
            raise UserError(
                f"{where}.params={section.params!r}; no parameter is left for it ({_some(left)}); correct the name, or "
                "remove the section"
            )
        optimizers.append(_make(section, where, taken))
        left = {name: p for name, p in left.items() if name not in taken}
    if left:
        raise UserError(
            f"inner leaves {count(len(left), 'parameter')} out: {_some(left)}; "
            "add a section with params: rest at the end"
        )
    return optimizers


def _wants(params: str, name: str, parameter: nn.Parameter, embedding: bool) -> bool:
    if params == "rest":
        return True
    if params == "matrices":
        return parameter.dim() == 2 and not embedding
    return name.startswith(f"{params}.") or fnmatch.fnmatchcase(name, params)


def _make(section: InnerConfig, where: str, taken: NamedParameters) -> Optimizer:
    cls, settings = _class_of(section, where)
    make: Callable[..., Optimizer] = cls
    try:
        return make(_groups(section, taken), lr=section.lr, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {cls.__name__} for {_some(taken)}: {error}") from error


def _groups(section: InnerConfig, taken: NamedParameters) -> list[dict[str, Any]]:
    """All in one group; with ``decay: weights`` norms and biases in one of their own, without decay."""
    if section.decay == "all":
        return [{"params": list(taken.values())}]
    weights = [p for p in taken.values() if p.dim() > 1]
    vectors = [p for p in taken.values() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _class_of(section: InnerConfig, where: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
    """The class, and its arguments besides parameters and rate."""
    if isinstance(section, TorchConfig):
        return _imported(section, where), section.args
    if isinstance(section, AdamWConfig):
        cls = torch.optim.Adam if isinstance(section, AdamConfig) else torch.optim.AdamW
        return cls, {"betas": tuple(section.betas), "eps": section.eps, "weight_decay": section.weight_decay}
    shared = {"momentum": section.momentum, "nesterov": section.nesterov, "weight_decay": section.weight_decay}
    if isinstance(section, SgdConfig):
        return torch.optim.SGD, shared
    assert isinstance(section, MuonConfig)
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        raise UserError(f"{where}.name=muon needs torch 2.9, this is {torch.__version__}; use adamw, or a newer torch")
    return muon, {**shared, "ns_steps": section.ns_steps, "adjust_lr_fn": section.adjust_lr}


def _imported(section: TorchConfig, where: str) -> type[Optimizer]:
    module, _, name = section.cls.rpartition(".")
    found = own.find(f"{where}.cls", f"{module}:{name}", shown=section.cls)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise UserError(f"{where}.cls={section.cls!r} is not a torch.optim.Optimizer; use e.g. torch.optim.RMSprop")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{where}.cls={section.cls!r} calls for the loss several times a step, which this loop does not"
        )
    return found


def _some(named: NamedParameters, limit: int = 4) -> str:
    names = list(named)
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
