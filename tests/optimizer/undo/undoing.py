"""Optimizers whose last step is undone: what they held before and after, and the bounds of `undo_step`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

KINDS: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

RULES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {}),
    "sgd, decay": (SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, {"momentum": 0.9}),
    "momentum, decay, dampening": (SGD, {"momentum": 0.8, "weight_decay": 0.1, "dampening": 0.3}),
    "nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    "adam": (Adam, {}),
    "adam, decay": (Adam, {"weight_decay": 0.1, "maximize": True}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "adamw, betas": (AdamW, {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-4, "maximize": True}),
}
SHAPES = ((7, 5), (33,), (), (2, 3, 4), (64,))


def optimizer(
    rule: str, kind: str, *, dtype: torch.dtype = torch.float32, lr: float = 0.05, groups: int = 2, **more: Any
) -> Optimizer:
    """One with parameters of `SHAPES` in several groups of unlike rates."""
    made, settings = RULES[rule]
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    size = -(-len(parameters) // groups)
    parts = [{"params": parameters[i * size : (i + 1) * size], "lr": lr * (i + 1)} for i in range(groups)]
    return made(parts, lr=lr, **{**settings, **more}, **KINDS[kind])  # type: ignore[call-arg]


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All of them, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Optimizer, *, scale: float = 1.0) -> None:
    """New ones by chance."""
    for p in parameters(optimizer):
        p.grad = (torch.randn(p.shape) * scale).to(p.dtype)


@dataclass(frozen=True)
class Held:
    """Copies of parameters and states."""

    parameters: list[Tensor]
    states: list[dict[str, Tensor]]

    @classmethod
    def by(cls, optimizer: Optimizer) -> Held:
        """What an optimizer holds now."""
        kept = parameters(optimizer)
        states = [{k: v for k, v in optimizer.state.get(p, {}).items() if v is not None} for p in kept]
        return cls([p.detach().clone() for p in kept], copy.deepcopy(states))


def assert_undone(optimizer: Optimizer, before: Held, after: Held, *, cycles: int = 1) -> float:
    """What it holds is what it held before the step, within the bounds; the largest error in units of its bound."""
    now, worst = Held.by(optimizer), 0.0
    place = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            allowed = bounds(group, p, before, after, place)
            assert now.states[place].keys() == before.states[place].keys(), place
            if "step" in before.states[place]:
                assert torch.equal(now.states[place]["step"], before.states[place]["step"])
            errors = {"param": now.parameters[place].double() - before.parameters[place].double()}
            for name in before.states[place].keys() - {"step"}:
                errors[name] = now.states[place][name].double() - before.states[place][name].double()
            for name, error in errors.items():
                ratio = float((error.abs() / (cycles * allowed[name] + 1e-300)).max())
                assert ratio <= 1, (place, name, ratio)
                worst = max(worst, ratio)
            place += 1
    return worst


def bounds(group: Mapping[str, Any], p: Tensor, before: Held, after: Held, place: int) -> dict[str, Tensor]:
    """The docstring's, elementwise, plus the least normal number."""
    u, tiny = torch.finfo(p.dtype).eps / 2, torch.finfo(p.dtype).tiny
    assert p.grad is not None
    kept: Any
    old, wd, lr = before.parameters[place].double(), group["weight_decay"], float(group["lr"])
    state = {name: value.double() for name, value in after.states[place].items()}
    decoupled = group.get("decoupled_weight_decay", False)
    d = p.grad.double().abs() + (0 if decoupled else wd) * old.abs()
    kept = (
        1 - lr * wd * (1 + group["momentum"] if group.get("nesterov") else 1) if "eps" not in group or decoupled else 1
    )
    if "betas" in group:
        b1, b2 = group["betas"]
        t = float(state["step"])
        over = (state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
        moved = lr / (1 - b1**t) * state["exp_avg"].abs() / over
        moments = {
            "exp_avg": 8 * u * (state["exp_avg"].abs() + (1 - b1) * d) / b1,
            "exp_avg_sq": 8 * u * (state["exp_avg_sq"] + (1 - b2) * d.square()) / b2,
        }
    elif group["momentum"]:
        b = state["momentum_buffer"].abs()
        moved = lr * (d + group["momentum"] * b) if group["nesterov"] else lr * b
        moments = {"momentum_buffer": 8 * u * (b + (1 - group["dampening"]) * d) / group["momentum"]}
    else:
        moved, moments = lr * d, {}
    bound = {"param": 8 * u * (old.abs() + moved) / kept} | moments
    return {name: value + tiny for name, value in bound.items()}


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether they are equal bit for bit."""
    return all(map(torch.equal, a, b))
