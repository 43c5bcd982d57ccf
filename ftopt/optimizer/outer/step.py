"""The outer step, as one replica takes it: the six steps of the protocol in order.

==========  =================  ===============================================================================
1 propose   training thread    `OuterStep.boundary`, `_propose`: freeze the parameters, offer the contribution
2 gather    the group          `boundary` waits for it (or trains on)
3 reduce    reducer thread     `Reduction.reduce`: payload, share, sum
4 prepare   reducer thread     `Reduction.reduce`: the agreed result in memory of its own, and its digest
5 decide    network thread     `Reduction.commit`, `discard`; `install` for a replica that was away
6 apply     training thread    `_take_over`, at a boundary between two inner steps, and nowhere else
==========  =================  ===============================================================================

What keeps every inner step counted exactly once is one invariant, held at each boundary through all
interleavings of the three threads: ``params - base`` is the work of the steps
``base_step + 1 .. local_steps`` (see ``fragment.py``). While a newer state waits to be taken up there is no
snapshot, since `commit` and `install` free it; so nothing moves ``base`` under the training thread's hands,
and tensors are never touched under the lock.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ftopt.methods import GRADIENT, ContributionStats, Due, Method, Progress, ReplicaView
from ftopt.methods.method import reads_tensors, settings_of
from ftopt.methods.triggers import AT_ROUNDS, MeanMeasurements, Measurement, Measurements, MemberStats
from ftopt.optimizer.inner import Inner
from ftopt.optimizer.outer.fragment import Fragment, Snapshot, State, name_tensors
from ftopt.optimizer.outer.freezer import Freezer
from ftopt.optimizer.outer.frozen import Frozen, flat_parts
from ftopt.optimizer.outer.mean import in_pieces
from ftopt.optimizer.outer.merge import mixed, rebase_
from ftopt.optimizer.outer.reduction import Reduction
from ftopt.optimizer.outer.trigger_metrics import StepTotals, TriggerMetrics, means_of
from ftopt.optimizer.tensors import pieces
from ftopt.optimizer.tensors.buffers import part
from ftopt.optimizer.tensors.digest import damage, digest, digest_and_sums
from ftopt.optimizer.tensors.flat import FlatView
from ftopt.optimizer.tensors.gradients import GradientView, Live
from ftopt.optimizer.tensors.memory import Memory
from ftopt.optimizer.tensors.pieces import Measured, piece_of
from ftopt.streams import publish, used_here
from ftopt.sync.group import Committed, Contribution, Fingerprint, ReplicaGroup

_SMOOTHING = 0.9
_DESCRIBED = 8
"""So many fragments are described one by one to the other replicas, the others by a hash."""


@dataclass(frozen=True, slots=True)
class ShareOffer:
    """What a contribution to a global batch is made of.

    Args:
        plan: whose share it is.
        units: ``(start, stop)``.
        samples: in them; the contribution weighs as much.
    """

    plan: int
    units: tuple[tuple[int, int], ...]
    samples: int


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What a snapshot says of itself, as of the boundary at which it was begun."""

    contribution: Contribution
    taken: State
    start: Tensor
    tokens: int
    lr: float
    totals: StepTotals
    seen: MemberStats
    now: bool
    shared: bool


