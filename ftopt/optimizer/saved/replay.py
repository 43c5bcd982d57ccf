"""`recover: replay`: a neighbour keeps a copy of a replica, and another process repeats a dead replica's steps.

A copy is made when the training thread has applied an outer step that the replica was in; with ``policy.copy_every``
also between two inner steps, that many steps after the neighbour's last copy. It contains the inner optimizers' state,
buffers, the random number generators, error feedback, and where work is pending (overlapping outer steps, other
fragments, the middle of a round) that work with its anchor. It does not contain the committed state, which all replicas
hold. The loop sets rates and other values of parameter groups by the job's inner step.

Together with the units in the order of their grants, this is all that an inner step depends on. So training on repeats
the steps, bit for bit if the committed state is unchanged and the machine is of the same kind.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ftopt.common.rng import get_rng_state, set_rng_state
from ftopt.common.tree import Tree, flatten, unflatten
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.saved import extra_state
from ftopt.optimizer.saved.adopt import adopt_works, work_of
from ftopt.optimizer.saved.capture import capture_own
from ftopt.step import inner_state
from ftopt.step.inner import Inner
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.buffers import kept, put
from ftopt.step.tensors.digest import digest
from ftopt.step.tensors.flat import FlatView
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import AdoptedWork, ReplicaGroup


@dataclass(frozen=True)
class Replay:
    """The inner steps of another incarnation that are repeated.

    Args:
        steps: their number.
        of: the replica and incarnation that had taken them.
        until: the job's inner step at their end.
        pending: inner steps of each fragment that were adopted without being repeated.
    """

    of: tuple[str, int]
    steps: int
    until: int
    pending: tuple[int, ...]


@torch.no_grad()
def copy_of(outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool) -> tuple[str, dict[str, Tensor]]:
    """The copy: a text and tensors. Training thread, between two inner steps; a pass over the inner state. UserError:
    the inner state holds a value that cannot be copied."""
    own = capture_own(outer, inner, model, copies, to_replay=True)
    tensors: dict[str, Tensor] = {}
    extra = extra_state.capture(model, copies.of)
    plain = flatten(own | {"inner_step": outer.inner_step(), "rng": get_rng_state(), "extra": extra}, tensors)
    return json.dumps({"value": plain, "digest": digest(tensors)}, separators=(",", ":")), tensors


@torch.no_grad()
def restore_copy(outer: OuterStep, inner: Inner, model: nn.Module, inherited: AdoptedWork) -> Replay:
    """Restores a copy in this replica, which has just fetched the committed state. Training thread. ValueError: the
    copy is damaged or of another model; nothing has changed."""
    own = _checked(outer, inner, model, inherited)
    parts: list[Tree] = own["fragments"]
    adopt_works(outer, [[work_of(f.view, own, f.index, parts[f.index]["base"])] for f in outer.fragments], own=0)
    for fragment, part in zip(outer.fragments, parts, strict=True):
        behind = own["local_steps"] - part["trigger_from_step"]
        outer.schedule.restart(fragment, anew=False, behind=behind)
    inner_state.restore(inner, model, own["inner"])
    put(model, own["buffers"])
    extra_state.restore(model, own["extra"])
    set_rng_state(own["rng"])
    steps = max(0, inherited.inner_step - int(own["inner_step"]))
    return Replay(inherited.copy.incarnation_id, steps, outer.inner_step() + steps, outer.pending_by_fragment())


def _checked(outer: OuterStep, inner: Inner, model: nn.Module, inherited: AdoptedWork) -> Tree:
    copy = inherited.copy
    try:
        outside = json.loads(copy.text)
        check_copy(copy.text, copy.tensors)
        own: Tree = unflatten(outside["value"], copy.tensors)
        inner_state.check(inner, model, own["inner"])
        pairs = zip(outer.fragments, own["fragments"], strict=True)
        shapes = [_fits(fragment.view, part, own["local_steps"] - part["base_step"]) for fragment, part in pairs]
        here = {name: buffer.shape for name, buffer in kept(model).items()}
        if not all(shapes) or here != {name: buffer.shape for name, buffer in own["buffers"].items()}:
            raise ValueError("its tensors are not of this model")
        if len(copy.versions) != len(outer.fragments) or set(own["rng"]) < {"torch", "python"}:
            raise ValueError("a part is missing")
    except (AttributeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"it is no copy of a replica: {error!r}") from None
    return own


def check_copy(text: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError if the copy is damaged: it has changed while being read or sent. Any thread."""
    try:
        known = json.loads(text)["digest"]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"it is no copy of a replica: {error!r}") from None
    if known != digest(tensors):
        raise ValueError("it was damaged on its way")


