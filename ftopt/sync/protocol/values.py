"""The parts of messages: contributions, positions, records, and the hash chain that distinguishes histories."""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from ftopt.sync.protocol import limits
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.limits import FragmentIndex, Loss, Name, Number, Step, UnitRanges, Word, at_most, within

IncarnationId = tuple[Name, Annotated[int, within(limits.MAX_STEPS, 1)]]
"""A replica's id and the number of its life."""

_Seconds = Annotated[float, within(limits.MAX_SECONDS)]

OWN = "own "
"""Prefix of the names of a hello's lines that need not agree; a replica whose lines differ gets a warning."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What the protocol knows of a replica's payload for the next version of one fragment (FREEZE: immutable).

    Args:
        fragment: the fragment.
        version: the version it builds on (the last one applied).
        steps: inner steps in it: ``last_step`` minus the holder's last counted step.
        last_step: the holder's own count of executed inner steps at the snapshot, in this incarnation.
        weight: its weight in the mean, >= 0 (DiLoCo, LocalSGD: ``steps``). 0: sends zeros, receives the result.
        tokens: tokens in it, 0 when not counted.
        norm: L2 norm of its outer gradient (or of the sum of gradients, if the method exchanges these), 0 when not
            finite.
        at_step: the job's inner step at the snapshot, with a method whose replicas have equal parameters, but for
            noise, at each step: contributions of older steps are left out of the mean. 0: does not matter.
        finite: False when a NaN or Inf is in it (its weight is then 0).
        ranges: units ``(start, stop)`` that its steps, and dropped steps before them, have used; empty without a
            ledger, and in any fragment but 0.
        overlap_s: how long its holder trains on without the result: ``delay`` of its steps.
        grace: gamma of the adaptive grace (`pace`), >= 0. 0: the grace is ``grace_s``.
        plan: the plan that ``ranges`` are a share of (`plans`); 0 without a global batch.
        peak: the largest absolute element of the tensor whose norm is ``norm``.
        reach: the sum of the rates of its steps; 0 for gradients, and where the inner optimizers have no rate.
        behind: the largest absolute difference in state other than parameters: averaged buffers and inner state.
        excess: its size as a multiple of the usual in the job's history (`outliers`); 0: not known yet.
        rated: its learning rate as a multiple of the usual in the job; 0: not known yet, or it has none.
        alone: its size as a multiple of what its own steps can make, for when no peer can tell; 0: its holder has no
            history of the job, or has dropped work like this, and has come to the same again from the anchor with a
            fresh inner state.
        gradients: it is made of gradients, which differ more between sound replicas than displacements do.
    """

    fragment: FragmentIndex
    version: Step
    steps: Step
    last_step: Step
    weight: Annotated[float, within(limits.MAX_WEIGHT)]
    tokens: Number = 0
    norm: Annotated[float, within(math.inf)] = 0.0
    finite: bool = True
    ranges: UnitRanges = ()
    overlap_s: Annotated[float, within(limits.MAX_OVERLAP_S)] = 0.0
    grace: Annotated[float, within(limits.MAX_GRACE)] = 0.0
    plan: Number = 0
    peak: Annotated[float, within(math.inf)] = 0.0
    behind: Annotated[float, within(math.inf)] = 0.0
    excess: Annotated[float, within(math.inf)] = 0.0
    alone: Annotated[float, within(math.inf)] = 0.0
    reach: Annotated[float, within(math.inf)] = 0.0
    rated: Annotated[float, within(math.inf)] = 0.0
    gradients: bool = False
    at_step: Step = 0


def excluded(contribution: Contribution) -> Contribution:
    """``contribution`` without weight and without its new steps: its COUNT entry stays unchanged."""
    counted = contribution.last_step - contribution.steps
    return replace(contribution, steps=0, last_step=counted, weight=0.0, tokens=0, ranges=())


