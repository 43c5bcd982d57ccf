"""Captures one replica's state for a checkpoint, between two inner steps.

The cut is the position of the *training thread*: the committed state that the parameters are based on (``applied``),
the pending work on it, and the contribution frozen on it if there is one. A commit that the training thread has not
applied is not included: after the resume the same contributions are reduced again, to the same bits, and applied at the
same step. So with equal steps on all replicas a resumed run equals an uninterrupted one, bit for bit, overlap included.

Committed tensors are immutable and passed by reference. State that training changes is copied: parameters, inner state,
buffers, frozen parameters of contributions under way. ``restore.py`` resumes a replica from it, and ``adopt.py`` adds
the pending work of others. The copy that a neighbour keeps (``replay.py``) is the same tree, with less in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from ftopt.common.streams import publish
from ftopt.common.tree import Tree
from ftopt.step import inner_state
from ftopt.step.inner import Inner
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.state import CommittedState, Snapshot
from ftopt.step.outer.step import OuterStep
from ftopt.step.outer.trigger_metrics import pack
from ftopt.step.tensors.buffers import kept
from ftopt.step.tensors.flat import FlatView, local
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import Held, Record, ReplicaGroup, union

CaptureInner = Callable[[Inner, nn.Module, CopyPool], list[Tree]]


@dataclass(frozen=True)
class CommittedVersion:
    """A committed state of one fragment: its record, digest and tensors."""

    record: Record
    digest: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """The outer step of fragment 0 that a checkpoint was taken at: ``attempt`` made it, with ``members`` members."""

    attempt: int
    members: int
    version: int
    inner_step: int


@dataclass(frozen=True)
class SavedReplica:
    """One replica: its membership; the version of each fragment that its parameters are based on; and its own state:
    counters, parameters, frozen contributions, inner optimizers, buffers."""

    held: Held
    committed: tuple[CommittedVersion, ...]
    own: Tree


def cut_of(outer: OuterStep) -> Cut | None:
    """The outer step at which the replica could be saved; None: it has fetched that version, or starts anew."""
    first = outer.fragments[0].applied
    if first.made is None or any(fragment.reset for fragment in outer.fragments):
        return None
    return Cut(first.made.attempt, first.made.size, first.meta.version, first.meta.inner_step)


@torch.no_grad()
def capture_replica(
    outer: OuterStep,
    inner: Inner,
    model: nn.Module,
    group: ReplicaGroup,
    *,
    copies: CopyPool,
    capture_inner: CaptureInner = inner_state.capture,
) -> SavedReplica:
    """Copies the state that training changes. Training thread, between two inner steps."""
    outer.freezer.join()
    pending = [fragment.pending() for fragment in outer.fragments]
    committed = tuple(_version(fragment.applied) for fragment in outer.fragments)
    contributions = tuple(each.snapshot.contribution for each in pending if each.snapshot is not None)
    records, held = tuple(version.record for version in committed), group.held()
    used = union(held.used, *(c.ranges for c in contributions))  # even if it is counted but not applied yet
    held = replace(held, records=records, contributions=contributions, used=used)
    now_s = outer.shared.clock()
    own = capture_own(outer, inner, model, copies, capture_inner=capture_inner)
    for part, fragment, each in zip(own["fragments"], outer.fragments, pending, strict=True):
        part |= {  # needed only if the same replica resumes
            "base_totals": each.base.totals._asdict(),
            "base_version": each.base.version,
            "direction": fragment.trigger_metrics.direction,
            "trigger_from_ago_s": now_s - fragment.trigger_from_s,
            "snapshot_step": fragment.snapshot_step,
            "pace": fragment.pace,
            "snapshot": None if each.snapshot is None else _of_snapshot(each.snapshot, copies),
        }
    own["model"] = _flat(outer.gradients.live.view, copies) if outer.gradients is not None else None
    own["counted"] = outer.gradients.live.counted if outer.gradients is not None else None
    for device in {fragment.view.device for fragment in outer.fragments}:
        publish(device)
    return SavedReplica(held, committed, own)


def capture_own(
    outer: OuterStep,
    inner: Inner,
    model: nn.Module,
    copies: CopyPool,
    *,
    to_replay: bool = False,
    capture_inner: CaptureInner = inner_state.capture,
) -> Tree:
    """Counters, pending work, inner state and buffers. ``to_replay``: parameters only where work is pending, with its
    base."""
    return {
        **outer.counters.capture(),
        "fragments": [_work_of(fragment, copies, to_replay=to_replay) for fragment in outer.fragments],
        "inner": capture_inner(inner, model, copies),
        "buffers": {name: copies.of(local(buffer)) for name, buffer in kept(model).items()},
    }


def _work_of(fragment: Fragment, copies: CopyPool, *, to_replay: bool) -> Tree:
    """The pending work of a fragment, and the start of its triggers' counts."""
    pending = fragment.pending()
    base = pending.base
    works = not to_replay or fragment.steps_since(base) > 0
    return {
        "params": _flat(fragment.view, copies) if works else None,
        "base_step": base.step,
        "base_tokens": base.tokens,
        "residuals": {
            units: {"own": left.own, "first": left.owed[0], "owed": left.owed[1]}
            for units, left in pending.residuals.items()
        },
        "trigger_from_step": fragment.trigger_from_step,
    } | ({"base": fragment.start if works else None} if to_replay else {})


def _version(state: CommittedState) -> CommittedVersion:
    assert state.meta.record is not None
    return CommittedVersion(state.meta.record, state.digest, state.tensors())


def _flat(view: FlatView, copies: CopyPool) -> Tensor:
    return view.read(copies.empty((view.numel,), torch.float32, view.device))


def _of_snapshot(snapshot: Snapshot, copies: CopyPool) -> Tree:
    return {
        "contribution": asdict(snapshot.contribution),
        "params": copies.of(snapshot.params.flat()),  # its buffer is reused once the round is decided
        "tokens": snapshot.tokens,
        "lr": snapshot.lr,
        "totals": snapshot.totals._asdict(),
        "seen": pack(snapshot.seen),
        "until": snapshot.until,
    }
