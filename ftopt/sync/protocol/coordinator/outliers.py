"""Contributions that are out of line: they weigh nothing, and stay with their holder.

Two can tell: the job's own history (`Contribution.excess`, from the committed state), and the peers in the same round.
The history comes first, because one or two members have it, too. What exceeds it may be honest all the same: if the
others have grown likewise. Among three or more that is enough up to the square of the limit. Else all whose work
exceeds it must have dropped such work once, and done it again from the anchor: a flipped bit does not come again.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from ftopt.sync.protocol.messages import Contribution

_PEERS = 2
"""With fewer peers none can be told from the others by these alone."""


def outliers(contributions: Mapping[str, Contribution], ratio: float | None) -> dict[str, str]:
    """Replica -> why its contribution must not be summed.

    A norm, or a largest element, may be ``ratio`` times the usual, and more in proportion for a contribution with more
    steps: a replica that was cut off for long is not out of line. Gradients may be ``ratio`` squared times the usual.
    ``ratio`` None: there are no outliers.
    """
    if ratio is None:
        return {}
    counting = {replica: c for replica, c in contributions.items() if c.weight > 0}
    sizes = [sorted(column) for column in zip(*map(_sizes, counting.values()), strict=True)]
    all_steps = sorted(c.steps for c in counting.values())
    redone = all(c.redone for c in counting.values() if c.excess > _limit(c, ratio))
    found = {}
    for replica, c in counting.items():
        limit, peers = _limit(c, ratio), 0.0
        if len(counting) > 1:
            longer = max(1.0, c.steps / max(_median_of_others(all_steps, c.steps), 1.0))
            usual = (_median_of_others(ordered, own) for ordered, own in zip(sizes, _sizes(c), strict=True))
            peers = max(times(own, its * longer) for own, its in zip(_sizes(c), usual, strict=True))
        agreed = 0 < peers <= limit or len(counting) == 1
        few = len(counting) <= _PEERS
        if c.excess > limit and not (agreed and (redone or (not few and c.excess <= limit * limit))):
            found[replica] = _reason(c, f"{c.excess:.3g} times what is usual in this job", limit)
        elif not c.excess and not few and peers > limit:
            found[replica] = _reason(c, f"{peers:.3g} times the median of its peers'", limit)
    return found


def _limit(c: Contribution, ratio: float) -> float:
    return ratio * ratio if c.gradients else ratio


def _sizes(c: Contribution) -> tuple[float, float, float]:
    return c.norm, c.peak, c.behind


def times(value: float, usual: float) -> float:
    """How many times ``usual`` a norm is; 0 if nothing is known of what is usual."""
    return value / usual if usual > 0 else 0.0


def _reason(c: Contribution, found: str, limit: float) -> str:
    return (
        f"its contribution over {c.steps} steps, of norm {c.norm:.3g} and largest element {c.peak:.3g}, is {found}; at "
        f"most {limit:g} times is taken (sync.outlier_ratio)"
    )


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of sorted numbers but for one that is ``own``; the lower of two, so that of two others one may be out
    of line itself."""
    n, at = len(ordered) - 1, bisect.bisect_left(ordered, own)
    low = (n - 1) // 2
    return ordered[low + (low >= at)]
