"""Contributions whose norm is out of line with their peers': they weigh nothing, and stay with their holder."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from ftopt.sync.protocol.messages import Contribution

_PEERS = 2
"""With fewer peers none can be told from the others."""


def outliers(contributions: Mapping[str, Contribution], limit: float | None) -> dict[str, str]:
    """Replica -> why its contribution must not be summed.

    A norm may be ``limit`` times the median of the peers' norms, and more in proportion for one that brings more steps
    than they do: a replica that was cut off for long is not out of line. ``limit`` None: there are no outliers.
    """
    if limit is None:
        return {}
    counting = {replica: c for replica, c in contributions.items() if c.weight > 0}
    if len(counting) <= _PEERS:
        return {}
    norms, all_steps = sorted(c.norm for c in counting.values()), sorted(c.steps for c in counting.values())
    found = {}
    for replica, c in counting.items():
        norm, steps = _median_of_others(norms, c.norm), _median_of_others(all_steps, c.steps)
        allowed = limit * norm * max(1.0, c.steps / max(steps, 1.0))
        if norm > 0 and c.norm > allowed:
            found[replica] = (
                f"the norm of its contribution, {c.norm:.3g} over {c.steps} steps, is {c.norm / norm:.3g} times the "
                f"median of its peers', {norm:.3g}; at most {allowed / norm:.3g} times is taken (sync.outlier_ratio); "
                "its steps stay pending; end it, or lower its learning rate"
            )
    return found


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of sorted numbers but for one that is ``own``."""
    n, at = len(ordered) - 1, bisect.bisect_left(ordered, own)
    low, high = ((n - 1) // 2, n // 2)
    return (ordered[low + (low >= at)] + ordered[high + (high >= at)]) / 2
