"""Conversion between one fragment's parameters, with the buffers averaged with them, and one flat fp32 tensor.

A `FlatView` holds references to the parameters and knows where each lies in a flat tensor. Parameters of one dtype lie
together, so that rounding a whole flat tensor to the parameters' precision is one operation per dtype; buffers follow
them. Flat tensors are always fp32, which is exact for fp32, bf16 and fp16 values.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ftopt.common.plural import count
from ftopt.errors import UserError
from ftopt.methods import Span
from ftopt.methods.fragments import Parameter
from ftopt.step.tensors.mapped import behind, is_mapped, let_go
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pieces import piece_of
from ftopt.step.tensors.place import Place

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes whose values fp32 holds exactly."""
_COMPILED_PREFIX = "_orig_mod."
_PART = 1 << 17
"""Elements written at a time when they come from a file."""


Together = Callable[[Any], list[Any]]
"""Collects one value from each rank of an island whose ranks share a tensor; all of them call it, in the same order."""


def alone(value: Any) -> list[Any]:
    """`Together` where a tensor is whole."""
    return [value]


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that train: tied ones once, frozen ones not, names as before `torch.compile`."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield uncompiled(name), parameter


def uncompiled(name: str) -> str:
    """The name that a parameter, or a buffer, had before `torch.compile`."""
    return name.replace(_COMPILED_PREFIX, "")


def parameters(model: nn.Module) -> list[Parameter]:
    """The parameters that train, in the form in which a method partitions them."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [Parameter(name, tuple(p.shape), id(p) in embeddings) for name, p in trainable(model)]


def check_covered(model: nn.Module, groups: Sequence[dict[str, Any]]) -> None:
    """Refuses (UserError) parameters that train but are in no inner optimizer, parameters of inner optimizers that are
    not in the model, parameters without values, and dtypes that fp32 does not hold exactly."""
    optimized = {id(p) for group in groups for p in group["params"] if p.requires_grad}
    named = dict(trainable(model))
    left_out = [name for name, p in named.items() if id(p) not in optimized]
    if left_out:
        what = count(len(left_out), "parameter trains but is", "parameters train but are")
        raise UserError(
            f"{what} in no inner optimizer: {some(left_out)}; "
            "every trainable parameter must be in one; add them, or freeze them with requires_grad_(False)"
        )
    strangers = len(optimized - {id(p) for p in named.values()})
    if strangers:
        what = count(strangers, "parameter that is", "parameters that are")
        raise UserError(
            f"the inner optimizer trains {what} not in the model; replicas would "
            "drift apart there; pass wrap() the module that holds them all, e.g. nn.ModuleList([model, head])"
        )
    empty = [name for name, p in named.items() if p.is_meta or isinstance(p, nn.UninitializedParameter)]
    if empty:
        raise UserError(
            f"parameters without values: {some(empty)}; make them before the optimizer: of a model on the meta device "
            "by model.to_empty(device=...) and its initialization, of lazy modules by one forward pass"
        )
    imaginary = [f"{name} ({p.dtype})" for name, p in named.items() if p.is_complex()]
    if imaginary:
        raise UserError(
            f"complex parameters, which the fp32 anchor cannot hold: {some(imaginary)}; keep the real view as the "
            "parameter, nn.Parameter(torch.view_as_real(w)), and use torch.view_as_complex(parameter) in forward()"
        )
    odd = [f"{name} ({p.dtype})" for name, p in named.items() if p.dtype not in DTYPES]
    if odd:
        raise UserError(
            f"parameters of a dtype that the fp32 anchor cannot hold: {some(odd)}; "
            f"allowed: {', '.join(str(d) for d in DTYPES)}; convert the model with .float()"
        )
    if not named:
        raise UserError("the model has no parameter that trains; nothing to wrap")
    if shared := sharing(named):
        raise UserError(
            f"parameters with elements that share memory: {some(shared)}; each would be moved several times by one "
            "step; give each parameter memory of its own with .clone() (tie modules by assigning the parameter itself)"
        )


def sharing(named: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that share an element's memory within themselves or with another (`Tensor.expand`, views of
    one storage)."""
    within: dict[int, list[tuple[range, str, Tensor]]] = {}
    found: dict[str, None] = {}
    for name, parameter in named.items():
        tensor = local(parameter)
        if type(tensor) is not Tensor or tensor.device.type == "meta" or not tensor.numel():
            continue
        size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() > size or (tensor.numel() < size and torch.unique(_offsets(tensor)).numel() < tensor.numel()):
            found[name] = None
        first = tensor.storage_offset()
        storage = within.setdefault(tensor.untyped_storage().data_ptr(), [])
        storage.append((range(int(first), int(first + size)), name, tensor))
    for places in within.values():
        for (here, name, tensor), (there, other, second) in itertools.combinations(places, 2):
            apart = here.stop <= there.start or there.stop <= here.start
            if not apart and bool(torch.isin(_offsets(tensor), _offsets(second)).any()):
                found |= {name: None, other: None}
    return list(found)


