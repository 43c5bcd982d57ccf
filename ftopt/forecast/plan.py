"""Forecasts a recipe's job on given machines: utilization, goodput, bytes.

With the letters of ``ftopt/methods/method.py``, ``M`` replicas and a link of rate ``B``, an outer step of ``n``
elements costs:

    link    = 1.05 * 8 * bytes / B                      bytes: what a replica sends; 1.05: TCP's and IP's headers
    latency = (2 + (M - 1)) * rtt, with a codec 3 rtt   two for the round, the rest for the reduction
    own     = round_s + n * (element_s + codec_s)       messages, copies, the outer step's arithmetic; the codec's

Without delay the training thread waits for all three. With delay it waits for a fifth of ``own`` (measured: 0.19
to 0.26), and the rest is hidden by ``tau`` inner steps; the thread waits up to ``wait_for_result_s`` for a late result,
and again when the fragment is due anew.

Each replica fails once every ``mtbf_s`` seconds. A failure costs this replica its pending steps, ``H / 2 + tau`` on
average, its start, and the transfer of the state. It costs the others the wait in their round until the silence has
lasted ``dead_after_s``, unless the delay hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftopt.config.schema import Recipe
from ftopt.forecast.timeline import Transfer, play
from ftopt.run.preview import FragmentPlan, Plan

HEADERS = 1.05
HELD_WITH_DELAY = 0.2
ROUND_TRIPS = 2
CODEC_S: Mapping[str, float] = {"bf16": 5e-9, "int8": 17e-9, "fp4": 20e-9, "top_k": 48e-9}
"""Seconds per element on two CPU cores, from the codecs' table on loopback (``docs/performance.md``)."""


@dataclass(frozen=True)
class Machines:
    """The machines and network that the replicas run on.

    Args:
        step_s: seconds of an inner step's computation.
        gbit_s: rate at which a replica can send, and at the same time receive. Default 1.
        latency_s: a round trip between two replicas, or to the coordinator. Default 0.001.
        mtbf_s: seconds between two failures of one replica; None (default): there are none.
        round_s, element_s: seconds of an outer step, plus seconds per element, without the network. Default 0.02 and
            25e-9: two CPU cores (``docs/performance.md``).
        codec_s: codec -> additional seconds per element. Default: `CODEC_S`.
        start_s: seconds from a replica's death until a new process requests the state. Default 10.
        memory_bytes: memory of a replica; None (default): not limited.
    """

    step_s: float
    gbit_s: float = 1.0
    latency_s: float = 0.001
    mtbf_s: float | None = None
    round_s: float = 0.02
    element_s: float = 25e-9
    codec_s: Mapping[str, float] = field(default_factory=lambda: CODEC_S)
    start_s: float = 10.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Forecast:
    """The forecast of a job.

    Args:
        utilization: share of the time in which a replica computes, without failures.
        goodput: steps in the model / steps that the replicas could have computed, with failures.
        sync_bytes: bytes that a replica sends in the largest outer step.
        bytes_s: bytes that it sends per second, on average.
        memory_bytes: memory of a replica, without activations.
        pending_s: seconds of work that are lost when a replica dies, on average.
        stall_s: seconds that the others wait when one dies, on average.
        discarded: share of the steps that the method overwrites by design (``mix``).
        late_steps: maximum inner steps by which a result is later than ``delay``; 0 without delay.
        state_bytes: bytes that a joiner fetches.
        state_s: seconds that they occupy the link.
    """

    utilization: float
    goodput: float
    sync_bytes: int
    bytes_s: float
    memory_bytes: int
    pending_s: float
    stall_s: float
    discarded: float
    late_steps: int
    state_bytes: int
    state_s: float


