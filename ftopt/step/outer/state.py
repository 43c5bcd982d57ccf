"""The values that a fragment holds. All are immutable: a fragment changes by having one replaced by another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method, own_code
from ftopt.methods.triggers import MemberStats
from ftopt.step.outer.counters import StepTotals
from ftopt.step.outer.error_feedback import Residual
from ftopt.step.outer.frozen import Frozen
from ftopt.step.outer.trigger_metrics import RESERVED, first_agreed
from ftopt.step.outer.usual import USUAL, first_usual
from ftopt.step.tensors.buffers import part
from ftopt.step.tensors.digest import Described, damage, digest_and_sums, digest_of, sums_of
from ftopt.step.tensors.flat import FlatView, alone
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import AttemptView, Committed, Contribution

_OUTER = "outer."


@dataclass(frozen=True, slots=True)
class CommittedState:
    """A fragment's committed state. Peers may be reading it at any time.

    Args:
        meta: version, committed inner step, this replica's counted step. Of the state before until an attempt is
            decided.
        anchor: flat fp32.
        outer: the outer optimizer's state, flat fp32 tensors.
        digest: of `tensors`.
        sums: of the blocks of `tensors`, as they were when the digest was taken.
        fetched: it came from a peer.
        live: of a fragment of gradients, the peer's model and inner state, and the agreed gradient unless it was
            applied there (see `Live`).
        made: the attempt that made it, if this replica took part.
        described: all that the digest is made of, where several ranks share the fragment.
    """

    meta: Committed
    anchor: Tensor
    outer: Mapping[str, Tensor]
    digest: str
    sums: Mapping[str, Tensor]
    fetched: bool = False
    live: Mapping[str, Tensor] | None = None
    made: AttemptView | None = None
    described: Described | None = None

    def damage(self) -> list[str]:
        """The blocks whose memory has changed since, which must not happen: ``name[start:stop]`` in elements."""
        return [f"{name}[{part.start}:{part.stop}]" for name, part in self.damaged_parts()]

    def damaged_parts(self) -> list[tuple[str, slice]]:
        """The same as names of `tensors` and slices."""
        return [(name, part) for name, t in self.tensors().items() for part in damage(t, self.sums[name])]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names under which peers fetch them."""
        return name_tensors(self.anchor, self.outer)

    def placed(self, memory: Memory) -> CommittedState:
        """The same state, where committed states lie."""
        return replace(self, anchor=memory.place(self.anchor), outer=place_all(self.outer, memory))


