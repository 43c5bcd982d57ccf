"""An outer step whose bits depend on the machine: each element is computed by one member, then gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from ftopt.methods import Method, OuterState, Round, own_code
from ftopt.sync.group import Collective


def outer_step(
    method: Method, anchor: Tensor, state: OuterState, gradient: Tensor, round: Round, collective: Collective
) -> tuple[Tensor, dict[str, Tensor]]:
    """`Method.outer_step`, with the same bits on all members, also of a method that is computed `sharded`.

    The shares are gathered as sums of tensors that are zero elsewhere: exact, and it needs nothing else of a transport.
    It moves twice what a gather would, ``2 (n-1)/n`` of the anchor and of each tensor of the outer state.
    ConnectionError, TimeoutError, InterruptedError: as ``collective`` raises them.
    """
    if not method.execution.sharded or collective.size == 1:
        return own_code.outer_step(method, anchor, state, gradient, round)
    rank, size, length = collective.rank, collective.size, anchor.numel()
    where = slice(-(-length * rank // size), -(-length * (rank + 1) // size))  # rounded up: rank 0's is never empty
    own = {name: t[where] if t.dim() else t for name, t in state.items()}
    made_anchor, made = own_code.outer_step(method, anchor[where], own, gradient[where], round)

    def gathered(part: Tensor, like: Tensor) -> Tensor:
        out = torch.zeros_like(like)
        if like.dim():
            out[where] = part
        elif rank == 0:
            out.copy_(part)
        collective.all_reduce_(out.view(-1))
        return out

    return gathered(made_anchor, anchor), {name: gathered(made[name], t) for name, t in sorted(state.items())}
