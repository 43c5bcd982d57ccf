"""The replica's state machine, for thousands of replicas in one process.

Whatever all members of an attempt compute from equal inputs is computed once: the record and its digest, and the list
of members. News about other replicas is only stored until a hello needs it. The rest is the original state machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as r
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.replica.prepared import PreparedResult

_Ids = tuple[m.IncarnationId, ...]


class MemberLists:
    """Lists of members after a change: nearly all replicas have the same list, and hear of the same change."""

    def __init__(self) -> None:
        self._known: tuple[tuple[_Ids, _Ids, _Ids], _Ids] = (((), (), ()), ())

    def after(self, before: _Ids, joined: _Ids, left: _Ids) -> _Ids:
        change = (before, joined, left)
        if not all(a is b for a, b in zip(change, self._known[0], strict=True)):
            self._known = change, tuple(sorted((set(before) - set(left)) | set(joined)))
        return self._known[1]


@dataclass
class SharedReplica(Replica):
    """A `Replica` that shares results with others that would compute the same."""

    lists: MemberLists = field(default_factory=MemberLists)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._heard: list[tuple[_Ids, _Ids]] = []

    def prepared_alike(self, fragment: int, attempt: int, first: PreparedResult) -> list[r.ReplicaEffect]:
        """Step 4, with the result that another member of the same attempt has made from the same record and members."""
        f = self.fragments[fragment]
        if f.quorum is None or f.quorum.attempt != attempt:
            return self.reduce_failed(fragment, attempt, reason="the attempt is over")
        f.become_prepared(PreparedResult(attempt, first.digest, first.record, f.quorum.outlier))
        return self._send(m.Prepared(fragment, attempt, first.digest))

    def hello(self) -> m.Hello:
        heard, self._heard = self._heard, []
        for known, gone in heard:
            super()._learn(known, gone)
        return super().hello()

    def _learn(self, known: _Ids, gone: _Ids) -> None:
        self._heard.append((known, gone))

    def _quorum(self, q: m.Quorum) -> list[r.ReplicaEffect]:
        if q.joined or q.left:
            f = self.fragments[q.fragment]
            f.members = self.lists.after(f.members, q.joined, q.left)
            q = replace(q, joined=(), left=())
        return super()._quorum(q)
