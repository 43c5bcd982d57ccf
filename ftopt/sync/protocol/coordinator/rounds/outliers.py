"""Contributions that are out of line: they weigh nothing, and stay with their holder.

A contribution is in line if it is usual in the job (`Contribution.excess`, from the committed state), or agrees with
its peers of the same round, whatever the job's history: the same bit does not flip in two replicas. Any other
contribution is out of line if some peer is a witness, which has enough steps and is usual itself. Without a witness, it
is compared with what its holder's own steps can make (`Contribution.alone`).
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Mapping, Sequence

from ftopt.sync.protocol.messages import Contribution

_PEERS = 2
"""With fewer peers, comparison among them cannot tell which one is odd."""
_ENOUGH = 0.1
"""A peer with a smaller share of another's steps is no witness: it may have missed the same event."""


def outliers(
    contributions: Mapping[str, Contribution], ratio: float | None, *, struck: Container[str] = ()
) -> dict[str, str]:
    """Replica -> why its contribution must not be summed.

    ``struck``: replicas that were out of line in their last round with others, and are not alone in the job.

    A norm, or a largest element, may be ``ratio`` times the usual, or the median of the peers'; proportionally more for
    a contribution with more steps or higher rates, so that a replica that was cut off for long is not out of line.
    Gradients may be ``ratio`` squared times that. ``ratio`` None: there are no outliers.
    """
    if ratio is None:
        return {}
    counting = {replica: c for replica, c in contributions.items() if c.weight > 0}
    columns = [sorted(column) for column in zip(*map(_sizes, counting.values()), strict=True)]
    times = {replica: max(c.excess, _rate_excess(c, columns, len(counting))) for replica, c in counting.items()}
    unusual = {replica: c for replica, c in counting.items() if times[replica] > _limit(c, ratio)}
    usual = [c for replica, c in counting.items() if replica not in unusual and c.norm > 0]
    found = {}
    for replica, c in unusual.items():
        limit = _limit(c, ratio)
        if len(counting) > 1 and _agrees(c, columns, limit):
            continue
        witnessed = any(peer.steps >= _ENOUGH * c.steps for peer in usual)
        if witnessed or replica in struck:
            found[replica] = _reason(c, f"{times[replica]:.3g} times what is usual in this job", limit)
        elif c.alone > limit:
            found[replica] = _reason(c, f"{c.alone:.3g} times what its steps can make it", limit)
    return found


def _rate_excess(c: Contribution, columns: Sequence[Sequence[float]], members: int) -> float:
    """The learning rate of a contribution as a multiple of the usual, which its size per rate does not show. If the job
    has no record yet, it is a multiple of the median of two or more peers; a single peer may itself be odd."""
    if c.rated or not c.reach or members <= _PEERS:
        return c.rated
    steps, reach = (
        _median_of_others(ordered, own) for ordered, own in zip(columns[:2], (c.steps, c.reach), strict=True)
    )
    return c.reach / reach * max(1.0, steps) / max(1.0, c.steps) if reach else 0.0


def _limit(c: Contribution, ratio: float) -> float:
    return ratio * ratio if c.gradients else ratio


def _sizes(c: Contribution) -> tuple[float, float, float, float, float]:
    return c.steps, c.reach, c.norm, c.peak, c.behind


def _agrees(c: Contribution, columns: Sequence[Sequence[float]], limit: float) -> bool:
    """Whether a contribution's size is within the limit of the others' median, above and below."""
    steps, reach, *sizes = (_median_of_others(ordered, own) for ordered, own in zip(columns, _sizes(c), strict=True))
    faster, slower = _times(c.reach, reach), _times(reach, c.reach)
    longer = max(_times(c.steps, steps), faster if faster <= limit * _times(c.steps, steps) else 1.0)
    shorter = max(_times(steps, c.steps), slower)
    own = c.norm, c.peak, c.behind
    return all(value <= limit * longer * its for value, its in zip(own, sizes, strict=True)) and all(
        its <= limit * shorter * value for value, its in zip(own[:2], sizes[:2], strict=True)
    )


def _times(value: float, other: float) -> float:
    return max(1.0, value / other) if other else 1.0


def _reason(c: Contribution, found: str, limit: float) -> str:
    return (
        f"its contribution over {c.steps} steps, of norm {c.norm:.3g} and largest element {c.peak:.3g}, is {found}; at "
        f"most {limit:g} times is taken (policy.outlier_ratio)"
    )


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of sorted numbers without one that equals ``own``; the lower of two, so that one of two others may be
    out of line itself."""
    n, at = len(ordered) - 1, bisect.bisect_left(ordered, own)
    low = (n - 1) // 2
    return ordered[low + (low >= at)]
