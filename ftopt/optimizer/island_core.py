"""The wrapped optimizer on each rank of an island: rank 0 runs the outer step on the mirror, the others do as it says.

All ranks call `step`, `sync`, `settle`, `close` and so on alike, as they call the model. Within such a call rank 0 is
an ordinary replica, `Core`, of the mirror's model. Where it needs the ranks, it tells them what to do (`Do`), and at
last that the call is over, with where training stands and what was raised.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from ftopt.common.tree import Tree
from ftopt.errors import FtoptError, UserError
from ftopt.methods import Method
from ftopt.optimizer.asked import Asked, Leave, leave
from ftopt.optimizer.core import CLOSED, Core, Standing, tell_not_loaded
from ftopt.optimizer.counts import NextStep
from ftopt.optimizer.in_model import tell_set_back
from ftopt.optimizer.leaving import FORKED, at_exit
from ftopt.optimizer.passed import Passed
from ftopt.optimizer.ranks.inner import MirrorInner, groups_of, set_groups
from ftopt.optimizer.ranks.loads import RankLoads
from ftopt.optimizer.ranks.loops import states_of_ranks, unlike
from ftopt.optimizer.ranks.mirror import BUFFERS, INNER, PARAMS, Mirror, RankModel
from ftopt.optimizer.saved.capture import Cut, SavedReplica
from ftopt.optimizer.saved.loop import Loop
from ftopt.optimizer.saved.restore import Fallback, Resume
from ftopt.optimizer.schedules import Schedules
from ftopt.step.inner import Inner
from ftopt.step.outer.fingerprint import own_lines
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.pool import CopyPool
from ftopt.sync.group import UNLIKE, Do, Island, Position, ReplicaGroup

_log = logging.getLogger(__name__)

_ASK_S = 1.0


class IslandCore:
    """What a `Core` is, for one rank of several. Calls are collective, but for `count`, `report`, and leaving at once.

    Attributes:
        leader: on rank 0, from the start on: the replica.
    """

    last = None
    replays = None

    def __init__(
        self,
        inner: Inner,
        model: nn.Module,
        method: Method,
        *,
        group: ReplicaGroup,
        island: Island,
        memory: Memory | None,
        asked: Asked,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):  # replicas of other layouts have other names
            model = model.module
        self.inner, self.model, self.method, self.group = inner, model, method, group
        self.island, self.leads = island, island.leads
        self.leader: Core | None = None
        self.suspended = 0
        self.passed, self.schedules = Passed(), Schedules()
        self.first_step = self.planned = 0
        self.own_lines = own_lines(inner)
        self.closed = self._forked = False
        self.resume: Resume | None = None
        self.fallback: Fallback | None = None
        self.loop: Loop | None = None
        self.folder: Path | None = None
        self.while_waiting: Callable[[], object] = lambda: None
        self.before_leaving: Callable[[float], object] | None = None
        self._memory = memory
        self._ranks: RankModel | None = None
        self._loads: RankLoads | None = None
        self._mirrored: MirrorInner | None = None
        self._standing, self._next, self._tokens = Standing(), NextStep(), 0
        self._back = False  # in this call loaded weights have been replaced
        self._by_eval = self._there = False  # the outer parameters are in the model: by `eval`, or at all
        self._asked, self._leaves = asked, ""
        self._ask_at = -math.inf

    # Calls.

    def _together(
        self,
        call: str,
        lead: Callable[[Core, MirrorInner], Any],
        closure: Callable[[], Any] | None = None,
        *,
        tells: bool = True,
    ) -> Any:
        """Rank 0: runs ``lead`` on the replica, and brings what it has changed to all ranks. The others: follow.
        ``tells``: they have its result, else their own."""
        if self._forked:
            raise UserError(f"{call}(): {FORKED}")
        if self.closed and not self._standing.started and call != "close":
            raise RuntimeError(f"{call}: {CLOSED}")
        self.island.check()
        if not self._standing.started:
            self.inner.turn("train")
        if not self.island.leads:
            return self._follow(call, closure)
        try:
            core, inner = self._built()
            inner.follow_groups()
            try:
                self._put_back(core, inner)
                result = lead(core, inner)
            finally:
                if self.island.broken is None:
                    inner.publish()
        except BaseException as error:
            self._end(call, None, error)
            raise
        self._end(call, (result,) if tells else None, None)
        self._watch()
        return result

    def _end(self, call: str, result: tuple[Any] | None, error: BaseException | None) -> None:
        if self.leader is not None:
            standing = self.leader.standing()
            self._standing = replace(standing, digest=self._digest(self.leader, standing, call))
        where, island = self._standing, self.island
        committed = None if where.committed is None else replace(where.committed, record=None)  # may be long
        told = None if error is None else _portable(error)
        try:
            standing, broken = replace(where, committed=committed), island.broken is not None
            island.say((Do.END, (call, standing, result, told, broken, self._leaves)))
        except FtoptError:
            if error is None:
                raise
        finally:
            if island.broken is not None:
                island.part()

    def _digest(self, leader: Core, now: Standing, call: str) -> str:
        """For `anchor_digest`. "": it would cost a pass over the model in each step."""
        if leader.outer is None:
            return ""
        if leader.outer.live is None and now.versions == self._standing.versions and self._standing.digest:
            return self._standing.digest
        costs = leader.outer.live is not None and call == "step" and not self.closed
        return "" if costs else leader.anchor_digest()

    def _follow(self, call: str, closure: Callable[[], Any] | None) -> Any:
        loss: Any = None
        island = self.island
        try:
            with island.whole():
                do, *_ = heard = island.hear()
                what = heard[-1]
                while do is not Do.END:
                    if not isinstance(do, Do):
                        raise FtoptError(f"rank {island.rank}: {UNLIKE}")
                    loss = self._obey(do, what, closure, loss)
                    do, what = island.hear()
                started = self._standing.started
                name, self._standing, result, error, broken, self._leaves = what
                if self._standing.started and not started:
                    self._asked.joined()
                    at_exit.add(self)
                if name != call:
                    raise FtoptError(
                        f"replica {self.group.replica}: rank 0 was in {name}() while rank {island.rank} called "
                        f"{call}(); all ranks of an island make the same calls in the same order"
                    ) from error
                if broken:
                    raise error or FtoptError("rank 0 has parted from the others")
        finally:
            if island.broken is not None:
                island.part()
        if error is not None:
            raise error
        self._watch()
        return loss if result is None else result[0]

    # Weights that user code loads into the model.

    def _watch(self) -> None:
        """From the start on."""
        if self._loads is None and self._ranks is not None and self._standing.started and not self.closed:
            self._loads = RankLoads(self.model, self._ranks, lambda: not (self.closed or self._there))

    def _judge(self) -> bool:
        """Whether this rank has loaded weights."""
        return self._loads is not None and self._loads.judge()

    def _put_back(self, core: Core, inner: MirrorInner) -> None:
        """Replaces weights that have been loaded, on all ranks, as `Core` does."""
        self._back = False
        if self._loads is None or not self._loads.noted:
            return
        assert self._ranks is not None
        self._ranks.check_trained()
        with self.island.whole():
            self.island.say((Do.PUT_BACK, None))
            self._back = any(self.island.gather(self._loads.put_back()))
        if not self._back:
            return
        outer, steps = core.started(), 0
        if outer.gradients is None:  # else the mirror is as the ranks were
            outer.freezer.join()
            inner.refresh(anew=True)
            steps = outer.drop_loaded()
        inner.put_back()
        tell_set_back(steps, closing=self.closed)

    def _obey(self, do: Do, what: Any, closure: Callable[[], Any] | None, loss: Any) -> Any:
        inner = self.inner
        if do is Do.BUILD:
            self._ranks = RankModel(self.island, self.model, inner, self.group.replica)
            return loss
        assert self._ranks is not None
        if do is Do.STEP:
            self._judge()
            found = inner.step(closure if what else None)
            return found if loss is None else loss
        if do is Do.EVALUATE:
            return inner.evaluate(closure)
        if do is Do.PULL:
            self._ranks.pull(what, None)
            self.island.gather((self._taken_tokens(), groups_of(inner), self._judge()))
        elif do is Do.PUSH:
            self._judge()
            self._ranks.push(what, None)
        elif do is Do.KEEP_GRADIENTS:
            self._ranks.keep_gradients()
        elif do is Do.PUT_GRADIENTS:
            self._ranks.put_gradients()
        elif do is Do.ZERO_GRAD:
            inner.zero_grad(set_to_none=what)
        elif do is Do.TELL_ASKED:
            self.island.gather(self._asked.why())
        elif do is Do.TELL_GRADIENT:
            self.island.gather(inner.has_gradient())
        elif do is Do.RESET_STATE:
            inner.reset_state()
        elif do is Do.SET_GROUPS:
            set_groups(inner, what)
        elif do is Do.GO_ON:
            assert self.fallback is not None
            self.fallback.go_on(what)
        elif do is Do.TELL_INCLUDED:
            self._included()
        elif do is Do.PUT_BACK:
            self.island.gather(self._loads is not None and self._loads.put_back())
        elif do is Do.TELL_LOOP:
            self._loops(lambda tensor: tensor.cpu())
        return loss

    def _taken_tokens(self) -> int:
        tokens = self._next.take()["tokens"]
        self._tokens += tokens
        return tokens

    def _built(self) -> tuple[Core, MirrorInner]:
        """Rank 0's replica and its inner optimizers; made at the first call."""
        if self.leader is None or self._mirrored is None:
            self.island.say((Do.BUILD, None))
            self._ranks = ranks = RankModel(self.island, self.model, self.inner, self.group.replica)
            mirror = Mirror(ranks)
            gradients, moments = self.method.gradients is not None, self.method.inner_state == "average"
            self._mirrored = MirrorInner(
                ranks,
                mirror,
                together=gradients,
                moments=moments,
                buffers=self.method.buffers == "mean",
                count=self._add,
            )
            self._mirrored.refresh()
            self.leader = Core(self._mirrored, mirror.model, self.method, group=self.group, memory=self._memory)
            self.leader.whole_model = self.model
            self.leader.first_step, self.leader.planned = self.first_step, self.planned
            self.leader.own_lines = self.own_lines
            self.leader.schedules.leave_alone()  # each rank's own do
            self.leader.count(**self._next.take(), loss=self._next.take_loss())
        return self.leader, self._mirrored

    def _add(self, tokens: int) -> None:
        """Tokens that the other ranks have counted."""
        if tokens and self.leader is not None and self.leader.outer is not None:
            self.leader.outer.counters.add_tokens(tokens)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See `OuterOptimizer.step`."""
        if self.suspended or (not self._standing.started and self._is_empty_step()):
            if self._mirrored is not None:
                self._mirrored.mark()
            self._judge()
            return self.inner.step(closure)
        at = self._standing
        if at.started and not self.closed:
            self.schedules.follow(self, start_step=at.start_step, local_steps=at.local_steps, inner_step=at.inner_step)

        def lead(core: Core, inner: MirrorInner) -> Any:
            self._begin(core, inner)
            if self._back and closure is None:
                return None  # The gradient belongs to the loaded weights.
            inner.in_step = True
            try:
                found = core.step(closure)
            finally:
                inner.in_step = False
            self._leaves = self._why()
            return found

        found = self._together("step", lead, closure, tells=False)
        if self._leaves:
            self._leave()
        return found

    def _why(self) -> str:
        """Why this replica is asked to leave, on rank 0. A signal may come to one rank alone, or to each in a step of
        its own, and launchers are of one host: once a second the other ranks are asked."""
        why, now_s = self._asked.why(), time.monotonic()
        if why or now_s < self._ask_at:
            return why
        self._ask_at = now_s + _ASK_S
        with self.island.whole():
            self.island.say((Do.TELL_ASKED, None))
            found = self.island.gather("")
        return next((f"rank {rank}: {each}" for rank, each in enumerate(found) if each), "")

    def _leave(self) -> NoReturn:
        if self.island.leads:
            leave(self.group.replica, self._leaves)
        raise Leave(0)

    def _is_empty_step(self) -> bool:
        """See `Inner.is_empty_step`. Before the start: the ranks are nothing to each other yet, but in this."""
        if not self.inner.only_sets_up():
            return False
        gradients = self.island.gather(self.inner.has_gradient())
        if self.island.leads:
            self.island.say(any(gradients))
            return not any(gradients)
        return not self.island.hear()

    def _begin(self, core: Core, inner: MirrorInner) -> bool:
        """Joins the job unless that is done."""
        if core.outer is not None or core.closed:
            return False
        at_exit.check_alone(self.model)
        core.resume, core.fallback = self.resume, None if self.fallback is None else self
        self.resume = None
        with self._asked.joining():
            fetched = core.start()
        at_exit.remove(core)
        at_exit.add(self)
        if core.started().counters.resumed:
            inner.restored()
        if self.group.units is not None:
            self.group.units.when_out_of_units(partial(self._offer_rest, core, inner))
            self.group.units.while_waiting(self._leave_if_asked)
        return fetched

    def leave_if_worker_died(self, error: BaseException | None) -> None:
        """Not in an island, whose other ranks may be in a step that this one is not in."""

    def _leave_if_asked(self) -> None:
        """Rank 0 waits for units, and the others for it: they are told what this raises."""
        self._leaves = self._why()
        if self._leaves:
            self._leave()

    def _offer_rest(self, core: Core, inner: MirrorInner) -> None:
        """The loader waits for units that others hold; see `Core.offer_rest`."""
        inner.refresh(anew=True)
        core.offer_rest()
        inner.publish()

    def _for_loader(self, call: str, act: Callable[[], object]) -> Any:
        return self._together(call, lambda core, inner: act())

    def start(self) -> bool:
        """Joins the job unless that is done; True when the parameters came from another replica."""
        fetched = not self._standing.started and bool(self._together("start", self._begin))
        self.island.together = self._for_loader
        return fetched

    def sync(self) -> bool:
        """See `OuterOptimizer.sync`."""

        def lead(core: Core, inner: MirrorInner) -> bool:
            self._begin(core, inner)
            inner.refresh(anew=True)
            return core.sync()

        return bool(self._together("sync", lead))

    def settle(self) -> bool:
        """See `OuterOptimizer.settle`."""

        def lead(core: Core, inner: MirrorInner) -> bool:
            inner.refresh(anew=True)
            return core.settle()

        return bool(self._together("settle", lead))

    def eval(self) -> None:
        """See `OuterOptimizer.eval`."""
        if not self._standing.started:
            self.inner.turn("eval")
        elif not (self.closed or self._there):
            self.enter_outer()
            self._by_eval = True
            self.inner.turn("eval", keep=True)

    def train(self) -> None:
        """See `OuterOptimizer.train`."""
        if self._by_eval:
            self._turn_back()
            self.exit_outer()
        elif not (self.closed or self._there):
            self.inner.turn("train")

    def _turn_back(self) -> None:
        if self._by_eval:
            self._by_eval = False
            self.inner.turn("train", keep=True)

    def enter_outer(self) -> bool:
        """See `Core.enter_outer`."""
        if self._by_eval:
            return False

        def lead(core: Core, inner: MirrorInner) -> None:
            self._begin(core, inner)
            inner.refresh(anew=True)
            core.enter_outer()

        self._together("outer_parameters", lead)
        self._there = True
        return True

    def exit_outer(self) -> None:
        """See `Core.exit_outer`."""
        if not self._there:
            return
        if (error := sys.exc_info()[1]) is not None:
            _log.error(
                "rank %d of replica %s: outer_parameters() is left by an error, and waits for the other ranks: %r",
                self.island.rank,
                self.group.replica,
                error,
            )
        self._there = False

        def lead(core: Core, inner: MirrorInner) -> None:
            core.exit_outer()
            inner.put_back()  # whatever user code has done to the ranks' parameters meanwhile

        self._together("outer_parameters", lead)

    def close(self, *, flush: bool, timeout_s: float, early: bool = False) -> None:
        """Leaves the job; see `OuterOptimizer.close`. Without ``flush`` this rank alone, at once: the others may be in
        other calls, and are told that it is gone."""
        if self.closed:
            return
        self.closed, self.island.together = True, None
        at_exit.remove(self)
        self._turn_back()
        loaded: Callable[[], None] | None = None
        deadline, broken = time.monotonic() + timeout_s, self.island.broken is not None

        def hand_in(core: Core, inner: MirrorInner) -> None:
            if core.outer is not None:
                self._ask_at = -math.inf
                self._leaves = self._leaves or self._why()  # here alone: later it has come to its end before
                inner.refresh(anew=True)
                early_ = early or bool(self._leaves)
                core._hand_in(core.started(), self.group, time.perf_counter() + timeout_s, early=early_)

        def lead(core: Core, inner: MirrorInner) -> None:
            if core.outer is not None:
                inner.refresh(anew=True)
            left_s = max(0.0, deadline - time.monotonic())
            core.close(flush=True, timeout_s=left_s, early=early or bool(self._leaves))

        try:
            loaded = None if self._loads is None else self._loads.keep()
            if flush and self._ranks is not None and not broken:
                if self._standing.started:
                    self.exit_outer()  # what is handed in are the replica's own parameters
                    self._together("close", hand_in)
                    if self.before_leaving is not None:
                        self.before_leaving(max(0.0, deadline - time.monotonic()))
                self._together("close", lead)
            else:
                self.island.part()
        finally:
            self._asked.left()
            if self.leader is not None:
                self.leader.close(flush=False, timeout_s=0.0, early=early or broken)  # unless it has left
            elif self.island.leads:
                self.group.close()
            if loaded is not None:
                loaded()

    # Of this rank alone.

    def standing(self) -> Standing:
        """Where the island stands, as of the end of the last call: what loops go by must be alike on all ranks, and on
        rank 0 a result may come at any time."""
        return self._standing

    def stop(self, reason: str) -> None:
        """See `OuterOptimizer.stop`. All ranks know of it after the next call."""
        if self.leader is not None:
            self.leader.stop(reason)

    def anchor_digest(self) -> str:
        """See `OuterOptimizer.anchor_digest`; as of the end of the last call, as `standing`."""
        if not self._standing.started:
            raise RuntimeError("not started: use `with optimizer:`, or take a first step")
        if digest := self._standing.digest:
            return digest
        if self.leader is None:
            raise RuntimeError(
                f"anchor_digest() on rank {self.island.rank} right after step(): with {self.method.name} rank 0 alone "
                "has it then, since each step changes the whole model; call it on rank 0, or after sync() or close()"
            )
        return self.leader.anchor_digest()

    def count(self, *, tokens: int, samples: int, loss: float | Tensor | None) -> None:
        """What this rank's part of the next step uses. Tokens of all ranks are added up; loss and samples are rank
        0's."""
        if self.leader is not None:
            self.leader.count(tokens=tokens, samples=samples, loss=loss)
        else:
            self._next.add(tokens, samples, loss, life=self._tokens)

    def report(self, state: str) -> None:
        """See `Core.report`."""
        if self.leader is not None:
            self.leader.report(state)

    def load_inner(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's inner state, unless the replicas have agreed on it."""
        if self._standing.started and not self.closed and self.method.gradients is not None:
            tell_not_loaded(self.method)
            return
        self.inner.load_state_dict(state_dict)
        if self._mirrored is not None:
            self._mirrored.mark()

    def disown(self) -> None:
        """See `Leaver`."""
        self.closed = self._forked = True

    def announce(self) -> None:
        """See `Core.announce`."""
        if self.leader is not None and not self._leaves:
            self.leader.announce()

    @property
    def trains(self) -> tuple[nn.Module | None, str]:
        """See `Core.trains`."""
        return self.model, self.group.replica

    def unfinished(self) -> str:
        """See `Core.unfinished`."""
        return "" if self.leader is None else self.leader.unfinished()

    def undo_step(self) -> Any:
        """There is none."""
        raise UserError("undo_step in a replica of several ranks is not supported; use a replica of one process")

    def go_on_from(self, resume: Resume) -> None:
        """See `Core.go_on_from`."""
        if self.standing().started:
            raise RuntimeError("resume() after the start; call it before `with optimizer:` and the first step()")
        self.resume = resume

    def cut(self) -> Cut | None:
        """See `Core.cut`; on all ranks."""
        return self._standing.cut

    def on_leader(self, call: str, act: Callable[[], bool]) -> bool:
        """Rank 0 does ``act``, for which it may `capture`; its result, on all ranks."""

        return bool(self._together(call, lambda core, inner: act()))

    @property
    def place(self) -> tuple[int, int]:
        """See `Core.place`."""
        return self.island.rank, self.island.size

    def check_included(self, call: str) -> bool:
        """See `Core.check_included`. Before the start it is not known."""

        def lead(core: Core, inner: MirrorInner) -> None:
            with self.island.whole():
                self.island.say((Do.TELL_INCLUDED, None))
                found = self._included()
            for rank, names in enumerate(found):
                if names != found[0]:
                    raise unlike(found[0], names, rank)

        if self._standing.started and not self.closed:
            self._together(call, lead)
        return self._standing.started

    def _included(self) -> list[list[str]]:
        return self.island.gather(None if self.loop is None else sorted(self.loop.watched))

    def capture_loops(self, copies: CopyPool) -> list[Tree]:
        """See `Core.capture_loops`. Rank 0, within `on_leader`."""
        self.island.say((Do.TELL_LOOP, None))
        return self._loops(copies.of)

    def _loops(self, copy: Callable[[Tensor], Tensor]) -> list[Tree]:
        assert self.loop is not None
        return states_of_ranks(self.island, partial(self.loop.capture, copy))

    def capture(self, copies: CopyPool) -> SavedReplica:
        """See `Core.capture`. Rank 0, within `on_leader`."""
        assert self.leader is not None and self._mirrored is not None
        self._mirrored.pull(PARAMS | INNER | BUFFERS)
        return self.leader.capture(copies)

    # What a checkpoint is resumed from when nobody holds the state any more: `Fallback`, for rank 0's replica.

    def newest(self) -> Position | None:
        """See `Fallback`."""
        assert self.fallback is not None
        return self.fallback.newest()

    def go_on(self, incarnation: int) -> Resume:
        """See `Fallback`. All ranks read the checkpoint: each loop has a state."""
        assert self.fallback is not None
        self.island.say((Do.GO_ON, incarnation))
        return self.fallback.go_on(incarnation)


def _portable(error: BaseException) -> BaseException:
    """The error as it can go to another process."""
    try:
        found = pickle.loads(pickle.dumps(error))
        return found if isinstance(found, BaseException) else FtoptError(str(error))
    except Exception:
        return FtoptError(f"rank 0: {type(error).__name__}: {error}")