class OuterStep(Reduction):
    """One replica's outer steps: a `Host` for its group, and the training thread's side of them.

    Args:
        views: the fragments' parameters, one view a fragment. Their present values are the initial anchor.
        method: what is computed.
        group: who takes part.
        inner: the inner optimizers and their model, for a method that exchanges gradients.
        clock: seconds, monotonic.
        memory: where committed states lie. Default: in RAM.

    Attributes:
        exchanges_gradients: a backward pass is followed by `accumulate`, and not by a step of the inner optimizers.
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
    ) -> None:
        super().__init__(group, memory)
        self.local_steps = 0
        self.tokens = 0
        self.totals = StepTotals()
        self.step_s = 0.0
        self.nonfinite_drops = 0
        self.rounds_taken = 0  # take-overs of a committed contribution of this replica
        self.doing = "starting"  # the last `report`
        self.resumed = False  # `ftopt.optimizer.recovery.restore.restore_replica` has put in what this replica was
        self._method = method
        self._uses_loss = Measurement.LOSS in method.timing.uses
        self._uses_totals = bool(AT_ROUNDS & method.timing.uses)
        self.clock = clock
        self._said_lossless = False
        self.freezer = Freezer()
        self.broken_off: list[Fragment] = []  # frozen in place when a boundary raised; `join` goes on with them
        self._gradients: GradientView | None = None
        self._inner = inner[0] if inner is not None else None
        self.exchanges_gradients = False
        if method.gradients is not None and inner is not None:
            self.exchanges_gradients = True
            self._gradients = GradientView(inner[1])
            self._live = Live(inner[1], inner[0]) if not views else None
            self._add(self._gradients, method.gradients)
        for view in views:
            self._add(view, method)
        self._committed_memory.check(self._fragments[0].view.device)

    def _add(self, view: FlatView, method: Method) -> None:
        anchor = self._committed_memory.place(view.read(view.empty()))
        trigger_metrics = TriggerMetrics(view, method.timing.uses)
        outer = self._place_all(method.init(part(anchor, slice(0, view.trained))) | trigger_metrics.first())
        digest, sums = digest_and_sums(name_tensors(anchor, outer))
        if isinstance(view, GradientView) and self._live is not None:
            digest = self._live.digest()
        state = State(Committed(len(self._fragments), 0, 0, 0), anchor, outer, digest, sums)
        self._fragments.append(Fragment(view, method, trigger_metrics, state))

    # Starting, and where it stands. Training thread.

    def start(self) -> bool:
        """Connects; afterwards the parameters are the committed ones, with this replica's pending work if it has any.

        Returns:
            True when they came from another replica and are not what they were.
        """
        initial = [fragment.state.digest for fragment in self._fragments]
        for meta in self._group.start(self, self.fingerprint()):
            fragment = self._fragments[meta.fragment]
            with self._lock:
                # A resumed one knows where it stands, and its reducer may be at work on this very state.
                if fragment.state is fragment.taken and not self.resumed:
                    fragment.state = fragment.taken = replace(fragment.state, meta=meta)
        fetched = [fragment.state.digest for fragment in self._fragments] != initial
        for fragment in self._fragments:
            if not self._take_over(fragment) and not self.resumed:
                self.restart_trigger(fragment, anew=True)
        return fetched

    def fingerprint(self) -> Fingerprint:
        """What must agree among the replicas: the model's tensors, the method and its settings."""
        views = [fragment.view.describe() for fragment in self._fragments]
        if len(views) > _DESCRIBED:
            views = [*views[:_DESCRIBED], f"{len(views) - _DESCRIBED} more fragments, {_short(views)[:12]}"]
        lines = {"model": "; ".join(views)}
        lines["method"] = self._method.name
        lines |= {f"method.{name}": value for name, value in settings_of(self._method).items()}
        initial = self._fragments[0].state.digest
        if len(self._fragments) > 1:
            initial = _short(fragment.state.digest for fragment in self._fragments)
        period = self._fragments[0].timing.period
        return Fingerprint(lines=lines, initial=initial, fragments=len(self._fragments), period=period)

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The fragments, to look at."""
        return self._fragments

    @property
    def lock(self) -> threading.Lock:
        """Held while the variables of a fragment change; see ``fragment.py``."""
        return self._lock

    @property
    def live(self) -> Live | None:
        """The model and the inner state where they are part of the committed state."""
        return self._live

    def anchor_digest(self) -> str:
        """Of the committed state of all fragments; of a model that is itself the committed state, of that."""
        if self._live is not None:
            return self._live.digest()
        if len(self._fragments) == 1:
            return self._fragments[0].state.digest
        states = [(f"{fragment.index}.", fragment.state.tensors()) for fragment in self._fragments]
        return digest({prefix + name: t for prefix, tensors in states for name, t in tensors.items()})

    def accumulate(self, times: float = 1.0) -> None:
        """Adds the gradients at hand, ``times`` as they are, to those that wait for a round."""
        assert self._gradients is not None
        self._gradients.add(times)

    def empty(self) -> None:
        """The gradients that wait for a round are void."""
        fragment = self._fragments[0]
        fragment.view.write(fragment.start)

    def pending_steps(self, index: int = 0) -> int:
        """Inner steps of this replica that no committed state has counted (dropped ones left out)."""
        return self.local_steps - self._fragments[index].base_step

    def inner_step(self) -> int:
        """The job's committed inner step plus this replica's pending steps."""
        fragment = self._fragments[0]
        with self._lock:
            return fragment.state.meta.inner_step + self.local_steps - fragment.base_step

    def progress(self, index: int = 0) -> Progress:
        """What triggers look at."""
        fragment = self._fragments[index]
        return Progress(
            fragment=index,
            steps=self._beat(fragment) - fragment.trigger_from_step,
            pending_steps=self.pending_steps(index),
            local_steps=self.local_steps,
            inner_step=self.inner_step(),
            seconds=self.clock() - fragment.trigger_from_s,
            elements=fragment.view.trained,
            agreed=fragment.trigger_metrics.agreed(fragment.taken.outer),
            pace=fragment.pace or self.totals.pace(fragment.base_totals),
        )

    def count(self, largest_lr: Callable[[], float], loss: float | Tensor | None, step_s: float | None) -> None:
        """An inner step has been taken.

        Args:
            largest_lr: the inner optimizer's.
            loss: the step's, when it is known.
            step_s: seconds from the end of the one before, when nothing else was done in between.
        """
        if step_s is not None:
            self.step_s = self.step_s * _SMOOTHING + step_s * (1 - _SMOOTHING) if self.step_s else step_s
        self.local_steps += 1
        if self._group.units is not None:
            self._group.units.used()
        if self._uses_totals:
            self.totals = self.totals.plus(largest_lr(), loss if self._uses_loss else None, step_s)

    # Steps 1, 2 and 6, on the training thread, between two inner steps.

    def boundary(self, largest_lr: Callable[[], float]) -> bool:
        """What is to be done after an inner step: take up, propose, wait, take up. Usually nothing.

        Args:
            largest_lr: the inner optimizer's.

        Returns:
            True when anything was done.
        """
        if not self.exchanges_gradients:
            return not self._is_quiet() and self._boundary(self._fragments, largest_lr())
        lr = largest_lr()
        acted = self._boundary(self._fragments[:1], lr)  # the parameters' turn is when their step has been taken
        return self._boundary(self._fragments[1:], lr) or acted

    def _is_quiet(self) -> bool:
        """Whether `_boundary` would find nothing to do: seen at a glance after most steps, which all pay for it."""
        step, called_in = self.local_steps, self._group.called_in
        for fragment in self._fragments:
            if (
                fragment.state is not fragment.taken
                or fragment.period is None
                or step >= fragment.trigger_from_step + fragment.period
                or step == fragment.snapshot_step + fragment.overlap.delay
                or called_in(fragment.index)
            ):
                return False
        return True

    def _boundary(self, fragments: Sequence[Fragment], lr: float) -> bool:
        acted = False
        wait: list[tuple[Fragment, float | None]] = []
        try:
            for fragment in fragments:
                index = fragment.index
                if fragment.state is not fragment.taken:
                    acted |= self._take_over(fragment)
                due, called_in = self._due(fragment), self._group.called_in(index)
                if not (due or called_in or self.local_steps == fragment.snapshot_step + fragment.overlap.delay):
                    continue  # nothing, as after nearly every step
                tau = self._tau(fragment)
                if (due or called_in) and not self._group.outstanding(index):
                    acted |= self._take_over(fragment, early=True)
                    waits = bool(due) and not tau
                    if waits:
                        wait.append((fragment, None))
                    self._propose(fragment, lr, now=due is Due.NOW, waits=waits)
                    acted = True
                elif due and self._group.outstanding(index):
                    wait.append((fragment, None))
                elif tau and self.local_steps == fragment.snapshot_step + tau and self._is_on_its_way(fragment):
                    wait.append((fragment, fragment.overlap.wait_for_result_s))
            for fragment, timeout_s in wait:
                self._wait(fragment.index, timeout_s)
                self._go_on(fragment)
                acted = True
        except BaseException:
            self._break_off()
            raise
        return acted

    def _break_off(self) -> None:
        """Something was raised before `_go_on`, which is due at the latest when the parameters are to change."""
        self.broken_off = [fragment for fragment in self._fragments if fragment.in_place is not None]
        for fragment in self.broken_off:
            self._thaw(fragment)

    def _go_on(self, fragment: Fragment) -> None:
        """Behind a wait. What was frozen in place and is decided is taken up whatever `_tau` is by now: there is no
        copy that later steps could be measured from."""
        in_place = fragment.in_place is not None
        self._thaw(fragment)
        self._take_over(fragment, early=in_place)
        fragment.in_place = None

    def _thaw(self, fragment: Fragment) -> None:
        """The parameters may change from here."""
        frozen = fragment.in_place
        if frozen is not None:
            with self._lock:
                undecided = fragment.snapshot is not None and fragment.snapshot.params is frozen
            frozen.thaw(keep=undecided)

    def _is_on_its_way(self, fragment: Fragment) -> bool:
        """Whether there is something to take up, now or soon. It may have been decided since the boundary began: then
        the newer state is there, which is set before the group says that nothing is outstanding."""
        return self._group.outstanding(fragment.index) or fragment.state is not fragment.taken

    def _due(self, fragment: Fragment) -> Due:
        """Whether it is time. What triggers want is measured only while nothing is outstanding: they would go by work
        that is on its way already."""
        progress = self.progress(fragment.index)
        wanted = fragment.timing.needs(progress)
        if wanted and not self._group.outstanding(fragment.index):
            with torch.no_grad():
                own = fragment.trigger_metrics.look(wanted, fragment.start, self._fresh(fragment))
            progress = replace(progress, own=own, means=self._share(fragment, own))
        return fragment.timing.due(progress)

    def _share(self, fragment: Fragment, own: Measurements) -> MeanMeasurements | None:
        """Tells the others, if the trigger goes by them; what is known of them."""
        index, version = fragment.index, fragment.taken.meta.version
        reading = fragment.trigger_metrics.reading(own, index, version) if fragment.timing.shares else None
        if reading is None:
            return None
        self._group.share(reading)
        return means_of(self._group.means(index), version)

    def _tau(self, fragment: Fragment) -> int:
        """Inner steps from a snapshot to its take-over: none while replicas still average every step."""
        return 0 if self._averages(fragment) else fragment.overlap.delay

    def _averages(self, fragment: Fragment) -> bool:
        """Whether replicas still average their parameters after every step (``average_until_step``)."""
        start = fragment.method.average_until_step
        return start > 0 and self.inner_step() <= start

    def sync(self, *, lr: float) -> bool:
        """A round of each fragment now, with whatever steps there are; waits for what is outstanding first.

        Returns:
            False when a contribution is still undecided: the replica is cut off or alone, and trains on.
        """
        if not self.settle():
            return False
        try:
            proposed = [each for each in self._fragments if self.propose_pending(each.index, lr=lr, waits=True)]
            decided = [self._wait(each.index) for each in proposed]
            for each in proposed:
                self._go_on(each)
        except BaseException:
            self._break_off()
            raise
        return all(decided) and (not proposed or self.settle())

    def settle(self) -> bool:
        """Waits for what is outstanding or being fetched, and takes it up; False when something stays undecided."""
        self.join()
        decided = [self._wait(fragment.index) for fragment in self._fragments]
        decided.append(self._group.catch_up())
        self.take_over()
        return all(decided)

    def propose_pending(self, index: int, *, lr: float, spent: bool = False, waits: bool = False) -> bool:
        """Proposes the pending steps of a fragment if there are any and nothing is outstanding.

        Args:
            index: the fragment's.
            lr: the inner optimizer's.
            spent: also without steps, if units have been used by steps that were given up: nobody else uses them.
            waits: the training thread is going to wait for it, and then to call `_go_on`.
        """
        self.join()
        if self._shared_out or self._group.outstanding(index):
            return False
        units = self._group.units
        rest = spent and index == 0 and units is not None and bool(units.offer())
        if not (self.pending_steps(index) or self._group.called_in(index) or rest):
            return False
        self._propose(self._fragments[index], lr, waits=waits)
        self.freezer.join()  # no pass follows to do it behind, and who leaves next must have offered it
        return True

    def propose_share(self, share: ShareOffer, *, lr: float) -> None:
        """Offers the gradients that are added up as a share of the global batch."""
        self._propose(self._fragments[0], lr, share=share)

    def is_whole(self) -> bool:
        """Whether the global batch is committed and not taken up yet. A sound copy of what was damaged here is."""
        fragment = self._fragments[0]
        if fragment.state is not fragment.taken and fragment.state.meta.version == fragment.taken.meta.version:
            self._take_over(fragment)
        return fragment.state is not fragment.taken

    def take_over(self) -> bool:
        """Takes up whatever newer committed states there are (step 6); True when there was one."""
        self.join()
        took = False
        for fragment in self._fragments:
            took |= self._take_over(fragment, early=True)
        return took

    def report(self, state: str) -> None:
        """Tells the group what the training thread is doing from now on."""
        self.doing = state
        self._group.report(state)

    def standing(self) -> tuple[int, float]:
        """For the group: the inner step, and the seconds that one takes.

        A newer state counts when it is taken up: a training thread that hangs must not seem to move when others do.
        """
        fragment = self._fragments[0]
        with self._lock:
            seen = fragment.taken.meta.inner_step + self.local_steps - fragment.seen().step
        return seen, self.step_s

    def _wait(self, index: int, timeout_s: float | None = None) -> bool:
        if not self._group.outstanding(index):
            return True
        self.report("waiting")
        try:
            return self._group.wait(index, timeout_s=timeout_s)
        finally:
            self.report("training")

    @torch.no_grad()
    def _propose(
        self, fragment: Fragment, lr: float, *, now: bool = False, share: ShareOffer | None = None, waits: bool = False
    ) -> None:
        """Freezes the parameters and offers the contribution; ``waits``: the training thread is going to."""
        taken, view, index = fragment.taken, fragment.view, fragment.index
        version = taken.meta.version
        self._group.emit("propose", fragment=index, version=version + 1, inner_step=self.inner_step())
        steps = self.local_steps - fragment.base_step
        tokens = self.tokens - fragment.base_tokens
        work = ContributionStats(steps, tokens, staleness=version - fragment.base_version)
        weight = fragment.method.weight(work) if share is None else float(share.samples)
        ranges = self._group.units.offer() if self._group.units is not None and not index else ()
        contribution = Contribution(
            fragment=index,
            version=version,
            steps=steps,
            last_step=self.local_steps,
            weight=weight,
            tokens=tokens,
            ranges=ranges if share is None else share.units,
            plan=share.plan if share is not None else 0,
            overlap_s=self._tau(fragment) * self.step_s,
            grace=fragment.overlap.adaptive_grace,
        )
        seen = fragment.trigger_metrics.seen(steps, lr, self.totals, fragment.base_totals)
        if Measurement.LOSS in fragment.timing.uses and steps and seen.loss is None:
            self._warn_of_no_loss()
        proposal = _Proposal(
            contribution, taken, fragment.start, self.tokens, lr, self.totals, seen, now, share is not None
        )
        fragment.snapshot_step = self.local_steps
        fragment.pace = seen.pace or fragment.pace
        self.restart_trigger(fragment, anew=self._averages(fragment))
        tau, whole = self._tau(fragment), view.trained == view.numel and not isinstance(view, GradientView)
        if waits and in_pieces(fragment) and not reads_tensors(fragment.method) and not fragment.trigger_metrics.learns:
            self._offer(fragment, proposal, *self._freeze_in_place(fragment, proposal))
        elif whole and share is None and tau:
            self.freezer.begin(view.device, partial(self._copy_and_offer, fragment, proposal))
        else:
            params = self._fresh(fragment)
            parts: pieces.Parts = view.parts(piece_of(params))
            if share is not None and share.samples:
                parts = flat_parts(view.read(params).div_(share.samples), piece_of(params))
            measured = pieces.copy(parts, fragment.start, params)
            self._offer(fragment, proposal, Frozen(view, params), measured)

    def _freeze_in_place(self, fragment: Fragment, proposal: _Proposal) -> tuple[Frozen, Measured]:
        """No copy, since the training thread waits; the payload is computed in the sweep that measures it."""
        view, start, assumed = fragment.view, fragment.start, fragment.assumed
        frozen, made = Frozen(view), self._fresh(fragment)
        mine = ReplicaView(
            anchor=fragment.taken.anchor,
            start=start,
            params=start.new_empty(0),
            layout=view.layout,
            steps=proposal.contribution.steps,
            lr=proposal.lr,
            alone=assumed.alone,
            lossy=self._mean.lossy,
            averages=assumed.averages,
        )
        measured = pieces.payload(fragment.method, mine, view.parts(piece_of(start)), made, assumed.share)
        frozen.offer(assumed, made)
        return frozen, measured

    @torch.no_grad()
    def _copy_and_offer(self, fragment: Fragment, proposal: _Proposal) -> Callable[[], None]:
        """On the freezer's thread; what is left to do is for the training thread."""
        params = self._fresh(fragment)
        measured = pieces.copy(fragment.view.parts(piece_of(params)), proposal.start, params)
        offer = partial(self._offer, fragment, proposal, Frozen(fragment.view, params), measured)
        if not measured.finite:
            return offer  # the parameters are to be given up
        offer()
        return lambda: None

    def join(self) -> None:
        """Waits until what was being frozen is frozen and offered: the parameters may change. Training thread."""
        if self.freezer.under_way:
            self.freezer.join()
        while self.broken_off:
            self._go_on(self.broken_off[-1])
            self.broken_off.pop()

    def _offer(self, fragment: Fragment, proposal: _Proposal, params: Frozen, measured: Measured) -> None:
        """Hands the frozen parameters over; if they are not finite, gives them up. (Freezer's thread if they are.)"""
        contribution, start = proposal.contribution, proposal.start
        if measured.finite:
            norm = measured.norm if math.isfinite(measured.norm) else 0.0
            contribution = replace(contribution, norm=norm, finite=True)
        else:
            contribution = replace(contribution, weight=0.0, finite=False)
            params = Frozen(fragment.view, self._fresh(fragment).copy_(start))
            if not proposal.shared:  # with more units in it, a share still holds what is not finite
                self._drop(fragment, start, "nonfinite")
        with self._lock:
            if fragment.state is not proposal.taken:
                # A newer state came since the boundary began. The caller takes it up; these steps go with the
                # next round.
                return
            fragment.snapshot = Snapshot(
                contribution, params, start, proposal.tokens, proposal.lr, proposal.totals, proposal.seen
            )
            fragment.in_place = params if params.copy is None else None
        # An `install` may free the snapshot before the next line. The group then drops this proposal: its
        # version is old.
        self._group.propose(contribution, now=proposal.now)

    def _beat(self, fragment: Fragment) -> int:
        """What triggers count by: this replica's inner steps. Beside gradients, which keep replicas in step, the job's:
        whoever waited for an average that the others are not due for would hold up their gradients."""
        return self.inner_step() if self._gradients is not None and fragment.index else self.local_steps

    def restart_trigger(self, fragment: Fragment, *, anew: bool) -> None:
        """Triggers count from here; ``anew``: by the job's steps, since no proposal of this replica gives the beat."""
        fragment.trigger_from_step, fragment.trigger_from_s = self._beat(fragment), self.clock()
        if anew:
            count = len(self._fragments)
            fragment.trigger_from_step -= fragment.timing.phase(fragment.index, count, self.inner_step())

    def _warn_of_no_loss(self) -> None:
        if not self._said_lossless:
            self._said_lossless = True
            warnings.warn(
                f"the trigger of {self._method.name} goes by the loss, and none is counted, or it is NaN: it "
                "keeps its initial period; call optimizer.count(loss=loss) before step(), or give step() a closure",
                stacklevel=2,
            )

    def _take_over(self, fragment: Fragment, *, early: bool = False) -> bool:
        """Takes up newer committed states; what counted this replica's snapshot ``tau`` steps after that, or early."""
        if fragment.state is fragment.taken:
            return False
        tau = self._tau(fragment)
        while fragment.state is not fragment.taken:
            with self._lock:
                state, base, reset = fragment.state, fragment.base, fragment.reset
            used_here([base, *state.tensors().values()])
            counted = base is not fragment.start
            since = self.local_steps - fragment.snapshot_step
            if counted and not state.fetched and not early and since < tau:
                return False
            version = state.meta.version
            self._group.emit("apply", fragment=fragment.index, version=version, inner_step=self.inner_step())
            start = self._committed_memory.place(fragment.view.cast(state.anchor))
            alpha = fragment.overlap.mix if counted and tau and since == tau else None
            if self.local_steps == fragment.base_step:
                fragment.view.write(start)
                fragment.base_version = version
            elif reset or (self._shared_out and version != fragment.taken.meta.version):
                self._drop(fragment, start, "reset" if reset else "taken_over")
            elif alpha is not None:
                self._mix(fragment, start, alpha)
            elif counted or version != fragment.taken.meta.version:
                self._rebase(fragment, base, start, self._unknown(fragment, base) if state.fetched else [])
            # else: a sound copy of what was damaged here. The work is what the parameters differ from it.
            if reset and self._group.units is not None and not fragment.index:
                self._group.units.redo()
            fragment.trigger_metrics.moved(fragment.taken.anchor, state.anchor, version - fragment.taken.meta.version)
            if isinstance(fragment.view, GradientView):
                self._apply(fragment, fragment.view, state)
            else:
                fragment.applied = state
            fragment.start = start
            with self._lock:
                fragment.taken, fragment.base, fragment.before = state, start, None
                if fragment.state is state:
                    fragment.reset = False
            if counted:
                self.rounds_taken += 1
            else:
                self.restart_trigger(fragment, anew=True)
        self._committed_memory.release()
        return True

    def _apply(self, fragment: Fragment, view: GradientView, state: State) -> None:
        """One step of the inner optimizers with the agreed gradient, or a peer's model in the place of this one."""
        assert self._inner is not None
        gradient: Tensor | None = state.outer[GRADIENT]
        with self._live.lock if self._live is not None else nullcontext():
            if state.fetched:
                gradient = state.live.gradient if state.live is not None else None
                if self._live is not None and state.live is not None:
                    self._live.put(state.live)
            if gradient is not None:
                view.give(gradient)
                self._group.emit("aggregated", fragment=fragment.index, inner_step=self.inner_step())
                self._inner.step(None)
            fragment.applied = state
            publish(view.device)  # where the model is copied for a peer

    def _unknown(self, fragment: Fragment, base: Tensor) -> list[slice]:
        """Where ``base`` is damaged: how the parameters differ from it says nothing there."""
        taken = fragment.taken
        found = damage(base, taken.sums["anchor"]) if base is taken.anchor else []
        if found:
            data = {"blocks": len(found)}
            self._group.emit("repaired", fragment=fragment.index, version=taken.meta.version, data=data)
        return found

    def _rebase(self, fragment: Fragment, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> None:
        """Moves the pending work onto the new anchor; drops it if that is not finite."""
        if not rebase_(fragment.view, base, start, unknown):
            self._drop(fragment, start, "nonfinite")

    def _mix(self, fragment: Fragment, start: Tensor, alpha: float) -> None:
        """Mixes; a share ``1 - alpha`` of the pending work is gone."""
        fragment.view.write(mixed(fragment.view, start, alpha, out=self._fresh(fragment)))
        pending = self.local_steps - fragment.base_step
        self._discard(fragment, math.ceil((1 - alpha) * pending), "mixed")

    def _drop(self, fragment: Fragment, start: Tensor, reason: str) -> None:
        """Gives the pending steps up: the parameters go back to ``start``."""
        self.nonfinite_drops += reason == "nonfinite"
        fragment.view.write(start)
        self._discard(fragment, self.local_steps - fragment.base_step, reason)

    def _discard(self, fragment: Fragment, steps: int, reason: str) -> None:
        """Counts the oldest ``steps`` pending steps as discarded."""
        if not steps:
            return
        with self._lock:
            fragment.base_step += steps
            if fragment.base_step == self.local_steps:
                fragment.base_tokens, fragment.base_totals = self.tokens, self.totals
        self._group.emit(
            "discarded",
            fragment=fragment.index,
            inner_step=self.inner_step(),
            data={"steps": steps, "reason": reason},
        )


def _short(parts: Iterable[str]) -> str:
    """SHA-256 (hex) of many strings."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
