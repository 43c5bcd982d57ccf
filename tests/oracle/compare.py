"""How far ftopt is from the oracle, and how far rounding alone may take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.oracle.driver import drive
from tests.oracle.oracle import Trace, oracle
from tests.oracle.scenario import Scenario

SAMPLES = 8
"""ftopt's rounding errors and those of the oracle in float32 are of one distribution: the largest of thousands."""
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verdict:
    """Of one scenario."""

    apart: float
    """The largest difference between ftopt and the oracle, over all replicas, ticks and elements."""
    allowed: float
    where: str
    """The first tick and replica at which more than that is between them."""

    @property
    def same(self) -> bool:
        """Whether rounding explains the difference."""
        return self.apart <= self.allowed


def apart(a: Trace, b: Trace) -> dict[tuple[str, int, int], float]:
    """(what, tick, replica) -> the largest difference of an element."""
    result = {}
    for what in ("parameters", "anchors"):
        first, second = getattr(a, what), getattr(b, what)
        for at in sorted(first.keys() & second.keys()):
            pairs = zip(first[at], second[at], strict=True)
            result[what, *at] = max(float((x.double() - y.double()).abs().max()) for x, y in pairs)
    return result


def allowed(scenario: Scenario, exact: Trace) -> float:
    """What rounding may do: so many times what it does to the oracle itself in float32, and to the largest number."""
    rounded = oracle(scenario, torch.float32)
    largest = max(float(t.abs().max()) for tensors in exact.parameters.values() for t in tensors)
    # Averaged moments in bf16 are often half-way between two of its numbers. A method that sends displacements has them
    # to fp32's rounding, on all replicas alike, and that decides which of the two it is.
    halves = scenario.bf16 and scenario.spec.inner_state == "average" and scenario.spec.kind != "paft"
    half = torch.finfo(torch.bfloat16).eps * largest if halves else 0.0
    return SAMPLES * (max(apart(exact, rounded).values()) + EPS * largest) + half


def compare(scenario: Scenario) -> Verdict:
    """Runs the scenario on both sides."""
    exact = oracle(scenario)
    limit = allowed(scenario, exact)
    found = drive(scenario)
    assert found.parameters.keys() == exact.parameters.keys(), "other replicas, or other ticks"
    differences = apart(found, exact)
    beyond = [at for at, d in sorted(differences.items(), key=lambda item: item[0][1:]) if not d <= limit]
    return Verdict(max(differences.values()), limit, str(beyond[:1]))
