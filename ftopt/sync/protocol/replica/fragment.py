"""What a replica holds of one fragment, and what a reduction makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges, union
from ftopt.sync.protocol.replica.effects import Fetch
from ftopt.sync.protocol.replica.lease import Lease
from ftopt.sync.protocol.samples import Samples


@dataclass(slots=True)
class PreparedResult:
    attempt: int
    digest: str
    record: m.Record


@dataclass(slots=True)
class FragmentState:
    """One fragment's variables in a replica; ``docs/protocol.md`` has the state diagram."""

    record: m.Record | None = None
    contribution: m.Contribution | None = None
    quorum: m.Quorum | None = None
    prepared: PreparedResult | None = None
    members: tuple[m.IncarnationId, ...] = ()
    fetching: Fetch | None = None
    told: list[m.Position] = field(default_factory=list)
    """States that the coordinator named on this connection since the fetch under way began: only these are taken up."""
    unhealed: bool = False
    """The held state is in doubt, until a fetch is complete."""
    under_way: bool = False
    """The shell is fetching: it answers with `fetched` or `fetch_failed`."""
    installing: bool = False
    """A fetched state is being installed: what is held is not known before that has ended."""
    reset: bool = False
    """The held state is a dead incarnation's: pending work on it is void."""
    offered: bool = False
    """The outstanding contribution is known on this connection."""
    unsure: bool = False
    """A cold start may still replace what is held, since not all fragments are: nothing is offered on it."""
    called_in: bool = False
    now: bool = False
    """The outstanding contribution's trigger means now."""
    means: m.Means | None = None
    """Of the replicas' readings, the last that were told."""
    released: bool = False
    """Don't wait for the outstanding contribution: cut off, or too few replicas."""


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
    held: Sequence[FragmentState],
    *,
    incarnation: int,
    epoch: int,
    fresh: bool,
    inner_step: int,
    roster: Mapping[str, int],
    gone: Mapping[str, int],
    adopted_by: Mapping[str, str],
    lease: Lease,
    done: Ranges,
    share: m.Plan,
    checkpoint: m.Position | None,
) -> m.Hello:
    """The hello of a replica that holds ``held`` soundly; ``fresh``: it has held nothing yet."""
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
        inner_step=inner_step,
        samples=identity.samples,
        claim=lease.held,
        done=done,
        cursor=lease.cursor,
        wants=lease.wants,
        plan=share.plan,
        units=share.units,
        checkpoint=checkpoint,
    )


def agree(
    record: m.Record, quorum: m.Quorum, members: Sequence[m.IncarnationId], rows: list[list[int]], digest: str
) -> tuple[str, m.Record]:
    """The digest that members report, and the record that a commit of ``quorum`` makes current (COUNT, CHAIN, DONE).

    Args:
        record: the current one.
        quorum: the attempt.
        members: its members, in rank order.
        rows: each member's last step, in rank order.
        digest: of the reduced result.
    """
    dropped = dict(quorum.drop)
    counted = {(r, i): step for r, i, step in record.counted if not m.is_gone((r, i), dropped)}
    counted |= {incarnation_id: row[0] for incarnation_id, row in zip(members, rows, strict=True)}
    table = tuple(sorted((replica, life, step) for (replica, life), step in counted.items()))
    inner_step = record.inner_step + quorum.advance
    done = union(record.done, quorum.ranges) if quorum.ranges else record.done
    text = f"{digest}|{table}|{inner_step}" + (f"|{done}" if done else "")
    agreed = hashlib.sha256(text.encode()).hexdigest()[:32]
    chain = m.next_chain(record.chain, record.fragment, quorum.version, agreed)
    made = replace(record, version=quorum.version, chain=chain, inner_step=inner_step, counted=table, done=done)
    return agreed, made
