"""The wrapped optimizer on each rank of an island *by shard*: each rank does the outer step of its slice.

All ranks call `step`, `sync`, `settle`, `close` and so on alike. Each runs the ordinary `Core` on a model of its
slices: what they must agree on, they have from rank 0's words (`ftopt.optimizer.island.rank_group`); what is of all
slices, they bring together (`FlatView.together`). Before the outer step looks at a fragment, the slices become as the
ranks' parts of the model are (`Exchange.pull`), and afterwards these become as the slices are.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ftopt.common.tree import Tree
from ftopt.errors import UserError
from ftopt.methods import Due, Method
from ftopt.optimizer.arguments import check_by_shard
from ftopt.optimizer.asked import Asked, Leave, leave
from ftopt.optimizer.core import CLOSED, Core
from ftopt.optimizer.in_model import tell_set_back
from ftopt.optimizer.island.inner import check_groups, groups_of
from ftopt.optimizer.island.loads import RankLoads, check_loaded_alike
from ftopt.optimizer.island.loops import states_of_ranks, unlike
from ftopt.optimizer.island.mirror import Ranks
from ftopt.optimizer.island.rank_group import RankGroup, portable
from ftopt.optimizer.island.saved_slices import Whole, sliced_resume
from ftopt.optimizer.island.slices import Exchange, SliceView
from ftopt.optimizer.leaving import Raised, at_exit, end_together, hand_in, tell_left
from ftopt.optimizer.saved.capture import SavedReplica, capture_replica
from ftopt.optimizer.saved.restore import Fallback, Resume, start_or_resume
from ftopt.step import inner_state
from ftopt.step.inner import Inner, put_beside
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import uncompiled
from ftopt.step.tensors.mapped import Mapped
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.step.tensors.views import partition_of
from ftopt.sync.group import Island, Position, ReplicaGroup

_log = logging.getLogger(__name__)
T = TypeVar("T")


class RankInner(Inner):
    """A rank's inner optimizers: what all ranks do with their state, they do alike."""

    def forget_nonfinite_state(self) -> None:
        """Resets all of it: one rank alone cannot tell whether another's part is finite."""
        self.reset_state()


