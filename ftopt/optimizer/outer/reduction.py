"""Steps 3 to 5 of an outer step, beside the training thread: reduce, prepare, decide; and what peers fetch.

The table of all six steps is in ``step.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.codecs import codec_named
from ftopt.methods import GRADIENT, Round
from ftopt.optimizer.outer.fragment import Fragment, Result, Snapshot, State, check_fetched, name_tensors
from ftopt.optimizer.outer.mean import Mean, in_pieces
from ftopt.optimizer.outer.sharded_step import outer_step
from ftopt.optimizer.outer.trigger_metrics import methods_own
from ftopt.optimizer.tensors import pieces
from ftopt.optimizer.tensors.buffers import joined, part
from ftopt.optimizer.tensors.digest import digest_and_sums
from ftopt.optimizer.tensors.gradients import Live
from ftopt.optimizer.tensors.memory import Memory
from ftopt.streams import SideStream, reached
from ftopt.sync.group import AttemptView, Collective, Committed, Damaged, ReplicaGroup, Summed


class Reduction:
    """What the reducer and the network do with a replica's fragments: the part of a `Host` that is not training's.

    Args:
        group: who takes part.
        memory: where committed states lie. Default: in RAM.
    """

    def __init__(self, group: ReplicaGroup, memory: Memory | None = None) -> None:
        self._group = group
        self._shared_out = group.global_batch is not None  # gradients belong to one version (TIE)
        self._lock = threading.Lock()
        self._memory = Memory()
        self._committed_memory = memory or self._memory
        self._mean = Mean(codec_named(group.sync.codec), group.sync.error_feedback, self._lock, self._memory)
        self._fragments: list[Fragment] = []
        self._live: Live | None = None
        self._reducing, self._installing = SideStream(), SideStream()

    # Steps 3 and 4, on the reducer thread.

    @torch.no_grad()
    def reduce(self, attempt: AttemptView, collective: Collective) -> str:
        """Computes this attempt's result from the frozen contribution; keeps it, and returns its digest.

        With one fragment the result is the whole committed state, so its digest scrubs that too.

        Raises:
            InterruptedError: stopped, or a fetched state has overtaken the attempt.
            Damaged: this replica's own committed state is not what it was: it must be fetched.
            ConnectionError, TimeoutError: as ``collective`` raises them. The contribution stays as it is.
        """
        fragment = self._fragments[attempt.fragment]
        with self._lock:
            state, snapshot = fragment.state, fragment.snapshot
            fragment.result = None
        if snapshot is None or attempt.version != state.meta.version + 1:
            raise InterruptedError(
                f"attempt {attempt.attempt} for version {attempt.version} is overtaken: "
                f"this replica holds version {state.meta.version}"
            )
        with self._reducing.after(snapshot.params.point, fragment.view.device):
            result = self._result(attempt, collective, fragment, state, snapshot)
        fragment.tried = attempt.version
        with self._lock:
            if fragment.state is state:
                fragment.result = result
        self._committed_memory.release()
        return result.digest

    def _result(
        self, attempt: AttemptView, collective: Collective, fragment: Fragment, state: State, snapshot: Snapshot
    ) -> Result:
        """The reduction, the outer step and the digests."""
        if fragment.tried == attempt.version and attempt.size > 1:
            self._look_over(state)
        anchor, outer, sums = state.anchor, state.outer, dict[str, Tensor]()
        if attempt.total_weight > 0:
            method, memory, trained = fragment.method, self._committed_memory, slice(0, fragment.view.trained)
            averages = attempt.inner_step < method.average_until_step
            steps: list[pieces.Steps] = []

            def begin(mean: Tensor, at: Round) -> Summed | None:
                if averages or not _can_begin_early(fragment):
                    return None
                steps.append(pieces.Steps(method, state.anchor, methods_own(state.outer), mean, at, memory))
                return steps[0].there

            work, at = self._mean.reduce(attempt, fragment, state, snapshot, collective, begin)
            fragment.work = steps[0].waiting() if steps else work
            self._group.emit(
                "reduce.after", fragment=attempt.fragment, version=attempt.version, attempt=attempt.attempt
            )
            fragment.work = None
            anchor, mean = part(state.anchor, trained), part(work, trained)
            if averages:
                anchor = method.average(anchor, mean, at)
            else:
                gradient = method.aggregation.aggregate(mean, at) if method.aggregation is not None else mean
                own = methods_own(state.outer)
                if method.execution.elementwise:
                    step = steps[0] if steps else pieces.Steps(method, anchor, own, gradient, at, memory)
                    anchor, outer, (of_anchor, of_outer) = step.finish()
                    sums = name_tensors(of_anchor, of_outer)
                else:
                    anchor, outer = outer_step(method, anchor, own, gradient, at, collective)
            if anchor.numel() < work.numel():
                anchor = joined(anchor, state.anchor, work, at)
                sums.pop("anchor", None)
            outer = {**outer, **fragment.trigger_metrics.after(state.outer, at.seen)}
        elif self._shared_out:  # nothing finite in the whole batch
            outer = fragment.method.init(anchor)
        anchor, outer = self._committed_memory.place(anchor), self._place_all(outer)
        return Result(attempt.attempt, anchor, outer, *digest_and_sums(name_tensors(anchor, outer), sums))

    def _look_over(self, state: State) -> None:
        """Before a retry of what had been prepared: if the digests have differed, it may be this replica's fault."""
        if blocks := state.damage():
            at = state.meta
            self._group.emit("damaged", fragment=at.fragment, version=at.version, data={"blocks": blocks[:8]})
            raise Damaged(f"the committed state of version {at.version} is damaged in {', '.join(blocks[:8])}")

    def place(self, state: State) -> State:
        """A state that was not made here, where committed states lie."""
        return replace(state, anchor=self._committed_memory.place(state.anchor), outer=self._place_all(state.outer))

    def _place_all(self, outer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._committed_memory.place(tensor) for name, tensor in outer.items()}

    def _fresh(self, fragment: Fragment) -> Tensor:
        """A flat tensor of the fragment's length, with nothing in particular in it."""
        return self._memory.take(fragment.view.numel, fragment.view.device)

    # Step 5, on the network thread (install: a worker thread). O(1) under the lock, and parameters are not
    # touched.

    def commit(self, attempt: AttemptView, committed: Committed) -> None:
        """The result of ``attempt`` is the committed state now; the training thread takes it up at its next
        boundary."""
        fragment = self._fragments[attempt.fragment]
        with self._lock:
            result = fragment.result
            if result is None or result.attempt != attempt.attempt:
                assert fragment.state.meta.version >= committed.version, "a commit without its result"
                return
            made = State(committed, result.anchor, result.outer, result.digest, result.sums, made=attempt)
            fragment.advance(made)

    def discard(self, fragment: int) -> None:
        """The attempt came to nothing: its result goes, the contribution stays (FREEZE)."""
        with self._lock:
            self._fragments[fragment].result = None

    def state(self, fragment: int) -> tuple[str, dict[str, Tensor]]:
        """The committed state, for a peer: digest and tensors, which never change.

        Raises:
            LookupError: an inner step that is being applied lasts too long to wait for.
        """
        f, live = self._fragments[fragment], self._live
        if live is None:
            return f.state.digest, f.state.tensors()
        if not live.hold():
            raise LookupError("an inner step is being applied")
        try:
            state = f.state
            if state.live is not None and f.applied is not state:  # the model here is still of another version
                return state.digest, dict(state.live.tensors)
            return live.serve(None if f.applied is state else state.outer[GRADIENT])
        finally:
            live.lock.release()

    def install(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], *, reset: bool) -> None:
        """A fetched state becomes the committed one; pending work is rebased onto it, or dropped if
        ``reset``.

        Raises:
            ValueError: it is damaged or not of this model; nothing has changed.
        """
        fragment = self._fragments[committed.fragment]
        device = fragment.view.device
        with self._installing.after(reached(device), device):
            if self._live is not None:
                live = self._live.check(digest, tensors)
                held = fragment.state
                state = State(committed, held.anchor, held.outer, digest, held.sums, fetched=True, live=live)
            else:
                state = self.place(check_fetched(fragment.state, committed, digest, tensors))
        with self._lock:
            fragment.advance(state)
            fragment.reset = fragment.reset or reset


def _can_begin_early(fragment: Fragment) -> bool:
    """Whether its outer step can begin when the first elements of the mean are there."""
    plain = fragment.method.aggregation is None
    return plain and in_pieces(fragment) and not fragment.trigger_metrics.learns
