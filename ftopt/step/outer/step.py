"""The outer step, as one replica takes it: the six steps of the protocol in order.

==========  =================  ===============================================================================
1 propose   training thread    `OuterStep.boundary`, `Freezer.propose`: freeze the parameters, offer the contribution
2 gather    the group          `boundary` waits for it (or trains on)
3 reduce    reducer thread     `Reduction.reduce`: payload, share, sum
4 prepare   reducer thread     `Reduction.reduce`: the agreed result in memory of its own, and its digest
5 decide    network thread     `Reduction.commit`, `discard`; `install` for a replica that was away
6 apply     training thread    `Applier.apply`, at a boundary between two inner steps, and nowhere else
==========  =================  ===============================================================================

The threads share the `Fragment`s, each with its lock, and the `Counters`. Every inner step is counted exactly once
because of one invariant, which holds at each boundary under all interleavings: ``params - base.params`` is the work of
the steps ``base.step + 1 .. local_steps`` (see ``fragment.py`` and ``counters.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn

from ftopt.codecs.named import prepare_kernels
from ftopt.methods import Method
from ftopt.methods.method import has_scalars
from ftopt.methods.triggers import AT_ROUNDS, Due, Measurement
from ftopt.step.inner import Inner
from ftopt.step.outer.apply import Applier
from ftopt.step.outer.fingerprint import digest_of_all, fingerprint, kinds_of
from ftopt.step.outer.fragment import Fragment
from ftopt.step.outer.freeze import Freezer
from ftopt.step.outer.gradient_fragment import GradientFragment, verify_every
from ftopt.step.outer.reduction import Reduction
from ftopt.step.outer.schedule import SyncSchedule
from ftopt.step.outer.shared import Shared
from ftopt.step.outer.state import first_state
from ftopt.step.tensors.arithmetic import arithmetic_of
from ftopt.step.tensors.buffers import averaged
from ftopt.step.tensors.flat import FlatView, trainable
from ftopt.step.tensors.fused import OUTER_STEPS, difference
from ftopt.step.tensors.gradients import GradientView
from ftopt.step.tensors.live import Live
from ftopt.step.tensors.memory import Memory
from ftopt.step.tensors.trained import Trained
from ftopt.sync.group import OWN, Fingerprint, ReplicaGroup

P = ParamSpec("P")
R = TypeVar("R")


def _at_rest(call: Callable[Concatenate[OuterStep, P], R]) -> Callable[Concatenate[OuterStep, P], R]:
    """Wraps a method to run within `OuterStep.at_rest`."""

    @wraps(call)
    def wrapped(self: OuterStep, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.gradients is None:
            return call(self, *args, **kwargs)
        with self.at_rest():
            return call(self, *args, **kwargs)

    return wrapped


class OuterStep:
    """One replica's outer steps, on its training thread.

    Args:
        views: one for each fragment. Their present values are the initial anchor.
        inner: the inner optimizers and their model.
        clock: seconds, monotonic.
        memory: memory of committed states. Default: in RAM.
        refresh: called before a fragment's parameters are read. Default: nothing to refresh.
        gradients: for a method that exchanges gradients, their view, and the model and inner state. Default: those of
            ``inner``.

    Attributes:
        gradients: the fragment of gradients, if the method exchanges them. A step then only adds up gradients, and the
            inner optimizers step when the result is applied.
        live: the model and the inner state, where they are part of the committed state.
        trained: what trains; None without ``inner``.
        doing: the last `report`.
        frozen: lines that replicas compare about parameters that do not train; set before `start`.
        moves: moves of parameters that an exception has interrupted; `Freezer.join` completes them.
    """

    def __init__(
        self,
        views: Sequence[FlatView],
        method: Method,
        group: ReplicaGroup,
        inner: tuple[Inner, nn.Module] | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        memory: Memory | None = None,
        refresh: Callable[[int], object] | None = None,
        gradients: tuple[GradientView, Live] | None = None,
    ) -> None:
        room = Memory()
        shared = Shared(group=group, clock=clock, memory=room, committed_memory=memory or room)
        self.shared, self.counters = shared, shared.counters
        self.fragments = found = shared.fragments
        self.gradients: GradientFragment | None = None
        self.live: Live | None = None
        self._arithmetic = ""
        self.doing = "starting"
        self.frozen: Mapping[str, str] = {}
        self.start_step = 0
        self.own_lines: Mapping[str, str] = {}
        self._group, self._method = group, method
        self.trained = Trained(*inner) if inner is not None else None
        self._refresh = refresh or _nothing
        self._uses_loss = Measurement.LOSS in method.timing.uses
        self._inner = inner[0] if inner is not None else None
        self._uses_totals = bool((AT_ROUNDS | Measurement.RATE) & method.timing.uses) or has_scalars(method)
        if method.gradients is not None and inner is not None:
            buffers = averaged(inner[1]) if views and method.buffers == "mean" and gradients is None else []
            alike, live = gradients or (GradientView(inner[1]), Live(inner[1], inner[0], buffers=buffers))
            self.live = live if not views else None
            self.gradients = GradientFragment(
                alike, method.gradients, shared, inner=inner[0], live=live, trained=None if views else self.trained
            )
            found.append(self.gradients)
            if verify_every(method):
                self._arithmetic = arithmetic_of(inner[0], next(p for _, p in trainable(inner[1])))
        by_job = self.gradients is not None
        for view in views:
            state = first_state(view, method, len(found), shared.committed_memory)
            found.append(Fragment(view, method, state, self.counters, by_job=by_job))
        # The parameters follow once the step with the agreed gradient has been taken.
        self._turns = [found[:1], found[1:]] if by_job else [found]
        self.schedule = SyncSchedule(shared)
        self.reduction = Reduction(shared, method)
        self._applier = Applier(shared, self.schedule)
        self.moves = self._applier.moves
        self.freezer = Freezer(shared, self.schedule, self._applier, lossy=self.reduction.lossy)
        shared.committed_memory.check(found[0].view.device)
        device, numel = found[0].view.device, sum(fragment.view.numel for fragment in found)
        if views and method.execution.elementwise:
            OUTER_STEPS.prepare(device, numel, difference)
        if self.reduction.lossy:
            prepare_kernels(device, numel)

    # Starting, and where it stands. Training thread.

    @_at_rest
    def start(self) -> bool:
        """Connects; afterwards the parameters are the committed ones, with this replica's pending work if any. True if
        they came from another replica and have changed."""
        initial = [fragment.state.digest for fragment in self.fragments]
        for meta in self._group.start(self.reduction, self.fingerprint()):
            if not self.counters.resumed:  # a resumed replica has its metas, and its reducer may be using one
                self.fragments[meta.fragment].start_at(meta)
        fetched = [fragment.state.digest for fragment in self.fragments] != initial
        for fragment in self.fragments:
            if not self._applier.apply(fragment) and not self.counters.resumed:
                self.schedule.restart(fragment, anew=True)
        if self.gradients is not None:
            self.gradients.note_begun()
        return fetched

    def fingerprint(self) -> Fingerprint:
        """The settings on which replicas must agree: the model's tensors, the method and its settings."""
        inner: dict[str, str] = {}
        compared = self._group.policy.inner == "compare"
        if self._inner is not None and (compared or self.gradients is not None):
            inner["inner optimizer"] = kinds_of(self._inner)
        if compared:
            inner |= self.own_lines
            inner |= {f"{OWN}planned inner steps": str(self.counters.planned)} if self.counters.planned else {}
        found = fingerprint(self.fragments, self._method, inner, self._arithmetic, self.frozen)
        return replace(found, start_step=self.start_step)

    def digest(self) -> str:
        """The digest of all fragments' committed states, or of the model if that is the committed state."""
        if self.live is not None:
            return self.live.digest()
        if len(self.fragments) == 1:
            return self.fragments[0].state.digest
        # Without the used gradient, which a replica that fetches the model after its step has not seen.
        return digest_of_all([fragment for fragment in self.fragments if fragment is not self.gradients])

    def pending_by_fragment(self) -> tuple[int, ...]:
        """For each fragment, the inner steps of this replica that its committed state has not counted."""
        return tuple(fragment.pending_steps for fragment in self.fragments)

    def inner_step(self) -> int:
        """The job's committed inner step plus this replica's pending steps."""
        return self.shared.inner_step()

    def step_to_take(self) -> int:
        """The inner step that the parameters have reached, for schedules."""
        return self.inner_step() if self.gradients is None else self.shared.job_step()

    def report(self, state: str) -> None:
        """Tells the group what the training thread does from now on."""
        self.doing = state
        self._group.report(state)

    def at_rest(self) -> AbstractContextManager[None]:
        """Surrounds the training thread's work or wait within a call of its optimizer: see `Live.at_rest`."""
        return nullcontext() if self.gradients is None else self.gradients.live.at_rest()

    # An inner step, and steps 1, 2 and 6 after it. Training thread.

    def count(
        self, largest_lr: Callable[[], float], loss: float | Tensor | None, step_s: float | None, *, tokens: int
    ) -> None:
        """Counts an inner step; see `Counters.count_step`."""
        self.counters.count_step(tokens, step_s)
        if self._group.units is not None:
            self._group.units.use()
        if self._uses_totals:
            self.counters.add_to_totals(largest_lr(), loss if self._uses_loss else None, step_s)
        if loss is not None:  # last, since adding a tensor of a broken device to others raises
            self._group.tell_loss(loss)

    @_at_rest
    def boundary(self, largest_lr: Callable[[], float], turns: Sequence[Sequence[Fragment]] | None = None) -> bool:
        """Does the work due after an inner step: apply, propose, wait, apply. False: there was none, as usual.
        ``turns``: groups of fragments; by default all."""
        acted = False
        step, called_in = self.counters.local_steps, self._group.called_in
        if self.gradients is not None:
            self.gradients.in_step = True
        try:
            for fragments in self._turns if turns is None else turns:
                wait: list[tuple[Fragment, float | None]] = []
                for fragment in fragments:
                    if (
                        step < fragment.ask_from
                        and step != fragment.apply_step
                        and fragment.state is fragment.applied
                        and not fragment.condemned
                        and not called_in(fragment.index)
                    ):
                        continue  # nothing to do, as after nearly every step
                    self._refresh(fragment.index)
                    acted |= self._attend(fragment, largest_lr, wait)
                for fragment, timeout_s in wait:
                    self._wait(fragment.index, timeout_s)
                    self.freezer.release(fragment)
                    acted = True
                    if self.schedule.tau(fragment) and not self._group.outstanding(fragment.index):
                        self._attend(fragment, largest_lr, [])  # as where the result came before this boundary
                if self.gradients is not None and not self._with_others():
                    break
        except BaseException:
            self.freezer.thaw()
            raise
        finally:
            if self.gradients is not None:
                self.gradients.in_step = False
        return acted

    @_at_rest
    def take_whole(self, largest_lr: Callable[[], float]) -> None:
        """Takes the step with the gradient of a complete global batch, and does the work due after it."""
        assert self.gradients is not None
        self.freezer.join()
        self.gradients.in_step = True
        try:
            self._applier.apply(self.gradients, early=True)
        finally:
            self.gradients.in_step = False
        if self._with_others():
            self.boundary(largest_lr, self._turns[1:])

    def _with_others(self) -> bool:
        """Whether the last step with an agreed gradient was taken with the others. A replica that joins or was cut off
        may still be behind after fetching; its parameters are averaged with theirs from the first common step on."""
        first = self.gradients
        if first is None:
            return True
        return first.state is first.applied and not first.applied.fetched and not self._group.outstanding(0)

    def _attend(
        self, fragment: Fragment, largest_lr: Callable[[], float], wait: list[tuple[Fragment, float | None]]
    ) -> bool:
        """Applies a newer state, and proposes if it is time; adds to ``wait`` the fragments to wait for, and how
        long."""
        index, acted = fragment.index, self._applier.apply(fragment)
        due, called = self.schedule.due(fragment), self._group.called_in(index)
        awaited = self.counters.local_steps == fragment.apply_step
        if not (due or called or awaited):
            return acted
        tau, outstanding = self.schedule.tau(fragment), self._group.outstanding(index)
        if (due or called) and not outstanding and self._applier.apply(fragment, early=True):  # decided since
            acted, due, called = True, self.schedule.due(fragment), self._group.called_in(index)
            if not (due or called):
                return True
        if acted and fragment is self.gradients and (due or not fragment.applied.fetched):
            return True  # the next agreed gradient is used at the loop's next rate, as on the others
        if (due or called) and not outstanding:
            if self.trained is not None:
                self.trained.check()
            waits = bool(due) and not tau
            if waits:
                wait.append((fragment, None))
            self.freezer.propose(fragment, largest_lr(), now=due is Due.NOW, waits=waits)
            return True
        if due and outstanding:
            wait.append((fragment, None))
        elif tau and awaited and (outstanding or fragment.state is not fragment.applied):
            # The newer state arrives before the group reports that nothing is outstanding.
            wait.append((fragment, fragment.overlap.wait_for_result_s))
        return acted

    def _wait(self, index: int, timeout_s: float | None = None) -> bool:
        if not self._group.outstanding(index):
            return True
        self.report("waiting")
        try:
            return self._group.wait(index, timeout_s=timeout_s)
        finally:
            self.report("training")

    # Other work of the training thread.

    @_at_rest
    def apply(self) -> bool:
        """Applies any newer committed states (step 6); True if there was one."""
        self.freezer.join()
        applied = [self._applier.apply(fragment, early=True) for fragment in self.fragments]
        return any(applied)

    def drop_loaded(self) -> int:
        """Drops the pending work that is not proposed yet, since user code has replaced the parameters. Returns its
        steps."""
        self.freezer.join()
        dropped = [self._applier.drop_since_frozen(fragment, "loaded") for fragment in self.fragments]
        if self._group.units is not None and not self._group.outstanding(0):
            self._group.units.redo(once=True)
        return max(dropped)

    @_at_rest
    def settle(self) -> bool:
        """Waits for outstanding contributions and fetches, and applies the results; False if any stays undecided."""
        self.freezer.join()
        decided = [self._wait(fragment.index) for fragment in self.fragments]
        decided.append(self._group.catch_up())
        self.apply()
        return all(decided)

    @_at_rest
    def sync(self, *, lr: float) -> bool:
        """Holds a round of each fragment now, with the pending steps; first waits for outstanding contributions. False
        if a contribution stays undecided (the replica is cut off or alone, and trains on), or if steps remain after an
        outstanding agreed gradient: they use the rate that the loop sets next."""
        before = self.gradients.stepped if self.gradients is not None else None
        if not self.settle():
            return False
        if self.gradients is not None and self.gradients.stepped is not before:
            return not any(self.pending_by_fragment())
        try:
            proposed = [each for each in self.fragments if self._propose_pending(each, lr, waits=True)]
            decided = [self._wait(each.index) for each in proposed]
            for each in proposed:
                self.freezer.release(each)
        except BaseException:
            self.freezer.thaw()
            raise
        return all(decided) and (not proposed or self.settle())

    def propose_pending(self, index: int, *, lr: float, spent: bool = False) -> bool:
        """Proposes the pending steps of a fragment if there are any and nothing is outstanding. ``spent``: also without
        steps, if dropped steps have used units, which no other replica uses."""
        self.freezer.join()
        return self._propose_pending(self.fragments[index], lr, spent=spent)

    def _propose_pending(self, fragment: Fragment, lr: float, *, spent: bool = False, waits: bool = False) -> bool:
        index, units = fragment.index, self._group.units
        if not fragment.carries_over or self._group.outstanding(index) or (index and not self._with_others()):
            return False
        rest = spent and not index and fragment.view.together(units is not None and bool(units.offer()))[0]
        if not (fragment.pending_steps or self._group.called_in(index) or rest):
            return False
        self.freezer.propose(fragment, lr, waits=waits)
        return True

    def is_whole(self) -> bool:
        """Whether the global batch is committed but not applied yet; first applies a sound copy of a state damaged
        here."""
        fragment = self.fragments[0]
        if fragment.state is not fragment.applied and fragment.state.meta.version == fragment.applied.meta.version:
            self._applier.apply(fragment)
        return fragment.state is not fragment.applied


def _nothing(fragment: int) -> None:
    pass
