"""What one replica gives to a checkpoint, between two inner steps.

The cut is where the *training thread* stands: the committed state that the parameters are based on (``taken``), the
pending work on it, and the contribution frozen on it if there is one. A commit that the training thread has not taken
up yet has not happened: after the resume the same contributions are reduced again, to the same bits, and are taken up
at the same step. So with equal steps everywhere a resumed run is the uninterrupted one, bit for bit, overlap included.

Committed tensors are immutable and given by reference. What training changes is copied: parameters, inner state,
buffers, frozen parameters of contributions under way. How a replica goes on from this is in ``restore.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from ftopt.optimizer import inner_state
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.error_feedback import Residual
from ftopt.optimizer.outer.fragment import Base, Fragment, Snapshot, State
from ftopt.optimizer.outer.step import OuterStep
from ftopt.optimizer.outer.trigger_metrics import StepTotals, pack
from ftopt.optimizer.tensors.flat import FlatView, uncompiled
from ftopt.optimizer.tensors.pool import CopyPool
from ftopt.streams import publish
from ftopt.sync.group import Held, Record, ReplicaGroup, union
from ftopt.tree import Tree


@dataclass(frozen=True)
class CommittedVersion:
    """A committed state of one fragment: its record, digest and tensors."""

    record: Record
    digest: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """Which outer step a checkpoint was taken at: that of fragment 0 which ``attempt`` made, with so many members."""

    attempt: int
    members: int
    version: int
    inner_step: int


@dataclass(frozen=True)
class SavedReplica:
    """One replica.

    Args:
        held: its membership.
        committed: one version a fragment, which its parameters are based on.
        own: all that it alone has: counters, parameters, frozen contributions, inner optimizers, buffers.
    """

    held: Held
    committed: tuple[CommittedVersion, ...]
    own: Tree


# Giving.


def cut_of(outer: OuterStep) -> Cut | None:
    """Where the replica stands; None where it cannot be saved: it has fetched that version, or starts anew."""
    first = outer.fragments[0].taken
    if first.made is None or any(fragment.reset for fragment in outer.fragments):
        return None
    return Cut(first.made.attempt, first.made.size, first.meta.version, first.meta.inner_step)


@torch.no_grad()
def capture_replica(
    outer: OuterStep, inner: Inner, model: nn.Module, group: ReplicaGroup, *, copies: CopyPool
) -> SavedReplica:
    """Copies what training changes. Training thread, between two inner steps."""
    outer.join()
    now_s = outer.clock()
    with outer.lock:
        seen = [(fragment.taken, fragment.seen()) for fragment in outer.fragments]
    contributions = tuple(base.snapshot.contribution for _, base in seen if base.snapshot is not None)
    held = group.held()
    held = replace(
        held,
        records=tuple(_record(taken) for taken, _ in seen),
        contributions=contributions,
        used=union(held.used, *(c.ranges for c in contributions)),  # also where it is counted and not taken up yet
    )
    own: Tree = {
        "local_steps": outer.local_steps,
        "tokens": outer.tokens,
        "tally": of_totals(outer.totals),
        "rounds_taken": outer.rounds_taken,
        "fragments": [
            _of_fragment(fragment, base, now_s, copies)
            for fragment, (_, base) in zip(outer.fragments, seen, strict=True)
        ],
        "inner": inner_state.capture(inner, model, copies),
        "buffers": {uncompiled(name): copies.of(buffer) for name, buffer in buffers(model)},
        "model": _flat(FlatView(model), copies) if outer.live is not None else None,
    }
    for device in {fragment.view.device for fragment in outer.fragments}:
        publish(device)
    return SavedReplica(held, tuple(CommittedVersion(_record(t), t.digest, t.tensors()) for t, _ in seen), own)


def _record(state: State) -> Record:
    assert state.meta.record is not None
    return state.meta.record


def _flat(view: FlatView, copies: CopyPool) -> Tensor:
    return view.read(copies.empty((view.numel,), torch.float32, view.device))


def _of_fragment(fragment: Fragment, base: Base, now_s: float, copies: CopyPool) -> Tree:
    return {
        "params": _flat(fragment.view, copies),
        "base_step": base.step,
        "base_tokens": base.tokens,
        "base_tally": of_totals(base.totals),
        "base_version": base.version,
        "residuals": {units: of_residual(left) for units, left in base.residuals.items()},
        "direction": fragment.trigger_metrics.direction,
        "trigger_from_step": fragment.trigger_from_step,
        "trigger_from_ago_s": now_s - fragment.trigger_from_s,
        "snapshot_step": fragment.snapshot_step,
        "pace": fragment.pace,
        "snapshot": None if base.snapshot is None else _of_snapshot(base.snapshot, copies),
    }


def of_residual(residual: Residual) -> Tree:
    first, values = residual.owed
    return {"own": residual.own, "first": first, "owed": values}


def _of_snapshot(snapshot: Snapshot, copies: CopyPool) -> Tree:
    return {
        "contribution": asdict(snapshot.contribution),
        "params": copies.of(snapshot.params.flat()),  # its buffer is used again once the round is decided
        "tokens": snapshot.tokens,
        "lr": snapshot.lr,
        "tally": of_totals(snapshot.totals),
        "seen": pack(snapshot.seen),
    }


def of_totals(totals: StepTotals) -> Tree:
    return totals._asdict()


def buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Those that the model's state dict holds."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
