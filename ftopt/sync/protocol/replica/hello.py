"""The first message of a connection: everything that a replica is, holds and knows."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.known import Known
from ftopt.sync.protocol.replica.lease import Lease


def hello_of(
    me: Identity,
    fragments: Sequence[FragmentState],
    lease: Lease,
    *,
    known: Known,
    incarnation: int,
    epoch: int,
    resumed: bool,
    standby: bool,
    unplaced: bool,
    checkpoint: m.Position | None,
) -> m.Hello:
    """The hello of a replica; its fragments note what it tells the coordinator."""
    newcomer = incarnation == 0
    held = [] if newcomer else [f for f in fragments if f.record is not None and f.sound]
    for f in fragments:
        f.tell(held=f in held, all_held=len(held) == len(fragments))
    first = fragments[0].record
    prepared = [f.prepared for f in held if f.prepared is not None]
    return m.Hello(
        protocol=m.PROTOCOL,
        job=me.job,
        replica=me.replica,
        incarnation=incarnation,
        rank=0,  # a replica is one process
        size=1,
        epoch=epoch,
        address=me.address,
        initial="" if any(f.record for f in fragments) else me.initial,
        fragments=me.fragments,
        lines=me.lines,
        settings=me.settings,
        positions=tuple(f.record.position for f in held if f.record),
        contributions=tuple(f.contribution for f in held if f.contribution),
        prepared=tuple(m.PreparedAttempt(p.record.fragment, p.attempt, p.record.version, p.digest) for p in prepared),
        roster=tuple(sorted(known.roster.items())),
        gone=tuple(sorted(list(known.gone.items())[-limits.MAX_GONE :])),
        adopted_by=tuple(sorted(known.adopted_by.items())),
        inner_step=first.inner_step if first else me.start_step,
        samples=me.samples,
        claim=lease.held,
        done=first.done if first else (),
        cursor=lease.cursor,
        wants=lease.wants,
        plan=lease.share(first).plan,
        units=lease.share(first).units,
        checkpoint=checkpoint,
        arithmetic=me.arithmetic,
        replaces=me.replaces,
        horizon=known.horizon,
        resumed=resumed,
        standby=standby,
        unplaced=unplaced,
    )
