"""Resuming a replica from a checkpoint: unchanged, as an adopter of others, or as a new one.

It is restored before it connects; for the job it was then only away (`ftopt.sync.protocol.replica.resumed`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from ftopt.common.plural import count
from ftopt.common.tree import Tree
from ftopt.common.weakly import weakly
from ftopt.errors import UserError
from ftopt.optimizer.saved.adopt import adopt, on, residual_of, state_of
from ftopt.optimizer.saved.capture import CommittedVersion, SavedReplica
from ftopt.step import inner_state
from ftopt.step.inner import Inner
from ftopt.step.outer.counters import Counters, StepTotals
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.frozen import Frozen
from ftopt.step.outer.state import Base, Pending, Snapshot, Unfit
from ftopt.step.outer.step import OuterStep
from ftopt.step.outer.trigger_metrics import seen_of
from ftopt.step.tensors.buffers import kept, put
from ftopt.step.tensors.flat import some
from ftopt.sync.group import OWN, Contribution, Foreign, Held, Position, ReplicaGroup, union


@dataclass(frozen=True)
class Resume:
    """The state from which one replica resumes.

    Args:
        saved: the replica itself; `newcomer` makes a new one.
        adopted: replicas that do not return, whose pending work this one adopts.
        newest: the newest version of each fragment in the checkpoint.
        lines: the fingerprint of the job that wrote the checkpoint.
        source: the checkpoint, for messages.
        damaged, foreign: make the error for a reason why the checkpoint cannot be used.
    """

    saved: SavedReplica
    adopted: tuple[SavedReplica, ...]
    newest: tuple[CommittedVersion, ...]
    lines: Mapping[str, str]
    source: str
    damaged: Callable[[str], UserError]
    foreign: Callable[[str], UserError]

    @property
    def held(self) -> Held:
        """The membership from which the group resumes. An adopter is based on the newest versions, has nothing under
        way, and owns the units of the others' pending steps (ADOPT)."""
        held = self.saved.held
        if not self.adopted:
            return held
        used = union(held.used, *(saved.held.used for saved in self.adopted))
        return replace(held, records=tuple(v.record for v in self.newest), contributions=(), used=used)


class Fallback(Protocol):
    """Checkpoints to fall back on when no replica holds the job's state any more."""

    def newest(self) -> Position | None:
        """Fragment 0's position in the newest checkpoint, with chain "" if that is damaged; None: there is none. Any
        thread."""

    def go_on(self, incarnation: int) -> Resume:
        """The state from which this replica resumes as this incarnation. Raises UserError."""


def newcomer(held: Held, newest: Sequence[CommittedVersion], peer: SavedReplica) -> SavedReplica:
    """A replica that is not in the checkpoint: the newest state, nothing pending, a fresh inner state; or ``peer``'s
    model and inner state, if replicas take the same steps. ``held``: its membership; ``newest``: one version per
    fragment."""
    own: Tree = Counters().capture() | {
        "fragments": [None] * len(newest),
        "inner": peer.own["inner"] if peer.own["model"] is not None else None,
        "buffers": None,
        "model": peer.own["model"],
        "counted": peer.own["counted"],
    }
    return SavedReplica(replace(held, records=tuple(v.record for v in newest)), tuple(newest), own)


def start_or_resume(
    outer: OuterStep,
    inner: Inner,
    model: nn.Module,
    group: ReplicaGroup,
    resume: Resume | None,
    fallback: Fallback | None,
) -> bool:
    """Starts, from ``resume`` if given, or from ``fallback`` if no replica holds the job's state any more.

    ``fallback`` works while its owner keeps it alive; the group, which a loader may keep, refers to it weakly.

    Returns:
        True if the parameters have changed.

    Raises:
        UserError: a checkpoint is damaged, or of another job.
    """
    pending: tuple[int, ...] = ()
    if resume is not None:
        pending = _restore_checked(outer, inner, model, resume, group.resume)
    if fallback is not None:

        def go_on() -> Held:
            nonlocal pending
            found = fallback.go_on(group.incarnation)
            pending = _restore_checked(outer, inner, model, found, lambda held: None)
            return found.held

        group.fall_back(weakly(fallback.newest, None), go_on)
    fetched = outer.start()
    if not outer.counters.resumed:
        return fetched
    group.emit("resumed", inner_step=outer.inner_step(), data={"pending_by_fragment": list(pending)})
    return True


def _restore_checked(
    outer: OuterStep, inner: Inner, model: nn.Module, resume: Resume, tell: Callable[[Held], None]
) -> tuple[int, ...]:
    """Restores a replica; returns the pending steps of each fragment."""
    try:
        check_replica(outer, inner, model, resume)
        restore_replica(outer, inner, model, resume)
        tell(resume.held)
    except Foreign as error:
        raise resume.foreign(str(error)) from None
    except ValueError as error:
        raise resume.damaged(str(error)) from None
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise resume.damaged(f"it holds no replica ({type(error).__name__}: {error})") from error
    return outer.pending_by_fragment()


