"""What an outer step holds for one fragment, and which thread may change it.

============  ================  ========================================================================
``state``     network, worker   the committed state; replaced as a whole, never changed
``snapshot``  all, under lock   the frozen contribution with the parameters it was taken from (FREEZE)
``result``    reducer           what `reduce` computed and no one has decided yet
``taken``     training          the committed state that the model's parameters are based on
``start``     training          ``cast(taken.anchor)``
``base``      all, under lock   what the pending work is measured from: at every step boundary
                                ``params - base`` is exactly the work of ``base_step + 1 .. local_steps``
============  ================  ========================================================================

``base`` moves in three cases: to the snapshot when that was counted, to ``cast(anchor)`` when a state is
taken up (the parameters move by the same amount), and to ``cast(anchor)`` with the parameters when steps are
dropped. What it was, until the training thread takes the newer state up, is in ``before``: seen from the
parameters nothing has been counted yet, and that is how a checkpoint sees it (`ftopt.optimizer.recovery.capture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ftopt.methods import Method
from ftopt.methods.triggers import MemberStats
from ftopt.optimizer.outer.error_feedback import Residual
from ftopt.optimizer.outer.frozen import Assumed, Frozen
from ftopt.optimizer.outer.trigger_metrics import StepTotals, TriggerMetrics
from ftopt.optimizer.tensors.digest import damage, digest_and_sums
from ftopt.optimizer.tensors.flat import FlatView
from ftopt.optimizer.tensors.gradients import Fetched
from ftopt.sync.group import AttemptView, Committed, Contribution

_OUTER = "outer."


@dataclass(frozen=True, slots=True)
class State:
    """A fragment's committed state. Immutable: peers may be reading it at any time.

    Args:
        meta: version, committed inner step, this replica's counted step.
        anchor: flat fp32.
        outer: the outer optimizer's state, flat fp32 tensors.
        digest: of `tensors`.
        sums: of the blocks of `tensors`, as they were when the digest was taken.
        fetched: it came from a peer.
        live: of a fragment of gradients, the model and inner state that came with it.
        made: the attempt that made it, if this replica took part.
    """

    meta: Committed
    anchor: Tensor
    outer: Mapping[str, Tensor]
    digest: str
    sums: Mapping[str, Tensor]
    fetched: bool = False
    live: Fetched | None = None
    made: AttemptView | None = None

    def damage(self) -> list[str]:
        """The blocks whose memory has changed since: ``name[start:stop]`` in elements. None must."""
        found = [(name, part) for name, t in self.tensors().items() for part in damage(t, self.sums[name])]
        return [f"{name}[{part.start}:{part.stop}]" for name, part in found]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names under which peers fetch them."""
        return name_tensors(self.anchor, self.outer)


