"""The outer step, as one replica takes it: the six steps of the protocol in order.

==========  =================  ===============================================================================
1 propose   training thread    `OuterStep.boundary`, `_propose`: freeze the parameters, offer the contribution
2 gather    the group          `boundary` waits for it (or trains on)
3 reduce    reducer thread     `OuterStep.reduce`: payload, share, sum
4 prepare   reducer thread     `OuterStep.reduce`: the agreed result in fresh memory, and its digest
5 decide    network thread     `OuterStep.commit`, `discard`; `install` for a replica that was away
6 apply     training thread    `_take_over`, at a boundary between two inner steps, and nowhere else
==========  =================  ===============================================================================

What keeps every inner step counted exactly once is one invariant, held at each boundary through all
interleavings of the three threads: ``params - base`` is the work of the steps
``base_step + 1 .. local_steps`` (see ``state.py``). While a newer state waits to be taken up there is no
snapshot, since `commit` and `install` free it; so nothing moves ``base`` under the training thread's hands,
and tensors are never touched under the lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ftopt.methods import Method, Progress
from ftopt.optimizer.digest import damage, digest_and_sums
from ftopt.optimizer.flat import FlatView
from ftopt.optimizer.state import Fragment, Result, Snapshot, State, check_fetched, name_tensors
from ftopt.sync.group import Attempt, Collective, Committed, Contribution, Damaged, Fingerprint, ReplicaGroup


class OuterStep:
    """One replica's outer steps: a `Host` for its group, and the training thread's side of them.

    Args:
        views: the fragments' parameters, one view a fragment. Their present values are the initial anchor.
        method: what is computed.
        group: who takes part.
    """

    def __init__(self, views: Sequence[FlatView], method: Method, group: ReplicaGroup) -> None:
        self.local_steps = 0
        self.tokens = 0
        self.step_s = 0.0
        self.nonfinite_drops = 0
        self._method = method
        self._group = group
        self._lock = threading.Lock()
        self._fragments: list[Fragment] = []
        for index, view in enumerate(views):
            anchor = view.read(view.empty())
            outer = method.init(anchor)
            state = State(Committed(index, 0, 0, 0), anchor, outer, *digest_and_sums(name_tensors(anchor, outer)))
            self._fragments.append(Fragment(view, state))

    # Starting, and where it stands. Training thread.

    def start(self) -> bool:
        """Connects; afterwards the parameters are the committed ones.

        Returns:
            True when they came from another replica and are not what they were.
        """
        initial = [fragment.state.digest for fragment in self._fragments]
        for meta in self._group.start(self, self.fingerprint()):
            fragment = self._fragments[meta.fragment]
            with self._lock:
                if fragment.state is fragment.taken:
                    fragment.state = fragment.taken = replace(fragment.state, meta=meta)
        fetched = [fragment.state.digest for fragment in self._fragments] != initial
        self.take_over()
        return fetched

    def fingerprint(self) -> Fingerprint:
        """What must agree among the replicas: the model's tensors, the method and its settings."""
        lines = {"model": "; ".join(fragment.view.describe() for fragment in self._fragments)}
        lines["method"] = self._method.name
        lines |= {f"method.{name}": value for name, value in self._method.settings().items()}
        initial = self._fragments[0].state.digest
        if len(self._fragments) > 1:
            initial = ",".join(fragment.state.digest for fragment in self._fragments)
        return Fingerprint(lines=lines, initial=initial, fragments=len(self._fragments))

    @property
    def fragments(self) -> Sequence[Fragment]:
        """The fragments, to look at."""
        return self._fragments

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
        with self._lock:
            pending = self.local_steps - fragment.base_step
            committed = fragment.state.meta.inner_step
        return Progress(
            fragment=index,
            steps=self.local_steps - fragment.marked_step,
            pending_steps=pending,
            local_steps=self.local_steps,
            inner_step=committed + pending,
        )

    def before_inner_step(self) -> None:
        """The method's word before each inner step."""
        self._method.before_inner_step(self.progress())

    # Steps 1, 2 and 6, on the training thread, between two inner steps.

    def boundary(self) -> bool:
        """What is to be done after an inner step: take up, propose, wait, take up. Usually nothing.

        Returns:
            True when anything was done.
        """
        acted = False
        for fragment in self._fragments:
            index = fragment.index
            acted = self._take_over(fragment) or acted
            due = self._method.due(self.progress(index))
            if (due or self._group.called_in(index)) and not self._group.outstanding(index):
                self._propose(fragment)
                acted = True
            if due and self._group.outstanding(index):
                self._wait(index)
                acted = True
            acted = self._take_over(fragment) or acted
        return acted

    def sync(self) -> bool:
        """A round now, with whatever steps there are; waits for what is outstanding first.

        Returns:
            False when a contribution is still undecided: the replica is cut off or alone, and trains on.
        """
        for fragment in self._fragments:
            index = fragment.index
            if not self._wait(index):
                return False
            self._take_over(fragment)
            if self.propose_pending(index) and not self._wait(index):
                return False
            self._take_over(fragment)
        return True

    def propose_pending(self, index: int) -> bool:
        """Proposes the pending steps of a fragment if there are any and nothing is outstanding."""
        if self._group.outstanding(index) or not (self.pending_steps(index) or self._group.called_in(index)):
            return False
        self._propose(self._fragments[index])
        return True

    def take_over(self) -> bool:
        """Takes up whatever newer committed states there are (step 6); True when there was one."""
        took = False
        for fragment in self._fragments:
            took |= self._take_over(fragment)
        return took

    def report(self, state: str) -> None:
        """Tells the group what the training thread is doing."""
        self._group.report(state=state, inner_step=self.inner_step(), step_s=self.step_s)

    def _wait(self, index: int) -> bool:
        if not self._group.outstanding(index):
            return True
        self.report("waiting")
        try:
            return self._group.wait(index)
        finally:
            self.report("training")

    @torch.no_grad()
    def _propose(self, fragment: Fragment) -> None:
        taken, view, index = fragment.taken, fragment.view, fragment.index
        version = taken.meta.version
        self._group.emit("propose", fragment=index, version=version + 1, inner_step=self.inner_step())
        params = view.read(_borrow(fragment))
        displacement = torch.sub(fragment.start, params)
        norm = float(torch.linalg.vector_norm(displacement))
        finite = math.isfinite(norm) or bool(torch.isfinite(displacement).all())
        steps = self.local_steps - fragment.base_step
        tokens = self.tokens - fragment.base_tokens
        contribution = Contribution(
            fragment=index,
            version=version,
            steps=steps,
            last_step=self.local_steps,
            weight=self._method.weight(steps=steps, tokens=tokens) if finite else 0.0,
            tokens=tokens,
            norm=norm if math.isfinite(norm) else 0.0,
            finite=finite,
        )
        if not finite:
            params.copy_(fragment.start)
            self._drop(fragment, fragment.start, "nonfinite")
        with self._lock:
            if fragment.state is not taken:
                # A newer state came since the boundary began. The caller takes it up; these steps go with the
                # next round.
                fragment.spare = params
                return
            fragment.snapshot = Snapshot(contribution, params, fragment.start, self.tokens)
        fragment.marked_step = self.local_steps
        # An `install` may free the snapshot before the next line. The group then drops this proposal: its
        # version is old.
        self._group.propose(contribution)

    def _take_over(self, fragment: Fragment) -> bool:
        if fragment.state is fragment.taken:
            return False
        while fragment.state is not fragment.taken:
            with self._lock:
                state, base, reborn = fragment.state, fragment.base, fragment.reborn
            version = state.meta.version
            self._group.emit("apply", fragment=fragment.index, version=version, inner_step=self.inner_step())
            start = fragment.view.cast(state.anchor)
            if self.local_steps == fragment.base_step:
                fragment.view.write(start)
            elif reborn:
                self._drop(fragment, start, "reborn")
            elif base is not fragment.start or version != fragment.taken.meta.version:
                self._rebase(fragment, base, start, self._unknown(fragment, base) if state.fetched else [])
            # else: a sound copy of what was damaged here. The work is what the parameters differ from it.
            if base is not fragment.start and not state.fetched:
                fragment.spare = base  # The counted snapshot of a decided attempt: nobody reads it any more.
            fragment.start = start
            with self._lock:
                fragment.taken, fragment.base = state, start
                if fragment.state is state:
                    fragment.reborn = False
            fragment.marked_step = self.local_steps
        return True

    def _unknown(self, fragment: Fragment, base: Tensor) -> list[slice]:
        """Where ``base`` is damaged: how the parameters differ from it says nothing there."""
        taken = fragment.taken
        found = damage(base, taken.sums["anchor"]) if base is taken.anchor else []
        if found:
            data = {"blocks": len(found)}
            self._group.emit("repaired", fragment=fragment.index, version=taken.meta.version, data=data)
        return found

    def _rebase(self, fragment: Fragment, base: Tensor, start: Tensor, unknown: Sequence[slice]) -> None:
        """``params <- cast(new anchor) + (params - base)``: moves the pending work onto the new anchor.

        With the cast, so that ``params - start`` is the work again and what the parameters' dtype rounds off
        the anchor is not taken for work. In the blocks ``unknown`` the parameters become the anchor's.
        """
        moved = fragment.view.read(_borrow(fragment)).sub_(base).add_(start)
        for block in unknown:
            moved[block] = start[block]
        if bool(torch.isfinite(moved).all()):
            fragment.view.write(moved)
        else:
            self._drop(fragment, start, "nonfinite")
        fragment.spare = moved

    def _drop(self, fragment: Fragment, start: Tensor, reason: str) -> None:
        """Gives the pending steps up: the parameters go back to ``start`` and the steps are counted as
        discarded."""
        with self._lock:
            steps = self.local_steps - fragment.base_step
            fragment.base_step, fragment.base_tokens = self.local_steps, self.tokens
        self.nonfinite_drops += reason == "nonfinite"
        fragment.view.write(start)
        self._group.emit(
            "discarded",
            fragment=fragment.index,
            inner_step=self.inner_step(),
            data={"steps": steps, "reason": reason},
        )

    # Steps 3 and 4, on the reducer thread.

    @torch.no_grad()
    def reduce(self, attempt: Attempt, collective: Collective) -> str:
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
        if fragment.tried == attempt.version and attempt.size > 1:
            self._look_over(state)
        anchor, outer = state.anchor, state.outer
        if attempt.total_weight > 0:
            # Not kept while in use: after a failure a late piece may still be written to it.
            work, fragment.work = fragment.work, None
            work = fragment.view.empty() if work is None else work
            self._payload(attempt, state, snapshot, work)
            collective.all_reduce_(work)
            fragment.work = work
            self._group.emit(
                "reduce.after", fragment=attempt.fragment, version=attempt.version, attempt=attempt.attempt
            )
            anchor, outer = self._method.outer_step(state.anchor, state.outer, work)
            if anchor is work:
                fragment.work = None
        result = Result(attempt.attempt, anchor, outer, *digest_and_sums(name_tensors(anchor, outer)))
        fragment.tried = attempt.version
        with self._lock:
            if fragment.state is state:
                fragment.result = result
        return result.digest

    def _look_over(self, state: State) -> None:
        """Before a retry of what had been prepared: if the digests have differed, it may be this replica's fault."""
        if blocks := state.damage():
            at = state.meta
            self._group.emit("damaged", fragment=at.fragment, version=at.version, data={"blocks": blocks[:8]})
            raise Damaged(f"the committed state of version {at.version} is damaged in {', '.join(blocks[:8])}")

    def _payload(self, attempt: Attempt, state: State, snapshot: Snapshot, out: Tensor) -> None:
        if attempt.weight <= 0:
            out.zero_()
            return
        alone = attempt.contributors == 1
        self._method.payload(state.anchor, snapshot.start, snapshot.params, alone=alone, out=out)
        if not alone:
            out.mul_(attempt.weight / attempt.total_weight)

    # Step 5, on the network thread (install: a worker thread). O(1) under the lock, and parameters are not
    # touched.

    def commit(self, attempt: Attempt, committed: Committed) -> None:
        """The result of ``attempt`` is the committed state now; the training thread takes it up at its next
        boundary."""
        fragment = self._fragments[attempt.fragment]
        with self._lock:
            result = fragment.result
            if result is None or result.attempt != attempt.attempt:
                assert fragment.state.meta.version >= committed.version, "a commit without its result"
                return
            fragment.advance(State(committed, result.anchor, result.outer, result.digest, result.sums))

    def discard(self, fragment: int) -> None:
        """The attempt came to nothing: its result goes, the contribution stays (FREEZE)."""
        with self._lock:
            self._fragments[fragment].result = None

    def state(self, fragment: int) -> tuple[str, dict[str, Tensor]]:
        """The committed state, for a peer: digest and tensors, which never change."""
        state = self._fragments[fragment].state
        return state.digest, state.tensors()

    def install(self, committed: Committed, digest: str, tensors: Mapping[str, Tensor], *, reborn: bool) -> None:
        """A fetched state becomes the committed one; pending work is rebased onto it, or dropped if
        ``reborn``.

        Raises:
            ValueError: it is damaged or not of this model; nothing has changed.
        """
        fragment = self._fragments[committed.fragment]
        state = check_fetched(fragment.state, committed, digest, tensors)
        with self._lock:
            fragment.advance(state)
            fragment.reborn = fragment.reborn or reborn


def _borrow(fragment: Fragment) -> Tensor:
    """The training thread's spare buffer, or a new one."""
    spare, fragment.spare = fragment.spare, None
    return fragment.view.empty() if spare is None else spare
