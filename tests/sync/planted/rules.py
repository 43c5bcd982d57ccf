"""Protocol bugs to plant, one a rule: the walks must find each of them.

A bug that a later defence absorbs is planted together with that defence taken out; `Bug.without` says which.

``python -m tests.sync.planted.rules [NAME ...]`` prints a table of rules and bugs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.hellos import Hellos
from ftopt.sync.protocol.coordinator.entry.phases import Phases
from ftopt.sync.protocol.coordinator.entry.startup import Startup
from ftopt.sync.protocol.coordinator.entry.truth import Truth
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.members.grants import Grants
from ftopt.sync.protocol.coordinator.members.members import Members
from ftopt.sync.protocol.coordinator.roster.effects import Forgotten
from ftopt.sync.protocol.coordinator.roster.horizon import MovingHorizon
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster
from ftopt.sync.protocol.coordinator.rounds import gather
from ftopt.sync.protocol.coordinator.rounds.attempts import Attempt, RoundOutcome
from ftopt.sync.protocol.coordinator.rounds.catch_up import CatchUp
from ftopt.sync.protocol.coordinator.rounds.decide import Decide
from ftopt.sync.protocol.coordinator.rounds.gather import Gather
from ftopt.sync.protocol.coordinator.rounds.versions import Versions
from ftopt.sync.protocol.intervals import Ranges, subtract, union
from ftopt.sync.protocol.ledger.ledger import Ledger
from ftopt.sync.protocol.ledger.unit_queue import UnitQueue
from ftopt.sync.protocol.replica import resumed
from ftopt.sync.protocol.replica.effects import CommitPrepared
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.protocol.replica.states import State
from tests.simulation import checkpoints
from tests.simulation.walk import History, run
from tests.sync.planted import coming, copies, drawn, ends, losses, plans, spares, waits

LIMIT = 10_000
"""Histories within which each must be found."""

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """``without``: the later defence that is removed as well. ``slow``: only after many histories, or long ones.
    ``seed``: where its walk begins, for what few histories meet. ``drawn``: what changes how histories are drawn."""

    rule: str
    plant: Callable[[Patch], None]
    without: str = ""
    slow: bool = False
    seed: int = 0
    drawn: Callable[[Patch], None] = lambda _: None

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def text(self) -> str:
        return (self.plant.__doc__ or "").strip().rstrip(".")


def find(bug: Bug, patch: Patch, *, seed: int | None = None) -> tuple[int, History | None]:
    """Plants it and walks from ``seed`` on, or from its own; returns after how many histories it was found, and in
    which. A bug that raises anything but what a broken rule does is not planted well: AssertionError."""
    bug.plant(patch)
    bug.drawn(patch)
    for count in range(LIMIT):
        history = run((bug.seed if seed is None else seed) + count)
        if history.failure is not None:
            assert history.failure.startswith(("Violation: ", "AssertionError: ")), f"{bug.name}: {history.failure}"
            return count + 1, history
    return LIMIT, None


# ---------------------------------------------------------------- contributions


def freeze_off(patch: Patch) -> None:
    """A lost connection frees the contribution; the next one is another."""
    disconnect = Replica.disconnect

    def mutant(self: Replica) -> Any:
        effects = disconnect(self)
        for f in self.fragments:
            f.free()
        return effects

    patch.setattr(Replica, "disconnect", mutant)
    patch.setattr(FragmentState, "expects", lambda self, counted, held: True)


def changed_retry(patch: Patch) -> None:
    """An abort frees the contribution; the retry takes another one."""
    receive = Replica.receive

    def mutant(self: Replica, message: m.FromCoordinator) -> Any:
        effects = receive(self, message)
        if isinstance(message, m.Abort) and self.welcomed:
            self.fragments[message.fragment].free()
        return effects

    def fits(self: FragmentState, quorum: m.Quorum, own: m.IncarnationId) -> bool:
        if self.state is not State.OFFERED or self.record is None or quorum.version != self.record.version + 1:
            return False
        return len(self.members) == quorum.size and self.members[quorum.rank : quorum.rank + 1] == (own,)

    patch.setattr(Replica, "receive", mutant)
    patch.setattr(FragmentState, "fits", fits)


def count_off(patch: Patch) -> None:
    """A replica that comes back late keeps its contribution, counted or not."""
    patch.setattr(Replica, "counted_step", lambda self, record: 0)
    patch.setattr(FragmentState, "expects", lambda self, counted, held: True)


# ---------------------------------------------------------------- decisions


_commit = Decide._commit


def commit_early(patch: Patch) -> None:
    """Commit as soon as one member has prepared."""
    verdict = Attempt.verdict

    def mutant(self: Attempt) -> Any:
        if self.prepared and self.alive():
            return RoundOutcome(next(iter(self.prepared.values())).digest)
        return verdict(self)

    def commit(self: Decide, now: float, a: Attempt, digest: str) -> Any:
        for replica, _ in a.members:
            a.prepared.setdefault(replica, m.Prepared(self._fragment, a.attempt, ""))
        return _commit(self, now, a, digest)

    patch.setattr(Attempt, "verdict", mutant)
    patch.setattr(Decide, "_commit", commit)


def count_of_the_prepared(patch: Patch) -> None:
    """COUNT only for a contribution that its holder has seen reduced."""
    reduced, counted_step = Replica.reduced, Replica.counted_step

    def note(self: Replica, fragment: int, attempt: int, digest: str, rows: list[list[int]]) -> Any:
        c = self.fragments[fragment].contribution
        if c is not None:
            vars(self).setdefault("seen", set()).add((fragment, c.last_step))
        return reduced(self, fragment, attempt, digest, rows)

    def mutant(self: Replica, record: m.Record) -> int:
        f, step = self.fragments[record.fragment], counted_step(self, record)
        c, held = f.contribution, f.record
        if c is None or held is None or step != c.last_step or (record.fragment, step) in vars(self).get("seen", ()):
            return step
        return counted_step(self, held)

    patch.setattr(Replica, "reduced", note)
    patch.setattr(Replica, "counted_step", mutant)


def commit_early_count_off(patch: Patch) -> None:
    """Commit as soon as one member has prepared."""
    commit_early(patch)
    count_of_the_prepared(patch)


def any_digest(patch: Patch) -> None:
    """A decision names no digest: each member applies what it has prepared."""

    def commit(self: Decide, now: float, a: Attempt, digest: str) -> Any:
        a.prepared = {replica: replace(report, digest=digest) for replica, report in a.prepared.items()}
        return _commit(self, now, a, digest)

    patch.setattr(Decide, "_commit", commit)

    def mutant(self: Replica, message: m.Commit) -> Any:
        f = self.fragments[message.fragment]
        p = f.prepared
        if p is None or p.attempt != message.attempt:
            return []
        f.become_holding(p.record)
        return [CommitPrepared(p.attempt, p.record)]

    patch.setattr(Replica, "_commit", mutant)


def sent_first(patch: Patch) -> None:
    """A decision is sent before it is journalled."""
    patch.setattr(Decide, "_commit", lambda self, now, a, digest: _commit(self, now, a, digest)[::-1])


def no_deadline(patch: Patch) -> None:
    """An attempt is waited for forever, whoever hangs."""
    patch.setattr(Attempt, "overdue_s", lambda self, roster, patience_s, usual_s: math.inf)


def hung_again(patch: Patch) -> None:
    """A member whose reducer hangs is tried again in each attempt."""
    patch.setattr(Member, "busy", lambda self, now, patience_s: False)


# ---------------------------------------------------------------- who is known, and what is true


def sticky_off(patch: Patch) -> None:
    """A lost connection takes a member off the roster."""
    lost = Coordinator.lost

    def mutant(self: Coordinator, now: float, conn: int) -> Any:
        member = self.roster.by_conn(conn)
        effects = lost(self, now, conn)
        if member is not None and member.conn is None and self.roster.members.get(member.replica) is member:
            del self.roster.members[member.replica]
        return effects

    patch.setattr(Coordinator, "lost", mutant)


def absent_is_dead(patch: Patch) -> None:
    """Holders of a version that are away count for nothing."""
    patch.setattr(
        Member,
        "may_hold",
        lambda self, at: (
            self.conn is not None and at in (self.held.get(at.fragment), self.maybe_fetched.get(at.fragment))
        ),
    )
    patch.setattr(Member, "may_exceed", lambda self, best: False)
    patch.setattr(Startup, "absent", lambda self: [])
    patch.setattr(Startup, "_unheard", lambda self: iter(()))


def wait_off(patch: Patch) -> None:
    """A coordinator without memory goes on with the first state holder."""
    may_end = Startup.may_end
    patch.setattr(Startup, "may_end", lambda self, now: bool(self.state_holders()) or may_end(self, now))


def cold_off(patch: Patch) -> None:
    """The first replica to connect starts the job anew."""
    patch.setattr(Startup, "may_end", lambda self, now: bool(self.hellos))


def newcomers_alone(patch: Patch) -> None:
    """Without a journal newcomers start the job anew as soon as enough of them are there."""
    patch.setattr(Startup, "_known_new_s", lambda self: -math.inf)


def superseded_at_once(patch: Patch) -> None:
    """While the coordinator starts up, a newcomer takes the place of a replica that is heard."""
    newcomer = Hellos._newcomer

    def mutant(self: Hellos, now: float, conn: int, hello: m.Hello) -> Any:
        old = self.roster.members.get(hello.replica)
        gone = self.members.gone(old.incarnation_id, "superseded by a newcomer") if old and self.phases.startup else []
        return gone + newcomer(self, now, conn, hello)

    patch.setattr(Hellos, "_newcomer", mutant)


def rollback_off(patch: Patch) -> None:
    """The coordinator insists on the highest version when nobody holds it any more."""
    patch.setattr(Phases, "unheld", lambda self: [])


def forgotten_comes_back(patch: Patch) -> None:
    """An incarnation that was given up comes back and is admitted."""
    comes_back = Hellos._return

    def mutant(self: Hellos, now: float, conn: int, hello: m.Hello) -> Any:
        if self.roster.gone.get(hello.replica) == hello.incarnation:
            del self.roster.gone[hello.replica]
        return comes_back(self, now, conn, hello)

    patch.setattr(Hellos, "_return", mutant)


# ---------------------------------------------------------------- who votes, who is a source


def stale_proposal(patch: Patch) -> None:
    """A proposal for a version of the past is accepted."""

    def mutant(self: Gather, member: Member, contribution: m.Contribution, *, now: bool = False) -> Any:
        self.proposals.setdefault(member.replica, contribution)
        return []

    patch.setattr(Gather, "propose", mutant)


def stale_state(patch: Patch) -> None:
    """A fetched state is installed whatever it is: another version's, another moment's."""

    patch.setattr(FragmentState, "may_install", lambda self, record: self.fetching)
    patch.setattr(FragmentState, "expects", lambda self, counted, held: True)


def unhealed_source(patch: Patch) -> None:
    """A replica whose own state is in doubt is a source of it."""
    patch.setattr(FragmentState, "serves", lambda self: self.record)


def unhealed_votes(patch: Patch) -> None:
    """Replicas that are behind are named as sources, and vote."""
    patch.setattr(
        Roster,
        "sources",
        lambda self, at, *, but, turn=0: tuple(x.address for x in self.connected() if x.replica != but),
    )
    patch.setattr(Versions, "held_by", lambda self, member: self.fragment in member.held)


# ---------------------------------------------------------------- the sample ledger


def suspect_releases(patch: Patch) -> None:
    """What a member that is away holds is granted to others"""
    away = Members.away

    def mutant(self: Members, now: float, member: Member, *, close: bool = False) -> Any:
        self.assignment.gone(member.incarnation_id, None, None)
        return away(self, now, member, close=close)

    patch.setattr(Members, "away", mutant)


def limbo_off(patch: Patch) -> None:
    """A new coordinator takes for free what it knows nothing of"""
    ledger_open = Ledger.open
    patch.setattr(Ledger, "open", lambda self, done, cursor, unheard: ledger_open(self, done, cursor, ()))
    patch.setattr(Ledger, "expect", lambda self, incarnation_id: None)


def cursor_of_done(patch: Patch) -> None:
    """A new coordinator takes the cursor from what is done"""
    patch.setattr(Truth, "cursor", lambda self: 0)


def dead_not_done(patch: Patch) -> None:
    """A commit does not mark what a member that died meanwhile has used"""
    commit = Grants.commit

    def mutant(self: Grants, a: Attempt) -> Any:
        lost = union(*(c.ranges for r, c in a.contributions.items() if r in a.lost))
        a.ranges = subtract(a.ranges, lost)
        return commit(self, a)

    patch.setattr(Grants, "commit", mutant)


def claim_adds(patch: Patch) -> None:
    """What a replica claims to hold is added to what was believed of it"""
    claim = Ledger.claim

    def mutant(self: Ledger, incarnation_id: m.IncarnationId, ranges: Ranges) -> Any:
        return claim(self, incarnation_id, union(ranges, self.leases.get(incarnation_id, ())))

    patch.setattr(Ledger, "claim", mutant)


def gone_not_kept(patch: Patch) -> None:
    """Replicas do not keep the gone incarnations, and a coordinator without memory admits them"""
    hello = Replica.hello
    patch.setattr(Replica, "hello", lambda self: replace(hello(self), gone=(), horizon=m.NONE_FORGOTTEN))


def forgotten_is_let_in(patch: Patch) -> None:
    """A gone incarnation that is forgotten comes back and is let in"""
    patch.setattr(MovingHorizon, "covers", lambda self, hello: False)


def horizon_not_told(patch: Patch) -> None:
    """A coordinator without memory does not learn of those that are forgotten"""
    hello = Replica.hello
    patch.setattr(Replica, "hello", lambda self: replace(hello(self), horizon=m.NONE_FORGOTTEN))


def lives_again(patch: Patch) -> None:
    """The lives of those that are forgotten are given once more"""
    patch.setattr(MovingHorizon, "life", 0)


def forgotten_too_early(patch: Patch) -> None:
    """A gone incarnation is forgotten before the next version is committed"""
    move = MovingHorizon.move

    def hasty(self: MovingHorizon, at: m.Position, gone: dict[str, int], _: Any, *, epoch: int) -> Any:
        self._went_at.clear()
        forgotten = move(self, at, gone, lambda _: False, epoch=epoch)
        if forgotten is None:
            return None
        self._at = m.Horizon(at.version, self._at.life)  # else the version beyond the newest one covers it
        return Forgotten(self._at, forgotten.replicas)

    patch.setattr(MovingHorizon, "move", hasty)


def horizon_of_now(patch: Patch) -> None:
    """A forgotten incarnation is taken to hold no version as late as the newest one"""
    move = MovingHorizon.move

    def mutant(self: MovingHorizon, at: m.Position, *arguments: Any, epoch: int) -> Any:
        forgotten = move(self, at, *arguments, epoch=epoch)
        if forgotten is None:
            return None
        self._at = m.Horizon(at.version, self._at.life)
        return Forgotten(self._at, forgotten.replicas)

    patch.setattr(MovingHorizon, "move", mutant)


def void_part_is_used(patch: Patch) -> None:
    """Two parts of a checkpoint have steps on the same units, and both are resumed"""
    for module in (resumed, checkpoints):
        patch.setattr(module, "given_up", lambda there: set())


def hold_off(patch: Patch) -> None:
    """What an undecided attempt has used is free when its owner is gone"""
    patch.setattr(Ledger, "hold", lambda self, ranges: None)


def taken_is_used(patch: Patch) -> None:
    """What a loader has taken ahead counts as used"""
    take = UnitQueue.take

    def mutant(self: UnitQueue) -> Any:
        unit = take(self)
        if unit is not None:
            self._used = union(self._used, ((unit, unit + 1),))
        return unit

    patch.setattr(UnitQueue, "take", mutant)


def void_is_used(patch: Patch) -> None:
    """A replica that was given up counts what its void steps have used since it came back"""
    patch.setattr(UnitQueue, "redo", lambda self: None)


def tail_off(patch: Patch) -> None:
    """At the end of the data a replica that hangs is waited for forever"""
    patch.setattr(Grants, "waits", lambda self: {})


def asks_once(patch: Patch) -> None:
    """What was asked for when nothing was free is forgotten"""
    grant = Grants._grant

    def mutant(self: Grants) -> Any:
        effects = grant(self)
        self._asks.clear()
        return effects

    patch.setattr(Grants, "_grant", mutant)


def given_up_again(patch: Patch) -> None:
    """Of the last units, who was given up for doing nothing is granted as much as anybody, each time"""
    patch.setattr(Grants, "gave_up", lambda self, replica: None)


def left_out_is_another(patch: Patch) -> None:
    """Who was left out as an outlier, and had dropped steps before, takes its own entry for another process'"""

    def mutant(self: FragmentState, counted: int, held: int) -> bool:
        known = 0 if self.record is None or self.reset else held
        offered = known if self.contribution is None else self.contribution.last_step
        return counted in (known, offered)

    patch.setattr(FragmentState, "expects", mutant)


