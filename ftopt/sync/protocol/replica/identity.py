"""What a replica says of itself when it connects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.lease import Lease
from ftopt.sync.protocol.samples import Samples


@dataclass(frozen=True)
class Identity:
    """What a replica says of itself in each hello."""

    job: str
    replica: str
    lines: dict[str, str]
    settings: dict[str, int | float | str | None]
    initial: str
    fragments: int = 1
    address: str = ""
    rank: int = 0
    size: int = 1
    samples: Samples | None = None


def greeting(
    identity: Identity,
    fragments: Sequence[FragmentState],
    held: Sequence[FragmentState],
    *,
    incarnation: int,
    epoch: int,
    roster: Mapping[str, int],
    gone: Mapping[str, int],
    adopted_by: Mapping[str, str],
    lease: Lease,
    checkpoint: m.Position | None,
) -> m.Hello:
    """The hello of a replica that has ``held`` soundly, of all its ``fragments``."""
    first, share = fragments[0].record, lease.share(fragments[0].record)
    fresh = not any(f.record for f in fragments)
    return m.Hello(
        protocol=m.PROTOCOL,
        job=identity.job,
        replica=identity.replica,
        incarnation=incarnation,
        rank=identity.rank,
        size=identity.size,
        epoch=epoch,
        address=identity.address,
        initial=identity.initial if fresh else "",
        fragments=identity.fragments,
        lines=identity.lines,
        settings=identity.settings,
        positions=tuple(f.record.position for f in held if f.record),
        contributions=tuple(f.contribution for f in held if f.contribution),
        prepared=tuple(
            m.PreparedAttempt(p.record.fragment, p.attempt, p.record.version, p.digest)
            for p in (f.prepared for f in held)
            if p
        ),
        roster=tuple(sorted(roster.items())),
        gone=tuple(sorted(gone.items())),
        adopted_by=tuple(sorted(adopted_by.items())),
        inner_step=first.inner_step if first else 0,
        samples=identity.samples,
        claim=lease.held,
        done=first.done if first else (),
        cursor=lease.cursor,
        wants=lease.wants,
        plan=share.plan,
        units=share.units,
        checkpoint=checkpoint,
    )