def check_replica(outer: OuterStep, inner: Inner, model: nn.Module, resume: Resume) -> None:
    """Refuses a checkpoint of a different model, method or inner optimizer; warns of different settings.

    Raises:
        Foreign: the message names the difference; nothing has changed.
        ValueError: the message names the damage; nothing has changed.
    """
    lines = outer.fingerprint().lines
    changed = [k for k in sorted(resume.lines) if k in lines and lines[k] != resume.lines[k] and not k.startswith(OWN)]
    settings = [k for k in changed if k.startswith("method.") and k.rpartition(".")[0] not in changed]
    differ = ", ".join(f"{k}={resume.lines[k]} there, {lines[k]} here" for k in settings)
    for name in ("method", "model"):
        if resume.lines.get(name) != lines[name]:
            why = f"; its method has other settings, too: {differ}" if name == "model" and differ else ""
            raise Foreign(f"it is of another {name}: {resume.lines.get(name)} there, {lines[name]} here{why}")
    for saved in (resume.saved, *resume.adopted):
        if len(saved.committed) != len(outer.fragments):
            raise Foreign(
                f"it has {count(len(saved.committed), 'fragment')}, and the method makes {len(outer.fragments)} here"
            )
        for fragment, version in zip(outer.fragments, saved.committed, strict=True):
            try:
                state_of(fragment, version, saved.held, saved.committed[0].record)
            except Unfit as error:
                raise Foreign(f"its method has other settings: {differ}") if differ else error from None
    _check_own(inner, model, resume.saved.own)
    if frozen := [name.removeprefix("frozen.") for name in changed if name.startswith("frozen.")]:
        raise Foreign(
            f"it was trained beside other frozen weights: {some(frozen)} have other values here; load those of that "
            "job, or set policy.frozen=ignore to go on with these"
        )
    other = [f"{k}={resume.lines[k]}" for k in changed]
    if other:
        warnings.warn(f"{resume.source} was written with other settings: {', '.join(other)}", stacklevel=2)


def _check_own(inner: Inner, model: nn.Module, own: Tree) -> None:
    if own["inner"] is not None:
        try:
            inner_state.check(inner, model, own["inner"])
        except ValueError as error:
            raise Foreign(str(error)) from None
    if own["buffers"] is not None:
        shapes = {name: tuple(buffer.shape) for name, buffer in kept(model).items()}
        got = {name: tuple(buffer.shape) for name, buffer in own["buffers"].items()}
        if shapes != got:
            wrong = sorted(n for n in shapes.keys() | got.keys() if shapes.get(n) != got.get(n))
            raise Foreign(f"buffers are not alike there and here: {', '.join(wrong[:8])}")


@torch.no_grad()
def restore_replica(outer: OuterStep, inner: Inner, model: nn.Module, resume: Resume) -> None:
    """Restores a checked ``resume``, before the replica starts."""
    saved, own = resume.saved, resume.saved.own
    counters = outer.counters
    counters.restore(own)
    first = saved.committed[0].record
    for fragment, version, part in zip(outer.fragments, saved.committed, own["fragments"], strict=True):
        fragment.stand_on(state_of(fragment, version, saved.held, first).placed(outer.shared.committed_memory))
        if part is None:
            at = counters.local_steps, counters.tokens, counters.totals  # an older one may have been restored before
            fragment.restore(Pending(Base(fragment.start, *at, version.record.version), None, {}))
            fragment.view.write(fragment.start)
            outer.schedule.restart(fragment, anew=True)
        else:
            _restore_fragment(fragment, part, outer.shared.clock())
    if own["inner"] is not None:
        inner_state.restore(inner, model, own["inner"])
        inner_state.restore_groups(inner, own["inner"])
    if own["buffers"] is not None:
        put(model, own["buffers"])
    if own["model"] is not None and outer.gradients is not None:
        view = outer.gradients.live.view
        view.write(own["model"].to(view.device))
        outer.gradients.live.counted = own["counted"]
    if resume.adopted:
        adopt(outer, resume.saved, resume.adopted, resume.newest)


def _restore_fragment(fragment: Fragment, part: Tree, now_s: float) -> None:
    """Restores a fragment, which is based on the state on which it was captured."""
    view, frozen = fragment.view, part["snapshot"]
    totals, snapshot = StepTotals(**part["base_totals"]), None
    base = Base(fragment.start, part["base_step"], part["base_tokens"], totals, part["base_version"])
    if frozen is not None:
        contribution, params = Contribution(**frozen["contribution"]), Frozen(view, on(view, frozen["params"]))
        totals_then, seen = StepTotals(**frozen["totals"]), seen_of(frozen["seen"])
        snapshot = Snapshot(
            contribution, params, fragment.start, frozen["tokens"], frozen["lr"], totals_then, seen, frozen["until"]
        )
    residuals = {units: residual_of(view, left) for units, left in part["residuals"].items()}
    view.write(part["params"].to(view.device))
    fragment.restore(Pending(base, snapshot, residuals))
    fragment.note_snapshot(part["snapshot_step"], part["pace"])
    fragment.restart_trigger(part["trigger_from_step"], now_s - part["trigger_from_ago_s"])
    fragment.trigger_metrics.direction = on(view, part["direction"])