def lost_is_hung(patch: Patch) -> None:
    """Who reconnects before its loss was noticed counts as one whose reducer hangs"""

    def mutant(self: Attempt, roster: Roster) -> list[Member]:
        members = roster.present(x for x in self.members if x[0] not in self.prepared)
        return [x for x in members if x.conn is not None]

    patch.setattr(Attempt, "silent", mutant)


# ---------------------------------------------------------------- checkpoints


def life_again(patch: Patch) -> None:
    """A replica that restores a checkpoint gets an incarnation that its state counts"""
    patch.setattr(
        checkpoints, "another_life", lambda incarnation_id, there, newest: Held(incarnation_id[0], incarnation_id[1], 0)
    )


def resumed_without_the_end(patch: Patch) -> None:
    """A replica that resumes from a checkpoint does not learn that the data have ended"""
    welcome = Replica._welcome

    def mutant(self: Replica, message: m.Welcome) -> Any:
        self._put_back = False
        return welcome(self, message)

    patch.setattr(Replica, "_welcome", mutant)


def grace_alone(patch: Patch) -> None:
    """A member overtaken while it fetches is waited for no longer than the grace."""
    patch.setattr(CatchUp, "arrival", lambda self, replica: None)


def outliers_off(patch: Patch) -> None:
    """A contribution that is out of line is reduced"""
    patch.setattr(gather, "outliers", lambda contributions, ratio, **_: {})


