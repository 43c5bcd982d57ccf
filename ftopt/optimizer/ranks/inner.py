"""The inner optimizers as the outer step on rank 0 sees them: of the mirror's parameters, and stepped on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftopt.errors import UserError
from ftopt.optimizer.ranks.loads import check_loaded_alike
from ftopt.optimizer.ranks.mirror import BUFFERS, GRADS, INNER, NOTHING, PARAMS, Kinds, Mirror, RankModel
from ftopt.step.inner import Inner
from ftopt.step.tensors.packed import changed, marks
from ftopt.sync.group import Do


class MirrorInner(Inner):
    """The inner optimizers as rank 0's outer step sees them: of the mirror's parameters. What they do, all ranks do.

    Args:
        together: the method takes each step on all replicas alike, so that the mirror, with the inner state, is always
            as the ranks are.
        moments: the outer step reads and writes the inner state; ``buffers``: and the buffers.
        count: called with the tokens that the other ranks have counted.

    Attributes:
        in_step: a ``step()`` of the user's is under way.
    """

    def __init__(
        self,
        ranks: RankModel,
        mirror: Mirror,
        *,
        together: bool,
        moments: bool,
        buffers: bool,
        count: Callable[[int], None],
    ) -> None:
        super().__init__(mirror.optimizers)
        self._ranks, self._mirror, self._real = ranks, mirror, ranks.inner
        self._together, self._count = together, count
        self._kinds = PARAMS | (INNER if together or moments else NOTHING) | (BUFFERS if buffers else NOTHING)
        self._stale = True
        self.in_step = False
        self._seen: dict[str, list[int]] = {}

    def _all(self, do: Do, what: object = None) -> None:
        self._ranks.island.say((do, what))

    # The mirror and the ranks.

    def mark(self) -> None:
        """The ranks are no longer as the mirror is."""
        self._stale = True

    def refresh(self, fragment: int = 0, *, anew: bool = False) -> None:
        """The mirror is as the ranks are, all of it. ``anew``: whatever user code has changed there since the last
        step."""
        if self._stale or anew:
            self.pull(self._kinds)

    def pull(self, kinds: Kinds) -> None:
        """Brings ``kinds`` together."""
        self._ranks.check_trained()
        for name, parameter in self._mirror.trained.items():
            parameter.requires_grad_(self._ranks.trained[name].requires_grad)
        with self._ranks.island.whole():
            self._all(Do.PULL, kinds)
            self._ranks.pull(kinds, self._mirror)
            told = self._ranks.island.gather((0, groups_of(self._real), False))
        check_groups([groups for _, groups, _ in told])
        check_loaded_alike([loaded for *_, loaded in told])
        self._count(sum(tokens for tokens, *_ in told))
        self._seen |= {kind: self._mirror.state(kind) for kind in kinds}
        self._stale &= not kinds >= self._kinds

    def publish(self) -> None:
        """The ranks are as the mirror is: what the outer step has changed reaches them."""
        if not self._stale:
            kinds = frozenset(kind for kind, seen in self._seen.items() if self._mirror.state(kind) != seen) - GRADS
            if kinds:
                self._push(kinds)
        self._set_groups()

    def put_back(self) -> None:
        """The ranks' parameters are as the mirror's, whatever they were."""
        self._push(PARAMS)

    def restored(self) -> None:
        """The inner state and the buffers in the mirror are those of a checkpoint."""
        self._seen = {kind: [] for kind in PARAMS | INNER | BUFFERS}

    def _push(self, kinds: Kinds) -> None:
        with self._ranks.island.whole():
            self._all(Do.PUSH, kinds)
            self._ranks.push(kinds, self._mirror)
        self._seen |= {kind: self._mirror.state(kind) for kind in kinds}

    def follow_groups(self) -> None:
        """The groups' values are the real optimizers': schedulers have changed them."""
        for optimizer, real in zip(self.optimizers, self._real.optimizers, strict=True):
            for group, own in zip(optimizer.param_groups, real.param_groups, strict=True):
                group.update(_values(own))

    def _set_groups(self) -> None:
        values = groups_of(self)
        if values != groups_of(self._real):
            self._all(Do.SET_GROUPS, values)
            set_groups(self._real, values)

    # What an inner optimizer does.

    def step(self, closure: Callable[[], Any] | None) -> Any:
        before = groups_of(self._real)
        aside = self._together and not self.in_step  # as `GradientFragment.follow` does with the mirror's
        self.publish()
        if aside:
            self._all(Do.KEEP_GRADIENTS)
            self._ranks.keep_gradients()
        if self._together:
            self._push(GRADS)
        self._stale = True
        marked = [marks(group) for group in self._real.param_groups]
        with self._ranks.island.whole():
            self._all(Do.STEP, closure is not None)
            loss = self._real.step(closure)
        if aside:
            self._all(Do.PUT_GRADIENTS)
            self._ranks.put_gradients()
        for i, own in enumerate(itertools.chain(*before)):  # what the step counts in the groups stays
            group = self._real.param_groups[i]
            counts = {key: group[key] for key in changed(marked[i], marks(group))}
            own.update(counts)
            self.param_groups[i].update(counts)
        if self._together:
            self.refresh()
            if before != groups_of(self._real):  # those of a fetched gradient, for this step
                self._all(Do.SET_GROUPS, before)
                set_groups(self._real, before)
        return loss

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        with self._ranks.island.whole():
            self._all(Do.EVALUATE)
            loss = self._real.evaluate(closure)
        self.pull(GRADS)
        return loss

    def zero_grad(self, *, set_to_none: bool) -> None:
        self._all(Do.ZERO_GRAD, set_to_none)
        self._real.zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none=set_to_none)

    def reset_state(self) -> None:
        self._all(Do.RESET_STATE)
        self._real.reset_state()
        super().reset_state()

    def forget_nonfinite_state(self) -> None:
        """Resets all of it: one rank alone cannot tell whether another's part is finite."""
        self.reset_state()

    def only_sets_up(self) -> bool:
        return self._real.only_sets_up()

    def has_gradient(self) -> bool:
        with self._ranks.island.whole():
            self._all(Do.TELL_GRADIENT)
            return any(self._ranks.island.gather(self._real.has_gradient()))


def check_groups(found: Sequence[list[list[dict[str, Any]]]]) -> None:
    """UserError: a rank has other rates than rank 0. ``found``: `groups_of` each rank."""
    mine = found[0]
    for rank, groups in enumerate(found):
        pairs = zip(itertools.chain(*mine), itertools.chain(*groups), strict=True)
        for i, (own, theirs) in enumerate(pairs):
            for key in own.keys() | theirs.keys():
                if not _alike(own.get(key), theirs.get(key)):
                    raise UserError(
                        f"parameter group {i} has {key}={own.get(key)!r:.40} on rank 0 and "
                        f"{theirs.get(key)!r:.40} on rank {rank}; the ranks of a replica take each step alike: "
                        "make and step the same schedulers on all of them"
                    )


def groups_of(inner: Inner) -> list[list[dict[str, Any]]]:
    """The values of all groups, the parameters left out."""
    return [[_values(group) for group in optimizer.param_groups] for optimizer in inner.optimizers]


def set_groups(inner: Inner, values: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """The reverse of `groups_of`."""
    for optimizer, each in zip(inner.optimizers, values, strict=True):
        for group, own in zip(optimizer.param_groups, each, strict=True):
            group.update(own)


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _alike(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
