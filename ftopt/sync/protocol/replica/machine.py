"""The replica side of the outer-sync protocol: a pure state machine.

Events go in as method calls (a message arrived, the connection was lost, the reduction ended, the trainer proposes); a
list of effects comes out. No sockets, threads or clocks: `ftopt.sync.replica.client` is the shell around it, and the
simulator another one.

Per fragment it holds three things. The *record*: version, chain and COUNT table of the committed state. The
*contribution* that is outstanding (FREEZE): it stays, unchanged, until a commit or a fetched state tells whether it was
counted; abort, disconnect and a new coordinator do not touch it. And what it has *prepared*: the record that a commit
would make current.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import contains, union
from ftopt.sync.protocol.limits import HISTORY
from ftopt.sync.protocol.messages import excluded
from ftopt.sync.protocol.replica.effects import Begin as Begin
from ftopt.sync.protocol.replica.effects import CommitPrepared as CommitPrepared
from ftopt.sync.protocol.replica.effects import Disconnect as Disconnect
from ftopt.sync.protocol.replica.effects import Fetch as Fetch
from ftopt.sync.protocol.replica.effects import GiveUp as GiveUp
from ftopt.sync.protocol.replica.effects import Granted as Granted
from ftopt.sync.protocol.replica.effects import InheritWork as InheritWork
from ftopt.sync.protocol.replica.effects import KeepCopy as KeepCopy
from ftopt.sync.protocol.replica.effects import Notice as Notice
from ftopt.sync.protocol.replica.effects import Planned as Planned
from ftopt.sync.protocol.replica.effects import ReplicaEffect as ReplicaEffect
from ftopt.sync.protocol.replica.effects import Reset as Reset
from ftopt.sync.protocol.replica.effects import RestoreCheckpoint as RestoreCheckpoint
from ftopt.sync.protocol.replica.effects import Send as Send
from ftopt.sync.protocol.replica.effects import Settled as Settled
from ftopt.sync.protocol.replica.effects import StartReduce as StartReduce
from ftopt.sync.protocol.replica.effects import StopReduce as StopReduce
from ftopt.sync.protocol.replica.fragment import FragmentState, PreparedResult, agree, greeting
from ftopt.sync.protocol.replica.fragment import Identity as Identity
from ftopt.sync.protocol.replica.lease import Lease
from ftopt.sync.protocol.replica.resumed import Held

NO_PLAN = m.Plan(0, 0, ())


@dataclass
class Replica:
    """The machine. Public fields are for reading only."""

    identity: Identity
    incarnation: int = 0
    epoch: int = 0
    connected: bool = False
    welcomed: bool = False
    leaving: bool = False
    roster: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    lease: Lease = field(default_factory=Lease)
    plan: m.Plan = NO_PLAN
    checkpoint: m.Position | None = None
    """What it could restore: the shell says so before it connects."""

    def __post_init__(self) -> None:
        self._fragments = [FragmentState() for _ in range(self.identity.fragments)]
        self._greeted = False
        self._copy: m.Copied | None = None
        self._adopted_by: dict[str, str] = {}
        self._put_back = False
        """Whether its stock of units is a checkpoint's, and has not been told yet what is done."""

    def resume(self, held: Held) -> None:
        """Before the first connection: goes on where a checkpoint has left this replica, which was away since."""
        assert self.incarnation == 0 and len(held.records) == len(self._fragments)
        self.incarnation, self.epoch = held.incarnation, held.epoch
        self.roster, self.gone, self._adopted_by = dict(held.roster), dict(held.gone), dict(held.adopted_by)
        for f, record in zip(self._fragments, held.records, strict=True):
            f.record = record
        self.lease.held, self.lease.cursor = held.lease, held.cursor
        self._put_back = True
        for contribution in held.contributions:
            self._fragments[contribution.fragment].contribution = contribution

    def restore(self, held: Held) -> None:
        """`RestoreCheckpoint` is done: this is what the checkpoint holds, and what this replica has taken over of a
        dead one.

        Its life may be a later one than it was given: see `ftopt.sync.protocol.replica.resumed.another_life`.
        """
        self.incarnation = held.incarnation
        self._learn((), tuple(held.gone.items()))
        for f, record in zip(self._fragments, held.records, strict=True):
            f.record, f.reset, f.unhealed = record, False, False
        self.lease.held, self._copy = held.lease, None
        self._put_back = True

    # ------------------------------------------------------------ what the shell may ask

    def record(self, fragment: int) -> m.Record | None:
        """The committed state's record, None before there is one."""
        return self._fragments[fragment].record

    def counted_step(self, record: m.Record) -> int:
        """COUNT: this incarnation's last inner step that ``record`` includes."""
        return record.counted_step(self.identity.replica, self.incarnation)

    def outstanding(self, fragment: int) -> bool:
        """Whether a contribution waits for its fate."""
        return self._fragments[fragment].contribution is not None

    def contribution(self, fragment: int) -> m.Contribution | None:
        """The outstanding contribution."""
        return self._fragments[fragment].contribution

    def released(self, fragment: int) -> bool:
        """Whether the trainer shall not wait for it."""
        return self._fragments[fragment].released

    def called_in(self, fragment: int) -> bool:
        """Whether the others wait for a contribution of this replica."""
        return self._fragments[fragment].called_in

    def means(self, fragment: int) -> m.Means | None:
        """The replicas' means of what triggers go by, None when nobody has told any since the last commit."""
        f = self._fragments[fragment]
        return f.means if f.means and f.record and f.means.version == f.record.version else None

    @property
    def reset(self) -> bool:
        """Whether any fragment still waits for the state that it starts anew from."""
        return any(f.reset for f in self._fragments)

    def reset_in(self, fragment: int) -> bool:
        """Whether pending work of that fragment is void: pass it on when a fetched state is installed."""
        return self._fragments[fragment].reset

    def serves(self, fragment: int) -> m.Record | None:
        """The record to serve to a peer that fetches; None when this replica is no source (I5)."""
        f = self._fragments[fragment]
        return None if f.unhealed or f.reset or f.installing else f.record

    def install(self, record: m.Record) -> bool:
        """Whether a fetched state may be installed. If so, do it and answer with `fetched` or `fetch_failed`.

        The coordinator must have named it on this connection, and it must be the one wanted or news: another one may be
        of another branch, or older than what is held. Until the answer nothing is said of what this replica holds.
        """
        f = self._fragments[record.fragment]
        if f.fetching is None or record.position not in f.told:
            return False
        f.installing = record.position == f.fetching.position or (f.record is None or record.version > f.record.version)
        return f.installing

    def fetching(self, fragment: int) -> bool:
        """Whether a fetch is under way (I5: nobody unhealed votes)."""
        return self._fragments[fragment].fetching is not None

    @property
    def complete(self) -> bool:
        """Whether every fragment has a committed state, of whatever version."""
        return all(f.record is not None for f in self._fragments)

    @property
    def ready(self) -> bool:
        """Whether every fragment has the committed state."""
        return self.complete and not any(f.fetching for f in self._fragments)

    @property
    def may_train(self) -> bool:
        """Whether training can begin: every fragment has a committed state, and one of them the newest. The others
        catch up beside it: that all of them are there at one moment may never happen."""
        return self.complete and not all(f.fetching for f in self._fragments)

    # ------------------------------------------------------------ connection

    def hello(self) -> m.Hello:
        """The first message of a connection: all that this replica is, holds and knows."""
        newcomer = self.incarnation == 0
        sound = [f for f in self._fragments if f.record is not None and not f.unhealed and not f.reset]
        held = [] if newcomer else sound
        for f in self._fragments:
            f.offered, f.unsure = f in held, len(held) < len(self._fragments)
        first = self._fragments[0].record
        return greeting(
            self.identity,
            held,
            incarnation=self.incarnation,
            epoch=self.epoch,
            fresh=not any(f.record for f in self._fragments),
            inner_step=first.inner_step if first else 0,
            roster=self.roster,
            gone=self.gone,
            adopted_by=self._adopted_by,
            lease=self.lease,
            done=first.done if first else (),
            share=self.plan if first is not None and self.plan.version == first.version + 1 else NO_PLAN,
            checkpoint=None if self.complete else self.checkpoint,
        )

    def connect(self) -> list[ReplicaEffect]:
        """A connection is open. The hello waits until it is known what this replica holds."""
        self.connected, self.welcomed, self._greeted, self.lease.asked = True, False, False, False
        for f in self._fragments:
            # The coordinator may be another one, on another branch: what it wants fetched it says anew.
            f.fetching, f.told = None, []
        return self._greet()

    def _greet(self) -> list[ReplicaEffect]:
        self._greeted = not any(f.installing for f in self._fragments)
        return [Send(self.hello())] if self._greeted else []

    def disconnect(self) -> list[ReplicaEffect]:
        """The connection is lost: the trainer goes on alone; contributions and what is prepared stay."""
        self.connected = self.welcomed = False
        effects: list[ReplicaEffect] = []
        for index, f in enumerate(self._fragments):
            effects += self._stop(index, keep_prepared=True)
            f.members, f.called_in, f.released = (), False, True
        return effects

    # ------------------------------------------------------------ the trainer

    def propose(self, contribution: m.Contribution, *, now: bool = False) -> list[ReplicaEffect]:
        """Step 1. A contribution to another version than the held one, or beside one outstanding, is dropped.

        ``now``: the others shall be called in.
        """
        f = self._fragments[contribution.fragment]
        if f.contribution is not None or f.fetching is not None or f.unhealed or f.reset:
            return []
        if f.record is None or f.record.version != contribution.version or not self._may_offer(contribution):
            return []
        f.contribution, f.called_in, f.released, f.offered = contribution, False, not self.welcomed, False
        f.now = now
        return self._offer()

    def _may_offer(self, c: m.Contribution) -> bool:
        """Whether it holds the units that ``c`` has used. COVER: of a global batch, the newest plan's share."""
        if c.fragment or self.identity.samples is None or self.identity.samples.global_batch is None:
            return self.lease.covers(c.ranges)
        plan = self.plan
        return (c.version + 1, c.plan, c.ranges) == (plan.version, plan.plan, plan.units)

    def leave(self) -> list[ReplicaEffect]:
        """From now on nobody waits for this replica."""
        self.leaving = True
        return [Send(m.Leaving())] if self.welcomed else []

    def ask(self) -> list[ReplicaEffect]:
        """The trainer will soon have used all its units."""
        return self.lease.ask() if self.welcomed else []

    # ------------------------------------------------------------ copies for a replacement

    def copied(self, serial: int, versions: tuple[int, ...]) -> list[ReplicaEffect]:
        """A copy of this replica, based on these versions of the fragments, can be fetched from here."""
        self._copy = m.Copied(serial, versions)
        return [Send(self._copy)] if self.welcomed else []

    def keeps(self, order: m.Keep) -> list[ReplicaEffect]:
        """The copy that was to be kept is here."""
        return [Send(m.Keeps(order.incarnation_id, order.serial))] if self.welcomed else []

    # ------------------------------------------------------------ the reducer and the fetcher

    def reduced(self, fragment: int, attempt: int, digest: str, rows: list[list[int]]) -> list[ReplicaEffect]:
        """Step 4: the reduction ended; ``rows`` holds each member's last step, in rank order."""
        f = self._fragments[fragment]
        q = f.quorum
        if q is None or q.attempt != attempt or f.record is None:
            return self.reduce_failed(fragment, attempt, reason="the attempt is over")
        agreed, record = agree(f.record, q, f.members, rows, digest)
        f.quorum, f.prepared = None, PreparedResult(attempt, agreed, record)
        return [Send(m.Prepared(fragment, attempt, agreed))] if self.welcomed else []

    def reduce_failed(self, fragment: int, attempt: int, *, reason: str, peer: str = "") -> list[ReplicaEffect]:
        """The reduction failed here, or was stopped: then the coordinator learns that the reducer is free again."""
        f = self._fragments[fragment]
        if f.quorum is not None and f.quorum.attempt == attempt:
            f.quorum = None
        return [Send(m.Failed(fragment, attempt, reason, peer))] if self.welcomed else []

    def damaged(self, fragment: int, attempt: int, *, reason: str) -> list[ReplicaEffect]:
        """The held state is not what it was: it is served to nobody, and nothing is proposed, until it is fetched."""
        f = self._fragments[fragment]
        if f.quorum is None or f.quorum.attempt != attempt:
            return self.reduce_failed(fragment, attempt, reason=reason)
        f.unhealed = True
        failed = self.reduce_failed(fragment, attempt, reason=reason)
        return [*failed, *self._lacks(fragment)] if self.welcomed else []

    def fetched(self, record: m.Record) -> list[ReplicaEffect]:
        """A fetched state is installed: it is what this replica holds, whatever has happened meanwhile.

        COUNT: it tells whether the outstanding contribution was counted. Anything else that it says of this incarnation
        was another process' (two coordinators without memory may give one number twice): then this one is reborn.
        """
        f = self._fragments[record.fragment]
        assert f.installing
        mine = self._is_mine(f, record)
        wanted = f.fetching if f.fetching and f.fetching.position != record.position else None
        f.installing, f.under_way, f.fetching, f.told = False, False, wanted, [wanted.position] if wanted else []
        offered = f.contribution
        f.record, f.contribution, f.prepared = record, None, None
        if self.incarnation == 0:  # given up meanwhile
            f.reset = True
            return self._answer(None)
        if not mine:
            return self._die("another process has had this incarnation too")
        f.released = f.unhealed = f.reset = False
        settled = self.lease.settle(record, offered, counted=self.counted_step(record))
        return [*settled, *self._answer(m.Holds(record.position)), *self._fetch(f)]

    def fetch_failed(self, fragment: int) -> list[ReplicaEffect]:
        """No source had a state that is wanted, or it could not be installed."""
        f = self._fragments[fragment]
        wanted, f.fetching, f.installing, f.under_way = f.fetching is not None, None, False, False
        if not wanted:  # a fetch of an earlier connection: an attempt may run by now
            return self._answer(None)
        f.members = ()
        return self._answer(m.Lacks(fragment))

    def _is_mine(self, f: FragmentState, record: m.Record) -> bool:
        """FREEZE: besides what the held state counts, only the one outstanding contribution can be counted."""
        step = self.counted_step(record)
        if f.record is None or f.reset:
            return step == 0
        known = [self.counted_step(f.record)] + ([f.contribution.last_step] if f.contribution else [])
        return step in known

    def _answer(self, message: m.FromReplica | None) -> list[ReplicaEffect]:
        """What follows an install: the hello that waited for it, or ``message``."""
        if self.welcomed:
            return [Send(message)] if message else []
        return self._greet() if self.connected and not self._greeted else []

    # ------------------------------------------------------------ messages

    def receive(self, message: m.FromCoordinator) -> list[ReplicaEffect]:
        """A message arrived."""
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.Refuse(kind="gone", reason=reason):
                return self._die(reason)
            case m.Refuse(kind="unreadable", reason=reason) if self.incarnation:
                return [Notice(reason)]  # It was let in before: it trains on, and comes again.
            case m.Refuse(reason=reason):
                return [GiveUp(reason)]
            case m.Restore(incarnation=incarnation, roster=roster) if not self.complete:
                self.incarnation = incarnation
                self._learn(roster, ())
                return [RestoreCheckpoint()]
            case m.Hold(text=text):
                return [Notice(text)]
            case _ if not self.welcomed:
                return []
            case m.RosterUpdate():
                self._learn(message.known, message.gone)
                return []
            case m.Start():
                return self._begin(message)
            case m.Behind():
                return self._behind(message)
            case m.CallIn(fragment=index, version=version):
                f = self._fragments[index]
                f.called_in = f.contribution is None and f.record is not None and f.record.version == version - 1
                return []
            case m.Means(fragment=index):
                self._fragments[index].means = message
                return []
            case m.TrainOn(fragment=index):
                self._fragments[index].released = True
                return []
            case m.Void(fragment=index):
                f = self._fragments[index]
                f.contribution, f.prepared = None, None
                return self._stop(index)
            case m.Quorum():
                return self._quorum(message)
            case m.Abort(fragment=index, attempt=attempt):
                f = self._fragments[index]
                if f.prepared and f.prepared.attempt == attempt:
                    f.prepared = None
                    return [StopReduce(index, attempt)]
                return self._stop(index) if f.quorum and f.quorum.attempt == attempt else []
            case m.Commit():
                return self._commit(message)
            case m.Grant():
                return self.lease.granted(message)
            case m.Plan():
                return self._take_plan(message)
            case m.Keep():
                return [KeepCopy(message)]
            case m.Inherit():
                self.lease.held = union(self.lease.held, message.ranges)
                return [InheritWork(message)]
        return []

    def _take_plan(self, plan: m.Plan) -> list[ReplicaEffect]:
        """PLAN. What is outstanding under an older plan fits the new one too, or is free: extended, or dropped (OWN).

        FREEZE's one exception: none is issued while an attempt is undecided, so that was aborted.
        """
        f = self._fragments[0]
        if f.record is None or plan.version != f.record.version + 1:  # TIE
            return []
        self.plan = plan
        planned, c = Planned(plan.version, plan.plan, plan.units, plan.ended), f.contribution
        if c is None or c.plan == plan.plan:
            return [planned]
        effects = self._stop(0)
        f.prepared, f.contribution = None, None
        if c.ranges != plan.units:
            return [*effects, planned]
        f.contribution, f.offered = replace(c, plan=plan.plan), False
        return [*effects, planned, *self._offer()]

    def _welcome(self, message: m.Welcome) -> list[ReplicaEffect]:
        if message.epoch < self.epoch:
            return [Disconnect(f"a coordinator of epoch {message.epoch} answers, the job is at {self.epoch}")]
        self.epoch, self.incarnation, self.welcomed = message.epoch, message.incarnation, True
        self._learn(message.roster, message.gone)
        for f in self._fragments:
            f.released = False
        first, put_back, self._put_back = self._fragments[0].record, self._put_back, False
        settled = self.lease.settle(first) if first is not None and put_back else []
        copy = [Send(self._copy)] if self._copy is not None else []
        if self.lease.wants:  # that there was nothing to grant was said on another connection, and so was what it asked
            settled.append(Granted((), out_of_units=False))
        return [*settled, *self._offer(), *copy, *([Send(m.Leaving())] if self.leaving else [])]

    def _offer(self) -> list[ReplicaEffect]:
        """Step 1 for the contributions that are not known on this connection yet."""
        effects: list[ReplicaEffect] = []
        for f in self._fragments:
            sound = not f.unsure and not f.unhealed and f.fetching is None
            if self.welcomed and f.contribution is not None and not f.offered and sound:
                f.offered = True
                effects.append(Send(m.Propose(f.contribution, f.now, self.lease.wants)))
        return effects

    def _learn(self, known: tuple[m.IncarnationId, ...], gone: tuple[m.IncarnationId, ...]) -> None:
        for replica, incarnation in gone:
            self.gone[replica] = max(incarnation, self.gone.get(replica, 0))
        for replica, incarnation in known:
            self.roster[replica] = max(incarnation, self.roster.get(replica, 0))
        self.roster = {r: i for r, i in self.roster.items() if not m.is_gone((r, i), self.gone)}

    def _die(self, reason: str) -> list[ReplicaEffect]:
        self.incarnation, self.welcomed, self.lease.held, self.plan, self._copy = 0, False, (), NO_PLAN, None
        effects: list[ReplicaEffect] = []
        for index, f in enumerate(self._fragments):
            effects += self._stop(index)
            f.contribution = f.prepared = f.fetching = None
            f.reset, f.unhealed, f.called_in, f.told = f.record is not None, False, False, []
        return [*effects, Reset(reason)]

    def _begin(self, start: m.Start) -> list[ReplicaEffect]:
        at = start.position
        f = self._fragments[at.fragment]
        reset = f.reset
        f.record, f.fetching = m.Record(at.fragment, at.version, at.chain, start.inner_step, done=start.done), None
        f.reset = f.unhealed = f.released = f.unsure = False
        f.contribution = f.prepared = None  # of another cold start, that came to nothing
        return [Begin(f.record, reset), *self.lease.settle(f.record)]

    def _behind(self, message: m.Behind) -> list[ReplicaEffect]:
        f = self._fragments[message.position.fragment]
        effects = self._stop(message.position.fragment)
        f.prepared, f.called_in = None, False
        at, known = message.position, f.record.position if f.record else None
        f.told = [*f.told[1 - HISTORY :], at] if f.under_way else [at]
        f.unhealed = f.unhealed or message.heal
        for other in self._fragments:  # who is told to fetch is no initial source
            other.unsure = False
        if at == known and not f.unhealed and not f.reset:
            f.fetching, f.offered = None, False
            return [*effects, Send(m.Holds(at)), *self._offer()]
        f.fetching = Fetch(at, message.sources, message.heal)
        if not message.sources:  # the coordinator names some when there are; nobody knows when that is
            f.released = True
            if f.record is None:
                effects.append(Notice(f"nobody who is here holds version {at.version}: waiting for one who does"))
        return [*effects, *self._offer(), *self._fetch(f)]

    def _fetch(self, f: FragmentState) -> list[ReplicaEffect]:
        if f.fetching is None or f.under_way or not f.fetching.sources:
            return []
        f.under_way = True
        return [f.fetching]

    def latest_fetch(self, fragment: int) -> Fetch | None:
        """The fetch to do now: its target and sources may have moved on since the effect."""
        return self._fragments[fragment].fetching

    def _quorum(self, q: m.Quorum) -> list[ReplicaEffect]:
        f = self._fragments[q.fragment]
        effects = self._stop(q.fragment)
        f.prepared = None
        if q.joined or q.left:
            f.members = tuple(sorted((set(f.members) - set(q.left)) | set(q.joined)))
        own = (self.identity.replica, self.incarnation)
        fits = len(f.members) == q.size and f.members[q.rank : q.rank + 1] == (own,)
        c = f.contribution if f.contribution and f.contribution.last_step == q.last_step else None
        fits = fits and c is not None and c.plan == q.plan and (bool(q.outlier) or contains(q.ranges, c.ranges))
        if not fits or c is None or f.record is None or q.version != f.record.version + 1 or f.fetching:
            failed = m.Failed(q.fragment, q.attempt, "the quorum does not fit what this replica holds", "")
            return [*effects, Send(failed), *self._lacks(q.fragment)]
        f.quorum, f.called_in, f.released = q, False, False
        return [*effects, StartReduce(q, f.members, excluded(c) if q.outlier else c)]

    def _commit(self, message: m.Commit) -> list[ReplicaEffect]:
        f = self._fragments[message.fragment]
        p = f.prepared
        if p is None or (p.attempt, p.digest, p.record.chain) != (
            message.attempt,
            message.digest,
            message.chain,
        ):
            known = f.record is not None and f.record.position == m.Position(
                message.fragment, message.version, message.chain
            )
            return [] if known or f.fetching else self._lacks(message.fragment)
        settled = self.lease.settle(p.record, f.contribution, counted=self.counted_step(p.record))
        f.record, f.prepared, f.contribution = p.record, None, None
        f.called_in = f.released = False
        return [CommitPrepared(p.attempt, p.record), *settled]

    def _lacks(self, fragment: int) -> list[ReplicaEffect]:
        """It does not hold what it should; both ends begin with an empty member list again."""
        effects = self._stop(fragment)
        self._fragments[fragment].members = ()
        return [*effects, Send(m.Lacks(fragment))]

    def _stop(self, fragment: int, *, keep_prepared: bool = False) -> list[ReplicaEffect]:
        f = self._fragments[fragment]
        q, f.quorum = f.quorum, None
        if q is not None:
            return [StopReduce(fragment, q.attempt)]
        if f.prepared is not None and not keep_prepared:
            return [StopReduce(fragment, f.prepared.attempt)]
        return []