BUGS = (
    Bug("FREEZE", freeze_off),
    Bug("FREEZE", changed_retry, "the attempt's `last_step`, which says which contribution is meant"),
    Bug("COUNT", count_off),
    Bug("step 5", commit_early_count_off, "COUNT for members that have not seen the result"),
    Bug("step 5", any_digest),
    Bug("step 5", no_deadline, slow=True),
    Bug("step 5", hung_again),
    Bug("JOURNAL", sent_first, seed=25),
    Bug("step 2", grace_alone, seed=58),
    Bug("step 2", outliers_off),
    Bug("STICKY", sticky_off),
    Bug("STICKY", absent_is_dead),
    Bug("STICKY", forgotten_comes_back, slow=True),
    Bug("WAIT", wait_off),
    Bug("COLD", cold_off),
    Bug("COLD", newcomers_alone, seed=115),
    Bug("STICKY", superseded_at_once, seed=185),
    Bug("ROLLBACK", rollback_off),
    Bug("ROLLBACK", waits.holder_superseded, slow=True),
    Bug("ROLLBACK", waits.dead_holders_count, seed=151_009_268),
    Bug("step 6", waits.never_released, seed=1840),
    Bug("step 5", waits.waits_outside, seed=410_007_030),
    Bug("I5", stale_proposal),
    Bug("I5", stale_state, slow=True),
    Bug("I5", unhealed_source, slow=True),
    Bug("I5", unhealed_votes),
    Bug("GONE", suspect_releases),
    Bug("LIMBO", limbo_off, seed=48),
    Bug("CURSOR", cursor_of_done, slow=True),
    Bug("DONE", dead_not_done, slow=True),
    Bug("TOTAL", claim_adds),
    Bug("FENCE", gone_not_kept, slow=True),
    Bug("HORIZON", forgotten_is_let_in),
    Bug("HORIZON", horizon_not_told, slow=True),
    Bug("HORIZON", lives_again, slow=True),
    Bug("HORIZON", forgotten_too_early, seed=61_009_820),
    Bug("HORIZON", horizon_of_now, seed=61_009_820),
    Bug("RESTORE", void_part_is_used, seed=112_000_220),
    Bug("HOLD", hold_off, slow=True),
    Bug("UNIT", taken_is_used),
    Bug("UNIT", void_is_used, slow=True),
    Bug("TAIL", tail_off, seed=12),
    Bug("TAIL", asks_once, seed=12),
    Bug("TAIL", given_up_again, seed=33, drawn=drawn.hung_near_the_end),
    Bug("TAIL", waits.waited_for_nothing),
    Bug("COUNT", left_out_is_another, seed=168, drawn=drawn.with_outliers),
    Bug("step 5", lost_is_hung, seed=91_000_030, drawn=drawn.without_slow_replicas),
    Bug("RESTORE", life_again, slow=True),
    Bug("CURSOR", coming.restored_without_a_cursor, seed=208, drawn=drawn.resumed_late),
    Bug(
        "SUPERSEDE",
        coming.refused_for_itself,
        "that it waits anew when another one has been let in",
        seed=3_000_052_850,
    ),
    Bug("SUPERSEDE", coming.resumed_in_its_place, seed=158),
    Bug("step 2", coming.placed_once),
    Bug("TAIL", resumed_without_the_end, seed=20, drawn=drawn.resumed_near_the_end),
    Bug("OWN", plans.own_off),
    Bug("TIE", plans.tie_off, slow=True),
    Bug("COVER", plans.any_plan_counts, seed=110),
    Bug("COVER", plans.part_of_a_batch, seed=270, drawn=drawn.with_global_batches),
    Bug("PLAN", plans.plan_in_an_attempt, seed=1410, drawn=drawn.with_global_batches),
    Bug("PLAN", plans.stale_shares, "COVER; that a member compares the quorum's plan with its own", slow=True),
    Bug("FREEZE", plans.frozen_under_a_plan),
    Bug("PLAN", waits.late_for_ever, seed=410_020_910),
    Bug("RESTART", plans.all_claims_hold, slow=True),
    Bug("ADOPT", copies.stale_copy, seed=2560),
    Bug("ADOPT", copies.adopted_in_an_attempt, "HOLD for its units", slow=True),
    Bug("ADOPT", copies.adopted_and_free, seed=150),
    Bug("LOSS", losses.revived_job, seed=790),
    Bug("LOSS", losses.finished_is_lost, seed=5570),
    Bug("END", ends.older_version, drawn=ends.all_finish),
    Bug("SPARE", spares.replaced_again, seed=470),
    Bug("SPARE", spares.promotion_forgotten, seed=700_006_530),
    Bug("SUSPECTS", waits.nobody_is_blamed, seed=90),
    Bug("step 2", waits.idle_open_rounds, seed=143_009_381),
    Bug("step 2", waits.fetchers_open_rounds, seed=128_004_759),
)


def main(names: list[str]) -> None:
    """Prints the table, a line as soon as it is known."""
    sys.stdout.write("| rule | bug | defence removed | found after | invariant |\n|---|---|---|---|---|\n")
    for bug in BUGS:
        if names and bug.name not in names:
            continue
        with pytest.MonkeyPatch.context() as patch:
            count, history = find(bug, patch)
        found = f"{count:,} | {history.failure}" if history else f"not in {count:,} |"
        sys.stdout.write(f"| {bug.rule} | {bug.text} ({bug.name}) | {bug.without} | {found} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
