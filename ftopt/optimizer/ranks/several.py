"""The ranks of an island, each with a slice of the replica: see `ftopt.optimizer.ranks.alone.Ranks`.

Each rank runs the ordinary `Core` on a model of its slices. The ranks take the values on which they must agree from
rank 0's words (`ftopt.optimizer.ranks.rank_group`), and combine values over all slices (`FlatView.together`). Before
the outer step reads a fragment, the slices are updated from the ranks' parts of the model (`Exchange.pull`), and
afterwards the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import nn

from ftopt.common.tree import Tree
from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method
from ftopt.methods.method import needs_whole, settings_of
from ftopt.optimizer.asked import Asked, Leave
from ftopt.optimizer.in_model import LoadedWeights, warn_set_back
from ftopt.optimizer.ranks.alike import check_found, check_resumed, check_settings, reason_of
from ftopt.optimizer.ranks.alone import Parts, Views
from ftopt.optimizer.ranks.inner import check_groups, groups_of
from ftopt.optimizer.ranks.loads import RankLoads, check_loaded_alike
from ftopt.optimizer.ranks.loops import states_of_ranks
from ftopt.optimizer.ranks.rank_group import RankGroup, portable
from ftopt.optimizer.ranks.rank_model import RankModel
from ftopt.optimizer.ranks.saved_slices import (
    Bounds,
    SlicedFallback,
    Whole,
    beside_checkpoints,
    inner_tree,
    sliced_resume,
    versions_of,
)
from ftopt.optimizer.ranks.slices import Exchange, SliceView
from ftopt.optimizer.ranks.whole import RankLive, WholeModel
from ftopt.optimizer.saved.capture import SavedReplica, capture_replica
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.restore import Fallback, Resume
from ftopt.step import inner_state
from ftopt.step.inner import Inner, put_beside
from ftopt.step.outer.step import OuterStep
from ftopt.step.tensors.flat import FlatView, check_covered
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.step.tensors.views import partition_of
from ftopt.sync.group import Island, RankLost, ReplicaGroup

T = TypeVar("T")

_TELL = ("start", "sync", "settle", "global_parameters", "export", "checkpoints.step", "checkpoints.last")
"""Calls after which all ranks know the digest of a model that each step changes; it costs a pass over the model."""


class Several:
    """This rank among those of an island.

    Args:
        whole: memory for whole states, which are gathered for peers.

    Attributes:
        group: the group that gives all ranks the same answers.
    """

    def __init__(self, group: ReplicaGroup, island: Island, asked: Asked, whole: Memory) -> None:
        self._island, self._asked = island, asked
        self.rank, self.size = island.rank, island.size
        self._words = RankGroup(group, island, asked.why, whole)
        self.group = cast("ReplicaGroup", self._words)
        self._parts: Parts = {}
        self._model: RankModel | None = None
        self._exchange: Exchange | None = None
        self._whole: WholeModel | None = None
        self._live: RankLive | None = None
        self._bounds: list[Bounds] = []
        self._outer: OuterStep | None = None
        self._loads: RankLoads | None = None
        self._stale: set[int] = set()
        self._seen: dict[int, list[int]] = {}
        self._tokens_counted, self._broken = 0, False
        self._dropped: int | None = None  # steps that were dropped with loaded weights, of which `call` warns
        self._saved_inner: list[Tree] | None = None
        self._fallback: Fallback | None = None  # kept here, since the group refers to it weakly

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Surrounds a call. An error within it breaks the island, unless all ranks raise it (`RankGroup.alike`)."""
        self._island.check()
        if self._words.call:  # within another call
            yield
            return
        self._words.call = name
        try:
            with self._words.links.training():
                if name != "step" and self._outer is not None and not self._words.has_left:
                    self._words.same(None)  # a word names rank 0's call; a step begins with one anyway
                yield
                if self._live is not None and name in _TELL and not self._words.has_left:
                    self._live.tell()
        except Leave:
            raise
        except BaseException as error:
            raise self._break(error)  # noqa: B904 (it is the same, or has it as its cause)
        finally:
            self._words.call = ""
        steps, self._dropped = self._dropped, None
        if steps is not None:  # last, since a warning may be an error
            warn_set_back(steps, closing=name == "close")

    def _break(self, error: BaseException) -> BaseException:
        """After an error on this rank alone, makes the others raise its reason. Returns the error to raise here."""
        if error is self._words.alike:
            return error
        if not self._broken:
            self._broken = True
            loss = self._words.links.loss() if isinstance(error, RankLost) else None
            if loss not in (None, error):
                loss.__cause__ = error
            self._island.broken = loss or self._island.broken or error
            self._words.links.fail(reason_of(self._island.broken))
            self._island.part()
        broken = self._island.broken
        return broken if isinstance(error, RankLost) and isinstance(broken, RankLost) else error

    def changing(self) -> None:
        """Called when the model is about to change. Of this rank alone."""
        if self._loads is not None:
            self._loads.judge()
        if self._exchange is not None:
            self._stale = set(range(len(self._exchange.cuts)))

    def cleared(self) -> None:
        """Called when the gradients have been cleared. Of this rank alone."""
        for parameter in self._whole.parameters.values() if self._whole is not None else ():
            parameter.grad = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Surrounds a step of the inner optimizers, with the agreed gradient if replicas take steps together."""
        together = self._live is not None and bool(self._words.call)
        if together and self._model is not None and self._whole is not None:
            self._restore_inner()
            self.push()  # the start may have fetched the model and the inner state
            self._model.push_gradients(self._whole.parameters)
        if together and self._live is not None:
            self._live.told = ""
        self.changing()
        yield
        if together:
            self.pull()

    def pull(self, fragment: int | None = None) -> None:
        if fragment is None:
            self.changing()
        all_of_it = fragment is None or self._whole is not None
        stale = sorted(self._stale) if all_of_it else sorted(self._stale & {fragment})
        if not stale:
            if self._model is not None:
                self._model.reshard()
            return
        self._stale.difference_update(stale)
        self._agree()
        for each in stale:
            assert self._exchange is not None
            self._exchange.pull(each)
            self._seen[each] = self._versions(each)
        if self._whole is not None:
            self._whole.pull()

    def push(self) -> None:
        changed = [fragment for fragment, seen in self._seen.items() if self._versions(fragment) != seen]
        self._push(self.all(changed)[0])
        if self._whole is not None:
            self._whole.push()

    def _push(self, fragments: list[int]) -> None:
        for fragment in fragments:
            assert self._exchange is not None
            self._exchange.push(fragment)
            self._seen[fragment] = self._versions(fragment)

    def _versions(self, fragment: int) -> list[int]:
        assert self._exchange is not None
        return [self._exchange.pieces[name]._version for name in self._exchange.cuts[fragment].names]

    def _agree(self) -> None:
        """Counts the tokens of all ranks. UserError: a rank's rates differ from rank 0's."""
        counters = None if self._outer is None else self._outer.counters
        own = counters.tokens - self._tokens_counted if counters is not None else 0
        differs = self._loads is not None and self._loads.judge()
        assert self._model is not None
        found = self.all((own, groups_of(self._model.inner), differs))
        try:
            check_groups([groups for _, groups, _ in found])
            check_loaded_alike([loaded for *_, loaded in found])
        except UserError as error:
            self._words.raise_alike(error)
        if counters is not None:
            counters.add_tokens(sum(tokens for tokens, *_ in found) - own)
            self._tokens_counted = counters.tokens

    def same(self, value: T) -> T:
        found: T = self._words.same(value)
        return found

    def all(self, value: T) -> list[T]:
        return self._words.all(value)

    def now_s(self) -> float:
        return self._words.now_s()

    def may_set_up(self) -> bool:
        """True only before the start."""
        return self._outer is None

    def serve(self, parts: Parts) -> None:
        self._parts = {**parts, "look": self.look}

    def lead(self, call: str, act: Callable[[], T]) -> T:
        with self.call(call):
            if self.rank:
                while (heard := self._island.hear())[0]:
                    try:
                        self._part(self._parts[heard[0]])
                    except BaseException as raised:
                        if raised is not self._words.alike:  # else rank 0 reports the outcome
                            raise
                _, found, error = heard
            else:
                found, error = None, None
                try:
                    found = act()
                except BaseException as raised:
                    if self._broken:
                        raise
                    error = raised
                self._island.say(("", found, portable(error)))
            if error is not None:
                self._words.raise_alike(error)
            return cast("T", found)

    def each(self, part: str, act: Callable[[], T]) -> T:
        self._island.say((part, None, None))
        return self._part(act)

    def _part(self, act: Callable[[], T]) -> T:
        """Runs ``act``; an error in it breaks the island at once, since the caller may go on."""
        try:
            return act()
        except BaseException as error:
            raise self._break(error)  # noqa: B904

    def views(self, model: nn.Module, method: Method, inner: Inner, group: ReplicaGroup) -> Views:
        self._model = RankModel(self._island, model, inner, group.replica)
        check_covered(model, inner.param_groups)
        check_settings(self.all(settings_of(method) | {"sync_every": str(method.sync_every)}))
        fragments, whole = partition_of(model, method), needs_whole(method)
        names = fragments or [list(self._model.trained)]
        self._exchange = exchange = Exchange(self._model, names, whole=whole)
        together = self._words.links.all
        self._words.tells_gradients = self.all(self._words.tells_gradients)[0]
        if not whole:
            self.pull()
            self._bounds = [cut.bounds for cut in exchange.cuts]
            return [SliceView(self._model, exchange.model, cut, together) for cut in exchange.cuts], None
        self._whole = WholeModel(self._model, exchange, method)
        self.pull()
        views, gradients = self._whole.views(method, fragments, together)
        found: list[FlatView] = views
        if gradients is not None:
            self._live, found = gradients[1], [gradients[0], *views]
        numels = self.all([view.numel for view in found])[0]
        self._bounds = [[(0, numel), *[(numel, numel)] * (self.size - 1)] for numel in numels]
        return views, gradients

    def resumed(self, resume: Resume | None, fallback: Fallback | None) -> tuple[Resume | None, Fallback | None]:
        check_resumed(self.all(versions_of(resume)))
        self._fallback = None if fallback is None else SlicedFallback(fallback, self._sliced, self._agree_on)
        return None if resume is None else self._sliced(resume), self._fallback

    def _agree_on(self, found: object) -> None:
        try:
            check_found(self.all(found))
        except FtoptError as error:
            self._words.raise_alike(error)

    def _sliced(self, resume: Resume) -> Resume:
        """This rank's slices of a checkpoint; the inner state is kept until all ranks have joined."""
        assert self._model is not None
        self._saved_inner = tree = resume.saved.own["inner"]
        if tree is not None:
            try:
                inner_state.check(self._model.inner, self._model.model, tree)
            except ValueError as error:
                raise resume.foreign(str(error)) from None
            if self._whole is not None and not self.rank:  # moments are part of its fragments
                inner_state.restore(self._whole.shadows, self._whole.model, tree)
        found: Resume = sliced_resume(self._bounds, self.rank, resume)
        return found

    def joined(self, outer: OuterStep, model: nn.Module, before_load: Callable[[], bool]) -> LoadedWeights:
        self._restore_inner()
        self._outer, self._tokens_counted = outer, outer.counters.tokens
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
        if self._whole is not None:
            state = self._whole.take_inner()  # as the start has made it
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
        """Drops pending steps, after the model's weights from before a load were restored."""
        outer = self._outer
        assert outer is not None
        outer.freezer.join()
        steps = 0
        if outer.gradients is None:  # else rank 0 has the parameters of the last step
            self.pull()
            steps = outer.drop_loaded()
        self._push(list(self._seen))
        if not self.rank:
            self._dropped = steps

    def leaves_whole(self, *, flush: bool) -> bool:
        return flush and self._island.broken is None

    def part(self, *, early: bool, reason: str) -> None:
        early = early or self._island.broken is not None
        self._words.part(early=early, reason=reason)
        self._island.part()

    def leave(self) -> None:
        if self._live is not None:
            self._live.tell()
        self._words.links.leave()

    def left(self) -> None:
        self._island.together = None

    # Checkpoints.

    def capture(
        self, outer: OuterStep, inner: Inner, model: nn.Module, copies: CopyPool, folder: Path | None
    ) -> SavedReplica:
        """This rank's slices; on rank 0 the whole replica."""
        parts = self._model
        assert parts is not None
        memory = Memory() if folder is None or self.rank else beside_checkpoints(folder)
        tree = inner_tree(inner, parts, memory)
        saved = capture_replica(outer, inner, model, self.group, copies=CopyPool(), capture_inner=lambda *_: tree)
        whole = Whole(self._island, self._bounds, lambda numel: memory.take(numel, torch.device("cpu")))
        committed = tuple(
            replace(version, tensors=whole.committed(index, dict(version.tensors)))
            for index, version in enumerate(saved.committed)
        )
        works = [whole.work(index, part) for index, part in enumerate(saved.own["fragments"])]
        return replace(saved, committed=committed, own={**saved.own, "fragments": works})

    def capture_loop(self, loop: Loop, copies: CopyPool) -> list[Tree] | Exception:
        copy = copies.of if not self.rank else lambda tensor: tensor.detach().cpu().clone()
        return states_of_ranks(self._island, partial(loop.capture, copy))

    @property
    def saved_model(self) -> nn.Module | None:
        return None if self._exchange is None else self._exchange.model
