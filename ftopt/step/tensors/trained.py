"""The parameters that a job trains, as the replicas agreed on them at the start, beside those that train here now.

What trains here and not in the job would be another parameter on each replica, and in no anchor, digest or checkpoint.
A parameter of the job that no longer trains stays in it.
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
    """Made when training starts. Training thread.

    Attributes:
        refused: why nothing here may train any more. Read on any thread.
    """

    def __init__(self, inner: Inner, model: nn.Module) -> None:
        self.refused: FtoptError | None = None
        self._model, self._inner = model, inner
        self._agreed = {id(p): (name, p) for name, p in trainable(model)}
        self._note()

    def refuse(self, error: FtoptError) -> None:
        """From now on each check raises ``error``."""
        self.refused = error

    def check_inner(self) -> None:
        """Before an inner step: what the inner optimizers are about to train. A few lookups, unless their groups have
        changed. UserError: as `check`. What `refuse` was given."""
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
        """Before a proposal: all of the model and of the inner optimizers.

        Raises:
            UserError: something trains that the job does not, or what the job trains is not in the model any more.
            Nothing has changed: when that is put right, training goes on.
            FtoptError: what `refuse` was given.
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
    """What the model holds. A quarter of the time that ``model.parameters()`` takes."""
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
