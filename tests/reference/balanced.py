"""Rounds shared out by speed, replica by replica and step by step, with nothing of ftopt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

StepTime = Callable[[int, int], float]
"""Replica and round -> seconds of each of its steps."""


def rounds(replicas: Sequence[Sequence[int]], step_s: StepTime, total: int, first: int) -> list[dict[int, float]]:
    """The inner steps of each replica in each round, not rounded.

    Args:
        replicas: of each round, who takes part.
        step_s: how long a step takes.
        total: steps of a round.
        first: steps of each replica in the first round.
    """
    taken: list[dict[int, float]] = [dict.fromkeys(replicas[0], first)]
    measured = {m: step_s(m, 0) for m in replicas[0]}
    for number in range(1, len(replicas)):
        last = replicas[number - 1]
        # As many as fit into the time in which all of last round's members, as they were then, make the total.
        seconds = total / sum(1.0 / measured[m] for m in last)
        taken.append({m: seconds / measured[m] for m in replicas[number] if m in last})
        measured = {m: step_s(m, number) for m in replicas[number]}
    return taken
