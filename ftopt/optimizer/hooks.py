"""The wrapper's own hooks, as torch runs those of its optimizers. Hooks for all optimizers fire in the inner ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def step_with(optimizer: Optimizer, take: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
    """``take``, the step, between the hooks of steps."""
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


def save_with(optimizer: Optimizer, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The state dict that ``make`` makes, or what a hook puts in its place."""
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    made = make()
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = hook(optimizer, made)
        made = made if replaced is None else replaced
    return made


def load_with(optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Gives ``load`` a copy of the state dict, or what a hook puts in its place."""
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = pre_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else dict(replaced)
    load(state_dict)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