def forecast(recipe: Recipe, plan: Plan, machines: Machines) -> Forecast:
    """The forecast for a recipe and its plan, with all replicas present and of equal speed."""
    parts = [part for part in plan.fragments if part.times]
    steps = max((part.every for part in parts), default=1)
    period_s = steps * machines.step_s
    transfers = [x for part in parts for x in _transfers(recipe, part, steps, machines)]
    played = play(period_s, transfers)
    taken_s, step_s = played.wall_s, played.wall_s / steps
    pending_s = _pending_steps(parts) * step_s
    stall_s = _stall_s(recipe, parts, step_s, taken_s / max(1, len(transfers)))
    discarded = _discarded(recipe, parts)
    kept = 1.0
    state_bytes = _state_bytes(plan, recipe)
    state_s = link_seconds(state_bytes, machines)
    if machines.mtbf_s is not None:
        useful_s = machines.mtbf_s - pending_s - (recipe.replicas - 1) * stall_s
        kept = max(0.0, useful_s) / (machines.mtbf_s + machines.start_s + state_s)
    sent = sum(part.bytes * (steps // part.every) for part in parts)
    return Forecast(
        utilization=period_s / taken_s,
        goodput=period_s / taken_s * kept * (1 - discarded),
        sync_bytes=max((part.bytes for part in parts), default=0),
        bytes_s=sent / taken_s,
        memory_bytes=sum(plan.memory.values()),
        pending_s=pending_s,
        stall_s=stall_s,
        discarded=discarded,
        late_steps=math.ceil(played.late_s / step_s - 1e-6) if any(part.delay for part in parts) else 0,
        state_bytes=state_bytes,
        state_s=state_s,
    )


def _transfers(recipe: Recipe, part: FragmentPlan, steps: int, machines: Machines) -> list[Transfer]:
    """The transfers of one fragment, in a period of ``steps`` inner steps."""
    link_s = link_seconds(part.bytes, machines)
    hops = 1 if recipe.method.codec != "fp32" else recipe.replicas - 1
    latency_s = (ROUND_TRIPS + hops) * machines.latency_s if recipe.replicas > 1 else 0.0
    codec_s = machines.codec_s.get(recipe.method.codec.partition(":")[0], 0.0)
    own_s = machines.round_s + part.elements * (machines.element_s + codec_s)
    held_s, lag_s = (HELD_WITH_DELAY * own_s, own_s) if part.delay else (0.0, own_s)
    patience_s = recipe.method.overlap.wait_for_result_s if part.delay else math.inf
    found = []
    for number in range(steps // part.every):
        at_s = (part.first + number * part.every) % steps * machines.step_s
        needed_s = at_s + part.delay * machines.step_s
        found.append(Transfer(at_s, needed_s, link_s, lag_s + latency_s, held_s, patience_s))
    return found


def link_seconds(nbytes: int, machines: Machines) -> float:
    """Seconds that ``nbytes`` occupy the link."""
    return HEADERS * 8e-9 * nbytes / machines.gbit_s


def _pending_steps(parts: Sequence[FragmentPlan]) -> float:
    """Inner steps that no committed state contains, on average over time and elements."""
    if any(part.what == "gradients" for part in parts):
        return max(part.every / 2 for part in parts if part.what == "gradients")
    elements = sum(part.elements for part in parts)
    return sum(part.elements * (part.every / 2 + part.delay) for part in parts) / max(1, elements)


def _stall_s(recipe: Recipe, parts: Sequence[FragmentPlan], step_s: float, between_s: float) -> float:
    """How long the others wait for a replica that dies at a random time, with rounds ``between_s`` apart."""
    if recipe.replicas == 1 or not parts:
        return 0.0
    part = parts[0]
    patient: bool = recipe.method.overlap.wait_for_result_s > 0
    hidden_s = (part.delay if patient else part.every) * step_s if part.delay else 0.0
    longest_s = max(0.0, recipe.policy.dead_after_s - hidden_s)
    return longest_s**2 / (2 * between_s) if longest_s < between_s else longest_s - between_s / 2


def _discarded(recipe: Recipe, parts: Sequence[FragmentPlan]) -> float:
    mix: float | None = recipe.method.overlap.mix
    if mix is None or not parts:
        return 0.0
    return max((1 - mix) * part.delay / part.every for part in parts)


def _state_bytes(plan: Plan, recipe: Recipe) -> int:
    """Bytes that a newcomer fetches."""
    if recipe.method.gradients is not None:
        return plan.memory.get("parameters", 0) + plan.memory.get("inner optimizer", 0)
    return plan.memory.get("anchor and outer optimizer", 8 * plan.trained)
