"""Buffers that training changes, such as BatchNorm's statistics: which a job averages, and how.

They lie behind the parameters in a fragment's flat tensors (`FlatView`), so that anchor, digests, joins and rebases
hold them like parameters. The method sees the parameters alone: buffers are averaged as `LocalSGD` averages, whatever
the method, and have no outer optimizer. No codec sees them either, they travel in fp32: a variance that one has rounded
may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ftopt.errors import UserError
from ftopt.methods import LocalSGD, Method, ReplicaView, Round
from ftopt.optimizer.tensors.flat import uncompiled

_PLAIN = LocalSGD(sync_every=1)


def averaged(model: nn.Module) -> list[str]:
    """Names of the buffers that can be averaged: floating-point ones that the model's state dict holds.

    Counters (BatchNorm's ``num_batches_tracked``) and buffers registered with ``persistent=False`` stay local.

    Raises:
        UserError: one holds NaN or Inf (a mask, say).
    """
    kept = model.state_dict().keys()
    found = [(name, b) for name, b in model.named_buffers() if name in kept and b.is_floating_point()]
    for name, buffer in found:
        if not bool(torch.isfinite(buffer).all()):
            raise UserError(
                f"method.buffers=mean, but buffer {name} holds NaN or Inf, which has no mean; register it with "
                "persistent=False if training does not change it, or use buffers=local"
            )
    return [uncompiled(name) for name, _ in found]


def shared_out(names: Sequence[str], fragments: Sequence[Sequence[str]]) -> list[list[str]]:
    """The buffers of each fragment: those of the modules whose parameters it holds.

    A module without parameters of its own (``affine=False``, frozen) counts to the nearest one around it that has some,
    and a module whose parameters lie in several fragments to the first of these.

    Args:
        names: of the buffers.
        fragments: names of the parameters that train, fragment by fragment.

    Raises:
        UserError: there are no fragments: the replicas exchange gradients and nothing else.
    """
    if names and not fragments:
        raise UserError(
            "method.buffers=mean, but this method exchanges gradients alone and has no round of parameters, which "
            "buffers could go with; use buffers=local"
        )
    home = {parameter: f for f, parameters in enumerate(fragments) for parameter in parameters}
    shared: list[list[str]] = [[] for _ in fragments]
    for name in names:
        around = name
        found: list[str] = []
        while not found:
            around = around.rpartition(".")[0]
            found = [parameter for parameter in home if not around or parameter.startswith(f"{around}.")]
        shared[home[found[0]]].append(name)
    return shared


def payload_with_buffers(method: Method, view: ReplicaView, out: Tensor, *, trained: int) -> Tensor:
    """`Method.payload` for the first ``trained`` elements, what `LocalSGD` sends through fp32 for those behind."""
    method.payload(of(view, slice(0, trained)), part(out, slice(0, trained)))
    if trained < out.numel():
        _PLAIN.payload(replace(of(view, slice(trained, None)), lossy=False), out[trained:])
    return out


def joined(made: Tensor, anchor: Tensor, mean: Tensor, round: Round) -> Tensor:
    """The next anchor of a whole fragment: the parameters that the method has made, and the buffers' mean behind them.

    Args:
        made: of the parameters; may be a part of ``mean``.
        anchor: the whole fragment's.
        mean: of the payloads; overwritten and returned if there are buffers. Else ``made`` is returned.
        round: which round it is.
    """
    trained = made.numel()
    if trained == mean.numel():
        return made
    mean[:trained].copy_(made)
    mean[trained:].copy_(_PLAIN.average(anchor[trained:], mean[trained:], replace(round, lossy=False)))
    return mean


def keep_between(moved: Tensor, now: Tensor, start: Tensor) -> None:
    """Rebased buffers, in place: none goes beyond what it was or beyond the anchor's.

    A running statistic forgets; moved by the whole difference of two anchors a variance could become negative.
    """
    torch.clamp(moved, torch.minimum(now, start), torch.maximum(now, start), out=moved)


def of(view: ReplicaView, where: slice) -> ReplicaView:
    """A part of a replica's side of the round; the tensors that were the same one are so again."""
    anchor = part(view.anchor, where)
    start = anchor if view.start is view.anchor else part(view.start, where)
    return replace(view, anchor=anchor, start=start, params=part(view.params, where))


def part(flat: Tensor, where: slice) -> Tensor:
    """``flat[where]``; ``flat`` itself when that is all of it."""
    cut = flat[where]
    return flat if cut.numel() == flat.numel() else cut
