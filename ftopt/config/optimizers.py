"""The inner optimizers that a recipe names, with the parameters that each of them trains."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from ftopt.common.later import torch
from ftopt.common.plural import count
from ftopt.config import own_code as own
from ftopt.config.inner_settings import AdamConfig, AdamWConfig, InnerConfig, MuonConfig, SgdConfig, TorchConfig
from ftopt.errors import UserError
from ftopt.methods.fragments import Parameter

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

NamedParameters: TypeAlias = "dict[str, nn.Parameter]"


def inner_optimizers(sections: Sequence[InnerConfig], model: nn.Module) -> list[Optimizer]:
    """One optimizer per section, over the trainable parameters of ``model``. UserError: see `shared_out`; or a class
    does not exist, or refuses its arguments or parameters."""
    named = dict(model.named_parameters())
    shares = shared_out(sections, parameters_of(model))
    return [
        _make(section, _where(sections, index), {name: named[name] for name in names})
        for index, (section, names) in enumerate(zip(sections, shares, strict=True))
    ]


def shared_out(sections: Sequence[InnerConfig], parameters: Sequence[Parameter]) -> list[list[str]]:
    """The names of each section's parameters: those that its ``params`` selects among what earlier sections left.
    UserError: a section finds no parameter, or parameters are left over."""
    left, shares, matrices = list(parameters), [], _matrices(parameters)
    for index, section in enumerate(sections):
        taken = [parameter for parameter in left if _wants(section.params, parameter, matrices)]
        if not taken:
            raise UserError(
                f"{_where(sections, index)}.params={section.params!r}; no parameter is left for it "
                f"({_some(p.name for p in left)}); correct the name, or remove the section"
            )
        shares.append([parameter.name for parameter in taken])
        left = [parameter for parameter in left if parameter not in taken]
    if left:
        raise UserError(
            f"inner leaves {count(len(left), 'parameter')} out: {_some(p.name for p in left)}; "
            "add a section with params: rest at the end"
        )
    return shares


def parameters_of(model: nn.Module) -> list[Parameter]:
    """The trainable parameters, as rules that partition a model see them."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [Parameter(name, tuple(p.shape), id(p) in embeddings) for name, p in named]


def _where(sections: Sequence[InnerConfig], index: int) -> str:
    return f"inner[{index}]" if len(sections) > 1 else "inner"


def _matrices(parameters: Sequence[Parameter]) -> list[Parameter]:
    """All of two dimensions but embeddings and, at the end, a language model's head, which has an embedding's shape."""
    found = [parameter for parameter in parameters if len(parameter.shape) == 2 and not parameter.embedding]
    heads = [parameter.shape for parameter in parameters if parameter.embedding]
    return found[:-1] if found and found[-1].shape in heads else found


def _wants(params: str, parameter: Parameter, matrices: Sequence[Parameter]) -> bool:
    if params == "rest":
        return True
    if params == "matrices":
        return parameter in matrices
    return parameter.name.startswith(f"{params}.") or fnmatch.fnmatchcase(parameter.name, params)


def _make(section: InnerConfig, where: str, taken: NamedParameters) -> Optimizer:
    cls, settings = _class_of(section, where)
    make: Callable[..., Optimizer] = cls
    try:
        return make(_groups(section, taken), lr=section.lr, **settings)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {cls.__name__} for {_some(taken)}: {error}") from error


def _groups(section: InnerConfig, taken: NamedParameters) -> list[dict[str, Any]]:
    """One group with all; with ``decay: weights``, norms and biases in a second group without decay."""
    if section.decay == "all":
        return [{"params": list(taken.values())}]
    weights = [p for p in taken.values() if p.dim() > 1]
    vectors = [p for p in taken.values() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _class_of(section: InnerConfig, where: str) -> tuple[type[Optimizer], Mapping[str, Any]]:
    """The class, and its arguments other than parameters and rate."""
    if isinstance(section, TorchConfig):
        return _imported(section, where), section.args
    if isinstance(section, AdamWConfig):
        cls = torch.optim.Adam if isinstance(section, AdamConfig) else torch.optim.AdamW
        return cls, {"betas": tuple(section.betas), "eps": section.eps, "weight_decay": section.weight_decay}
    shared = {"momentum": section.momentum, "nesterov": section.nesterov, "weight_decay": section.weight_decay}
    if isinstance(section, SgdConfig):
        return torch.optim.SGD, shared
    assert isinstance(section, MuonConfig)
    check_muon(where)
    return torch.optim.Muon, {**shared, "adjust_lr_fn": section.adjust_lr}


def check_muon(where: str) -> None:
    """Raises UserError if this torch has no Muon; does not import it."""
    if tuple(map(int, version("torch").split(".")[:2])) < (2, 9):
        raise UserError(f"{where}.name=muon needs torch 2.9, this is {version('torch')}; use adamw, or a newer torch")


def _imported(section: TorchConfig, where: str) -> type[Optimizer]:
    module, _, name = section.cls.rpartition(".")
    found = own.find(f"{where}.cls", f"{module}:{name}", shown=section.cls)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f"{where}.cls={section.cls!r} is not a torch.optim.Optimizer; use e.g. torch.optim.RMSprop")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UserError(
            f"{where}.cls={section.cls!r} calls for the loss several times a step, which this loop does not"
        )
    return found


def _some(named: Iterable[str], limit: int = 4) -> str:
    names = list(named)
    shown = ", ".join(names[:limit]) or "none"
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