def _offsets(tensor: Tensor) -> Tensor:
    """The place of each element in its storage."""
    at = torch.full((1,), int(tensor.storage_offset()))
    for n, step in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at.unsqueeze(-1) + torch.arange(n) * step).flatten()
    return at


P = TypeVar("P", bound=Tensor)


def flat_order(named: Sequence[tuple[str, P]]) -> list[tuple[str, P]]:
    """Parameters in the order of a fragment's flat tensor: by dtype, then by name. The order in which a replica has
    made its modules does not matter."""
    return sorted(named, key=lambda item: (DTYPES.index(item[1].dtype), item[0]))


class FlatView:
    """References to a fragment's parameters, with their places in a flat fp32 tensor.

    Made when training starts, not before: ``.to(device)`` and FSDP2 wrapping come after an optimizer is
    built. A sharded parameter (DTensor) stands for its local shard, whose storage `to_local` aliases.

    Args:
        names: names of the viewed parameters. Default: all that train.
        buffers: names of the buffers that follow them.
        more: further tensors after these: each by name, with a function that returns it.

    Attributes:
        names: names of all tensors, in order.
        layout: where each parameter lies.
        trained: number of elements of the parameters; ``numel``: of all tensors.
        together: collects each rank's value; here there is one rank.
        has_more: whether buffers or more follow the parameters.
        carried: the part in which the pending work of several replicas adds up, without buffers.
        measured: number of leading elements that are measured in a contribution.
    """

    together: Together = staticmethod(alone)
    shared = sliced = elsewhere = False
    """Whether several ranks share it. Either each has a slice (``sliced``), or rank 0 has all of it; the view of the
    other ranks is then ``elsewhere``: empty, but in step with rank 0's."""

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str] | None = None,
        *,
        buffers: Collection[str] = (),
        more: Sequence[tuple[str, Callable[[], Tensor]]] = (),
    ) -> None:
        wanted = [item for item in trainable(model) if names is None or item[0] in names]
        named = flat_order(wanted)
        embedding = {p.name: p.embedding for p in parameters(model)}
        self._parameters = [p for _, p in named]
        self._behind: list[Callable[[], Tensor]] = [*places(model, buffers), *(source for _, source in more)]
        self.names: list[str] = [*(name for name, _ in named), *buffers, *(name for name, _ in more)]
        tensors = self._locals()
        self._shapes = [t.shape for t in tensors]
        self._sizes = [t.numel() for t in tensors]
        self.numel: int = sum(self._sizes)
        self.trained: int = sum(self._sizes[: len(named)])
        self.has_more = self.numel > self.trained
        self.carried, self.measured = slice(0, self.trained), self.numel
        self.device: torch.device = tensors[0].device
        lie = self.places()
        self._spans = [span for span, _, _ in lie]
        self.layout = tuple(replace(s, embedding=embedding[s.name]) for s, _, _ in lie[: len(named)])
        runs = [(dtype, [span for span, _, _ in run]) for dtype, run in groupby(lie, key=lambda place: place[2])]
        self._runs = [(dtype, slice(run[0].start, run[-1].stop)) for dtype, run in runs]

    def versions(self) -> list[int]:
        """The version counters of the parameters, which miss changes through ``.data``. Any thread."""
        return [p._version for p in self._parameters]

    def part_from_model(self) -> list[int]:
        """Turns this into a view of copies, which no longer reads or changes the model. Returns the `versions` of the
        model's parameters after that."""
        copies = [nn.Parameter(local(p).clone(), requires_grad=False) for p in self._parameters]
        self._behind = [partial(_itself, local(source()).clone()) for source in self._behind]
        versions, self._parameters = self.versions(), copies
        return versions

    def empty(self) -> Tensor:
        """A flat fp32 tensor of the fragment's length, uninitialized."""
        return torch.empty(self.numel, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def read(self, out: Tensor, clones: Sequence[Tensor] | None = None) -> Tensor:
        """Copies the parameters, or `clones` of them, into ``out``, a flat fp32 tensor, exactly; returns it."""
        torch._foreach_copy_(self._views(out), self._locals() if clones is None else list(clones))
        return out

    def parts(self, size: int) -> Iterator[tuple[Tensor, slice]]:
        """The parameters in place, in parts of at most ``size`` elements (non-contiguous ones undivided), and where
        each lies in a flat tensor."""
        start = 0
        for tensor in self._locals():
            whole = tensor.numel() <= size or not tensor.is_contiguous()
            for part in [tensor] if whole else torch.split(tensor.view(-1), size):
                yield part, slice(start, start := start + part.numel())

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Writes ``flat`` (fp32) into the parameters, rounded to their dtypes."""
        if is_mapped(flat):
            for part, where in behind(self.parts(_PART), flat):
                part.copy_(flat[where].view(part.shape))
        else:
            torch._foreach_copy_(self._locals(), self._views(flat))

    @torch.no_grad()
    def cast(self, flat: Tensor, memory: Memory | None = None) -> Tensor:
        """``flat`` rounded to the parameters' dtypes, again as fp32: the values that `write` leaves in the parameters.
        ``flat`` itself if all parameters are fp32; else in ``memory`` (default: new memory)."""
        if all(dtype == torch.float32 for dtype, _ in self._runs):
            return flat
        out = (memory or Memory()).like(flat)
        for dtype, where in self._runs:
            pieces = (torch.split(each[where], piece_of(flat)) for each in (flat, out))
            for piece, place in zip(*pieces, strict=True):
                place.copy_(piece.to(dtype))
                let_go(piece, place)
        return out

    def total(self, value: float) -> float:
        """The sum over all slices."""
        return math.fsum(self.together(value)) if self.sliced else value

    @torch.no_grad()
    def gradient_norm(self) -> float | None:
        """The L2 norm of the parameters' present gradients; None if there are none."""
        gradients = [local(p.grad).float() for p in self._parameters if p.grad is not None]
        if not gradients:
            return None
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))

    def clones(self) -> list[Tensor]:
        """Copies of the parameters in their own dtypes, for `restore`."""
        return [t.clone() for t in self._locals()]

    @torch.no_grad()
    def restore(self, clones: Sequence[Tensor]) -> None:
        """Puts `clones` back, bit for bit."""
        torch._foreach_copy_(self._locals(), list(clones))

    def equals(self, clones: Sequence[Tensor]) -> bool:
        """Whether the parameters still equal ``clones``."""
        return all(torch.equal(t, clone) for t, clone in zip(self._locals(), clones, strict=True))

    def places(self) -> list[tuple[Span, tuple[int, ...], torch.dtype]]:
        """Where each tensor lies, buffers and more included, with its shape and dtype."""
        spans, start = [], 0
        for name, tensor in zip(self.names, self._locals(), strict=True):
            spans.append((Span(name, start, start + tensor.numel(), False), tuple(tensor.shape), tensor.dtype))
            start += tensor.numel()
        return spans

    def in_whole(self) -> list[tuple[Span, tuple[int, ...], torch.dtype]]:
        """`places` in the flat tensor of a replica of one process."""
        return self.places()

    def describe(self) -> str:
        """The numbers of tensors and parameters, and a hash of names, shapes and dtypes, on which replicas must
        agree."""
        lines = [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in zip(self.names, self._locals(), strict=True)]
        short = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        behind = f", {len(self._behind)} of them beside the parameters" if self._behind else ""
        return f"{len(self.names)} tensors{behind}, {self.trained:,} parameters, {short}"

    def name_at(self, element: int) -> str:
        """The name of the tensor that an element belongs to."""
        return self._spans[bisect_right(self._spans, element, key=lambda span: span.start) - 1].name

    def _locals(self) -> list[Tensor]:
        # Looked up each time, since user code may replace a parameter's `.data` or a whole buffer.
        return [local(t) for t in (*self._parameters, *(source() for source in self._behind))]

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def places(model: nn.Module, buffers: Collection[str]) -> list[Place]:
    """The place of each buffer."""
    found = {}
    for module_name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            name = uncompiled(f"{module_name}.{key}" if module_name else key)
            if name in buffers:
                found[name] = Place(module, key, name)
    return [found[name] for name in buffers]


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, else the tensor itself; detached."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():
        return to_local()


def placed(value: Tensor, parameter: Any) -> Tensor:
    """A parameter's state in its optimizer's form: a DTensor for a DTensor, on a mesh of this process alone."""
    if not hasattr(parameter, "to_local") or value.shape != parameter.shape or not value.dim():
        return value
    from torch.distributed.tensor import DTensor  # here, since the import is slow

    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        value, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def some(names: Sequence[str], limit: int = 8) -> str:
    """Names for a message: the first ones, and the number of further ones."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
