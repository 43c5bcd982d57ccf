"""The values that a fragment holds. All are immutable: a fragment changes by replacing one."""

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
        meta: version, committed inner step, this replica's counted step. Until the attempt is decided, those of the
            previous state.
        anchor: flat fp32.
        outer: the outer optimizer's state, flat fp32 tensors.
        digest: of `tensors`.
        sums: the block sums of `tensors` when the digest was taken.
        fetched: it came from a peer.
        live: for a fragment of gradients, the peer's model and inner state, and the agreed gradient unless the peer had
            applied it (see `Live`).
        made: the attempt that made it, if this replica took part.
        described: the digest's complete input, where several ranks share the fragment.
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
        """The blocks whose memory has changed since the digest was taken, which must not happen: ``name[start:stop]``
        in elements."""
        return [f"{name}[{part.start}:{part.stop}]" for name, part in self.damaged_parts()]

    def damaged_parts(self) -> list[tuple[str, slice]]:
        """The damaged parts as names of `tensors` and slices."""
        return [(name, part) for name, t in self.tensors().items() for part in damage(t, self.sums[name])]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names under which peers fetch them."""
        return name_tensors(self.anchor, self.outer)

    def placed(self, memory: Memory) -> CommittedState:
        """The same state in the memory of committed states."""
        return replace(self, anchor=memory.place(self.anchor), outer=place_all(self.outer, memory))


def name_tensors(anchor: Tensor, outer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``anchor`` and ``outer.<name>``."""
    return {"anchor": anchor, **{_OUTER + name: tensor for name, tensor in outer.items()}}


def sealed(
    tensors: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None, view: FlatView | None = None
) -> tuple[str, dict[str, Tensor], Described | None]:
    """The digest of a committed state; the `block_sums` of its tensors here, of which some may be ``known``; and, where
    several ranks share ``view``, the digest's complete input. All ranks call it."""
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
    """Whether a tensor of a committed state is as long as the parameters, so that ranks that share it have slices."""
    return tensor.dim() == 1 and name.removeprefix(_OUTER) not in RESERVED


def place_all(outer: Mapping[str, Tensor], memory: Memory) -> dict[str, Tensor]:
    """An outer state in the memory of committed states."""
    return {name: memory.place(tensor) for name, tensor in outer.items()}


def repaired(state: CommittedState, params: Tensor) -> CommittedState:
    """A repaired state: ``params`` (flat fp32) replace damaged parts of the anchor, and 0 those of the outer state."""
    tensors, damaged = dict(state.tensors()), state.damaged_parts()
    if not damaged:
        return state
    for name, where in damaged:
        tensors[name] = tensors[name].clone()
        tensors[name][where] = params[where] if name == "anchor" else 0
    if any(name == _OUTER + USUAL for name, _ in damaged):
        tensors[_OUTER + USUAL] = first_usual(tensors["anchor"])[USUAL]
    found, sums = digest_and_sums(tensors)  # slices are not repaired
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
    """A fragment's committed state at version 0: the present parameters.

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
    """The error of an island that has no peer to fetch its state from. ``blocks``: of each rank."""
    where = "; ".join(f"rank {rank}: {', '.join(each[:8])}" for rank, each in enumerate(blocks) if each)
    return FtoptError(
        f"the committed state has changed in memory ({where}), and no other replica holds it; start this island again, "
        "which resumes from a checkpoint if there is one"
    )


class Unfit(ValueError):
    """A committed state is of another model, or of a method with other settings."""


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
        tensors: kept, and must not change: tensors already on their device are not copied.
        view: the fragment's view; if it is shared, all ranks make this call.

    Raises:
        Unfit: names, lengths or dtypes differ from ``held``'s.
        ValueError: the digest differs from ``claimed``.
    """
    elsewhere, together = view is not None and view.elsewhere, alone if view is None else view.together
    misfits = together("" if elsewhere else _misfit(held, tensors))
    if wrong := next(filter(None, misfits), ""):
        raise Unfit(f"state of fragment {meta.fragment}, version {meta.version} does not fit the model: {wrong}")
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
    """The differences of tensors from ``held``'s in names, lengths or dtypes; "": none."""
    expected = {name: (tuple(t.shape), t.dtype) for name, t in held.tensors().items()}
    got = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
    return "; ".join(f"{n}: got {got.get(n, 'nothing')}, expected {expected.get(n, 'nothing')}" for n in wrong)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen contribution, and the tensors to compute its payload from.

    Args:
        params: the parameters at ``contribution.last_step``.
        start: ``cast(anchor)`` from which they started.
        tokens, totals: all that was counted by then.
        lr: the inner optimizer's largest rate, the mean over its steps.
        seen: the statistics for the other members' triggers.
        until: the last inner step that is in the contribution, or was dropped after it.
        staleness: versions made since its oldest step.
        unused: why a share of a global batch is left out of the mean; empty: it is not.
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
    """The start of the pending work.

    Args:
        params: the base's parameters, flat fp32: at every step boundary the parameters differ from them by exactly the
            work of the steps ``step + 1 .. local_steps``.
        step: the last inner step that is counted or dropped.
        tokens, totals: all that was counted by then.
        version: the version of the committed state when the oldest pending step was taken.
    """

    params: Tensor
    step: int
    tokens: int
    totals: StepTotals
    version: int


@dataclass(frozen=True, slots=True)
class Pending:
    """The pending work, its frozen contribution, and the codec's error in all counted contributions."""

    base: Base
    snapshot: Snapshot | None
    residuals: Mapping[str, Residual]
