"""Any elementwise `torch.optim` class as outer optimizer.

torch's own arithmetic gives different bits on different machines, so one member of a quorum computes each element, and
the results are gathered (`Execution.sharded`). The class must therefore treat each element independently, and all of
its state must be tensors and numbers that can be transferred. Making the rule tests both.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ftopt.common.later import torch
from ftopt.errors import Settings, UserError
from ftopt.methods.outer_optimizers import (
    SGD,
    ConstantRate,
    OuterOptimizer,
    Schedule,
    check_schedule,
    count,
    counted,
)
from ftopt.methods.values import Execution

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

_STEP = "steps_taken"
"""Outer steps taken; the class sets up its own state in the first."""


@dataclass(frozen=True, kw_only=True)
class Torch(Settings):
    """A `torch.optim` class on the outer gradient, on a flat fp32 parameter.

    The result is the class's own, up to the rounding of the machine that computes an element; all members of a quorum
    get the same bits. The class's state is part of the outer state, so newcomers get it.

    Args:
        cls: the path of the class, ``package.module.Class``, e.g. ``torch.optim.RMSprop``; or the class, which is then
            named by its path.
        args: its keyword arguments, e.g. ``{"lr": 0.1, "alpha": 0.9}``. Default none: the class's defaults, whose rates
            are meant for gradients and are small for displacements.
        schedule: of the rate, over outer steps: `ConstantRate` (default, no warm-up) or `CosineRate`.

    Raises:
        UserError: there is no such class, it does not take the arguments, or it cannot be computed on shares: it
            needs a closure (LBFGS) or matrices (Muon), looks at the whole tensor (Adafactor), or keeps state that
            cannot be transferred.
    """

    execution: ClassVar[Execution] = Execution(sharded=True)

    cls: str = "torch.optim.RMSprop"
    args: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=ConstantRate)

    def __post_init__(self) -> None:
        if isinstance(self.cls, type):
            short = getattr(torch.optim, self.cls.__name__, None) is self.cls
            module = "torch.optim" if short else self.cls.__module__
            object.__setattr__(self, "cls", f"{module}.{self.cls.__qualname__}")
        if not isinstance(self.cls, str) or not isinstance(self.args, dict):
            raise UserError(f"outer.cls={self.cls!r} with args={self.args!r}; must be package.module.Class and a dict")
        check_schedule(self.schedule)
        object.__setattr__(self, "args", {name: self.args[name] for name in sorted(self.args)})
        self._kinds()

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Zeros; the class sets up its own state at the first step."""
        state = {name: torch.zeros_like(anchor) for name, kind in self._kinds().items() if kind is None}
        scalars = {name: counted(0, anchor) for name, kind in self._kinds().items() if kind is not None}
        return {_STEP: counted(0, anchor), **scalars, **state}

    def step(self, anchor: Tensor, state: Mapping[str, Tensor], gradient: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One step of the class; all results are in fresh memory."""
        t, kinds = count(state, _STEP), self._kinds()
        theta = anchor.clone()
        theta.grad = gradient
        optimizer = _make(self.cls, self.args, theta)
        if t > 1:
            held = {name: _restored(state[name], kind) for name, kind in kinds.items()}
            optimizer.load_state_dict({"state": {0: held}, "param_groups": optimizer.state_dict()["param_groups"]})
        if self.schedule.moves:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.schedule.factor(t)
        step_without_hooks(optimizer)
        made = optimizer.state[theta]
        new = {name: made[name] if kind is None else counted(made[name], anchor) for name, kind in kinds.items()}
        return theta.detach(), {_STEP: counted(t, anchor), **new}

    def _kinds(self) -> Mapping[str, type | torch.dtype | None]:
        """Name -> None for state of the parameter's length, else the type of the number."""
        try:
            return _try_out(self.cls, json.dumps(self.args))
        except TypeError as error:
            raise UserError(f"outer.args={self.args!r}; must be numbers, strings and lists: {error}") from None


def step_without_hooks(optimizer: Optimizer) -> None:
    """Takes a step without the hooks that the user has registered for all optimizers."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _restored(tensor: Tensor, kind: type | torch.dtype | None) -> Any:
    """A copy, which the class may update in place; the committed state must not change."""
    if kind is None:
        return tensor.clone()
    return torch.tensor(float(tensor), dtype=kind) if isinstance(kind, torch.dtype) else kind(float(tensor))


def _make(path: str, args: Mapping[str, Any], theta: Tensor) -> Optimizer:
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        raise UserError(f"outer.cls={path!r}; there is no such class; e.g. torch.optim.RMSprop") from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise UserError(f"outer.cls={path!r}; is no torch.optim.Optimizer; e.g. torch.optim.RMSprop")
    try:
        optimizer: Optimizer = cls([theta], **args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"outer.args={dict(args)!r} for {path} on a flat tensor: {error}; give what the class takes, or another one"
        ) from None
    return optimizer


@functools.lru_cache
def _try_out(path: str, args: str) -> Mapping[str, type | torch.dtype | None]:
    """The state of one parameter, by name; see `Torch._kinds`. Raises UserError as `Torch` does."""
    whole = torch.linspace(-1.0, 1.0, 8)
    scale = torch.tensor([1e-3] * 4 + [1e2] * 4)
    # A class that looks at the whole tensor moves one half differently if the other is far larger, or missing.
    gradients = [scale * torch.linspace(1.0 - t, 2.0, 8) for t in range(3)]
    together, state = _run(path, args, whole, gradients)
    halves = [_run(path, args, whole[part], [g[part] for g in gradients])[0] for part in (slice(4), slice(4, 8))]
    if not torch.allclose(together, torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise _refusal(path, "looks at the whole tensor, or is random: what it does to an element depends on others")
    return state


def _run(
    path: str, args: str, start: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, Mapping[str, type | torch.dtype | None]]:
    """Takes a few steps from ``start``; returns the result and the kinds of the class's state."""
    theta = start.clone()
    optimizer = _make(path, json.loads(args), theta)
    groups = _groups(optimizer)
    names: set[str] | None = None
    for gradient in gradients:
        theta.grad = gradient.clone()
        try:
            step_without_hooks(optimizer)
        except Exception as error:
            raise _refusal(path, f"its step() on a flat tensor says: {error}") from None
        names = set(optimizer.state[theta]) if names is None else names
    state = optimizer.state[theta]
    if _groups(optimizer) != groups:
        raise _refusal(path, "keeps state in its parameter groups")
    if set(state) != names:
        raise _refusal(path, "makes state after its first step")
    kinds = {name: _kind(path, name, value, theta) for name, value in state.items() if value is not None}
    return theta.detach(), kinds


def _kind(path: str, name: str, value: object, theta: Tensor) -> type | torch.dtype | None:
    if isinstance(value, torch.Tensor):
        if value.shape == theta.shape and value.dtype == torch.float32:
            return None
        if value.dim() == 0:
            return value.dtype
    elif isinstance(value, int | float):
        return type(value)
    raise _refusal(path, f"its state {name!r} is neither an fp32 tensor like the parameter nor a number")


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _refusal(path: str, why: str) -> UserError:
    return UserError(
        f"outer.cls={path!r} cannot be computed on shares: {why}; use an elementwise class, e.g. torch.optim.RMSprop"
    )


def as_rule(outer: object) -> OuterOptimizer:
    """The outer optimizer that a user means: a rule itself, or a class of torch with its arguments bound.

    ``functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)`` becomes `SGD`; any other class, or SGD
    with other arguments, `Torch`.

    Raises:
        UserError: it is neither.
    """
    if isinstance(outer, functools.partial) and isinstance(outer.func, type) and not outer.args:
        if issubclass(outer.func, torch.optim.Optimizer) and "lr" in outer.keywords:
            return _of_torch(outer.func, outer.keywords)
    elif isinstance(outer, str):
        raise UserError(
            f"outer={outer!r}; must be auto, paper, sgd, adam, or an outer optimizer: in Python such as "
            "ftopt.outer.SGD(lr=1), in a recipe a section such as {name: sgd, lr: 1}"
        )
    elif not isinstance(outer, type) and all(callable(getattr(outer, name, None)) for name in ("init", "step")):
        return cast("OuterOptimizer", outer)
    kind = outer if isinstance(outer, type) else outer.func if isinstance(outer, functools.partial) else type(outer)
    name = getattr(kind, "__name__", str(kind))
    shown = f"the class {name}" if outer is kind else f"of type {type(outer).__name__}"
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise UserError(
            f"outer is {shown}; must be an outer optimizer, an instance; use ftopt.outer.SGD(lr=0.7, momentum=0.9, "
            "nesterov=True), or functools.partial(torch.optim.SGD, lr=0.7)"
        )
    where = "torch.optim" if kind.__module__.startswith("torch.optim") else kind.__module__
    settings = "lr=0.7, momentum=0.9, nesterov=True" if kind.__name__ == "SGD" else "lr=0.3"
    raise UserError(
        f"outer is {shown}; an outer optimizer of torch is given by its class and its arguments, with the rate among "
        f"them: functools.partial({where}.{name}, {settings})"
    )


def _of_torch(kind: type, arguments: Mapping[str, Any]) -> OuterOptimizer:
    """The rule for a class of torch. Its speed-ups (``foreach``, ``fused``, ...) mean nothing here."""
    given = {name: value for name, value in arguments.items() if name not in ("foreach", "fused", "capturable")}
    if kind is torch.optim.SGD and not given.keys() - {"lr", "momentum", "nesterov"}:
        return SGD(**given)
    where = "torch.optim" if getattr(torch.optim, kind.__name__, None) is kind else kind.__module__
    return Torch(cls=f"{where}.{kind.__qualname__}", args=given)