def name_tensors(anchor: Tensor, outer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``anchor`` and ``outer.<name>``."""
    return {"anchor": anchor, **{_OUTER + name: tensor for name, tensor in outer.items()}}


def sealed(
    tensors: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None, view: FlatView | None = None
) -> tuple[str, dict[str, Tensor], Described | None]:
    """The digest of a committed state; the `block_sums` of its tensors here, of which some may be ``known``; and, where
    several ranks share ``view``, all that the digest is made of. They call it alike."""
    if view is None or not view.shared:
        return *digest_and_sums(tensors, known), None
    sums = sums_of(tensors, known)
    if not view.sliced:  # rank 0 has it
        own = {name: (tensor.dtype, tuple(tensor.shape), sums[name]) for name, tensor in tensors.items()}
        (whole, *_) = view.together({} if view.elsewhere else own)
        return digest_of(whole), sums, whole
    described = dict[str, tuple[torch.dtype, tuple[int, ...], Tensor]]()
    ranks = view.together({name: (tensor.shape, sums[name]) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        shape, found = tuple(tensor.shape), sums[name]
        if is_sliced(name, tensor):
            shape, found = (sum(each[name][0].numel() for each in ranks),), torch.cat([each[name][1] for each in ranks])
        described[name] = tensor.dtype, shape, found
    return digest_of(described), sums, described


def is_sliced(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a committed state is as long as the parameters: ranks that share it have slices of it."""
    return tensor.dim() == 1 and name.removeprefix(_OUTER) not in RESERVED


def place_all(outer: Mapping[str, Tensor], memory: Memory) -> dict[str, Tensor]:
    """An outer state, where committed states lie."""
    return {name: memory.place(tensor) for name, tensor in outer.items()}


def repaired(state: CommittedState, params: Tensor) -> CommittedState:
    """A damaged state with ``params`` (flat fp32) in damaged parts of the anchor, and 0 in those of the outer state."""
    tensors, damaged = dict(state.tensors()), state.damaged_parts()
    if not damaged:
        return state
    for name, where in damaged:
        tensors[name] = tensors[name].clone()
        tensors[name][where] = params[where] if name == "anchor" else 0
    if any(name == _OUTER + USUAL for name, _ in damaged):
        tensors[_OUTER + USUAL] = first_usual(tensors["anchor"])[USUAL]
    found, sums = digest_and_sums(tensors)  # of slices none is repaired
    outer = {name.removeprefix(_OUTER): t for name, t in tensors.items() if name != "anchor"}
    return replace(state, anchor=tensors["anchor"], outer=outer, digest=found, sums=sums)


def first_state(
    view: FlatView,
    method: Method,
    index: int,
    memory: Memory,
    *,
    claimed: str | None = None,
    more: Mapping[str, Tensor] = MappingProxyType({}),
) -> CommittedState:
    """A fragment's committed state at version 0: the parameters as they are.

    Args:
        claimed: its digest. Default: that of its tensors.
        more: further outer state.
    """
    anchor = memory.place(view.read(view.empty()))
    trained = part(anchor, slice(0, view.trained))
    own = {} if view.elsewhere else own_code.init(method, trained)
    ours = first_agreed(method.timing.uses) | first_usual(trained, view.together) | dict(more)
    if taken := own.keys() & RESERVED:
        raise UserError(
            f"method {method.name}: init() names outer state {', '.join(sorted(taken))}; {', '.join(RESERVED)} are "
            "the names of what every fragment keeps: choose another name"
        )
    outer = place_all(own | ours, memory)
    found, sums, described = sealed(name_tensors(anchor, outer), view=view)
    return CommittedState(Committed(index, 0, 0, 0), anchor, outer, claimed or found, sums, described=described)


def damaged_slices(blocks: Sequence[Sequence[str]]) -> FtoptError:
    """The error of an island that has nobody to fetch its state from. ``blocks``: of each rank."""
    where = "; ".join(f"rank {rank}: {', '.join(each[:8])}" for rank, each in enumerate(blocks) if each)
    return FtoptError(
        f"the committed state has changed in memory ({where}), and no other replica holds it; start this island again, "
        "which resumes from a checkpoint if there is one"
    )


def check_fetched(
    held: CommittedState,
    meta: Committed,
    claimed: str,
    tensors: Mapping[str, Tensor],
    view: FlatView | None = None,
) -> CommittedState:
    """A fetched state as a `CommittedState` on the devices of ``held``.

    Args:
        held: the fragment's present state, for names and shapes.
        meta, claimed: of the fetched state; its digest is what the source claims.
        tensors: kept, and must not change: those on their device already are not copied.
        view: of the fragment; where it is shared, all ranks call this alike.

    Raises:
        ValueError: names, lengths or dtypes differ from ``held``'s, or the digest from ``claimed``.
    """
    elsewhere, together = view is not None and view.elsewhere, alone if view is None else view.together
    misfits = together("" if elsewhere else _misfit(held, tensors))
    if wrong := next(filter(None, misfits), ""):
        raise ValueError(
            f"fetched state of fragment {meta.fragment}, version {meta.version} does not fit the model: {wrong}"
        )
    places = held.tensors()
    own = places if elsewhere else {name: t.detach().to(places[name].device) for name, t in tensors.items()}
    found, sums, described = sealed(own, view=view)
    if found != claimed:
        raise ValueError(
            f"fetched state of fragment {meta.fragment}, version {meta.version} has digest {found[:12]}, "
            f"expected {claimed[:12]}; it was damaged on the way; fetch it again"
        )
    outer = {name.removeprefix(_OUTER): t for name, t in own.items() if name != "anchor"}
    return CommittedState(meta, own["anchor"], outer, found, sums, fetched=True, described=described)


def _misfit(held: CommittedState, tensors: Mapping[str, Tensor]) -> str:
    """In which names, lengths or dtypes tensors differ from those of ``held``; "": in none."""
    expected = {name: (tuple(t.shape), t.dtype) for name, t in held.tensors().items()}
    got = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
    return "; ".join(f"{n}: got {got.get(n, 'nothing')}, expected {expected.get(n, 'nothing')}" for n in wrong)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen contribution, and the tensors to compute its payload from.

    Args:
        params: the parameters at ``contribution.last_step``.
        start: ``cast(anchor)`` that they started from.
        tokens, totals: all that was counted by then.
        lr: the inner optimizer's largest rate, the mean over its steps.
        seen: what the other members get for their triggers.
        until: the last inner step that is in the contribution, or was dropped after it.
        staleness: versions that were made since its oldest step.
        unused: why a share of a global batch is left out of its mean; empty: it is in it.
    """

    contribution: Contribution
    params: Frozen
    start: Tensor
    tokens: int
    lr: float
    totals: StepTotals
    seen: MemberStats
    until: int
    staleness: int = 0
    unused: str = ""


@dataclass(frozen=True, slots=True)
class Base:
    """Where the pending work begins.

    Args:
        params: what it is measured from, flat fp32: at every step boundary the parameters differ from it by exactly
            the work of the steps ``step + 1 .. local_steps``.
        step: the last inner step that is counted or dropped.
        tokens, totals: all that was counted by then.
        version: of the committed state when the oldest pending step was taken.
    """

    params: Tensor
    step: int
    tokens: int
    totals: StepTotals
    version: int


@dataclass(frozen=True, slots=True)
class Pending:
    """The pending work, the contribution that is frozen of it, and what the codec left out of all that was counted."""

    base: Base
    snapshot: Snapshot | None
    residuals: Mapping[str, Residual]
