"""The ranks of an island, each with a slice of the replica: see `ftopt.optimizer.ranks.alone.Ranks`.

Each rank runs the ordinary `Core` on a model of its slices. What they must agree on, they have from rank 0's words
(`ftopt.optimizer.ranks.rank_group`); what is of all slices, they bring together (`FlatView.together`). Before the outer
step looks at a fragment, the slices become as the ranks' parts of the model are (`Exchange.pull`), and afterwards these
become as the slices are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt.common.tree import Tree
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.asked import Asked, Leave
from ftopt.optimizer.in_model import LoadedWeights, tell_set_back
from ftopt.optimizer.ranks.alone import Parts
from ftopt.optimizer.ranks.inner import check_groups, groups_of
from ftopt.optimizer.ranks.loads import RankLoads, check_loaded_alike
from ftopt.optimizer.ranks.loops import states_of_ranks
from ftopt.optimizer.ranks.mirror import RankModel
from ftopt.optimizer.ranks.rank_group import RankGroup, portable
from ftopt.optimizer.ranks.saved_slices import Whole, sliced_resume
from ftopt.optimizer.ranks.slices import Exchange, SliceView
from ftopt.optimizer.saved.capture import SavedReplica, capture_replica
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.restore import Fallback, Resume
from ftopt.step import inner_state
from ftopt.step.inner import Inner, put_beside
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, uncompiled
from ftopt.step.tensors.mapped import Mapped
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.step.tensors.views import partition_of
from ftopt.sync.group import Island, Position, ReplicaGroup

T = TypeVar("T")


class RankInner(Inner):
    """A rank's inner optimizers: what all ranks do with their state, they do alike."""

    def __init__(self, optimizers: Sequence[Optimizer], ranks: Several) -> None:
        super().__init__(optimizers)
        self._ranks = ranks

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """The slices are not as the model is any more."""
        self._ranks.changing()
        return super().step(closure)

    def is_empty_step(self) -> bool:
        """Asked before the start alone: the ranks are nothing to each other yet, but in this."""
        return self._ranks.asks_alike() and self.only_sets_up() and self._ranks.none(self.has_gradient())

    def forget_nonfinite_state(self) -> None:
        """Resets all of it: one rank alone cannot tell whether another's part is finite."""
        self.reset_state()


