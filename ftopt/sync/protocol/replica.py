"""The replica side of the outer-sync protocol: a pure state machine.

Events go in as method calls (a message arrived, the connection was lost, the reduction ended, the trainer proposes); a
list of effects comes out. No sockets, threads or clocks: `ftopt.sync.client` is the shell around it, and the simulator
another one.

Per fragment it holds three things. The *record*: version, chain and COUNT table of the committed state. The
*contribution* that is outstanding (FREEZE): it stays, unchanged, until a commit or a fetched state tells whether it was
counted; abort, disconnect and a new coordinator do not touch it. And what it has *prepared*: the record that a commit
would make current.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the coordinator."""

    message: m.FromReplica


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Reduce ``contribution`` among ``members``; answer with `Replica.reduced` or `Replica.reduce_failed`."""

    quorum: m.Quorum
    members: tuple[m.Mark, ...]
    contribution: m.Contribution


@dataclass(frozen=True, slots=True)
class StopReduce:
    """The attempt is over: stop reducing; its result may be dropped."""

    fragment: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Committed: what was prepared in ``attempt`` is the committed state now, with ``record``."""

    attempt: int
    record: m.Record


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the state at ``position`` from one of ``sources``; answer with `Replica.fetched` or `fetch_failed`."""

    position: m.Position
    sources: tuple[str, ...]
    heal: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """Cold start: the own state is committed as ``record``."""

    record: m.Record


@dataclass(frozen=True, slots=True)
class Reborn:
    """This incarnation is gone: pending work is void; reconnect as a newcomer."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The coordinator refuses this replica for good; the user must act."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop the connection and try again later (EPOCH: a coordinator of the past)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something for the user to read while waiting."""

    text: str


Effect = Send | StartReduce | StopReduce | Adopt | Fetch | Begin | Reborn | GiveUp | Disconnect | Notice


@dataclass(slots=True)
class _Prepared:
    attempt: int
    digest: str
    record: m.Record


@dataclass(slots=True)
class _Fragment:
    record: m.Record | None = None
    contribution: m.Contribution | None = None
    quorum: m.Quorum | None = None
    prepared: _Prepared | None = None
    members: tuple[m.Mark, ...] = ()
    fetching: Fetch | None = None
    called_in: bool = False
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


@dataclass
class Replica:
    """The machine. Public fields are for reading only."""

    identity: Identity
    incarnation: int = 0
    epoch: int = 0
    connected: bool = False
    welcomed: bool = False
    reborn: bool = False
    roster: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fragments = [_Fragment() for _ in range(self.identity.fragments)]

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

    def fetching(self, fragment: int) -> bool:
        """Whether a fetch is under way (I5: nobody unhealed votes)."""
        return self._fragments[fragment].fetching is not None

    @property
    def ready(self) -> bool:
        """Whether every fragment has a committed state."""
        return all(f.record is not None and f.fetching is None for f in self._fragments)

    # ------------------------------------------------------------ connection

    def hello(self) -> m.Hello:
        """The first message of a connection: all that this replica is, holds and knows."""
        newcomer = self.incarnation == 0
        held = [] if newcomer else [f for f in self._fragments if f.record is not None and not _healing(f)]
        return m.Hello(
            protocol=m.PROTOCOL,
            job=self.identity.job,
            replica=self.identity.replica,
            incarnation=self.incarnation,
            rank=self.identity.rank,
            size=self.identity.size,
            epoch=self.epoch,
            address=self.identity.address,
            initial="" if self.reborn else self.identity.initial,
            fragments=self.identity.fragments,
            lines=self.identity.lines,
            settings=self.identity.settings,
            positions=tuple(f.record.position for f in held if f.record),
            contributions=tuple(f.contribution for f in held if f.contribution),
            prepared=tuple(
                m.PreparedMark(p.record.fragment, p.attempt, p.record.version, p.digest)
                for p in (f.prepared for f in held)
                if p
            ),
            roster=tuple(sorted(self.roster.items())),
            gone=tuple(sorted(self.gone.items())),
            inner_step=self._fragments[0].record.inner_step if held and self._fragments[0].record else 0,
        )

    def connect(self) -> list[Effect]:
        """A connection is open."""
        self.connected, self.welcomed = True, False
        return [Send(self.hello())]

    def disconnect(self) -> list[Effect]:
        """The connection is lost: the trainer goes on alone; contributions and what is prepared stay."""
        self.connected = self.welcomed = False
        effects: list[Effect] = []
        for index, f in enumerate(self._fragments):
            effects += self._stop(index, keep_prepared=True)
            f.members, f.called_in, f.released = (), False, True
        return effects

    # ------------------------------------------------------------ the trainer

    def propose(self, contribution: m.Contribution) -> list[Effect]:
        """Step 1. A contribution to another version than the held one, or beside one outstanding, is dropped."""
        f = self._fragments[contribution.fragment]
        if f.contribution is not None or f.fetching is not None or self.reborn:
            return []
        if f.record is None or f.record.version != contribution.version:
            return []
        f.contribution, f.called_in, f.released = contribution, False, not self.welcomed
        return [Send(m.Propose(contribution))] if self.welcomed else []

    def leave(self) -> list[Effect]:
        """From now on nobody waits for this replica."""
        return [Send(m.Leaving())] if self.welcomed else []

    # ------------------------------------------------------------ the reducer and the fetcher

    def reduced(self, fragment: int, attempt: int, digest: str, rows: list[list[int]]) -> list[Effect]:
        """Step 4: the reduction ended; ``rows`` holds each member's last step, in rank order."""
        f = self._fragments[fragment]
        q = f.quorum
        if q is None or q.attempt != attempt or f.record is None:
            return []
        counted = {(name, life): step for name, life, step in f.record.counted}
        dropped = dict(q.drop)
        counted = {mark: step for mark, step in counted.items() if not m.is_gone(mark, dropped)}
        counted |= {mark: row[0] for mark, row in zip(f.members, rows, strict=True)}
        table = tuple(sorted((name, life, step) for (name, life), step in counted.items()))
        inner_step = f.record.inner_step + q.advance
        agreed = hashlib.sha256(f"{digest}|{table}|{inner_step}".encode()).hexdigest()[:32]
        chain = m.next_chain(f.record.chain, fragment, q.version, agreed)
        record = replace(f.record, version=q.version, chain=chain, inner_step=inner_step, counted=table)
        f.quorum, f.prepared = None, _Prepared(attempt, agreed, record)
        return [Send(m.Prepared(fragment, attempt, agreed))] if self.welcomed else []

    def reduce_failed(self, fragment: int, attempt: int, *, reason: str, peer: str = "") -> list[Effect]:
        """The reduction failed here."""
        f = self._fragments[fragment]
        if f.quorum is None or f.quorum.attempt != attempt:
            return []
        f.quorum = None
        return [Send(m.Failed(fragment, attempt, reason, peer))] if self.welcomed else []

    def fetched(self, record: m.Record) -> list[Effect]:
        """A fetched state is installed: whether an outstanding contribution was counted is known now (COUNT)."""
        f = self._fragments[record.fragment]
        if f.fetching is None:
            return []
        f.fetching, f.record, f.contribution, f.prepared = None, record, None, None
        f.released, self.reborn = False, False
        return [Send(m.Holds(record.position))] if self.welcomed else []

    def fetch_failed(self, fragment: int) -> list[Effect]:
        """No source answered."""
        self._fragments[fragment].fetching = None
        return [Send(m.Lacks(fragment))] if self.welcomed else []

    # ------------------------------------------------------------ messages

    def receive(self, message: m.FromCoordinator) -> list[Effect]:
        """A message arrived."""
        match message:
            case m.Welcome():
                return self._welcome(message)
            case m.Refused(kind="gone", reason=reason):
                return self._die(reason)
            case m.Refused(reason=reason):
                return [GiveUp(reason)]
            case m.Hold(text=text):
                return [Notice(text)]
            case _ if not self.welcomed:
                return []
            case m.Roster():
                self._learn(message.known, message.gone)
                return []
            case m.Start(position=at):
                return self._begin(at)
            case m.Behind():
                return self._behind(message)
            case m.CallIn(fragment=index, version=version):
                f = self._fragments[index]
                f.called_in = (
                    f.contribution is None and f.record is not None and f.record.version == version - 1
                )
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
        return []

    def _welcome(self, message: m.Welcome) -> list[Effect]:
        if message.epoch < self.epoch:
            return [Disconnect(f"a coordinator of epoch {message.epoch} answers, the job is at {self.epoch}")]
        self.epoch, self.incarnation, self.welcomed = message.epoch, message.incarnation, True
        self._learn(message.roster, message.gone)
        for f in self._fragments:
            f.released = False
        # A contribution of the time without connection: the hello did not carry what came after it.
        return [Send(m.Propose(f.contribution)) for f in self._fragments if f.contribution and not f.fetching]

    def _learn(self, known: tuple[m.Mark, ...], gone: tuple[m.Mark, ...]) -> None:
        for replica, incarnation in gone:
            self.gone[replica] = max(incarnation, self.gone.get(replica, 0))
        for replica, incarnation in known:
            self.roster[replica] = max(incarnation, self.roster.get(replica, 0))
        self.roster = {r: i for r, i in self.roster.items() if not m.is_gone((r, i), self.gone)}

    def _die(self, reason: str) -> list[Effect]:
        self.incarnation, self.reborn, self.welcomed = 0, True, False
        effects: list[Effect] = []
        for index, f in enumerate(self._fragments):
            effects += self._stop(index)
            f.contribution = f.prepared = f.fetching = None
        return [*effects, Reborn(reason)]

    def _begin(self, at: m.Position) -> list[Effect]:
        f = self._fragments[at.fragment]
        f.record, self.reborn, f.fetching = m.Record(at.fragment, at.version, at.chain, 0), False, None
        return [Begin(f.record)]

    def _behind(self, message: m.Behind) -> list[Effect]:
        f = self._fragments[message.position.fragment]
        effects = self._stop(message.position.fragment)
        f.prepared, f.called_in = None, False
        known = f.fetching is not None
        f.fetching = Fetch(message.position, message.sources, message.heal)
        return effects if known else [*effects, f.fetching]

    def latest_fetch(self, fragment: int) -> Fetch | None:
        """The fetch to do now: its target and sources may have moved on since the effect."""
        return self._fragments[fragment].fetching

    def _quorum(self, q: m.Quorum) -> list[Effect]:
        f = self._fragments[q.fragment]
        effects = self._stop(q.fragment)
        f.prepared = None
        f.members = tuple(sorted((set(f.members) - set(q.left)) | set(q.joined)))
        own = (self.identity.replica, self.incarnation)
        fits = len(f.members) == q.size and f.members[q.rank : q.rank + 1] == (own,)
        if not fits or f.contribution is None or f.record is None or q.version != f.record.version + 1:
            failed = m.Failed(q.fragment, q.attempt, "the quorum does not fit what this replica holds", "")
            return [*effects, Send(failed), Send(m.Lacks(q.fragment))]
        f.quorum, f.called_in, f.released = q, False, False
        return [*effects, StartReduce(q, f.members, f.contribution)]

    def _commit(self, message: m.Commit) -> list[Effect]:
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
            return [] if known or f.fetching else [Send(m.Lacks(message.fragment))]
        f.record, f.prepared, f.contribution = p.record, None, None
        f.called_in = f.released = False
        return [Adopt(p.attempt, p.record)]

    def _stop(self, fragment: int, *, keep_prepared: bool = False) -> list[Effect]:
        f = self._fragments[fragment]
        q, f.quorum = f.quorum, None
        if q is not None:
            return [StopReduce(fragment, q.attempt)]
        if f.prepared is not None and not keep_prepared:
            return [StopReduce(fragment, f.prepared.attempt)]
        return []


def _healing(f: _Fragment) -> bool:
    return f.fetching is not None and f.fetching.heal
