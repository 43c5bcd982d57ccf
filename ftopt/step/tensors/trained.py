"""Compares the parameters that train here now with those that the replicas agreed on at the start.

A parameter that trains here but not in the job would differ between replicas, and be in no anchor, digest or
checkpoint. A parameter of the job that no longer trains stays in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ftopt.errors import FtoptError, UserError
from ftopt.step.inner import Inner
from ftopt.step.tensors.flat import some, trainable


class Trained:
    """The check, made when training starts. Training thread.

    Attributes:
        refused: the reason why nothing may train here any more. Read on any thread.
    """

    def __init__(self, inner: Inner, model: nn.Module) -> None:
        self.refused: FtoptError | None = None
        self._model, self._inner = model, inner
        self._agreed = {id(p): (name, p) for name, p in trainable(model)}
        self._note()

    def refuse(self, error: FtoptError) -> None:
        """Makes each later check raise ``error``."""
        self.refused = error

    def check_inner(self) -> None:
        """Checks, before an inner step, the parameters that the inner optimizers are about to train. A few lookups,
        unless their groups have changed. UserError: as `check`. Also raises the error of `refuse`."""
        if self.refused is not None:
            raise self.refused
        for optimizer, seen in self._groups:
            groups = optimizer.param_groups
            if len(groups) != len(seen):
                return self._check()
            for group, (parameters, length) in zip(groups, seen, strict=True):
                if group["params"] is not parameters or len(parameters) != length:
                    return self._check()
        for parameter in self._waiting:
            if parameter.requires_grad:
                return self._check()
        return None

    def check(self) -> None:
        """Checks, before a proposal, the whole model and the inner optimizers.

        Raises:
            UserError: a parameter trains that the job does not train, or a parameter of the job is no longer in the
                model. Nothing has changed; once this is corrected, training goes on.
            FtoptError: the error of `refuse`.
        """
        if self.refused is not None:
            raise self.refused
        if self._in_inner() != self._seen_in_inner or _in(self._model) != self._seen_in_model:
            self._check()

    def _check(self) -> None:
        there = {id(p) for p in self._model.parameters()}
        named = dict(trainable(self._model))
        new = [name for name, p in named.items() if id(p) not in self._agreed]
        gone = [name for name, p in self._agreed.values() if p.requires_grad and id(p) not in there]
        in_inner = [p for group in self._inner.param_groups for p in group["params"] if p.requires_grad]
        held = {id(p) for p in in_inner}
        left_out = [name for name, p in named.items() if id(p) in self._agreed and id(p) not in held]
        strangers = len(held - there - self._agreed.keys())
        found = []
        if new:
            found.append(f"{some(new)} (unfrozen, or put into the model, since then)")
        if gone:
            found.append(f"{some(gone)} (not in the model any more)")
        if left_out:
            found.append(f"{some(left_out)} (in no inner optimizer any more)")
        if strangers:
            found.append(f"{strangers} in the inner optimizer that are not in the model")
        if found:
            raise UserError(
                "the parameters that train are not those that the replicas agreed on when training started: "
                f"{'; '.join(found)}; replicas would drift apart there; nothing is lost: freeze them with "
                "requires_grad_(False), or put back what was there, and go on; or save a checkpoint of the job and "
                "start a new one from its export; what shall train later must be there at the start: freeze it after "
                "`with optimizer:`, or give it lr=0"
            )
        self._note()

    def _note(self) -> None:
        self._groups: list[tuple[Optimizer, list[tuple[list[nn.Parameter], int]]]] = [
            (optimizer, [(group["params"], len(group["params"])) for group in optimizer.param_groups])
            for optimizer in self._inner.optimizers
        ]
        every = [p for group in self._inner.param_groups for p in group["params"]]
        self._waiting = [p for p in every if id(p) not in self._agreed and not p.requires_grad]
        self._seen_in_inner, self._seen_in_model = self._in_inner(), _in(self._model)

    def _in_inner(self) -> list[tuple[int, bool]]:
        return _seen([p for group in self._inner.param_groups for p in group["params"]])


def _in(model: nn.Module) -> list[tuple[int, bool]]:
    """The model's parameters, in a quarter of the time of ``model.parameters()``."""
    found: list[Any] = []
    _walk(model, found)
    return _seen(found)


def _walk(module: nn.Module, found: list[Any]) -> None:
    found += module._parameters.values()
    for child in module._modules.values():
        if child is not None:
            _walk(child, found)


def _seen(parameters: Sequence[nn.Parameter | None]) -> list[tuple[int, bool]]:
    return [(id(p), p.requires_grad) for p in parameters if p is not None]