def name_tensors(anchor: Tensor, outer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``anchor`` and ``outer.<name>``."""
    return {"anchor": anchor, **{_OUTER + name: tensor for name, tensor in outer.items()}}


def check_fetched(held: State, meta: Committed, claimed: str, tensors: Mapping[str, Tensor]) -> State:
    """A fetched state as a `State` on the devices of ``held``.

    Args:
        held: the fragment's state as it is, to tell names and shapes.
        meta: of the fetched one.
        claimed: its digest, as the source says.
        tensors: taken over: where they are on their device already they are not copied, and nobody may change them.

    Raises:
        ValueError: names, lengths or dtypes differ from ``held``'s, or the digest from ``claimed``.
    """
    expected = {name: (tuple(t.shape), t.dtype) for name, t in held.tensors().items()}
    got = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if expected != got:
        wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
        raise ValueError(
            f"fetched state of fragment {meta.fragment}, version {meta.version} does not fit the model: "
            + "; ".join(f"{n}: got {got.get(n, 'nothing')}, expected {expected.get(n, 'nothing')}" for n in wrong)
        )
    places = held.tensors()
    own = {name: t.detach().to(places[name].device) for name, t in tensors.items()}
    found, sums = digest_and_sums(own)
    if found != claimed:
        raise ValueError(
            f"fetched state of fragment {meta.fragment}, version {meta.version} has digest {found[:12]}, "
            f"expected {claimed[:12]}; it was damaged on the way; fetch it again"
        )
    outer = {name.removeprefix(_OUTER): t for name, t in own.items() if name != "anchor"}
    return State(meta, own["anchor"], outer, found, sums, fetched=True)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A frozen contribution: what the protocol knows of it, and the tensors to compute its payload from.

    Args:
        contribution: as proposed.
        params: the parameters at ``contribution.last_step``.
        start: ``cast(anchor)`` that they started from.
        tokens: all tokens counted by then.
        lr: the inner optimizer's largest rate.
        tally: the sums for triggers by then.
        seen: what the other members are told for triggers.
    """

    contribution: Contribution
    params: Frozen
    start: Tensor
    tokens: int
    lr: float
    totals: StepTotals
    seen: MemberStats


@dataclass(frozen=True, slots=True)
class Result:
    """What one attempt made, until it is decided."""

    attempt: int
    anchor: Tensor
    outer: Mapping[str, Tensor]
    digest: str
    sums: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Base:
    """Where the pending work begins, by this replica's counters, and the contribution that is frozen beyond it."""

    step: int
    tokens: int
    totals: StepTotals
    version: int
    snapshot: Snapshot | None
    residuals: Mapping[str, Residual]


class Fragment:
    """The variables of one fragment; the module's table says who writes them.

    Args:
        view: its parameters.
        method: what is computed for it.
        gauge: measures what its trigger wants.
        state: its initial committed state, of the parameters as they are.
    """

    def __init__(self, view: FlatView, method: Method, trigger_metrics: TriggerMetrics, state: State) -> None:
        self.view = view
        self.method = method
        self.trigger_metrics = trigger_metrics
        self.index = state.meta.fragment
        self.timing = method.timing
        self.overlap = method.overlap
        self.period = method.timing.fixed_period  # None: `timing.due` goes by more than steps
        self.state = state
        self.snapshot: Snapshot | None = None
        self.result: Result | None = None
        self.taken = state
        # Of gradients: the state whose gradient the inner optimizers took, under the lock of `Live`. Else `taken`.
        self.applied = state
        self.start = view.cast(state.anchor)
        self.base = self.start
        self.base_step = 0
        self.base_tokens = 0
        self.base_totals = StepTotals()
        self.base_version = state.meta.version
        # Error feedback, by the payload's units: what the codec left out of all that was counted, and what it will have
        # left out when that on its way is. Under the lock.
        self.residuals: Mapping[str, Residual] = {}
        self.left_out: Mapping[str, Residual] | None = None
        self.reset = False
        # As it was when `taken` was the newest, while it is not. Under the lock.
        self.before: Base | None = None
        # The version that a result was made for last: for a retry of it the state is looked over. Reducer thread.
        self.tried = 0
        # The local step that triggers count from: the last proposal's, or that of a take-over of something else; when.
        self.trigger_from_step = 0
        self.trigger_from_s = 0.0
        # The local step at which the last snapshot was taken. Training thread.
        self.snapshot_step = 0
        # Inner steps a second over the last contribution. Training thread.
        self.pace: float | None = None
        # The frozen parameters that are read in place, until the training thread goes on; its own.
        self.in_place: Frozen | None = None
        # What the last round said of the payload. Reducer thread.
        self.assumed = Assumed()
        # Of the mean that an attempt has just reduced, what nothing has been made of yet, for whoever hears of it.
        # Reducer thread.
        self.work: Tensor | None = None

    def advance(self, state: State) -> None:
        """A newer committed state. The snapshot has learnt its fate: counted (it is the new base), or not.
        Under lock."""
        if self.state is self.taken:
            self.before = self.seen()
        snapshot, self.snapshot, self.result = self.snapshot, None, None
        if snapshot is not None and snapshot.contribution.last_step <= state.meta.counted_step:
            # In place: the training thread waits, nothing is pending, and nobody looks at what it is measured from.
            self.base = self.start.new_empty(0) if snapshot.params.copy is None else snapshot.params.copy
            self.base_step = snapshot.contribution.last_step
            self.base_tokens = snapshot.tokens
            self.base_totals = snapshot.totals
            self.base_version = state.meta.version
            if self.left_out is not None:
                self.residuals, self.left_out = self.left_out, None
        self.state = state

    def seen(self) -> Base:
        """The pending work as the training thread sees it, on ``taken``. Under lock."""
        if self.state is not self.taken and self.before is not None:
            return self.before
        totals, version = self.base_totals, self.base_version
        return Base(self.base_step, self.base_tokens, totals, version, self.snapshot, self.residuals)