@dataclass(frozen=True, slots=True)
class Counts:
    """What a replica has done in this life, for reports and the live page; no decision depends on it.

    Args:
        steps: inner steps that it has taken; after a resume, including those of the checkpoint.
        pending: of these, steps that are in no version of fragment 0 that it knows, and not dropped.
        dropped: steps that it has dropped in fragment 0, by reason.
        waited_s: seconds that its training thread has waited for outer steps.
        sent: bytes that it has sent in reductions.
        tokens: that it has counted.
        tested, tested_step: the held-out loss of its last evaluation, and the inner step of it; None: no evaluation.
        planned: the inner step of the job at which its loop ends; 0: it does not know.
        waits: of a replica that leaves: how long outer steps have kept its training thread, in seconds, and how often
            for about so long.
    """

    steps: Step = 0
    pending: Step = 0
    dropped: Annotated[dict[Word, Step], at_most(limits.MAX_REASONS)] = field(default_factory=dict)
    waited_s: _Seconds = 0.0
    sent: Number = 0
    tokens: Number = 0
    tested: Loss = None
    tested_step: Step = 0
    planned: Step = 0
    waits: Annotated[tuple[tuple[_Seconds, Number], ...], at_most(limits.MAX_WAITS)] = ()


@dataclass(frozen=True, slots=True)
class Position:
    """Names a committed state of a fragment: after ``version`` outer steps, with the hash chain of its history."""

    fragment: FragmentIndex
    version: Step
    chain: Word


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt that a replica has prepared, and whose decision it does not know."""

    fragment: FragmentIndex
    attempt: Number
    version: Step
    digest: Word


@dataclass(frozen=True, slots=True)
class Record:
    """The protocol's part of a fragment's committed state; it travels with the tensors."""

    fragment: int
    version: int  # committed outer steps
    chain: str  # hash chain over all results (CHAIN)
    inner_step: int  # the fragment's committed inner step; fragment 0's is the job's
    counted: tuple[tuple[str, int, int], ...] = ()  # COUNT: (replica, incarnation, last inner step included), sorted
    done: Ranges = ()  # fragment 0, with a ledger: units that are in the committed state

    @property
    def position(self) -> Position:
        return Position(self.fragment, self.version, self.chain)

    def counted_step(self, replica: str, incarnation: int) -> int:
        """The last inner step of that incarnation in the committed state, 0 if there is none."""
        at = bisect.bisect_left(self.counted, (replica, incarnation, 0))
        found = self.counted[at : at + 1]
        return found[0][2] if found and found[0][:2] == (replica, incarnation) else 0


@dataclass(frozen=True, slots=True)
class Horizon:
    """HORIZON: a forgotten gone incarnation holds a version of fragment 0 before ``version``, and is at most the
    ``life``-th of its replica. ``life`` 0: none is forgotten."""

    version: Step = 0
    life: Step = 0


NONE_FORGOTTEN = Horizon()


def first_chain(fragment: int, last_attempt: int, initial_source: str, initial: str) -> str:
    """CHAIN of version 0: differs for each start of a job, also from the same initial state in the same second."""
    return hashlib.sha256(f"{fragment}|{last_attempt}|{initial_source}|{initial}".encode()).hexdigest()[:32]


def next_chain(chain: str, fragment: int, version: int, digest: str) -> str:
    """CHAIN: the chain of ``version``, a hash of its predecessor's chain and the agreed digest of its result.

    Its first 8 digits are those of version 0, which distinguish the starts of a job at any version.
    """
    return chain[:8] + hashlib.sha256(f"{chain}|{fragment}|{version}|{digest}".encode()).hexdigest()[:24]


def same_start(a: str, b: str) -> bool:
    return a[:8] == b[:8]


def is_gone(incarnation_id: IncarnationId, gone: Mapping[str, int]) -> bool:
    """Whether ``gone`` (replica -> newest gone incarnation; older ones are gone with it) covers ``incarnation_id``."""
    return incarnation_id[1] <= gone.get(incarnation_id[0], 0)
