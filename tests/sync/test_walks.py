"""Random walks of the real machines: 2,000 histories hold I1, I2, I4, I5 and I6; planted bugs don't.

``FTOPT_WALK_SEED=n pytest tests/sync/test_walks.py -k histories -s`` runs one history again and prints its trace;
``FTOPT_WALK_HISTORIES=n`` runs more.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ftopt.simulate.walk import History, run
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator import Coordinator
from ftopt.sync.protocol.gathering import Gathering
from ftopt.sync.protocol.replica import Adopt, Replica
from ftopt.sync.protocol.roster import Member, Roster
from ftopt.sync.protocol.rounds import Rounds

HISTORIES = int(os.environ.get("FTOPT_WALK_HISTORIES", "2000"))
COVERED = (
    "abort",
    "return",
    "decided while a member was away",
    "restart with journal",
    "restart without journal",
    "rebirth",
    "rollback",
    "mismatch",
    "leave",
    "join",
)


def fail(history: History) -> None:
    """Fails with the seed and the trace of a history."""
    trace = "\n".join(run(history.seed, trace=True).trace[-200:])
    pytest.fail(
        f"{trace}\n\nseed {history.seed}: {history.failure}\nrun it again: FTOPT_WALK_SEED={history.seed}",
        pytrace=False,
    )


@pytest.mark.timeout(600)
def test_histories_hold_every_invariant_and_cover_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    if again := os.environ.get("FTOPT_WALK_SEED"):
        history = run(int(again), trace=True)
        with capsys.disabled():
            sys.stdout.write("\n".join(["", *history.trace, ""]))
        assert history.failure is None, history.failure
        return
    covered: Counter[str] = Counter()
    events = 0
    for seed in range(HISTORIES):
        history = run(seed)
        if history.failure is not None:
            fail(history)
        covered.update(set(history.coverage))
        events += history.events
    with capsys.disabled():
        lines = [f"\n{HISTORIES} histories, {events} events; share of histories with:"]
        lines += [f"  {name:<32} {count / HISTORIES:6.1%}" for name, count in sorted(covered.items())]
        sys.stdout.write("\n".join([*lines, ""]))
    assert {name: covered[name] for name in COVERED if covered[name] <= 0.01 * HISTORIES} == {}


def test_a_seed_is_one_history() -> None:
    first, second = run(7, trace=True), run(7, trace=True)
    assert first.trace == second.trace
    assert len(first.trace) > 50


# ---------------------------------------------------------------- planted bugs

Patch = Callable[[pytest.MonkeyPatch], None]


def no_count(patch: pytest.MonkeyPatch) -> None:
    """COUNT off: whoever comes back keeps its contribution."""
    patch.setattr(Replica, "counted_step", lambda self, record: 0)
    patch.setattr(Replica, "_is_mine", lambda self, f, record: True)


def no_freeze(patch: pytest.MonkeyPatch) -> None:
    """FREEZE off: a lost connection frees the contribution, and the next one is another."""
    disconnect = Replica.disconnect

    def mutant(self: Replica) -> Any:
        for f in self._fragments:
            f.contribution = None
        return disconnect(self)

    patch.setattr(Replica, "disconnect", mutant)
    patch.setattr(Replica, "_is_mine", lambda self, f, record: True)


_commit = Rounds._commit


def tell_first(patch: pytest.MonkeyPatch) -> None:
    """JOURNAL off: a decision is told before it is written."""
    patch.setattr(Rounds, "_commit", lambda self, digest: _commit(self, digest)[::-1])


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """WAIT off: a coordinator without memory goes on with the first veteran."""
    may_end = Gathering.may_end
    patch.setattr(Gathering, "may_end", lambda self, now: bool(self.veterans()) or may_end(self, now))


def no_cold(patch: pytest.MonkeyPatch) -> None:
    """COLD off: whoever comes first starts the job anew."""
    patch.setattr(Gathering, "may_end", lambda self, now: bool(self.hellos))


def no_rollback(patch: pytest.MonkeyPatch) -> None:
    """ROLLBACK off: the coordinator insists on the highest version."""
    patch.setattr(Coordinator, "_survives", lambda self, r: True)


def eager_rollback(patch: pytest.MonkeyPatch) -> None:
    """Holders that are away count for nothing."""
    patch.setattr(
        Member,
        "may_hold",
        lambda self, at: self.conn is not None and at in (self.held.get(at.fragment), self.hopes.get(at.fragment)),
    )
    patch.setattr(Member, "may_exceed", lambda self, best: False)
    patch.setattr(Gathering, "_unheard", lambda self: [])


def any_digest(patch: pytest.MonkeyPatch) -> None:
    """A decision names no digest: each member takes up what it has prepared."""

    def commit(self: Rounds, digest: str) -> Any:
        assert self.attempt is not None
        self.attempt.prepared = dict.fromkeys(self.attempt.prepared, digest)
        return _commit(self, digest)

    patch.setattr(Rounds, "_commit", commit)

    def mutant(self: Replica, message: m.Commit) -> Any:
        f = self._fragments[message.fragment]
        p = f.prepared
        if p is None or p.attempt != message.attempt:
            return []
        f.record, f.prepared, f.contribution = p.record, None, None
        return [Adopt(p.attempt, p.record)]

    patch.setattr(Replica, "_commit", mutant)


def any_state(patch: pytest.MonkeyPatch) -> None:
    """A fetched state is taken up whatever it is: another version, another moment's."""

    def mutant(self: Replica, record: m.Record) -> bool:
        f = self._fragments[record.fragment]
        f.installing = f.fetching is not None
        return f.installing

    patch.setattr(Replica, "install", mutant)
    patch.setattr(Replica, "_is_mine", lambda self, f, record: True)


def any_source(patch: pytest.MonkeyPatch) -> None:
    """Replicas that are themselves behind are named as sources, and vote."""
    patch.setattr(
        Roster,
        "sources",
        lambda self, at, but, limit=4: tuple(x.address for x in self.connected() if x.replica != but),
    )
    patch.setattr(Rounds, "holds", lambda self, member: self.fragment in member.held)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """A forgotten incarnation comes back and is let in."""
    patch.setattr(Roster, "is_gone", lambda self, mark: False)


@pytest.mark.parametrize(
    "plant",
    [
        no_count, no_freeze, no_wait, no_cold, no_rollback, eager_rollback, any_digest, any_source, forgetful,
        *(pytest.param(x, marks=pytest.mark.slow) for x in (tell_first, any_state)),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(2000):
        history = run(seed)
        if history.failure is not None:
            sys.stdout.write(f"{plant.__name__}: seed {seed}: {history.failure}\n")
            return
    pytest.fail(f"2,000 histories did not find: {plant.__doc__}")
