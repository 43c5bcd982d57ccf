"""Gathers the states of an island's training loops on rank 0; a state that ranks share is gathered once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftopt.common.tree import Tree, flatten
from ftopt.errors import FtoptError, UserError
from ftopt.sync.group import Island

_log = logging.getLogger(__name__)


def states_of_ranks(island: Island, capture: Callable[[], Tree]) -> list[Tree] | Exception:
    """Each rank's captured states, by name; for ranks other than 0 only those that differ from rank 0's. Collective.

    Returns:
        The states, on rank 0; [] on the others. Or an error on rank 0, which the ranks are to raise together: a
        UserError if a rank has values that a checkpoint cannot hold, or different names than rank 0; the error of
        users' code on rank 0, or an FtoptError that describes that of another rank.
    """
    mine: Tree = {}
    error: Exception | None = None
    try:
        mine = capture()
        sent: object = {name: _digest(name, state) for name, state in mine.items()}
    except Exception as raised:
        error, sent = raised, raised if type(raised) is UserError else f"{type(raised).__name__}: {raised}"
        if not island.leads:
            _log.error("rank %d: the loop's state for a checkpoint", island.rank, exc_info=raised)
    with island.whole():
        found = island.gather(sent)
        wrong = error or _wrong(found)
        wanted = island.share(None if wrong is not None else _wanted(found)) if island.leads else island.hear()
        given = [] if wanted is None else island.gather({name: mine[name] for name in wanted[island.rank]})
    if wrong is not None and island.leads:
        return wrong
    return [mine, *given[1:]] if island.leads else []


def _wrong(found: Sequence[Any]) -> Exception | None:
    for rank, sent in enumerate(found):
        if isinstance(sent, UserError):
            return UserError(f"rank {rank}: {sent}")
        if isinstance(sent, str):
            return FtoptError(f"the loop's state of rank {rank} for a checkpoint: {sent}; its log has more")
    for rank, sent in enumerate(found):
        if sent.keys() != found[0].keys():
            return unlike(list(found[0]), list(sent), rank)
    return None


def unlike(first: Sequence[str], names: Sequence[str] | None, rank: int) -> UserError:
    """The error of a rank that includes different objects than rank 0, or has no checkpoints (None)."""
    if names is None:
        return UserError(
            f"rank 0 of this replica has ftopt.Checkpoints, and rank {rank} has none; make it on all ranks, and call "
            "its step() on all of them"
        )
    return UserError(
        f"checkpoints.include() got {', '.join(names) or 'nothing'} on rank {rank}, and "
        f"{', '.join(first) or 'nothing'} on rank 0; include the same names on all ranks, since a state dict may need "
        f"them all; an object that one rank "
        "alone has is another one there, with an empty state dict, on the others"
    )


def _wanted(found: Sequence[Mapping[str, bytes]]) -> list[list[str]]:
    """For each rank, the names of states that differ from rank 0's."""
    return [[name for name, digest in sent.items() if digest != found[0][name]] for sent in found]


def _digest(name: str, state: Any) -> bytes:
    tensors: dict[str, Tensor] = {}
    found = hashlib.sha256(json.dumps(flatten(state, tensors, name)).encode())
    for key, tensor in tensors.items():
        found.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
