"""The replica side of the outer-sync protocol: a pure state machine, without sockets, threads or clocks.

Events go in as method calls, a list of effects comes out; `ftopt.sync.replica.session` performs them, and so does the
simulator. `ftopt.sync.protocol.replica.fragment` has the states and transitions of one fragment; here is what fragments
share (the incarnation, the connection, the roster, the lease), and which transition an event makes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import union
from ftopt.sync.protocol.messages import excluded
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.fragment import FragmentState, State
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.lease import Lease
from ftopt.sync.protocol.replica.prepared import PreparedResult, agree
from ftopt.sync.protocol.replica.resumed import Held

COUNTED_ELSEWHERE = (
    "the job has counted steps of this replica that this process has not taken: it goes on from the job's state, which "
    "contains them (usual after a kill: the former process went on after the checkpoint that this one resumes from; "
    "otherwise another process has the same id)"
)
COUNTED_AND_GONE = "the job goes on without steps of this replica that were counted: nobody holds that state any more"


@dataclass
class Replica:
    """The machine. Public fields are for reading only."""

    identity: Identity
    incarnation: int = 0
    epoch: int = 0
    connected: bool = False
    welcomed: bool = False
    resumed: bool = False
    """Whether its incarnation, and who is gone, is a checkpoint's, and it was not let in yet."""
    standby: bool = False
    """SPARE: whether it holds the state and waits to be promoted; a promoted one never stands by again."""
    leaving: bool = False
    finished: bool = False
    """With ``on_loss: fail``: it has come to its end, and repeats its goodbye until that is heard (LOSS)."""
    said_bye: bool = False
    stopped: m.JobStopped | None = None
    """The job is stopped: what it says on each connection."""
    failed: bool = False
    """LOSS: the job has."""
    roster: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    horizon: m.Horizon = m.NONE_FORGOTTEN
    """HORIZON: as the coordinator has said, whose roster it has since then."""
    lease: Lease = field(default_factory=Lease)
    checkpoint: m.Position | None = None
    """What it could restore: the shell says so before it connects."""

    def __post_init__(self) -> None:
        self.fragments = tuple(FragmentState(index) for index in range(self.identity.fragments))
        self._greeted = False
        self._copy: m.Copied | None = None
        self._promoted = False
        """Whether this incarnation was a spare."""
        self._adopted_by: dict[str, str] = {}
        self._adopted: m.IncarnationId | None = None
        """ADOPT: the predecessor whose work this incarnation has begun with."""
        self._adopted_at: dict[int, int] = {}
        """Fragment -> the last inner step of that one which was counted then."""
        self._put_back = False
        """Whether its queue of units is a checkpoint's, and it does not know yet what is done."""
        self._at_end: m.AtEnd | None = None
        self._unplaced = set[int]()
        """Fragments of a checkpoint that is not known yet to be where the job is: training has not begun."""

    def resume(self, held: Held) -> None:
        """Before the first connection: goes on where a checkpoint has left this replica, which was away since."""
        assert self.incarnation == 0
        self.incarnation, self.epoch, self.resumed = held.incarnation, held.epoch, True
        self.roster, self.gone, self._adopted_by = dict(held.roster), dict(held.gone), dict(held.adopted_by)
        self.horizon = m.Horizon(0, held.forgotten)
        self._put_in(held)
        for contribution in held.contributions:
            self.fragments[contribution.fragment].become_offered(contribution)

    def restore(self, held: Held) -> None:
        """`RestoreCheckpoint` is done: ``held`` is the checkpoint's, with what this replica adopts of a dead one.

        Its life may be a later one than it was given: see `ftopt.sync.protocol.replica.resumed.another_life`. So may
        those of the others that restore, and a coordinator that knows of nobody has to wait for them too (WAIT).
        """
        self.incarnation, asked = held.incarnation, self.roster
        self.horizon = m.Horizon(0, held.forgotten)
        self._learn((), tuple(held.gone.items()))
        self._learn(tuple((name, max(life, self.gone.get(name, 0) + 1)) for name, life in asked.items()), ())
        self._put_in(held)
        self._copy = None

    def _put_in(self, held: Held) -> None:
        for f, record in zip(self.fragments, held.records, strict=True):
            f.become_holding(record)
        self._unplaced = {f.index for f in self.fragments}
        self.lease.held, self.lease.cursor, self._put_back = held.lease, held.cursor, True

    # ------------------------------------------------------------ what the shell may ask

    def counted_step(self, record: m.Record) -> int:
        """COUNT: this incarnation's last inner step that ``record`` includes."""
        return record.counted_step(self.identity.replica, self.incarnation)

    @property
    def complete(self) -> bool:
        """Whether every fragment has a committed state, of whatever version."""
        return all(f.record is not None for f in self.fragments)

    @property
    def may_restore(self) -> bool:
        """Whether there is nothing here that restoring a checkpoint would lose."""
        return not self.complete or (bool(self._unplaced) and any(f.reset for f in self.fragments))

    @property
    def ready(self) -> bool:
        """Whether every fragment has the committed state."""
        return self.complete and not any(f.fetching for f in self.fragments)

    @property
    def may_train(self) -> bool:
        """Whether training can begin: every fragment has a committed state, and one of them the newest; and this is no
        spare.

        The others catch up meanwhile: all may never be up to date at one moment. A spare that was promoted while it
        fetched begins at once from what it holds, like a replica that was away for a round.
        """
        if not self.complete or self.standby or self._unplaced:
            return False
        if self._promoted:
            return all(f.sound for f in self.fragments)
        return not all(f.fetching for f in self.fragments)

    # ------------------------------------------------------------ connection

    def hello(self) -> m.Hello:
        """The first message of a connection: all that this replica is, holds and knows."""
        newcomer = self.incarnation == 0
        held = [] if newcomer else [f for f in self.fragments if f.record is not None and f.sound]
        for f in self.fragments:
            f.tell(held=f in held, all_held=len(held) == len(self.fragments))
        me, lease, first = self.identity, self.lease, self.fragments[0].record
        prepared = [f.prepared for f in held if f.prepared is not None]
        return m.Hello(
            protocol=m.PROTOCOL,
            job=me.job,
            replica=me.replica,
            incarnation=self.incarnation,
            rank=0,  # a replica is one process
            size=1,
            epoch=self.epoch,
            address=me.address,
            initial="" if any(f.record for f in self.fragments) else me.initial,
            fragments=me.fragments,
            lines=me.lines,
            settings=me.settings,
            positions=tuple(f.record.position for f in held if f.record),
            contributions=tuple(f.contribution for f in held if f.contribution),
            prepared=tuple(
                m.PreparedAttempt(p.record.fragment, p.attempt, p.record.version, p.digest) for p in prepared
            ),
            roster=tuple(sorted(self.roster.items())),
            gone=tuple(sorted(list(self.gone.items())[-limits.MAX_GONE :])),
            adopted_by=tuple(sorted(self._adopted_by.items())),
            inner_step=first.inner_step if first else me.start_step,
            samples=me.samples,
            claim=lease.held,
            done=first.done if first else (),
            cursor=lease.cursor,
            wants=lease.wants,
            plan=lease.share(first).plan,
            units=lease.share(first).units,
            checkpoint=self.checkpoint if self.may_restore and not self.standby else None,
            arithmetic=me.arithmetic,
            replaces=me.replaces,
            horizon=self.horizon,
            resumed=self.resumed,
            standby=self.standby,
            unplaced=bool(self._unplaced),
        )

    def connect(self) -> list[e.ReplicaEffect]:
        """A connection is open. The hello waits until it is known what this replica holds."""
        self.connected, self.welcomed, self._greeted, self.lease.asked = True, False, False, False
        for f in self.fragments:
            f.connected()
        return self._greet()

    def _greet(self) -> list[e.ReplicaEffect]:
        self._greeted = not any(f.installing for f in self.fragments)
        return [e.Send(self.hello())] if self._greeted else []

    def disconnect(self) -> list[e.ReplicaEffect]:
        """The connection is lost: the trainer goes on alone; contributions and what is prepared stay."""
        self.connected = self.welcomed = False
        return [effect for f in self.fragments for effect in f.disconnected()]

    # ------------------------------------------------------------ the trainer

    def propose(self, contribution: m.Contribution, *, now: bool = False) -> list[e.ReplicaEffect]:
        """Step 1. A contribution to another version than the held one, or beside one outstanding, is dropped.

        ``now``: the others shall be called in.
        """
        f = self.fragments[contribution.fragment]
        if f.state is not State.HOLDS or not f.sound or not self.lease.may_offer(contribution, self.identity.samples):
            return []
        if f.record is None or f.record.version != contribution.version:
            return []
        f.become_offered(contribution, now=now)
        if not self.welcomed:
            f.train_on()
        return self._offer()

    def leave(self) -> list[e.ReplicaEffect]:
        """From now on no round waits for this replica."""
        self.leaving = True
        return self._send(m.Leaving())

    def finish(self) -> list[e.ReplicaEffect]:
        """END, LOSS: it has come to the end of its training."""
        self.finished = True
        return self._send(m.Finished())

    def stop(self, reason: str) -> list[e.ReplicaEffect]:
        """All loops of the job are to end."""
        if self.stopped is None:
            self.stopped = m.JobStopped(reason, self.identity.replica)
        return self._send(m.StopJob(self.stopped.reason, self.stopped.replica))

    def wait_for_end(self, message: m.AtEnd) -> list[e.ReplicaEffect]:
        """END: it has handed in what it had, and waits for the others that come to their end."""
        self.finished, self._at_end = True, message
        return self._send(message)

    def bye(self) -> list[e.ReplicaEffect]:
        """It goes, and says so again on each connection."""
        self.said_bye = True
        return self._send(m.Bye())

    @property
    def over(self) -> bool:
        """Whether its goodbye is heard, or its job has failed: no further connection is opened."""
        return self.failed or (self.said_bye and m.is_gone((self.identity.replica, self.incarnation), self.gone))

    def ask(self) -> list[e.ReplicaEffect]:
        """The trainer will soon have used all its units."""
        return self.lease.ask() if self.welcomed else []

    def copied(self, serial: int, versions: tuple[int, ...]) -> list[e.ReplicaEffect]:
        """A copy of this replica, based on these versions of the fragments, can be fetched from here."""
        self._copy = m.Copied(serial, versions)
        return self._send(self._copy)

    def keeps(self, order: m.Keep) -> list[e.ReplicaEffect]:
        """The copy that was to be kept is here."""
        return self._send(m.Keeps(order.incarnation_id, order.serial))

    def keep_failed(self, order: m.Keep, reason: str) -> list[e.ReplicaEffect]:
        """The copy that was to be kept could not be had."""
        return self._send(m.KeepFailed(order.incarnation_id, order.serial, reason))

    def _send(self, message: m.FromReplica) -> list[e.ReplicaEffect]:
        return [e.Send(message)] if self.welcomed else []

    # ------------------------------------------------------------ the reducer and the fetcher

    def reduced(
        self, fragment: int, attempt: int, digest: str, rows: list[list[int]], *, live: str = "", peak: float = 0.0
    ) -> list[e.ReplicaEffect]:
        """Step 4: the reduction ended; ``rows`` holds each member's last step, in rank order. Others: `m.Prepared`."""
        f = self.fragments[fragment]
        q = f.quorum
        if q is None or q.attempt != attempt or f.record is None:
            return self.reduce_failed(fragment, attempt, reason="the attempt is over")
        agreed, record = agree(f.record, q, f.members, rows, digest)
        f.become_prepared(PreparedResult(attempt, agreed, record, q.outlier))
        return self._send(m.Prepared(fragment, attempt, agreed, live, peak))

    def reduce_failed(
        self, fragment: int, attempt: int, *, reason: str, peer: str = "", cause: str = ""
    ) -> list[e.ReplicaEffect]:
        """The reduction failed here, or was stopped: then the coordinator learns that the reducer is free again."""
        f = self.fragments[fragment]
        if f.quorum is not None and f.quorum.attempt == attempt:
            f.stop()  # the reducer is free already
        return self._send(m.Failed(fragment, attempt, reason, peer, cause))

    def damaged(self, fragment: int, attempt: int, *, reason: str) -> list[e.ReplicaEffect]:
        """The held state is not what it was: it is not served, and nothing is proposed, until it is fetched anew."""
        f = self.fragments[fragment]
        if f.quorum is None or f.quorum.attempt != attempt:
            return self.reduce_failed(fragment, attempt, reason=reason)
        f.doubt()
        return [*self.reduce_failed(fragment, attempt, reason=reason, cause="state"), *self._lacks(f)]

    def install(self, record: m.Record) -> bool:
        """Whether to install a fetched state. If so, answer with `fetched` or `fetch_failed`; no hello before that."""
        return self.fragments[record.fragment].install(record)

    def fetched(self, record: m.Record) -> list[e.ReplicaEffect]:
        """A fetched state is installed: it is what this replica holds, whatever has happened meanwhile.

        COUNT: it tells whether the outstanding contribution was counted. Anything else that it says of this incarnation
        was another process' (two coordinators without memory may give one number twice): then this one is reset.
        """
        f = self.fragments[record.fragment]
        mine, offered, again = self._is_mine(f, record), f.contribution, self._is_counted_again(f, record)
        lacks = f.record is not None and self.counted_step(record) < self.counted_step(f.record)
        f.installed(record)
        if self.incarnation == 0:  # given up meanwhile
            f.become_reset()
            return self._answer(None)
        if not mine:
            return self._die(COUNTED_AND_GONE if lacks else COUNTED_ELSEWHERE)
        if again:
            return self._die("steps that this replica has adopted were counted elsewhere: there were two coordinators")
        self._unplaced.discard(f.index)
        settled = self.lease.settle(record, offered, counted=self.counted_step(record))
        return [*settled, *self._answer(m.Holds(record.position)), *f.start_transfer()]

    def fetch_failed(self, fragment: int) -> list[e.ReplicaEffect]:
        """No source had a state that is wanted, or it could not be installed."""
        f = self.fragments[fragment]
        if not f.not_fetched():  # a fetch of an earlier connection: an attempt may run by now
            return self._answer(None)
        f.members = ()
        return self._answer(m.Lacks(fragment))

    def _is_mine(self, f: FragmentState, record: m.Record) -> bool:
        """FREEZE: besides what the held state counts, only the one outstanding contribution can be counted: with its
        steps, or as an outlier without them, up to where they begin (past any that this replica has dropped)."""
        known = {0 if f.record is None or f.reset else self.counted_step(f.record)}
        if (c := f.contribution) is not None:
            known |= {c.last_step, excluded(c).last_step}
        return self.counted_step(record) in known

    def _is_counted_again(self, f: FragmentState, record: m.Record) -> bool:
        """ADOPT: whether ``record`` counts more of the predecessor than the state with which its work was adopted: it
        went on at another coordinator, and what is pending here of its work is in that state."""
        if self._adopted is None:
            return False
        counted = record.counted_step(*self._adopted)
        first = counted if f.record is None else f.record.counted_step(*self._adopted)
        return counted > self._adopted_at.setdefault(f.index, first)

    def _answer(self, message: m.FromReplica | None) -> list[e.ReplicaEffect]:
        """What follows an install: the hello that waited for it, or ``message``."""
        if self.welcomed:
            return [e.Send(message)] if message else []
        return self._greet() if self.connected and not self._greeted else []

    # ------------------------------------------------------------ messages

    def receive(self, message: m.FromCoordinator) -> list[e.ReplicaEffect]:
        """A message arrived."""
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.JobFailed():
                self.failed = True
                return [] if self.finished else [message]
            case m.Refuse(kind="gone" | "anew") if self.said_bye:  # its goodbye was heard, and the answer was lost
                self._learn((), ((self.identity.replica, self.incarnation),))
                return []
            case m.Refuse(kind="gone", reason=reason):
                incarnation, effects = self.incarnation, self._die(reason)
                if incarnation:  # FENCE: the next coordinator may have forgotten it
                    self._learn((), ((self.identity.replica, incarnation),))
                return effects
            case m.Refuse(kind="anew", reason=reason):
                effects = self._die(reason)
                self.roster, self.gone, self._adopted_by, self.horizon = {}, {}, {}, m.Horizon()  # of another start
                return effects
            case m.Refuse(kind="unreadable" | "misfit", reason=reason) if self.incarnation and not self.resumed:
                return [e.Notice(reason)]  # Another coordinator let it in: it trains on, and comes again.
            case m.Refuse(reason=reason):
                return [e.GiveUp(reason)]
            case m.Restore(incarnation=incarnation, roster=roster) if self.may_restore:
                self.incarnation = incarnation
                self._learn(roster, ())
                return [e.RestoreCheckpoint()]
            case m.Hold(text=text):
                return [e.Notice(text)]
            case m.Over() if self.standby or not self.complete:
                return [message]
            case m.Over(reason=reason) if not self.welcomed:  # it has trained, was given up, and comes after the end
                return [e.GiveUp(reason)]
            case _ if not self.welcomed:
                return []
            case m.RosterUpdate():
                self._learn(message.known, message.gone)
                self.horizon = message.horizon if message.forgotten else self.horizon
                for replica in message.forgotten:
                    self.gone.pop(replica, None)
                return []
            case m.Start():
                return self._begin(message)
            case m.Behind():
                return self._behind(message)
            case m.Quorum():
                return self._quorum(message)
            case m.Commit():
                return self._commit(message)
            case m.Grant():
                return self.lease.granted(message)
            case m.Plan():
                return self._take_plan(message)
            case m.Keep() | m.Kept() | m.Speed():
                return [message]
            case m.JobStopped():
                self.stopped = message
                return [message]
            case m.End():
                self._at_end = None
                if any(f.outstanding for f in self.fragments):  # its proposal has come too late to be seen
                    message = replace(message, whole=False)
                return [message]
            case m.Promote():
                return self._promote(message)
            case m.Inherit():
                if not any(f.reset for f in self.fragments):  # else it adopts the units only
                    self._adopted = message.incarnation_id
                self.lease.held = union(self.lease.held, message.ranges)
                return [message]
            case m.CallIn() | m.Means() | m.TrainOn() | m.Void() | m.Abort():
                return self.fragments[message.fragment].receive(message)
        return []

    def _promote(self, message: m.Promote) -> list[e.ReplicaEffect]:
        if not self.standby:
            return []
        self.standby, self._promoted = False, True
        return [message]

    def _take_plan(self, plan: m.Plan) -> list[e.ReplicaEffect]:
        """PLAN. What is outstanding under an older plan fits the new one too, or is free: extended, or dropped (OWN).

        FREEZE's one exception: none is issued while an attempt is undecided, so that was aborted.
        """
        f = self.fragments[0]
        if f.record is None or plan.version != f.record.version + 1:  # TIE
            return []
        self.lease.plan = plan
        c = f.contribution
        if c is None or c.plan == plan.plan:
            return [plan]
        effects = f.stop()
        if c.ranges != plan.units:
            f.free()
            return [*effects, plan]
        f.renumber(plan.plan)
        return [*effects, plan, *self._offer()]

    def _welcome(self, message: m.Welcome) -> list[e.ReplicaEffect]:
        if message.epoch < self.epoch:
            return [e.Disconnect(f"a coordinator of epoch {message.epoch} answers, the job is at {self.epoch}")]
        self.epoch, self.incarnation, self.welcomed, self.resumed = message.epoch, message.incarnation, True, False
        self.roster, self.gone, self.horizon = dict(message.roster), dict(message.gone), message.horizon
        for f in self.fragments:
            f.hush()
        first, put_back, self._put_back = self.fragments[0].record, self._put_back, False
        settled = self.lease.settle(first) if first is not None and put_back else []
        copy = [e.Send(self._copy)] if self._copy is not None else []
        if self.lease.wants:  # that there was nothing to grant was said on another connection, and so was what it asked
            settled.append(m.Grant((), self.lease.cursor))
        states = ((self.leaving, m.Leaving()), (self.finished, m.Finished()), (self.said_bye, m.Bye()))
        stop = [e.Send(m.StopJob(self.stopped.reason, self.stopped.replica))] if self.stopped is not None else []
        at_end = [e.Send(self._at_end)] if self._at_end is not None and not self.said_bye else []
        said = [e.Send(message) for is_so, message in states if is_so]
        return [*settled, *self._offer(), *copy, *stop, *at_end, *said]

    def _offer(self) -> list[e.ReplicaEffect]:
        return [x for f in self.fragments for x in f.propose(self.lease.wants)] if self.welcomed else []

    def _learn(self, known: tuple[m.IncarnationId, ...], gone: tuple[m.IncarnationId, ...]) -> None:
        for replica, incarnation in gone:
            self.gone[replica] = max(incarnation, self.gone.get(replica, 0))
        for replica, incarnation in known:
            self.roster[replica] = max(incarnation, self.roster.get(replica, 0))
        self.roster = {r: i for r, i in self.roster.items() if not m.is_gone((r, i), self.gone)}

    def _die(self, reason: str) -> list[e.ReplicaEffect]:
        if self.resumed:
            self.roster, self._adopted_by = {}, {}
        self.incarnation, self.welcomed, self._copy, self._promoted = 0, False, None, False
        if self._unplaced:
            self._unplaced = {f.index for f in self.fragments}
        self._adopted, self._adopted_at = None, {}
        self.lease.reset()
        return [*(effect for f in self.fragments for effect in f.become_reset()), e.Reset(reason)]

    def _begin(self, start: m.Start) -> list[e.ReplicaEffect]:
        at = start.position
        self._unplaced.discard(at.fragment)
        f = self.fragments[at.fragment]
        reset, again = f.reset, f.record is not None
        record = m.Record(at.fragment, at.version, at.chain, start.inner_step, done=start.done)
        f.become_holding(record)  # what was outstanding is of another cold start, that came to nothing
        return [e.Begin(record, reset, again), *self.lease.settle(record)]

    def _behind(self, message: m.Behind) -> list[e.ReplicaEffect]:
        at = message.position
        f = self.fragments[at.fragment]
        effects = f.stop()
        f.name(at)
        if message.heal:
            f.doubt()
        for other in self.fragments:  # a replica that fetches is no initial source
            other.confirm()
        if at == f.position and f.sound:
            self._unplaced.discard(f.index)
            f.end_fetch()
            f.propose_anew()
            return [*effects, e.Send(m.Holds(at)), *self._offer()]
        f.become_fetching(e.Fetch(at, message.sources, message.heal))
        if not message.sources:  # the coordinator names some when there are, whenever that is
            f.train_on()
        return [*effects, *self._offer(), *f.start_transfer()]

    def _quorum(self, q: m.Quorum) -> list[e.ReplicaEffect]:
        f = self.fragments[q.fragment]
        effects = f.stop()
        if q.joined or q.left:
            f.members = tuple(sorted((set(f.members) - set(q.left)) | set(q.joined)))
        c = f.contribution
        if c is None or not f.fits(q, (self.identity.replica, self.incarnation)):
            failed = m.Failed(q.fragment, q.attempt, "the quorum does not fit what this replica holds", "")
            return [*effects, e.Send(failed), *self._lacks(f)]
        f.become_reducing(q)
        return [*effects, e.StartReduce(q, f.members, excluded(c) if q.excludes else c)]

    def _commit(self, message: m.Commit) -> list[e.ReplicaEffect]:
        f = self.fragments[message.fragment]
        p, decided = f.prepared, (message.attempt, message.digest, message.chain)
        if p is None or (p.attempt, p.digest, p.record.chain) != decided:
            known = f.position == m.Position(message.fragment, message.version, message.chain)
            return [] if known or f.fetching else self._lacks(f)
        settled = self.lease.settle(p.record, f.contribution, counted=self.counted_step(p.record))
        f.become_holding(p.record)
        excluded = [e.Excluded(f.index, p.record.version, p.outlier, void=False)] if p.outlier else []
        return [*excluded, e.CommitPrepared(p.attempt, p.record), *settled]

    def _lacks(self, f: FragmentState) -> list[e.ReplicaEffect]:
        """It does not hold what it should; both ends begin with an empty member list again."""
        f.members = ()
        return [*f.stop(), e.Send(m.Lacks(f.index))]
