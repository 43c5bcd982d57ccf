"""The phase before a job runs: hellos are kept and nothing is decided, until the true state is known.

How it ends:

- WAIT: if a replica holds a version, when all on the roster are heard or gone, after ``recovery_s`` at most
  (``dead_after_s`` with a journal that knows as much as they do: nothing in it can be reversed). A member that may hold
  more than those heard is waited for until it is gone (ROLLBACK).
- COLD: if none holds a version, when each of the ``start_replicas`` is here, or was turned away since it does not fit,
  or is not started again, or after ``start_s``; but not while members that may hold one are unheard. Without a
  journal, also not before replicas that nobody has named had ``recovery_s`` to come back (unless the job is new).
- RESTORE: in place of a cold start, if the job has had a state: replicas with its newest checkpoint are asked to
  restore it; not before ``evict_after_s`` if a replica that has left had a newer version.
- END: if a job has ended, and nobody holds or can restore its state, it is not trained again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice, takewhile

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import id_in_use, one_process, refuse, restorable
from ftopt.sync.protocol.coordinator.entry.awaited import NAMED, awaits, awaits_silent, first, names_of
from ftopt.sync.protocol.coordinator.entry.heard import Heard
from ftopt.sync.protocol.coordinator.entry.past import Past
from ftopt.sync.protocol.coordinator.entry.truth import Truth
from ftopt.sync.protocol.coordinator.members.spares import over
from ftopt.sync.protocol.coordinator.roster.effects import Close, Decided, Effects, JournalState, SendTo
from ftopt.sync.protocol.coordinator.roster.lines import are_alike
from ftopt.sync.protocol.coordinator.roster.roster import Member, Roster, by_id
from ftopt.sync.protocol.policy import FaultPolicy

_TOGETHER = 3
"""END: the time of `Startup._sent_home_s` in units of ``dead_after_s``."""
_NEWS = 32
"""A newcomer is announced to all the others only when their number has grown by one part in `_NEWS`."""


class Startup:
    """The hellos of the startup phase, and what follows from them and the journal (``saved``).

    ``lost``: the last version of each fragment that the job had before. ``left_with_it``: the replica that has left in
    good order and held that version, and so may have saved it; "": none. ``lines``: the lines on which its replicas had
    to agree, if this coordinator knew them. ``reachable_s``: since when replicas can come back; minus infinity for a
    new job, which has no living replicas. ``given_up``: replicas that are not started again, for which nobody waits.
    """

    def __init__(
        self,
        roster: Roster,
        saved: JournalState | None = None,
        *,
        lost: Sequence[Decided] = (),
        left_with_it: str = "",
        lines: Mapping[str, str] | None = None,
        reachable_s: float = -math.inf,
        given_up: Set[str] = frozenset(),
    ) -> None:
        self._heard = Heard(roster, (*roster.incarnation_ids(), *(saved.roster if saved else ())))
        self.truth = Truth(self._heard, saved)
        self.rivals: dict[int, m.Hello] = {}
        """Waiting processes by connection, each under the id of another process that is here."""
        self.policy = FaultPolicy()
        self.sent: dict[str, int] = {}
        """RESTORE: replicas that were asked to restore a checkpoint, and its version."""
        self.turned_away: set[str] = set()
        """COLD: replicas that do not fit the job, and have not come again: nobody waits for them."""
        self._roster = roster
        self.past = Past(lost or self.truth.decided)
        self._left_with_it, self._lines, self._given_up = left_with_it, lines, given_up
        self._first_s: float | None = None
        self._reachable_s = reachable_s
        self._anew = not any(x.held or x.maybe_fetched for x in roster.members.values())
        """Whether nothing is known of what members hold, which cannot change in this phase."""
        self._outlived_at = -1

    @property
    def hellos(self) -> dict[int, m.Hello]:
        """One hello per replica, by connection."""
        return self._heard.hellos

    # ------------------------------------------------------------ hellos

    def turn_away(self, replica: str) -> None:
        """Notes that a replica does not fit the job."""
        if len(self.turned_away) < (self.policy.start_replicas or 0):
            self.turned_away.add(replica)

    def hear(self, now: float, conn: int, hello: m.Hello) -> Effects:
        """Keeps a hello; the newest of a process counts. Of two processes of one id, one waits: first choice is the one
        that was let in before, then one that resumes, then the one that came first."""
        self._first_s = now if self._first_s is None else self._first_s
        effects: Effects = []
        self.turned_away.discard(hello.replica)
        former = self._heard.conns.get(hello.replica)
        if former is not None:
            other = self.hellos[former]
            same = one_process(other, hello)
            if not (same or hello.was_let_in or hello.incarnation > 0 == other.incarnation):
                return [self._waits(conn, hello)]
            self._heard.drop(former)
            effects.append(Close(former) if same else self._waits(former, other))
        self._heard.add(now, conn, hello)
        if hello.was_let_in:
            self._heard.learn(hello.roster)
            if (member := self._roster.current((hello.replica, hello.incarnation))) is not None:
                member.hung_up = False
        count = len(self.hellos)
        return effects + self.tell(now, *([] if count % max(1, count // _NEWS) == 0 else [conn]))

    def tell(self, now: float, *conns: int) -> Effects:
        """Tells these connections, or all, what the startup waits for."""
        hold = m.Hold(self.text(now))
        return [SendTo(conn, hold) for conn in conns or self.hellos]

    def _waits(self, conn: int, hello: m.Hello) -> SendTo:
        self.rivals[conn] = hello
        return SendTo(conn, id_in_use(hello))

    def lose(self, now: float, conn: int, *, hung_up: bool = False) -> None:
        """Notes that a connection has ended, by the replica if ``hung_up``. A process that waited for its id moves
        up."""
        self.rivals.pop(conn, None)
        hello = self.hellos.get(conn)
        if hello is None:
            return
        if (member := self._roster.current((hello.replica, hello.incarnation))) is not None:
            self._roster.miss(member, now)
            member.hung_up |= hung_up
        self._heard.drop(conn)
        next_conn = next((number for number, h in self.rivals.items() if h.replica == hello.replica), None)
        if next_conn is not None:
            self._heard.add(now, next_conn, self.rivals.pop(next_conn))

    def outlived(self, now: float) -> list[tuple[int, m.Hello]]:
        """Takes out hellos of incarnations that another hello has reported as gone. Rivals come first, since they would
        move up."""
        if self._outlived_at == self._roster.changes:
            return []
        self._outlived_at = self._roster.changes
        known = [(conn, h) for conn, h in (*self.rivals.items(), *self.hellos.items()) if h.incarnation]
        covers = self._roster.horizon.covers
        gone = [
            (conn, h)
            for conn, h in known
            if self._roster.is_gone((h.replica, h.incarnation)) or (h.was_let_in and covers(h))
        ]
        for conn, _ in gone:
            self.lose(now, conn)
        return gone

    def superseded(self, now: float) -> list[Member]:
        """Members that are not heard, while a newcomer under their id has been here for ``dead_after_s``.

        Not at once: all connections were lost with the coordinator, also those of living members (STICKY). A member
        with which a version would be lost has ``evict_after_s``.
        """
        dead_after_s = self.policy.dead_after_s
        due = takewhile(lambda x: now >= x[1] + dead_after_s, self._heard.contested())
        return [x for x, _ in due if not self._holds_alone(x)]

    def _holds_alone(self, member: Member) -> bool:
        """ROLLBACK: whether a member has fallen silent, as a frozen or cut-off process does, and holds a newer version
        than all replicas here, as far as this coordinator knows."""
        twin = self.heard(member.replica)
        if member.hung_up or twin.replaces:
            return False
        if member.in_doubt and not self._holders():
            return True
        return not self._anew and member.may_exceed(self._heard.best(), restorable(twin, self.past.chain))

    def heard(self, replica: str) -> m.Hello:
        """The hello of that replica's process, which is here."""
        return self.hellos[self._heard.conns[replica]]

    def is_let_in(self, incarnation_id: m.IncarnationId) -> bool:
        """Whether the process that was let in as this incarnation is here."""
        conn = self._heard.conns.get(incarnation_id[0])
        return conn is not None and self.hellos[conn].was_let_in and self.hellos[conn].incarnation == incarnation_id[1]

    def absent(self) -> Sequence[Member]:
        """Members whose current incarnation is not here, by id; they may hold states that no hello reports."""
        contested = [x for x, _ in self._heard.contested()]
        return sorted((*self._heard.silent(), *contested), key=by_id) if contested else self._heard.silent()

    def _unheard(self) -> Iterator[Member]:
        """The members of `absent`, unsorted, since each hello asks whether there are any."""
        return chain(self._heard.silent(), (x for x, _ in self._heard.contested()))

    def absent_s(self) -> float:
        """When the first of the absent members was lost; inf: all are here."""
        return self._heard.lost_s()

    def state_holders(self) -> list[m.Hello]:
        """Hellos that hold a version of every fragment."""
        return list(self._holders().values())

    def trainers(self) -> int:
        """Number of replicas here that are no spares, which a cold start needs."""
        return self._heard.trainers

    def restorers(self) -> list[tuple[int, m.Hello, m.Position]]:
        """RESTORE: the replicas that can restore the newest checkpoint of this job. None while a replica holds a state,
        or if the job has ended with a version newer than that checkpoint.

        They include replicas that cannot read their newest checkpoint, which find that out and tell their users.
        """
        if self._holders() or not self.past.chain:
            return []
        offers = [(conn, h, h.checkpoint) for conn, h in self.hellos.items() if h.checkpoint is not None]
        ours = [x for x in offers if not x[2].chain or m.same_start(x[2].chain, self.past.chain)]
        newest = max((at.version for _, _, at in ours), default=0)
        if self.past.ended and (last := self.past.last) is not None and newest < last.version:
            return []  # the end of the job would be trained again
        return [x for x in ours if x[2].version == newest or not x[2].chain]

    def _missed(self) -> str:
        """RESTORE: the replica that has left with a newer version than the newest checkpoint here; "": none."""
        left = self._left_with_it
        if not left or self.past.last is None or self.past.ended or left in self._heard.conns:
            return ""
        return left if any(at.version < self.past.last.version for *_, at in self.restorers()[:1]) else ""

    def latecomers(self, now: float) -> list[tuple[m.Hello, Effects]]:
        """END: takes out replicas that would train an ended job again from the beginning, and returns the messages to
        them. Waits until that training would begin, since a replica that resumes a checkpoint may come. A former
        member, which a supervisor may have started again, is sent home sooner: it has nothing left to do."""
        if not self.past.ended or self._holders() or self.restorers() or self.sent:
            return []
        all_late = not self.trainers() or self.may_end(now)
        late = []
        for conn, hello in sorted((self.hellos | self.rivals).items()):
            begun_again = self._took_part(hello) and not hello.was_let_in
            if not (all_late or (begun_again and now >= self._sent_home_s())):
                continue
            self.lose(now, conn)
            if hello.standby:
                told = over(conn, (hello.replica, hello.incarnation))
            elif self._took_part(hello):
                told = over(conn, (hello.replica, hello.incarnation), self.past.has_ended())
            else:
                told = refuse(conn, hello, "final", self.past.has_ended())
            late.append((hello, [*told, Close(conn)]))
        return late

    def _holders(self) -> Mapping[int, m.Hello]:
        """The replicas here that hold a state from which the job goes on, by connection. After a job's end an older one
        is none (END), nor is one while a newer one is restored (RESTORE), and version 0 from then on."""
        held, last = self._heard.state_holders, self.past.last
        if not (self.past.ended or self.sent) or last is None or not last.version:
            return held
        best, tops = self._heard.best(), self.past.tops.values()
        whole = all(best.get(d.fragment, -1) >= d.version or _is_prepared(d, held) for d in tops)
        if self.past.ended and not self.sent:
            return held if whole else {}
        restoring = [
            at for name, at in self.sent.items() if name in self._roster.members and name not in self._heard.conns
        ]
        newest = max(restoring, default=0)
        if not any(best.values()) or best[0] < (max(newest, last.version) if self.past.ended else newest):
            return {}
        # What is being restored may hold the last version of each fragment.
        return held if whole or not restoring or best[0] > newest else {}

    def _took_part(self, hello: m.Hello) -> bool:
        """END: whether the replica was a member of the ended job. With another model, it is of a new job."""
        member = hello.incarnation > 0 or hello.replica in self._roster.gone
        return member and (self._lines is None or are_alike(hello.lines, self._lines))

    def _sent_home_s(self) -> float:
        """END: from when on former members are sent home: a while after the first has come, since several that are
        started again to resume a checkpoint come one by one."""
        return math.inf if self._first_s is None else self._first_s + _TOGETHER * self.policy.dead_after_s

    # ------------------------------------------------------------ when it ends

    def may_end(self, now: float) -> bool:
        """Whether the true state is known, or the wait for it is over."""
        if not self.hellos:
            return False
        doubtful = self._heard.doubtful.values()
        last_s = next(reversed(doubtful))[1] if doubtful else -math.inf
        if now < last_s + self.policy.dead_after_s or any(self._indispensable(self._unheard())):
            return False
        if state_holders := self._holders().values():
            fragments = len(next(iter(state_holders)).positions)
            unknown = any(len(x.held) < fragments for x in self._unheard())
            return not (unknown or doubtful) or now >= self.deadline_s()
        here = self.trainers()
        complete = not any(self._unheard()) and self._all_there(here) and not self._missed()
        return here > 0 and ((complete and now >= self._known_new_s()) or now >= self.deadline_s())

    def _all_there(self, here: int) -> bool:
        """COLD: whether ``start_replicas`` are here, or do not come. If most misfit, the first may be the odd one."""
        here_ids, wanted = self._heard.conns.keys(), self.policy.start_replicas
        misfits, missing = self.turned_away - here_ids, self._given_up - here_ids
        missing |= misfits if len(misfits) < here else set()
        return wanted is not None and here + len(missing) >= wanted

    def _indispensable(self, unheard: Iterable[Member]) -> Iterator[Member]:
        """Members that may hold a state that no hello reports; each is waited for until it is gone."""
        if self._holders():
            best = self._heard.best()
            return iter(()) if self._anew else (x for x in unheard if x.may_exceed(best))
        if self.past.ended and not self._heard.state_holders:  # members that still train go on without newcomers
            return iter(())
        # A journal with decisions shows that there was a state, which these members may hold.
        return (x for x in unheard if x.held or x.in_doubt or self.truth.decided)

    def deadline_s(self) -> float:
        """When waiting ends at the latest, as far as is known now."""
        if self._first_s is None:
            return math.inf
        if self._holders():
            known = self.truth.journal_knows_all()
            return self._first_s + (self.policy.dead_after_s if known else self.policy.derived.recovery_s)
        wait_s = max(self.policy.start_s, self.policy.derived.recovery_s if any(self._unheard()) else 0.0)
        wait_s = max(wait_s, self.policy.evict_after_s if self._missed() else 0.0)
        return max(self._first_s + wait_s, self._known_new_s())

    def next_s(self, after: float) -> float:
        """When time alone next changes something. ``after``: the time of the last look."""
        due, dead_after_s = [self.deadline_s()], self.policy.dead_after_s
        for came in (self._heard.contested(), self._heard.doubtful.values()):  # the earliest first
            due += islice((s + dead_after_s for _, s in came if s + dead_after_s > after), 1)
        if self._first_s is not None:
            due.append(self._known_new_s())
        if self.past.ended:
            due.append(self._sent_home_s())
        return min((s for s in due if s > after), default=math.inf)

    def _known_new_s(self) -> float:
        """COLD: from when on newcomers alone may begin. A journal tells for which members to wait, so at once."""
        return -math.inf if self.truth.decided else self._reachable_s + self.policy.derived.recovery_s

    def text(self, now: float) -> str:
        if self._first_s is None or not self.hellos:
            if (last := self.past.last) is None:
                return "waiting for the first replica"
            if self.past.ended:
                return f"{self.past.end()}: no replica is connected"
            return f"no replica is connected; the last version is {last.version}, inner step {last.inner_step}"
        left_s = max(0.0, self.deadline_s() - now)
        unheard, doubtful = self._heard.silent(), self._heard.doubtful.values()
        before = () if unheard else self._heard.contested()
        if not unheard and (names := [*(x.replica for x, _ in before), *(replica for replica, _ in doubtful)]):
            if alone := [x for x, _ in before if self._holds_alone(x)][:NAMED]:
                return awaits_silent(alone, self.policy.evict_after_s - now)
            wait_s = max(self.policy.dead_after_s, left_s if doubtful else 0.0)
            return f"waiting {wait_s:.3g} s at most to see whether an earlier {first(names)} still runs"
        if awaited := [*islice(self._indispensable(unheard), NAMED)]:
            return awaits(awaited, self.policy.evict_after_s - now, newer=bool(self._holders()))
        if self._holders() or (unheard and not self.past.ended):
            left = f": waiting for {names_of(unheard[:NAMED])}, {left_s:.0f} s at most"
            return f"the job goes on from what its replicas hold{left if unheard and left_s >= 0.5 else ''}"
        here, wanted = self.trainers(), self.policy.start_replicas
        if (left := self._missed()) and (last := self.past.last) is not None:
            return (
                f"waiting for {left}, {left_s:.0f} s at most (policy.evict_after_s): it has left with version "
                f"{last.version}, inner step {last.inner_step}, which is newer than all checkpoints here. "
                "Start it again, or resume a checkpoint (checkpoint.resume), which ends the wait"
            )
        if self.past.ended:
            if all(map(self._took_part, self.hellos.values())):
                left_s = max(0.0, min(left_s, self._sent_home_s() - now))
            return f"{self.past.end()}; waiting {left_s:.0f} s at most for a replica that resumes a checkpoint of it"
        if restorers := self.restorers():
            version = restorers[0][2].version
            goes_on = f"it goes on from a checkpoint of version {version} in {left_s:.0f} s at most"
            return (
                f"{self.past.had()}; {goes_on}"
                if self.past.undone(version)
                else f"nobody holds the job's state: {goes_on}"
            )
        if not here:
            return "only spares are connected; the job starts when replicas come that train"
        if (unsure_s := self._known_new_s() - now) > 0 and (wanted is None or self._all_there(here)):
            return (
                f"{here} connected; the coordinator has no record of this job, and waits {unsure_s:.0f} s for replicas "
                "that may run it already (`ftopt coordinator --new` starts new jobs at once)"
            )
        if wanted is None:
            return f"{here} connected; the job starts in {left_s:.0f} s (set start_replicas to start at once)"
        if here >= wanted:
            return f"all {wanted} replicas are connected" if wanted > 1 else "the one replica is connected"
        if self._all_there(here):
            return f"{here} of {wanted} replicas connected; the others do not come"
        return f"{here} of {wanted} replicas connected; the job starts in {left_s:.0f} s at most"


def _is_prepared(last: Decided, held: Mapping[int, m.Hello]) -> bool:
    """Whether a replica has prepared that version, and has not heard of the decision."""
    prepared = chain.from_iterable(hello.prepared for hello in held.values())
    return any((x.fragment, x.attempt, x.digest) == (last.fragment, last.attempt, last.digest) for x in prepared)
