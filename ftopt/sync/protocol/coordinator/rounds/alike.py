"""Warnings about results that should be equal but differ, and contributions that should differ but are equal."""

from __future__ import annotations

from collections.abc import Mapping

from ftopt.sync.protocol import messages as m

_ROUNDS = 3
"""Versions in a row with equal contributions before a warning."""
_NAMED = 8
"""The most replicas that are named."""


def results_differ(version: int, digests: Mapping[str, str]) -> str:
    """The log line of each member when the results of one attempt have several digests."""
    holders: dict[str, list[str]] = {}
    for replica, digest in digests.items():
        holders.setdefault(digest, []).append(replica)
    told = "; ".join(f"{digest[:8]} on {_names(replicas)}" for digest, replicas in holders.items())
    return (
        f"a mismatch of digests: the result for version {version} is not the same on all replicas ({told}), though "
        "each has computed it from the same payloads; it is computed again, and a replica that does not agree then "
        "fetches the others'. Memory or arithmetic has failed on one of them, or they compute other bits: look for "
        "torch.set_flush_denormal() on some of them, other versions of torch, other processors"
    )


class EqualContributions:
    """Looks at each commit of fragment 0 for replicas with bit-equal contributions, as when they train on the same
    batches. (In later fragments, parameters that follow agreed gradients are rightly equal.)"""

    def __init__(self) -> None:
        self._said, self._times, self._group = False, 0, tuple[str, ...]()

    def look(self, version: int, contributions: Mapping[str, m.Contribution]) -> tuple[tuple[str, ...], str]:
        """The replicas to warn, and the warning; none: no warning."""
        if self._said:
            return (), ""
        alike: dict[object, list[str]] = {}
        for replica, c in contributions.items():
            if c.weight > 0 and c.norm > 0:
                alike.setdefault((c.norm, c.peak, c.behind, c.steps), []).append(replica)
        group = max((tuple(sorted(replicas)) for replicas in alike.values()), key=len, default=())
        self._times = self._times + 1 if len(group) > 1 and group == self._group else 1
        self._group = group
        if len(group) < 2 or self._times < _ROUNDS:
            return (), ""
        self._said = True
        return group, (
            f"{_names(group)} have contributed the same to each of the versions {version - _ROUNDS + 1} to {version}, "
            "to the bit: they seem to train on the same batches, and together learn no more than one of them; give "
            "each replica data of its own: another seed for the shuffle (torch.manual_seed(optimizer.seed), a "
            "Generator, a sampler; in a Hugging Face Trainer, data_seed=optimizer.seed), another share of the data "
            "set, or ftopt.DataLoader"
        )


def _names(replicas: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(replicas) - _NAMED} more" if len(replicas) > _NAMED else ""
    return ", ".join(replicas[:_NAMED]) + more
