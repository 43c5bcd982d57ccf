"""Calls of a method's own code, which may be the user's: its exceptions and invalid results become a `UserError`.

Most of this code runs on the reducer thread, which repeats an attempt after a transport's exception. An error of the
method would only come again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ftopt.common.later import torch
from ftopt.errors import FtoptError, UserError
from ftopt.methods.method import Method
from ftopt.methods.values import ContributionStats, OuterState, ReplicaView, Round

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

MAX_WEIGHT = 1e24
"""The protocol's limit: a trillion tokens times a trillion tokens per step."""


def call(own: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of ``own``, a bound method of the user's class. UserError: it has raised, except for a lack of memory,
    which is not its fault."""
    try:
        return own(*args, **kwargs)
    except (FtoptError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UserError(f"{_name(own)} failed: {type(error).__name__}: {error}; mend it, and start again") from error


def weight(method: Method, stats: ContributionStats) -> float:
    """`Method.weight`. UserError: the result is not a number from 0 to `MAX_WEIGHT`."""
    made = call(method.weight, stats)
    if isinstance(made, bool) or not isinstance(made, int | float) or not 0 <= made <= MAX_WEIGHT:
        raise UserError(
            f"{_name(method.weight)} gives {made!r:.60} for {stats}; must be a number from 0 to {MAX_WEIGHT:g} (an int "
            "or float, float(x) of a tensor); give 0 to a contribution that is to count for nothing"
        )
    return float(made)


def init(method: Method, anchor: Tensor) -> dict[str, Tensor]:
    """`Method.init`. UserError: the result is not a dict of scalars and flat tensors of the anchor's length."""
    made = call(method.init, anchor)
    good = isinstance(made, dict) and all(isinstance(name, str) and _fits(t, anchor) for name, t in made.items())
    if not good:
        raise UserError(
            f"{_name(method.init)} gives {_shown(made)}; must be a dict of the outer state: name -> flat tensor of the "
            f"anchor's {anchor.numel()} elements, or a scalar (no dimensions); use {{}} for none"
        )
    return made


def payload(method: Method, view: ReplicaView, out: Tensor) -> Tensor:
    """`Method.payload`, in ``out``. UserError: the result is not ``out``."""
    made = call(method.payload, view, out)
    if not isinstance(made, torch.Tensor) or made.data_ptr() != out.data_ptr() or made.shape != out.shape:
        raise UserError(
            f"{_name(method.payload)} returns {_shown(made)}; must write what is sent into out, and return out: "
            "torch.sub(view.start, view.params, out=out)"
        )
    return out


def scalars(method: Method, view: ReplicaView) -> tuple[float, ...]:
    """`Method.scalars`. UserError: the result is not a tuple of numbers."""
    made = call(method.scalars, view)
    if not isinstance(made, tuple) or not all(isinstance(x, int | float) for x in made):
        raise UserError(f"{_name(method.scalars)} gives {made!r:.60}; must be a tuple of numbers, equally many always")
    return made


def outer_step(
    method: Method, anchor: Tensor, state: OuterState, mean: Tensor, round: Round
) -> tuple[Tensor, dict[str, Tensor]]:
    """`Method.outer_step`. UserError: the result is not an anchor and outer state like the present ones."""
    made = call(method.outer_step, anchor, state, mean, round)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise UserError(f"{_name(method.outer_step)} returns {_shown(made)}; must be (next anchor, next outer state)")
    got = {"anchor": made[0], **made[1]}
    wrong = [name for name, t in {"anchor": anchor, **state}.items() if not _alike(got.pop(name, None), t)] + [*got]
    if wrong:
        raise UserError(
            f"{_name(method.outer_step)} returned another {', '.join(wrong)} than the present one; must be the next "
            "anchor and a dict of the outer state, with the names, shapes and dtypes that init() gives"
        )
    return made


def like(own: Callable[P, Tensor], present: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
    """The result of ``own``. UserError: it is not a tensor like ``present``."""
    made = call(own, *args, **kwargs)
    if not _alike(made, present):
        raise UserError(
            f"{_name(own)} returns {_shown(made)}; must be a tensor of shape {tuple(present.shape)}, {present.dtype}"
        )
    return made


def _alike(made: object, present: Tensor) -> bool:
    return isinstance(made, torch.Tensor) and (made.shape, made.dtype) == (present.shape, present.dtype)


def _fits(made: object, anchor: Tensor) -> bool:
    return isinstance(made, torch.Tensor) and tuple(made.shape) in ((), tuple(anchor.shape)) and not made.requires_grad


def _name(own: Callable[..., object]) -> str:
    owner, name = getattr(own, "__self__", None), getattr(own, "__name__", repr(own))
    whose = f"method {owner.name}" if isinstance(owner, Method) else type(owner).__name__
    return f"{whose}: {name}()"


def _shown(made: object) -> str:
    if isinstance(made, torch.Tensor):
        return f"a tensor of shape {tuple(made.shape)}, {made.dtype}"
    return f"{type(made).__name__} {made!r:.60}"