def _fits(view: FlatView, part: Tree, steps: int) -> bool:
    """Whether pending work is consistent: both tensors are present, or there are no steps."""
    both = (part["params"], part["base"])
    return both == (None, None) if not steps else all(t.shape == (view.numel,) for t in both)


class Replays:
    """Offers copies of a replica, or repeats a dead one's steps. Training thread. ``clock``: seconds, monotonic.
    UserError: steps could not be repeated."""

    def __init__(
        self, inner: Inner, model: nn.Module, group: ReplicaGroup, method: Method, *, clock: Callable[[], float]
    ) -> None:
        if method.gradients is not None:
            raise UserError(
                f"policy.recover=replay with method {method.name}, whose replicas exchange gradients in each step; "
                "use policy.recover=drop"
            )
        if group.units is None:
            raise UserError(
                "policy.recover=replay needs a sample ledger, to know what a dead replica has trained on; draw batches "
                "from ftopt.DataLoader(..., group=group) (data.sampling=once in a recipe), made before `with "
                "optimizer:`, or use policy.recover=drop"
            )
        self.under_way: Replay | None = None
        self._inner, self._model, self._clock = inner, model, clock
        self._group, self._units = group, group.units
        self._began_s = 0.0
        self._every = group.policy.copy_every
        # Two alternate if the copy at the start of a round may come while the previous one is being fetched.
        self._pools = [CopyPool() for _ in range(1 if self._every is None else 2)]
        self._copied_step = 0  # of this incarnation, at the last copy
        group.check_copies(check_copy)

    def between(self, outer: OuterStep) -> bool:
        """Offers a copy between two inner steps of a round if one is due. Returns whether it did.

        Offers none while the previous copy is on its way to the neighbour, which it would replace, so that none might
        ever arrive; and none while a contribution is under way, which would void the copy when it is counted.
        """
        if self._every is None or outer.counters.local_steps - self._copied_step < self._every:
            return False
        if not self._group.copy_settled or any(
            fragment.reset or fragment.state is not fragment.applied or self._group.outstanding(fragment.index)
            for fragment in outer.fragments
        ):
            return False
        self.copy(outer)
        return True

    def undone(self, outer: OuterStep) -> None:
        """Replaces a copy that contains an undone step, which another process would otherwise bring back."""
        if self._copied_step > outer.counters.local_steps:
            self.copy(outer)

    def copy(self, outer: OuterStep) -> None:
        """Offers a copy of this replica: as a round begins, `between`, or when a step of the last one was `undone`."""
        if not self._pools:
            return
        began_s, pool = self._clock(), self._pools[0]
        self._pools.reverse()
        pool.recycle()
        self._copied_step = outer.counters.local_steps
        try:
            text, tensors = copy_of(outer, self._inner, self._model, pool)
        except UserError as error:
            warnings.warn(f"policy.recover=replay: no copy of this replica can be made: {error}", stacklevel=5)
            self._pools, self._every = [], None
            return
        self._group.offer_copy(tuple(f.applied.meta.version for f in outer.fragments), text, tensors)
        size = len(text) + sum(t.nbytes for t in tensors.values())
        pending = max(outer.pending_by_fragment())
        data = {"bytes": size, "stall_s": self._clock() - began_s, "pending_steps": pending}
        self._group.emit("copied", inner_step=outer.inner_step(), data=data)

    def inherit(self, outer: OuterStep) -> bool:
        """Takes the place of a dead replica, at the start. False: there is none to adopt."""
        inherited = self._group.adopted_work()
        if inherited is None:
            return False
        incarnation_id = list(inherited.copy.incarnation_id)
        try:
            replay = restore_copy(outer, self._inner, self._model, inherited)
        except ValueError as error:
            self._group.emit("replay_failed", data={"of": incarnation_id, "reason": str(error)})
            return False
        if any(replay.pending):
            self._units.spend(inherited.copy.used)
        size = sum(t.nbytes for t in inherited.copy.tensors.values())
        data = {"of": incarnation_id, "steps": replay.steps, "pending_by_fragment": list(replay.pending), "bytes": size}
        self._group.emit("replay", inner_step=outer.inner_step(), data={**data, "fetch_s": inherited.fetch_s})
        self.under_way, self._began_s = replay, self._clock()
        return True

    def stepped(self, outer: OuterStep) -> None:
        """Ends the replay after its last inner step."""
        replay = self.under_way
        if replay is not None and outer.inner_step() >= replay.until:
            self.under_way = None
            data = {"of": list(replay.of), "steps": replay.steps, "seconds": self._clock() - self._began_s}
            self._group.emit("replayed", data=data)
