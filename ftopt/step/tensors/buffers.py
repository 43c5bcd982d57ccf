"""Averaging of buffers that training changes, such as BatchNorm's statistics.

They follow the parameters in a fragment's flat tensors (`FlatView`), so that anchor, digests, joins and rebases
hold them like parameters. The method sees the parameters alone: whatever the method, buffers are averaged like
`LocalSGD`'s parameters, without an outer optimizer. They are sent in fp32, without a codec, whose rounding could make a
variance negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ftopt.common.tree import refusal
from ftopt.errors import UserError
from ftopt.methods import LocalSGD, Method, ReplicaView, Round, own_code
from ftopt.step.tensors.flat import DTYPES, local, uncompiled

_PLAIN = LocalSGD(sync_every=1)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in the model's state dict, by their names before `torch.compile`."""
    kept = model.state_dict().keys()
    return {uncompiled(name): buffer for name, buffer in model.named_buffers() if name in kept}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Those of `buffers` that a checkpoint can hold."""
    return {name: buffer for name, buffer in buffers(model).items() if not refusal(local(buffer))}


@torch.no_grad()
def put(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives the `kept` buffers these values, in place if torch can write there: it cannot if elements share memory
    (`Tensor.expand`) or a sparse tensor has a different number of elements. A buffer whose shape user code has changed
    keeps its values."""
    for name, buffer in kept(model).items():
        if name not in saved or saved[name].shape != local(buffer).shape:
            continue
        try:
            (local(buffer) if hasattr(buffer, "to_local") else buffer).copy_(saved[name])
        except RuntimeError:
            for module in model.modules():
                for key in [key for key, each in module._buffers.items() if each is buffer]:
                    module._buffers[key] = saved[name].to(buffer.device)


def averaged(model: nn.Module) -> list[str]:
    """Names of the buffers that can be averaged, sorted: floating-point ones that the model's state dict holds.

    Counters (BatchNorm's ``num_batches_tracked``) and buffers registered with ``persistent=False`` stay local.
    UserError: a buffer holds NaN or Inf (a mask, say), or is of a kind that a flat fp32 tensor cannot hold.
    """
    held = {name: local(buffer) for name, buffer in buffers(model).items()}
    found = {name: buffer for name, buffer in held.items() if buffer.is_floating_point()}
    for name, buffer in found.items():
        if buffer.dtype not in DTYPES or type(buffer) is not Tensor or buffer.layout != torch.strided:
            what = buffer.dtype if buffer.layout == torch.strided else f"a {buffer.layout} tensor"
            raise UserError(
                f"method.buffers=mean, but buffer {name} is {what}, which the fp32 anchor cannot hold; allowed: "
                f"{', '.join(map(str, DTYPES))}; convert it, with .float() or .to_dense(), register it with "
                "persistent=False if training does not change it, or use buffers=local"
            )
        if not bool(torch.isfinite(buffer).all()):
            raise UserError(
                f"method.buffers=mean, but buffer {name} holds NaN or Inf, which has no mean; register it with "
                "persistent=False if training does not change it, or use buffers=local"
            )
    return sorted(found)


def shared_out(names: Sequence[str], fragments: Sequence[Sequence[str]]) -> list[list[str]]:
    """The buffers of each fragment: those of the modules whose parameters it holds.

    A module without trained parameters (``affine=False``, frozen) belongs to the nearest enclosing module that has
    some; a module with parameters in several fragments belongs to the first of these.

    Args:
        names: names of the buffers.
        fragments: names of the parameters that train, fragment by fragment.

    Raises:
        UserError: there are no fragments, since the replicas exchange only gradients.
    """
    if names and not fragments:
        raise UserError(
            "method.buffers=mean, but this method exchanges gradients alone and has no round of parameters, which "
            "buffers could go with; use buffers=local"
        )
    home = {parameter: f for f, parameters in enumerate(fragments) for parameter in parameters}
    shared: list[list[str]] = [[] for _ in fragments]
    for name in names:
        around, found = name, list[str]()
        while not found:
            around = around.rpartition(".")[0]
            found = [parameter for parameter in home if not around or parameter.startswith(f"{around}.")]
        shared[home[found[0]]].append(name)
    return shared


def payload_with_buffers(method: Method, view: ReplicaView, out: Tensor, *, trained: int) -> Tensor:
    """`Method.payload` for the first ``trained`` elements, and `LocalSGD`'s fp32 payload for the rest."""
    own_code.payload(method, of(view, slice(0, trained)), part(out, slice(0, trained)))
    if trained < out.numel():
        _PLAIN.payload(replace(of(view, slice(trained, None)), lossy=False), out[trained:])
    return out


def joined(made: Tensor, anchor: Tensor, mean: Tensor, round: Round) -> Tensor:
    """The next anchor of a whole fragment, in ``mean``: the parameters ``made`` by the method, which may be a part of
    ``mean``, followed by the buffers' mean. ``anchor``: the whole fragment's present anchor."""
    trained = made.numel()
    mean[:trained].copy_(made)
    mean[trained:].copy_(_PLAIN.average(anchor[trained:], mean[trained:], replace(round, lossy=False)))
    return mean


def keep_possible(name: str, moved: Tensor, now: Tensor, start: Tensor) -> None:
    """Clamps rebased values after the parameters, in place.

    Buffers are kept between their old values and the anchor's: running statistics decay, and the full difference of two
    anchors could make a variance negative. Of the inner state, whose names are ``parameter/key``, only Adam's second
    moments have a limit: they are at least 0.
    """
    if "/" not in name:
        torch.clamp(moved, torch.minimum(now, start), torch.maximum(now, start), out=moved)
    elif name.endswith("_sq"):
        moved.clamp_(min=0)


def of(view: ReplicaView, where: slice) -> ReplicaView:
    """A part of a replica's view of the round; fields that shared a tensor still do."""
    anchor = part(view.anchor, where)
    start = anchor if view.start is view.anchor else part(view.start, where)
    return replace(view, anchor=anchor, start=start, params=part(view.params, where))


def part(flat: Tensor, where: slice) -> Tensor:
    """``flat[where]``, or ``flat`` itself if that is all of it."""
    cut = flat[where]
    return flat if cut.numel() == flat.numel() else cut
