"""The replica side of the outer-sync protocol: a pure state machine, without sockets, threads or clocks.

Events are method calls that return a list of effects, which `ftopt.sync.replica.session` performs. The transitions of
one fragment are in `ftopt.sync.protocol.replica.fragment`; this file has the events, and what fragments share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import union
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.protocol.replica.adoption import Adoption
from ftopt.sync.protocol.replica.fragment import FragmentState
from ftopt.sync.protocol.replica.hello import hello_of
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.known import Known
from ftopt.sync.protocol.replica.lease import Lease
from ftopt.sync.protocol.replica.prepared import PreparedResult, agree
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.protocol.replica.said import Said


@dataclass
class Replica:
    """The machine. Public fields are for reading only."""

    identity: Identity
    incarnation: int = 0
    epoch: int = 0
    connected: bool = False
    welcomed: bool = False
    resumed: bool = False
    """Whether its incarnation and the gone ones are from a checkpoint, and it was not let in yet."""
    standby: bool = False
    """SPARE: whether it holds the state and waits to be promoted; a promoted spare never stands by again."""
    said: Said = field(default_factory=Said)
    failed: bool = False
    """LOSS: whether the job has failed."""
    known: Known = field(default_factory=Known)
    lease: Lease = field(default_factory=Lease)
    checkpoint: m.Position | None = None
    """Fragment 0's position in the checkpoint that it could restore, set by the shell before connecting."""

    def __post_init__(self) -> None:
        self.fragments = tuple(FragmentState(index) for index in range(self.identity.fragments))
        self._greeted = self._promoted = self._was_let_in = False
        """Whether the hello was sent; whether this incarnation was a spare; whether this process was ever a member."""
        self._adoption = Adoption()
        self._put_back = False
        """Whether its queue of units is from a checkpoint, and it does not know yet which are done."""
        self.unplaced = set[int]()
        """Fragments from a checkpoint of which it is not known yet whether the job is there: training has not begun."""

    def resume(self, held: Held) -> None:
        """Before the first connection: continues from a checkpoint, as if this replica had been away since."""
        assert self.incarnation == 0
        self.incarnation, self.epoch, self.resumed = held.incarnation, held.epoch, True
        self.known = Known(dict(held.roster), dict(held.gone), m.Horizon(0, held.forgotten), dict(held.adopted_by))
        self._put_in(held)
        for contribution in held.contributions:
            self.fragments[contribution.fragment].become_offered(contribution)

    def restore(self, held: Held) -> None:
        """Ends `RestoreCheckpoint`: ``held`` is from the checkpoint, with what this replica adopts of a dead one.

        Its life may be later than the one assigned: see `ftopt.sync.protocol.replica.resumed.another_life`. So may the
        lives of others that restore, for which a coordinator without memory has to wait, too (WAIT).
        """
        self.incarnation, asked = held.incarnation, self.known.roster
        self.known.horizon = m.Horizon(0, held.forgotten)
        self._learn((), tuple(held.gone.items()))
        self._learn(tuple((name, max(life, self.known.gone.get(name, 0) + 1)) for name, life in asked.items()), ())
        self._put_in(held)
        self.said.copied = None

    def _put_in(self, held: Held) -> None:
        for f, record in zip(self.fragments, held.records, strict=True):
            f.become_holding(record)
        self.unplaced = {f.index for f in self.fragments}
        self.lease.held, self.lease.cursor, self._put_back = held.lease, held.cursor, True

    # ------------------------------------------------------------ what the shell may ask

    def counted_step(self, record: m.Record) -> int:
        """COUNT: this incarnation's last inner step that ``record`` includes."""
        return record.counted_step(self.identity.replica, self.incarnation)

    @property
    def complete(self) -> bool:
        """Whether every fragment has a committed state, of any version."""
        return all(f.record is not None for f in self.fragments)

    @property
    def may_restore(self) -> bool:
        """Whether restoring a checkpoint would lose nothing."""
        return not self.complete or (bool(self.unplaced) and any(f.reset for f in self.fragments))

    @property
    def ready(self) -> bool:
        """Whether every fragment has the newest committed state."""
        return not any(f.record is None or f.fetching for f in self.fragments)

    @property
    def may_train(self) -> bool:
        """Whether training can begin: every fragment has a committed state, one of them the newest, and this replica is
        no spare.

        The other fragments catch up meanwhile: all may never be up to date at one moment. A spare promoted during a
        fetch begins at once with the state that it holds, like a replica that was away for a round.
        """
        if not self.complete or self.standby or self.unplaced:
            return False
        if self._promoted:
            return all(f.sound for f in self.fragments)
        return not all(f.fetching for f in self.fragments)

    # ------------------------------------------------------------ connection

    def hello(self) -> m.Hello:
        """The first message of a connection: everything that this replica is, holds and knows."""
        return hello_of(
            self.identity,
            self.fragments,
            self.lease,
            known=self.known,
            incarnation=self.incarnation,
            epoch=self.epoch,
            resumed=self.resumed,
            standby=self.standby,
            unplaced=bool(self.unplaced),
            checkpoint=self.checkpoint if self.may_restore and not self.standby else None,
        )

    def connect(self) -> list[e.ReplicaEffect]:
        """Begins a connection. The hello waits until an install under way has ended."""
        self.connected, self.welcomed, self._greeted, self.lease.asked = True, False, False, False
        for f in self.fragments:
            f.connected()
        return self._greet()

    def _greet(self) -> list[e.ReplicaEffect]:
        self._greeted = not any(f.installing for f in self.fragments)
        return [e.Send(self.hello())] if self._greeted else []

    def disconnect(self) -> list[e.ReplicaEffect]:
        """Ends a connection: the trainer goes on alone; contributions and prepared results stay."""
        self.connected = self.welcomed = False
        return [effect for f in self.fragments for effect in f.disconnected()]

    # ------------------------------------------------------------ the trainer

    def propose(self, contribution: m.Contribution, *, now: bool = False) -> list[e.ReplicaEffect]:
        """Step 1. Drops a contribution that builds on another version than the held one, or is not the only one.

        ``now``: the others are to be called in.
        """
        f = self.fragments[contribution.fragment]
        if not (f.may_offer(contribution.version) and self.lease.may_offer(contribution, self.identity.samples)):
            return []
        f.become_offered(contribution, now=now)
        if not self.welcomed:
            f.train_on()
        return self._offer()

    @property
    def over(self) -> bool:
        """Whether its goodbye was heard, or its job has failed, so that no further connection is opened."""
        return self.failed or (self.said.bye and m.is_gone((self.identity.replica, self.incarnation), self.known.gone))

    def ask(self) -> list[e.ReplicaEffect]:
        """Asks for units, since the trainer will soon have used all of its own."""
        return self.lease.ask() if self.welcomed else []

    def say(self, message: m.FromReplica) -> list[e.ReplicaEffect]:
        """Sends what only the shell knows (the end, copies); repeats on each connection what must not be lost."""
        return self._send(self.said.note(message))

    def _send(self, message: m.FromReplica) -> list[e.ReplicaEffect]:
        return [e.Send(message)] if self.welcomed else []

    def reduced(
        self, fragment: int, attempt: int, digest: str, rows: list[list[int]], *, live: str = "", peak: float = 0.0
    ) -> list[e.ReplicaEffect]:
        """Step 4: takes the result of a reduction. ``rows``: members' last steps, by rank. Others: see `m.Prepared`."""
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
        """Takes the failure of a reduction; one that was stopped tells the coordinator that the reducer is free."""
        f = self.fragments[fragment]
        if f.quorum is not None and f.quorum.attempt == attempt:
            f.stop()  # the reducer is free already
        return self._send(m.Failed(fragment, attempt, reason, peer, cause))

    def damaged(self, fragment: int, attempt: int, *, reason: str) -> list[e.ReplicaEffect]:
        """The held state has changed in memory: until it is fetched again, it is not served and nothing is proposed."""
        f = self.fragments[fragment]
        if f.quorum is None or f.quorum.attempt != attempt:
            return self.reduce_failed(fragment, attempt, reason=reason)
        f.doubt()
        return [*self.reduce_failed(fragment, attempt, reason=reason, cause="state"), *f.lacks()]

    def install(self, record: m.Record) -> bool:
        """Whether to install a fetched state. If so, answer with `fetched` or `fetch_failed`; no hello before that."""
        return self.fragments[record.fragment].install(record)

    def fetched(self, record: m.Record) -> list[e.ReplicaEffect]:
        """Takes an installed state, which this replica now holds, whatever has happened meanwhile.

        COUNT: it tells whether the outstanding contribution was counted. Any other count of this incarnation belongs to
        another process (two coordinators without memory may assign one number twice): then this replica is reset.
        """
        f = self.fragments[record.fragment]
        counted, before = self.counted_step(record), self.counted_step(f.record) if f.record is not None else 0
        mine, offered = f.expects(counted, before), f.contribution
        again = self._adoption.is_counted_again(f.record, record)
        f.installed(record)
        if self.incarnation == 0:  # evicted meanwhile
            f.become_reset()
            return self._answer(None)
        if not mine:
            return self._die(e.COUNTED_AND_GONE if counted < before else e.COUNTED_ELSEWHERE)
        if again:
            return self._die("steps that this replica has adopted were counted elsewhere: there were two coordinators")
        self.unplaced.discard(f.index)
        settled = self.lease.settle(record, offered, counted=counted)
        return [*settled, *self._answer(m.Holds(record.position)), *f.start_transfer()]

    def fetch_failed(self, fragment: int) -> list[e.ReplicaEffect]:
        """Takes the failure of a fetch: no source had the wanted state, or it could not be installed."""
        f = self.fragments[fragment]
        if not f.not_fetched():  # a fetch of an earlier connection: an attempt may run now
            return self._answer(None)
        f.members = ()
        return self._answer(m.Lacks(fragment))

    def _answer(self, message: m.FromReplica | None) -> list[e.ReplicaEffect]:
        """Sends what follows an install: the hello that waited for it, or ``message``."""
        if self.welcomed:
            return [e.Send(message)] if message else []
        return self._greet() if self.connected and not self._greeted else []

    # ------------------------------------------------------------ messages

    def receive(self, message: m.FromCoordinator) -> list[e.ReplicaEffect]:
        """Handles a message of the coordinator."""
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.JobFailed():
                self.failed = True
                return [] if self.said.finished else [message]
            case m.Refuse(kind="gone" | "anew") if self.said.bye:  # its goodbye was heard, and the answer was lost
                self._learn((), ((self.identity.replica, self.incarnation),))
                return []
            case m.Refuse(kind="gone", reason=reason):
                incarnation, effects = self.incarnation, self._die(reason)
                if incarnation:  # FENCE: the next coordinator may have forgotten it
                    self._learn((), ((self.identity.replica, incarnation),))
                return effects
            case m.Refuse(kind="anew", reason=reason):
                effects, self.known = self._die(reason), Known()  # its knowledge is of another start
                return effects
            case m.Refuse(kind="unreadable" | "misfit") if (self.incarnation or self._was_let_in) and not self.resumed:
                return [e.Notice(message.reason)]  # Another coordinator had let it in: it trains on, and tries again.
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
            case m.Over(reason=reason) if not self.welcomed:  # it has trained, was evicted, and comes after the end
                return [e.GiveUp(reason)]
            case _ if not self.welcomed:
                return []
            case m.RosterUpdate():
                self._learn(message.known, message.gone)
                self.known.forget(message)
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
                self.said.stopped = message
                return [message]
            case m.End():
                self.said.at_end = None
                if any(f.outstanding for f in self.fragments):  # its proposal has come too late to be seen
                    message = replace(message, whole=False)
                return [message]
            case m.Promote() if self.standby:
                self.standby, self._promoted = False, True
                return [message]
            case m.Inherit():
                if not any(f.reset for f in self.fragments):  # else it adopts the units only
                    self._adoption.adopt(message.incarnation_id)
                self.lease.held = union(self.lease.held, message.ranges)
                return [message]
            case m.CallIn() | m.Means() | m.TrainOn() | m.Void() | m.Abort():
                return self.fragments[message.fragment].receive(message)
        return []

    def _take_plan(self, plan: m.Plan) -> list[e.ReplicaEffect]:
        effects = self.lease.take_plan(plan, self.fragments[0])
        return [*effects, *self._offer()]

    def _welcome(self, message: m.Welcome) -> list[e.ReplicaEffect]:
        if message.epoch < self.epoch:
            return [e.Disconnect(f"a coordinator of epoch {message.epoch} answers, the job is at {self.epoch}")]
        self.epoch, self.incarnation, self.resumed = message.epoch, message.incarnation, False
        self.welcomed = self._was_let_in = True
        self.known.take(message)
        for f in self.fragments:
            f.hush()
        first, put_back, self._put_back = self.fragments[0].record, self._put_back, False
        settled = self.lease.settle(first) if first is not None and put_back else []
        if self.lease.wants:  # requests and answers on another connection do not count
            settled.append(m.Grant((), self.lease.cursor))
        return [*settled, *self._offer(), *map(e.Send, self.said.again())]

    def _offer(self) -> list[e.ReplicaEffect]:
        return [x for f in self.fragments for x in f.propose(self.lease.wants)] if self.welcomed else []

    def _learn(self, known: tuple[m.IncarnationId, ...], gone: tuple[m.IncarnationId, ...]) -> None:
        self.known.learn(known, gone)

    def _die(self, reason: str) -> list[e.ReplicaEffect]:
        if self.resumed:
            self.known.roster, self.known.adopted_by = {}, {}
        self.incarnation, self.welcomed, self.said.copied, self._promoted = 0, False, None, False
        if self.unplaced:
            self.unplaced = {f.index for f in self.fragments}
        self._adoption = Adoption()
        self.lease.reset()
        return [*(effect for f in self.fragments for effect in f.become_reset()), e.Reset(reason)]

    def _begin(self, start: m.Start) -> list[e.ReplicaEffect]:
        at, f = start.position, self.fragments[start.position.fragment]
        self.unplaced.discard(at.fragment)
        reset, again = f.reset, f.record is not None
        record = m.Record(at.fragment, at.version, at.chain, start.inner_step, done=start.done)
        f.become_holding(record)  # what was outstanding is of another cold start, which failed
        return [e.Begin(record, reset, again), *self.lease.settle(record)]

    def _behind(self, message: m.Behind) -> list[e.ReplicaEffect]:
        at, f = message.position, self.fragments[message.position.fragment]
        effects = f.stop()
        f.name(at)
        if message.heal:
            f.doubt()
        for other in self.fragments:  # a replica that fetches is no initial source
            other.confirm()
        if at == f.position and f.sound:
            self.unplaced.discard(f.index)
            f.end_fetch()
            f.propose_anew()
            return [*effects, e.Send(m.Holds(at)), *self._offer()]
        f.become_fetching(e.Fetch(at, message.sources, message.heal))
        if not message.sources:  # the coordinator will name some as soon as there are
            f.train_on()
        return [*effects, *self._offer(), *f.start_transfer()]

    def _quorum(self, q: m.Quorum) -> list[e.ReplicaEffect]:
        return self.fragments[q.fragment].take_quorum(q, (self.identity.replica, self.incarnation))

    def _commit(self, message: m.Commit) -> list[e.ReplicaEffect]:
        f = self.fragments[message.fragment]
        p, decided = f.prepared, (message.attempt, message.digest, message.chain)
        if p is None or (p.attempt, p.digest, p.record.chain) != decided:
            known = f.position == m.Position(message.fragment, message.version, message.chain)
            return [] if known or f.fetching else f.lacks()
        settled = self.lease.settle(p.record, f.contribution, counted=self.counted_step(p.record))
        f.become_holding(p.record)
        excluded = [e.Excluded(f.index, p.record.version, p.outlier, void=False)] if p.outlier else []
        return [*excluded, e.CommitPrepared(p.attempt, p.record), *settled]