class SliceStep(OuterStep):
    """The outer step of a rank's slices: a boundary begins with rank 0's word, and what it has changed goes to the
    model.

    Args:
        core: whose it is.
    """

    def __init__(self, core: ShardCore, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._core = core
        self._refresh = core.refresh

    def _due(self, fragment: Fragment) -> Due:
        """Rank 0's answer, where it depends on more than the number of steps (on seconds, say)."""
        due = super()._due(fragment)
        if fragment.timing.fixed_period is not None:
            return due
        return Due(fragment.view.together(due)[0])

    def boundary(self, largest_lr: Callable[[], float], turns: Sequence[Sequence[Fragment]] | None = None) -> bool:
        self._core.boundary()
        acted = super().boundary(largest_lr, turns)
        if acted:
            self._core.publish()
        return acted


class ShardCore(Core):
    """What a `Core` is, for one rank of an island by shard. Calls are collective, but for `count`, `report`, and
    leaving at once.

    Args:
        whole: memory for whole states, where they are brought together for peers.

    Attributes:
        ranks: what all ranks hear of the group alike.
    """

    def __init__(
        self,
        inner: Inner,
        model: nn.Module,
        method: Method,
        *,
        group: ReplicaGroup,
        island: Island,
        memory: Memory | None,
        whole: Memory,
        asked: Asked,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):  # replicas of other layouts have other names
            model = model.module
        check_by_shard(method)
        self.ranks = RankGroup(group, island, asked.why, whole)
        super().__init__(inner, model, method, group=cast("ReplicaGroup", self.ranks), memory=memory)
        self.island = island
        self._parts: Ranks | None = None
        self._exchange: Exchange | None = None
        self._stale: set[int] = set()
        self._seen: dict[int, list[int]] = {}
        self._tokens_told = 0
        self._leaves = False  # `close` has been called
        self._set_back_told: int | None = None  # of loaded weights that were replaced: the steps dropped
        self._leaving = asked
        self._saved_inner: list[Tree] | None = None
        self._loaded: RankLoads | None = None
        self._sliced: _SlicedFallback | None = None  # kept here: the group asks it weakly

    # Calls.

    @contextmanager
    def _calling(self, call: str) -> Iterator[None]:
        """A call of the user's loop, which all ranks make. What is raised in its middle leaves them unlike, but for
        what the user can put right, which is raised before anything is done."""
        self.island.check()
        if self.ranks.call:  # within another call
            yield
            return
        self.ranks.call = call
        try:
            with self.ranks.links.training():
                yield
        except (UserError, Leave):
            raise
        except BaseException as error:
            self.island.broken = self.island.broken or error
            self.island.part()
            self.ranks.links.close()
            raise
        finally:
            self.ranks.call = ""
        told, self._set_back_told = self._set_back_told, None
        if told is not None:  # at last, since a warning may be an error
            tell_set_back(told, closing=self._leaves)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `OuterOptimizer.step`."""
        if self._loaded is not None:
            self._loaded.judge()
        if self.suspended or (self.outer is None and self._sets_up_alike()):
            self._mark()
            return self.inner.step(closure)
        self.inner.check_rates()
        if self.closed or self._evaluated.there:
            self._check_usable("step()")
        with self._calling("step"):
            if self.outer is None and self.start() and closure is None:
                return None  # The gradient belongs to the parameters that the fetched ones have replaced.
            outer = self.started()
            self._mark()
            assert self.group is not None
            if self.schedules.due:
                self._follow_schedules(outer)
            found = self._step(outer, self.group, closure)
            if self.ranks.why:
                if self.island.leads:
                    leave(self.ranks.replica, self.ranks.why)
                raise Leave(0)
            return found

    def leave_if_worker_died(self, error: BaseException | None) -> None:
        """Not in an island, whose other ranks may be in a step that this one is not in."""

    def _sets_up_alike(self) -> bool:
        """See `Inner.is_empty_step`; on all ranks alike."""
        if not self.inner.only_sets_up():
            return False
        gradients = self.island.gather(self.inner.has_gradient())
        return bool(self.island.share(not any(gradients) if self.island.leads else None))

    def sync(self) -> bool:
        """See `OuterOptimizer.sync`."""
        if self.outer is not None or self.closed:
            self._check_usable("sync()")  # on all ranks alike, before any of them does something
        return self._out_of_turn("sync", super().sync)

    def settle(self) -> bool:
        """See `OuterOptimizer.settle`."""
        self.started()
        self._check_usable("settle()")
        return self._out_of_turn("settle", super().settle)

    def enter_outer(self) -> bool:
        """See `Core.enter_outer`."""
        if self._evaluated.there or (self.closed and self.outer is None):
            return super().enter_outer()  # which changes nothing
        return self._out_of_turn("outer_parameters", super().enter_outer)

    def exit_outer(self) -> None:
        """See `Core.exit_outer`."""
        if not self._evaluated.there:
            return
        if (error := sys.exc_info()[1]) is not None and not self.closed:
            _log.error(
                "rank %d of replica %s: outer_parameters() is left by an error, and waits for the other ranks: %r",
                self.island.rank, self.ranks.replica, error,
            )  # fmt: skip
        self._out_of_turn("outer_parameters", super().exit_outer)

    def _out_of_turn(self, call: str, act: Callable[[], T]) -> T:
        """A call besides the steps: the slices are as the model is, whatever user code has changed there, and what
        ``act`` changes goes to the model."""
        with self._calling(call):
            self.start()
            if self._evaluated.there:
                found = act()
            else:
                if not self.closed:  # else they have left the job together, and have the model still
                    self.boundary()
                self._mark()
                self._pull_all()
                found = act()
            self.publish()
            return found

    # Weights that user code loads into the model.

    def boundary(self) -> None:
        """A step boundary begins. Weights that have been loaded are replaced first; a step that has been taken with
        them is dropped with the others that are pending."""
        if self.ranks.boundary():
            self._put_back()

    def _put_back(self) -> None:
        """Replaces loaded weights, on all ranks."""
        assert self._loaded is not None
        if any(self.ranks.all(self._loaded.put_back())):
            outer = self.started()
            outer.freezer.join()
            self._mark()
            self._pull_all()
            steps = outer.drop_loaded()
            self._push_all()
            if self.island.leads:
                self._set_back_told = steps

    def _push_all(self) -> None:
        assert self._exchange is not None
        for fragment in self._seen:
            self._exchange.push(fragment)
            self._seen[fragment] = self._versions(fragment)

    # The slices and the model.

    def _mark(self) -> None:
        """The slices are not as the model is any more."""
        self._stale = set(range(len(self._exchange.cuts))) if self._exchange is not None else set()

    def refresh(self, fragment: int) -> None:
        """The slices of a fragment are as the model is."""
        if fragment not in self._stale:
            return
        assert self._exchange is not None
        self._stale.discard(fragment)
        self._agree()
        self._exchange.pull(fragment)
        self._seen[fragment] = self._versions(fragment)

    def _pull_all(self) -> None:
        for fragment in sorted(self._stale):
            self.refresh(fragment)

    def _agree(self) -> None:
        """The tokens of all ranks are counted; UserError: a rank has other rates than rank 0."""
        counters = self.started().counters if self.outer is not None else None
        own = counters.tokens - self._tokens_told if counters is not None else 0
        differs = self._loaded is not None and self._loaded.judge()
        told = self.ranks.all((own, groups_of(self.inner), differs))
        check_groups([groups for _, groups, _ in told])
        check_loaded_alike([loaded for *_, loaded in told])
        if counters is not None:
            counters.add_tokens(sum(tokens for tokens, *_ in told) - own)
            self._tokens_told = counters.tokens

    def publish(self) -> None:
        """The model is as the slices are: what the outer step has changed goes there."""
        assert self._exchange is not None
        changed = [fragment for fragment, seen in self._seen.items() if self._versions(fragment) != seen]
        for fragment in self.ranks.all(changed)[0]:
            self._exchange.push(fragment)
            self._seen[fragment] = self._versions(fragment)

    def _versions(self, fragment: int) -> list[int]:
        assert self._exchange is not None
        return [self._exchange.pieces[name]._version for name in self._exchange.cuts[fragment].names]

    # Starting and leaving.

    def start(self) -> bool:
        """Joins the job unless that is done; True when the parameters came from another replica."""
        if self.outer is not None:
            return False
        if self.closed:
            raise RuntimeError(CLOSED)
        self.raised = Raised()
        with self._calling("start"):
            return self._start()

    def _start(self) -> bool:
        assert self.model is not None and self.method is not None and self.group is not None
        at_exit.check_alone(self.model)
        self._parts = Ranks(self.island, self.model, self.inner, self.ranks.replica)
        self._exchange = exchange = Exchange(self._parts, partition_of(self.model, self.method))
        self._mark()
        self._pull_all()
        links = self.ranks.links
        views = [SliceView(exchange.model, cut, self.island.rank, links.all) for cut in exchange.cuts]
        both = self.inner, self.model
        outer = SliceStep(self, views, self.method, self.ranks, both, clock=self._clock, memory=self._memory)
        outer.start_step, outer.planned, outer.own_lines = self.first_step, self.planned, self.own_lines
        resume, self.resume = self.resume, None
        with self._leaving.joining() if self.island.leads else nullcontext():
            found = None if resume is None else self._restored(resume)
            self._sliced = None if self.fallback is None else _SlicedFallback(self.fallback, self._restored)
            fetched = start_or_resume(outer, self.inner, self.model, self.group, found, self._sliced)
        self._restore_inner()
        if not self.island.leads:
            self._leaving.joined()
        self._tokens_told = outer.counters.tokens
        self._rounds_applied = outer.counters.rounds_applied
        self.outer = outer
        self.start_step = outer.fragments[0].state.meta.inner_step
        self.publish()
        if self.ranks.units is not None:
            self.ranks.units.when_out_of_units(partial(self._all, "rest"))
            self.ranks.units.while_waiting(self._leave_if_asked)
        self.island.together = self._for_loader
        outer.report("training")
        self._loaded = loaded = RankLoads(self.model, self._parts, lambda: not (self.closed or self._evaluated.there))
        self.ranks.loaded = lambda: loaded.noted
        at_exit.add(self)
        return fetched

    def close(self, *, flush: bool, timeout_s: float, early: bool = False) -> None:
        """Leaves the job; see `OuterOptimizer.close`. Without ``flush`` this rank alone, at once."""
        if self.closed:
            return
        at_exit.remove(self)
        loaded: Callable[[], None] | None = None
        self._leaves, broken = True, self.island.broken is not None
        try:
            loaded = None if self._loaded is None else self._loaded.keep()
            if flush and self.outer is not None and not broken:
                with self._calling("close"):
                    self._hand_in(self.outer, timeout_s, early=early)
            else:
                self.island.part()
                raised = self.raised.error() is not None
                self.ranks.part(early=early or broken or raised, reason=self.raised.text())
        finally:
            self.closed, self.island.together = True, None
            self._leaving.left()
            self.ranks.close()
            if loaded is not None:
                loaded()

    def _hand_in(self, outer: OuterStep, timeout_s: float, *, early: bool) -> None:
        self.exit_outer()
        ranks = self.ranks
        self.boundary()
        self._mark()
        self._pull_all()
        deadline, early = ranks.same((time.monotonic() + timeout_s, early or bool(ranks.why)))
        hand_in(outer, cast("ReplicaGroup", ranks), self.inner.largest_lr, deadline, ranks.now_s, early=early)
        if not (early or ranks.same(self.raised.error() is not None)):
            left_s, group = max(0.0, deadline - ranks.now_s()), cast("ReplicaGroup", ranks)
            asked = lambda: bool(self._leaving.why())  # noqa: E731
            tell = end_together(outer, group, but=at_exit.beside(self), timeout_s=left_s, until=asked)
            if self.island.leads:
                tell()
        reason = ranks.obstacle() or f"no round has taken them within {timeout_s:g} s"
        self._after_outer_work(outer)
        self.publish()  # what is saved now begins with the slices as the model is
        self.before_leaving(max(0.0, deadline - ranks.now_s()))
        early = early or self.raised.error() is not None
        if not early:
            ranks.finish()
        ranks.leave(timeout_s=max(0.0, deadline - ranks.now_s()), early=early, reason=self.raised.text())
        if not ranks.closed:
            ranks.boundary()
        outer.apply()
        self._after_outer_work(outer)
        self.publish()
        if self.island.leads:
            tell_left(outer, ranks.replica, reason)
        ranks.links.leave()

    # What rank 0 does, and needs the others for.

    def _leading(self, call: str, act: Callable[[], Any]) -> Any:
        """Rank 0 does ``act``, within which `_all` lets all ranks do something; its result, on all ranks."""
        with self._calling(call):
            if not self.island.leads:
                while (told := self.island.hear())[0]:
                    self._part(told[0], told[1])
                if told[2] is not None:
                    raise told[2]
                return told[1]
            try:
                found = act()
            except BaseException as error:
                self.island.say(("", None, portable(error)))
                raise
            self.island.say(("", found, None))
            return found

    def _all(self, name: str, what: Any = None) -> Any:
        self.island.say((name, what, None))
        return self._part(name, what)

    def _part(self, name: str, what: Any) -> Any:
        parts: dict[str, Callable[[Any], Any]] = {
            "rest": self._offer_rest, "why": self._tell_why, "loops": self._loops, "capture": self._captured,
        }  # fmt: skip
        return parts[name](what)

    def _for_loader(self, call: str, act: Callable[[], object]) -> Any:
        return self._leading(call, act)

    def _tell_why(self, what: Any) -> list[str]:
        return self.ranks.all(self._leaving.why())

    def _offer_rest(self, what: Any) -> None:
        """The loader waits for units that others hold; see `Core.offer_rest`."""
        outer = self.started()
        if self.closed or self._evaluated.there:
            return
        self.boundary()
        self._mark()
        self._pull_all()
        outer.report("out_of_units")
        outer.apply()
        self._propose_rest(outer, spent=bool(self.ranks.same(self._is_spent())))
        self.publish()
        self._ended_at = None

    def _leave_if_asked(self) -> None:
        """Rank 0 waits for units, and the others for it."""
        found = self._all("why")
        if why := next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), ""):
            leave(self.ranks.replica, why)

    def on_leader(self, call: str, act: Callable[[], bool]) -> bool:
        """Rank 0 does ``act``; its result, on all ranks."""
        return bool(self._leading(call, act))

    # Checkpoints.

    def check_included(self, call: str) -> bool:
        """See `Core.check_included`. Before the start it is not known."""
        if self.outer is None or self.closed:
            return False
        with self._calling(call):
            found = self.ranks.all(None if self.loop is None else sorted(self.loop.watched))
            for rank, names in enumerate(found):
                if names != found[0]:
                    raise unlike(found[0] or [], names, rank)
        return True

    def capture_loops(self, copies: CopyPool) -> list[Tree]:
        """See `Core.capture_loops`. Rank 0, within `on_leader`."""
        found: list[Tree] = self._all("loops")
        return found

    def _loops(self, what: Any) -> list[Tree]:
        assert self.loop is not None
        return states_of_ranks(self.island, partial(self.loop.capture, lambda tensor: tensor.detach().cpu().clone()))

    @torch.inference_mode(False)
    def capture(self, copies: CopyPool) -> SavedReplica:
        """See `Core.capture`. Rank 0, within `on_leader`."""
        found: SavedReplica = self._all("capture")
        return found

    def _captured(self, what: Any) -> SavedReplica:
        """What this rank's slices are; on rank 0 the whole replica."""
        outer, exchange, parts = self.started(), self._exchange, self._parts
        assert exchange is not None and parts is not None and self.model is not None and self.group is not None
        if self.ranks.same(self.ranks.loaded()):
            self._put_back()
        self._mark()
        self._pull_all()
        self._join(outer)
        memory = self._files()
        inner = _inner_tree(self.inner, parts, memory)
        saved = capture_replica(
            outer, self.inner, self.model, self.group, copies=CopyPool(), capture_inner=lambda *_: inner
        )
        whole = Whole(self.island, exchange.cuts, lambda numel: memory.take(numel, torch.device("cpu")))
        committed = tuple(
            replace(version, tensors=whole.committed(index, dict(version.tensors)))
            for index, version in enumerate(saved.committed)
        )
        works = [whole.work(index, part) for index, part in enumerate(saved.own["fragments"])]
        return replace(saved, committed=committed, own={**saved.own, "fragments": works})

    def _files(self) -> Memory:
        """Where whole tensors lie until a checkpoint is written: beside it, not in RAM."""
        if self.folder is None or not self.island.leads:
            return Memory()
        self.folder.mkdir(parents=True, exist_ok=True)
        return Mapped(self.folder)

    @property
    def saved_model(self) -> nn.Module | None:
        """See `Core.saved_model`."""
        return None if self._exchange is None else self._exchange.model

    def _restored(self, resume: Resume) -> Resume:
        """This rank's slices of a checkpoint; the inner state is kept for `_restore_inner`."""
        assert self._exchange is not None and self.model is not None
        self._saved_inner = tree = resume.saved.own["inner"]
        if tree is not None:
            try:
                inner_state.check(self.inner, self.model, tree)
            except ValueError as error:
                raise resume.foreign(str(error)) from None
        found: Resume = sliced_resume(self._exchange.cuts, self.island.rank, resume)
        return found

    def _restore_inner(self) -> None:
        tree, self._saved_inner = self._saved_inner, None
        if tree is None:
            return
        assert self._parts is not None
        state = {name: values for entry in tree for name, values in entry["state"].items()}
        self._parts.states.push(state if self.island.leads else {})
        for optimizer, entry in zip(self.inner.optimizers, tree, strict=True):
            put_beside(optimizer, entry["beside"])
        inner_state.restore_groups(self.inner, tree)

    # Of this rank alone.

    @property
    def leads(self) -> bool:  # type: ignore[override]
        """Whether this is rank 0."""
        return self.island.leads

    @property
    def place(self) -> tuple[int, int]:
        """See `Core.place`."""
        return self.island.rank, self.island.size

    def anchor_digest(self) -> str:
        """See `OuterOptimizer.anchor_digest`; on any rank."""
        return self.started().anchor_digest()

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """See `Core.trains`."""
        return self.model, self.ranks.replica

    def undo_step(self) -> Any:
        """There is none."""
        raise UserError("undo_step in a replica of several ranks is not supported; use a replica of one process")

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's inner state."""
        self.inner.load_state_dict(state_dict)

    def _set_back(self, *, closing: bool = False) -> bool:
        return False  # it is done at step boundaries


class _SlicedFallback:
    """A `Fallback` for one rank."""

    def __init__(self, fallback: Fallback, sliced: Callable[[Resume], Resume]) -> None:
        self._fallback, self._sliced = fallback, sliced

    def newest(self) -> Position | None:
        return self._fallback.newest()

    def go_on(self, incarnation: int) -> Resume:
        return self._sliced(self._fallback.go_on(incarnation))


def _inner_tree(inner: Inner, parts: Ranks, memory: Memory) -> list[Tree]:
    """As `inner_state.capture`, of all ranks; on rank 0."""

    def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        words = -(-shape.numel() * dtype.itemsize // 4)
        return memory.take(words, torch.device("cpu")).view(dtype)[: shape.numel()].view(shape).zero_()

    parts.states.zeros = zeros
    state, apart = parts.states.pull()
    parts.tell_apart(apart)
    named = {id(p): uncompiled(name) for name, p in parts.trained.items()}
    return [
        {
            "class": type(optimizer).__name__,
            "groups": groups,
            "beside": inner_state.beside_of(optimizer, CopyPool()),
            "state": {
                named[id(p)]: dict(state[named[id(p)]])
                for group in optimizer.param_groups
                for p in group["params"]
                if id(p) in named and state.get(named[id(p)])
            },
        }
        for optimizer, groups in zip(inner.optimizers, groups_of(inner), strict=True)
    ]
