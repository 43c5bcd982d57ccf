"""The result of a reduction: the digest on which members must agree, and the record that its commit makes current."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import union


@dataclass(slots=True)
class PreparedResult:
    """The result of an attempt, and the record that its commit makes current. ``outlier``: as in its quorum."""

    attempt: int
    digest: str
    record: m.Record
    outlier: str = ""


def agree(
    record: m.Record, quorum: m.Quorum, members: Sequence[m.IncarnationId], rows: list[list[int]], digest: str
) -> tuple[str, m.Record]:
    """The digest that members report, and the record that a commit of ``quorum`` makes current (COUNT, CHAIN, DONE).

    ``record``: the current one. ``members`` and their ``rows`` (last steps) are in rank order. ``digest``: of the
    reduced result.
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