class Several:
    """This rank among those of an island.

    Args:
        whole: memory for whole states, where they are brought together for peers.

    Attributes:
        group: what all ranks hear of the job alike.
    """

    def __init__(self, group: ReplicaGroup, island: Island, asked: Asked, whole: Memory) -> None:
        self._island, self._asked = island, asked
        self.rank, self.size = island.rank, island.size
        self._words = RankGroup(group, island, asked.why, whole)
        self.group = cast("ReplicaGroup", self._words)
        self._parts: Parts = {}
        self._model: RankModel | None = None
        self._exchange: Exchange | None = None
        self._outer: OuterStep | None = None
        self._loads: RankLoads | None = None
        self._stale: set[int] = set()
        self._seen: dict[int, list[int]] = {}
        self._tokens_told = 0
        self._dropped: int | None = None  # steps that were dropped with loaded weights, to be told
        self._saved_inner: list[Tree] | None = None
        self._fallback: Fallback | None = None  # kept here: the group asks it weakly

    # A call of the user's loop.

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """What is raised in its middle leaves the ranks unlike, but for what the user can put right, which is raised
        before anything is done."""
        self._island.check()
        if self._words.call:  # within another call
            yield
            return
        self._words.call = name
        try:
            with self._words.links.training():
                yield
        except (UserError, Leave):
            raise
        except BaseException as error:
            self._island.broken = self._island.broken or error
            self._island.part()
            self._words.links.close()
            raise
        finally:
            self._words.call = ""
        steps, self._dropped = self._dropped, None
        if steps is not None:  # at last, since a warning may be an error
            tell_set_back(steps, closing=name == "close")

    def changing(self) -> None:
        """The model is about to change. Of this rank alone."""
        if self._loads is not None:
            self._loads.judge()
        if self._exchange is not None:
            self._stale = set(range(len(self._exchange.cuts)))

    def pull(self, fragment: int | None = None) -> None:
        if fragment is None:
            self.changing()
        for each in sorted(self._stale) if fragment is None else self._stale & {fragment}:
            assert self._exchange is not None
            self._stale.discard(each)
            self._agree()
            self._exchange.pull(each)
            self._seen[each] = self._versions(each)

    def push(self) -> None:
        changed = [fragment for fragment, seen in self._seen.items() if self._versions(fragment) != seen]
        self._push(self.all(changed)[0])

    def _push(self, fragments: list[int]) -> None:
        for fragment in fragments:
            assert self._exchange is not None
            self._exchange.push(fragment)
            self._seen[fragment] = self._versions(fragment)

    def _versions(self, fragment: int) -> list[int]:
        assert self._exchange is not None
        return [self._exchange.pieces[name]._version for name in self._exchange.cuts[fragment].names]

    def _agree(self) -> None:
        """The tokens of all ranks are counted; UserError: a rank has other rates than rank 0."""
        counters = None if self._outer is None else self._outer.counters
        own = counters.tokens - self._tokens_told if counters is not None else 0
        differs = self._loads is not None and self._loads.judge()
        assert self._model is not None
        told = self.all((own, groups_of(self._model.inner), differs))
        check_groups([groups for _, groups, _ in told])
        check_loaded_alike([loaded for *_, loaded in told])
        if counters is not None:
            counters.add_tokens(sum(tokens for tokens, *_ in told) - own)
            self._tokens_told = counters.tokens

    def same(self, value: T) -> T:
        found: T = self._words.same(value)
        return found

    def all(self, value: T) -> list[T]:
        return self._words.all(value)

    def now_s(self) -> float:
        return self._words.now_s()

    def asks_alike(self) -> bool:
        """Whether a step may be one that only sets up the inner state: not from the start on."""
        return self._outer is None

    def none(self, value: bool) -> bool:
        """Whether it is false on all ranks; before the start."""
        found = self._island.gather(value)
        return bool(self._island.share(None if self.rank else not any(found)))

    # What rank 0 does, and needs the others for.

    def serve(self, parts: Parts) -> None:
        self._parts = {**parts, "look": self.look}

    def lead(self, call: str, act: Callable[[], T]) -> T:
        with self.call(call):
            if self.rank:
                while (told := self._island.hear())[0]:
                    self._parts[told[0]]()
                if told[2] is not None:
                    raise told[2]
                return cast("T", told[1])
            try:
                found = act()
            except BaseException as error:
                self._island.say(("", None, portable(error)))
                raise
            self._island.say(("", found, None))
            return found

    def each(self, part: str, act: Callable[[], T]) -> T:
        self._island.say((part, None, None))
        return act()

    # Joining and leaving.

    def views(self, model: nn.Module, method: Method, inner: Inner, group: ReplicaGroup) -> list[FlatView]:
        self._model = RankModel(self._island, model, inner, group.replica)
        self._exchange = exchange = Exchange(self._model, partition_of(model, method))
        self.pull()
        return [SliceView(exchange.model, cut, self.rank, self._words.links.all) for cut in exchange.cuts]

    def resumed(self, resume: Resume | None, fallback: Fallback | None) -> tuple[Resume | None, Fallback | None]:
        self._fallback = None if fallback is None else _SlicedFallback(fallback, self._sliced)
        return None if resume is None else self._sliced(resume), self._fallback

    def _sliced(self, resume: Resume) -> Resume:
        """This rank's slices of a checkpoint; the inner state is kept until all ranks have joined."""
        assert self._exchange is not None and self._model is not None
        self._saved_inner = tree = resume.saved.own["inner"]
        if tree is not None:
            try:
                inner_state.check(self._model.inner, self._model.model, tree)
            except ValueError as error:
                raise resume.foreign(str(error)) from None
        found: Resume = sliced_resume(self._exchange.cuts, self.rank, resume)
        return found

    def joined(self, outer: OuterStep, model: nn.Module, before_load: Callable[[], bool]) -> LoadedWeights:
        self._restore_inner()
        self._outer, self._tokens_told = outer, outer.counters.tokens
        self.push()
        self._island.together = self.lead
        assert self._model is not None
        self._loads = loads = RankLoads(model, self._model, before_load, self)
        self._words.loads = loads
        return loads

    def _restore_inner(self) -> None:
        tree, self._saved_inner = self._saved_inner, None
        if tree is None:
            return
        assert self._model is not None
        state = {name: values for entry in tree for name, values in entry["state"].items()}
        inner = self._model.inner
        self._model.states.push({} if self.rank else state)
        for optimizer, entry in zip(inner.optimizers, tree, strict=True):
            put_beside(optimizer, entry["beside"])
        inner_state.restore_groups(inner, tree)

    def why(self) -> str:
        return self._words.why

    def look(self) -> None:
        found = self.all(self._asked.why())
        self._words.why = next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), "")

    def drop_loaded(self) -> None:
        """The model is as it was before user code had loaded weights into it: pending steps are dropped."""
        outer = self._outer
        assert outer is not None
        outer.freezer.join()
        self.pull()
        steps = outer.drop_loaded()
        self._push(list(self._seen))
        if not self.rank:
            self._dropped = steps

    def leaves_whole(self, *, flush: bool) -> bool:
        return flush and self._island.broken is None

    def part(self, *, early: bool, reason: str) -> None:
        early = early or self._island.broken is not None
        self._island.part()
        self._words.part(early=early, reason=reason)

    def leave(self) -> None:
        self._words.links.leave()

    def left(self) -> None:
        self._island.together = None

    # Checkpoints.

    def capture(
        self, outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool, folder: Path | None
    ) -> SavedReplica:
        """This rank's slices; on rank 0 the whole replica."""
        exchange, parts = self._exchange, self._model
        assert exchange is not None and parts is not None
        memory = Memory() if folder is None or self.rank else _beside(folder)
        tree = _inner_tree(inner, parts, memory)
        saved = capture_replica(
            outer, inner, model, self.group, copies=CopyPool(), capture_inner=lambda *_: tree
        )  # fmt: skip
        whole = Whole(self._island, exchange.cuts, lambda numel: memory.take(numel, torch.device("cpu")))
        committed = tuple(
            replace(version, tensors=whole.committed(index, dict(version.tensors)))
            for index, version in enumerate(saved.committed)
        )
        works = [whole.work(index, part) for index, part in enumerate(saved.own["fragments"])]
        return replace(saved, committed=committed, own={**saved.own, "fragments": works})

    def capture_loop(self, loop: Loop, copies: CopyPool) -> list[Tree]:
        copy = copies.of if not self.rank else lambda tensor: tensor.detach().cpu().clone()
        return states_of_ranks(self._island, partial(loop.capture, copy))

    @property
    def saved_model(self) -> nn.Module | None:
        return None if self._exchange is None else self._exchange.model


def _beside(folder: Path) -> Memory:
    """Whole tensors lie beside the checkpoint until it is written, not in RAM."""
    folder.mkdir(parents=True, exist_ok=True)
    return Mapped(folder)


class _SlicedFallback:
    """A `Fallback` for one rank."""

    def __init__(self, fallback: Fallback, sliced: Callable[[Resume], Resume]) -> None:
        self._fallback, self._sliced = fallback, sliced

    def newest(self) -> Position | None:
        return self._fallback.newest()

    def go_on(self, incarnation: int) -> Resume:
        return self._sliced(self._fallback.go_on(incarnation))


def _inner_tree(inner: Inner, parts: RankModel, memory: Memory) -> list[Tree]:
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
