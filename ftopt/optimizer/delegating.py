"""The `torch.optim.Optimizer` interface of a wrapped optimizer, all of it the inner optimizer's.

It is an `Optimizer` in every way that schedulers, GradScaler, checkpointing, deepcopy and trainers test:
groups, state and defaults are the inner optimizer's own objects, looked up each time; hooks fire once; its
state dict is the inner one's with one key more.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from ftopt.errors import UserError
from ftopt.optimizer.core import Core
from ftopt.optimizer.training import Training
from ftopt.step.inner import Inner

STATE_KEY = "ftopt"
_FORMAT = 1


def _of_inner(name: str, doc: str) -> Any:
    def look_up(self: DelegatingOptimizer) -> Any:
        return getattr(self._core.inner, name)

    return property(look_up, lambda self, value: setattr(self._core.inner, name, value), doc=doc)


class DelegatingOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose groups, state, rates, hooks and state dicts are the inner one's."""

    _core: Core

    def _set_up(self, core: Core) -> None:
        _keep_from_compiler()
        self._core = core
        core.schedules.wrapper = weakref.ref(self)
        Optimizer.__setstate__(self, {})  # Sets up the hooks, without the groups that __init__ requires.

    param_groups: list[dict[str, Any]] = _of_inner("param_groups", "The inner optimizer's groups, the very dicts.")
    state: Any = _of_inner("state", "The inner optimizer's state; the fp32 anchor is not in it.")
    defaults: dict[str, Any] = _of_inner("defaults", "The inner optimizer's defaults (of several: the first one's).")

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self._core.inner.optimizers, "undo": self._core.training.last is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_up(Core(Training(Inner(state["inner"]), undo=state["undo"])))

    def __repr__(self) -> str:
        core = self._core
        inner = ", ".join(repr(optimizer) for optimizer in core.inner.optimizers)
        where = "a detached copy" if core.group is None else f"{core.method}, replica={core.group.replica!r}"
        return f"{type(self).__name__}({where}, inner={inner})"

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._step(closure)
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return _step_with(self, self._core.step, closure)
        return self._core.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters.

        In a job with a global batch they become None, also with ``set_to_none=False``: a micro-batch with cleared
        gradients is left out of the mean, rather than counted as one with gradients of 0.
        """
        in_parts = self._core.group is not None and self._core.group.global_batch is not None
        self._core.inner.zero_grad(set_to_none=set_to_none or in_parts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the inner optimizer; only before training starts, and only to a single inner optimizer.

        Raises:
            ftopt.errors.UserError: started already, or several inner optimizers.
        """
        if self._core.standing().started:
            raise UserError(
                "add_param_group() after the start: the replicas have agreed on the parameters; add groups "
                "before the first step, with lr=0 until they shall train"
            )
        if self._core.inner.single is None:
            raise UserError("add_param_group() with several inner optimizers; call it on one of them, before wrap()")
        self._core.inner.single.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict, plus a key ``ftopt`` of plain numbers. Tensors by reference, nothing
        copied.

        The anchor and the outer optimizer's state are not in it: a job's checkpoint holds them.
        """
        return _save_with(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        result, standing = self._core.inner.state_dict(), self._core.standing()
        result[STATE_KEY] = {
            "format": _FORMAT,
            "method": None if self._core.method is None else self._core.method.name,
            "versions": list(standing.versions),
            "inner_step": standing.inner_step,
            "local_steps": standing.local_steps,
            "pending_steps": next(iter(standing.pending_steps), 0),
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the inner optimizer's state. Parameters, anchor and versions are the job's and stay.

        After the start of a method that exchanges gradients (`ftopt.SyncSGD`, `ftopt.PAFT`) nothing is loaded, with a
        warning: its replicas share one inner state.

        Args:
            state_dict: of an `ReplicaOptimizer`, or (with a warning) of a bare inner optimizer.
        """
        _load_with(self, self._load_state_dict, state_dict)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = state_dict.pop(STATE_KEY, None)
        if ours is None:
            warnings.warn(
                f"the state dict has no key {STATE_KEY!r}: it is a bare inner optimizer's, or a checkpointer has "
                "dropped the key; the inner state is loaded",
                stacklevel=4,
            )
        elif self._core.method is not None and ours.get("method") not in (None, self._core.method.name):
            warnings.warn(
                f"the state dict is of method {ours['method']!r}, this job runs {self._core.method.name!r}; "
                "the inner state is loaded",
                stacklevel=4,
            )
        self._core.load_inner(state_dict)


# Runs the wrapper's own hooks as torch does. Hooks for all optimizers fire in the inner ones.


def _step_with(optimizer: Optimizer, take: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    """Calls ``take``, the step, between the step hooks."""
    args: tuple[Any, ...] = (optimizer,) if closure is None else (optimizer, closure)
    kwargs: dict[str, Any] = {}
    for pre_hook in list(optimizer._optimizer_step_pre_hooks.values()):
        replaced = pre_hook(optimizer, args, kwargs)
        if replaced is None:
            continue
        if not isinstance(replaced, tuple) or len(replaced) != 2:
            raise RuntimeError(f"a step pre-hook gives {replaced!r:.60}; must return None or the pair (args, kwargs)")
        args, kwargs = replaced
    result = take(*args[1:], **kwargs)
    for post_hook in list(optimizer._optimizer_step_post_hooks.values()):
        post_hook(optimizer, args, kwargs)
    return result


def _save_with(optimizer: Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict that ``make`` returns, or a hook's replacement."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    made = make()
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = hook(optimizer, made)
        made = made if replaced is None else replaced
    return made


def _load_with(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Gives ``load`` a copy of the state dict, or a hook's replacement."""
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else dict(replaced)
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


@cache
def _keep_from_compiler() -> None:
    """Keeps the step, which talks to other threads, from being compiled. Not done when this file is imported, since it
    imports the compiler, which takes seconds; an inner optimizer has imported it already. Not applied to ``step``
    itself: torch 2.8 compiles the function under a disabled method, without its object."""
    DelegatingOptimizer._step = torch.compiler.disable(DelegatingOptimizer._step)  # type: ignore[method-assign, no-untyped-call]
