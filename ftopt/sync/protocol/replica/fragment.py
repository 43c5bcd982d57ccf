"""One fragment of a replica: what it holds, what it is at, and the transitions between these states.

The states are in `ftopt.sync.protocol.replica.states`. A transition is a method; each says what holds afterwards. They
are the only writers of what a state carries: `FragmentState.quorum` is set exactly in `State.REDUCING`,
`FragmentState.prepared` in `State.PREPARED`, `FragmentState.wanted` in `State.FETCHING`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import contains
from ftopt.sync.protocol.limits import HISTORY
from ftopt.sync.protocol.messages import excluded
from ftopt.sync.protocol.replica.effects import Excluded, Fetch, ReplicaEffect, Send, StartReduce, StopReduce
from ftopt.sync.protocol.replica.prepared import PreparedResult
from ftopt.sync.protocol.replica.states import Call, Offer, Soundness, State, Transfer


@dataclass(slots=True)
class FragmentState:
    """One fragment's variables in a replica. Others read; `ftopt.sync.protocol.replica.machine` calls transitions."""

    index: int
    state: State = State.NOTHING
    record: m.Record | None = None
    """Of the committed state; None in `State.NOTHING`, and in `State.FETCHING` before the first state."""
    offer: Offer | None = None
    """Set in `State.OFFERED`, `State.REDUCING` and `State.PREPARED`; maybe in `State.FETCHING`."""
    quorum: m.Quorum | None = None
    prepared: PreparedResult | None = None
    wanted: Fetch | None = None
    """The fetch to do now: its target and sources may have moved on since the shell was asked."""
    soundness: Soundness = Soundness.FIRM
    transfer: Transfer = Transfer.NONE
    call: Call = Call.NONE
    named: list[m.Position] = field(default_factory=list)
    """States that the coordinator named on this connection since the transfer began: only these are installed."""
    members: tuple[m.IncarnationId, ...] = ()
    """Of the last quorum on this connection: the next one tells the changes."""
    last_means: m.Means | None = None
    """Of the replicas' readings, the last that were received, of any version."""

    # ------------------------------------------------------------ questions

    @property
    def position(self) -> m.Position | None:
        """Of the committed state."""
        return self.record.position if self.record is not None else None

    @property
    def contribution(self) -> m.Contribution | None:
        """The outstanding contribution."""
        return self.offer.contribution if self.offer is not None else None

    @property
    def outstanding(self) -> bool:
        """Whether a contribution waits for its fate."""
        return self.offer is not None

    @property
    def called_in(self) -> bool:
        """Whether the others wait for a contribution of this replica."""
        return self.call is Call.CALL_IN

    @property
    def released(self) -> bool:
        """Whether the trainer shall not wait for the outstanding contribution."""
        return self.call is Call.TRAIN_ON

    @property
    def fetching(self) -> bool:
        """Whether another state is wanted (I5: no replica votes on a state that it does not hold)."""
        return self.state is State.FETCHING

    @property
    def installing(self) -> bool:
        """Whether a fetched state is being installed, so that it is not known what is held."""
        return self.transfer is Transfer.INSTALLING

    @property
    def sound(self) -> bool:
        """Whether the held state, if there is one, is the job's as far as this replica knows."""
        return self.soundness in (Soundness.FIRM, Soundness.TENTATIVE)

    @property
    def reset(self) -> bool:
        """Whether pending work on the held state is void: pass it on when a fetched state is installed."""
        return self.soundness is Soundness.RESET

    @property
    def means(self) -> m.Means | None:
        """The replicas' means of what triggers go by, None when there are none of the held version."""
        means, record = self.last_means, self.record
        return means if means is not None and record is not None and means.version == record.version else None

    def serves(self) -> m.Record | None:
        """The record to serve to a peer that fetches; None when this replica is no source (I5)."""
        return self.record if self.sound and not self.installing else None

    def may_offer(self, version: int) -> bool:
        """Whether a contribution that builds on ``version`` can be offered: the state is held, and sound."""
        if self.state is not State.HOLDS or not self.sound:
            return False
        return self.record is not None and self.record.version == version

    def fits(self, quorum: m.Quorum, own: m.IncarnationId) -> bool:
        """Whether ``quorum`` is about what this replica, ``own``, holds and has offered."""
        c, members = self.contribution, self.members
        if self.state is not State.OFFERED or c is None or self.record is None:
            return False
        if len(members) != quorum.size or members[quorum.rank : quorum.rank + 1] != (own,):
            return False
        meant = (quorum.version, quorum.last_step, quorum.plan) == (self.record.version + 1, c.last_step, c.plan)
        return meant and (quorum.excludes or contains(quorum.ranges, c.ranges))

    def expects(self, counted: int, held: int) -> bool:
        """FREEZE: whether a fetched state may count this replica's steps up to ``counted``, when the held state counts
        them up to ``held``. Only the outstanding contribution can be counted besides: with its steps, or as an outlier
        without them, up to where they begin (past any that this replica has dropped)."""
        known = {0 if self.record is None or self.reset else held}
        if (c := self.contribution) is not None:
            known |= {c.last_step, excluded(c).last_step}
        return counted in known

    # ------------------------------------------------------------ transitions

    def _become(self, state: State) -> None:
        self.state, self.quorum, self.prepared, self.wanted = state, None, None, None

    def become_holding(self, record: m.Record) -> None:
        """HOLDS, from any state: Start, Commit, a fetched state, a checkpoint.

        ``record`` is the committed state and sound. Nothing is outstanding: what was is in it, or void, or the state
        tells (COUNT). There is no call about a round until the coordinator names this version.
        """
        self.record, self.offer, self.soundness, self.call = record, None, Soundness.FIRM, Call.NONE
        self._become(State.HOLDS)

    def become_offered(self, contribution: m.Contribution, *, now: bool = False) -> None:
        """OFFERED, from HOLDS: the trainer proposes.

        The contribution is immutable from now on, and stays until `become_holding` or `free` (FREEZE): an abort, a lost
        connection and a new coordinator leave it as it is. The coordinator has not been told yet.
        """
        assert self.state is State.HOLDS
        self.offer, self.call = Offer(contribution, now), Call.NONE
        self._become(State.OFFERED)

    def become_reducing(self, quorum: m.Quorum) -> None:
        """REDUCING, from OFFERED: the quorum `fits`. The trainer waits for the decision."""
        assert self.state is State.OFFERED
        self.call = Call.NONE
        self._become(State.REDUCING)
        self.quorum = quorum

    def become_prepared(self, result: PreparedResult) -> None:
        """PREPARED, from REDUCING: all that a commit needs is here, and stays when the connection is lost.

        It ends with the Commit that names it, with Abort, and with the next Quorum or Behind.
        """
        assert self.state is State.REDUCING
        self._become(State.PREPARED)
        self.prepared = result

    def become_fetching(self, wanted: Fetch) -> None:
        """FETCHING, from any state: the committed state is another one than what is held, or that is in doubt.

        No attempt is under way (`stop` it first); nothing is proposed. The record and the outstanding contribution stay
        as they are until the wanted state, or a newer one, is installed.
        """
        self._become(State.FETCHING)
        self.wanted = wanted

    def become_reset(self) -> list[ReplicaEffect]:
        """HOLDS or NOTHING, from any state: the incarnation is gone; the next one starts from what is held."""
        effects = self.stop()
        self.offer, self.call, self.named = None, Call.NONE, []
        self.soundness = Soundness.RESET if self.record is not None else Soundness.FIRM
        self._rest()
        return effects

    def end_fetch(self) -> None:
        """FETCHING to what it was before: OFFERED, HOLDS or NOTHING. Nothing is wanted; a transfer may still run."""
        if self.state is State.FETCHING:
            self._rest()

    def stop(self) -> list[ReplicaEffect]:
        """REDUCING or PREPARED to OFFERED: the attempt is over, and its contribution stays outstanding (FREEZE)."""
        attempt = self.quorum or self.prepared
        if attempt is None:
            return []
        self._become(State.OFFERED)
        return [StopReduce(self.index, attempt.attempt)]

    def free(self) -> None:
        """OFFERED to HOLDS: the contribution is in no attempt and never will be (Void, PLAN). FETCHING stays."""
        self.offer, self.call = None, Call.NONE
        if self.state is not State.FETCHING:
            self._rest()

    def renumber(self, plan: int) -> None:
        """PLAN: the outstanding contribution, which is in no attempt, is one of this plan; it is proposed anew."""
        assert self.offer is not None
        self.offer = Offer(replace(self.offer.contribution, plan=plan), self.offer.now)

    def _rest(self) -> None:
        held = State.HOLDS if self.record is not None else State.NOTHING
        self._become(held if self.offer is None else State.OFFERED)

    # ------------------------------------------------------------ soundness

    def doubt(self) -> None:
        """The held state is in doubt, if it is not even void."""
        if self.soundness is not Soundness.RESET:
            self.soundness = Soundness.IN_DOUBT

    def tell(self, *, held: bool, all_held: bool) -> None:
        """A hello tells of what is ``held`` here, with its contribution; ``all_held``: and of all other fragments."""
        if self.offer is not None:
            self.offer.known = held
        if self.sound:
            self.soundness = Soundness.FIRM if all_held else Soundness.TENTATIVE

    def confirm(self) -> None:
        """No cold start will replace what is held."""
        if self.soundness is Soundness.TENTATIVE:
            self.soundness = Soundness.FIRM

    def propose(self, wants: int) -> list[ReplicaEffect]:
        """Step 1: offers the outstanding contribution, unless the coordinator knows it on this connection already."""
        offer = self.offer
        if offer is None or offer.known or self.state is not State.OFFERED or self.soundness is not Soundness.FIRM:
            return []
        offer.known = True
        return [Send(m.Propose(offer.contribution, offer.now, wants))]

    def propose_anew(self) -> None:
        """The coordinator does not know the outstanding contribution any more."""
        if self.offer is not None:
            self.offer.known = False

    # ------------------------------------------------------------ the connection, and calls

    def connected(self) -> None:
        """A connection is open. Its coordinator may be another one, on another branch: it names anew what to fetch."""
        self.end_fetch()
        self.named = []

    def disconnected(self) -> list[ReplicaEffect]:
        """The connection is lost: a reduction ends; a contribution and a prepared result stay; the trainer goes on."""
        self.members, self.call = (), Call.TRAIN_ON if self.offer is not None else Call.NONE
        return self.stop() if self.state is State.REDUCING else []

    def hush(self) -> None:
        """No call about a round holds any longer."""
        self.call = Call.NONE

    def receive(self, message: m.CallIn | m.Means | m.TrainOn | m.Void | m.Abort) -> list[ReplicaEffect]:
        """A message about this fragment that depends on nothing else."""
        match message:
            case m.CallIn(version=version) if self.offer is None:  # else it has crossed a proposal
                fits = self.record is not None and self.record.version == version - 1  # else it has crossed a commit
                self.call = Call.CALL_IN if fits else Call.NONE
            case m.Means():
                self.last_means = message
            case m.TrainOn():
                self.train_on()
            case m.Void(outlier=outlier):
                effects = self.stop()
                if outlier and self.offer is not None and self.record is not None:
                    effects.append(Excluded(self.index, self.record.version + 1, outlier, void=True))
                self.free()
                return effects
            case m.Abort(attempt=attempt):
                under_way = self.quorum or self.prepared
                return self.stop() if under_way is not None and under_way.attempt == attempt else []
        return []

    def take_quorum(self, quorum: m.Quorum, own: m.IncarnationId) -> list[ReplicaEffect]:
        """Step 3: a quorum that names this replica, ``own``; the reduction starts if the quorum `fits`."""
        effects = self.stop()
        if quorum.joined or quorum.left:
            self.members = tuple(sorted((set(self.members) - set(quorum.left)) | set(quorum.joined)))
        c = self.contribution
        if c is None or not self.fits(quorum, own):
            reason = "the quorum does not fit what this replica holds"
            return [*effects, Send(m.Failed(self.index, quorum.attempt, reason, "")), *self.lacks()]
        self.become_reducing(quorum)
        return [*effects, StartReduce(quorum, self.members, excluded(c) if quorum.excludes else c)]

    def lacks(self) -> list[ReplicaEffect]:
        """The replica does not hold what it should; both ends begin with an empty member list again."""
        self.members = ()
        return [*self.stop(), Send(m.Lacks(self.index))]

    def train_on(self) -> None:
        """The trainer shall not wait for the outstanding contribution."""
        if self.offer is not None:
            self.call = Call.TRAIN_ON

    # ------------------------------------------------------------ fetches

    def name(self, position: m.Position) -> None:
        """The coordinator names the state to fetch: until it is here no contribution is waited for."""
        if self.called_in:
            self.call = Call.NONE
        self.named = [*self.named[1 - HISTORY :], position] if self.transfer is not Transfer.NONE else [position]

    def start_transfer(self) -> list[ReplicaEffect]:
        """Has the shell fetch what is wanted, unless it does so already or there are no sources."""
        if self.wanted is None or self.transfer is not Transfer.NONE or not self.wanted.sources:
            return []
        self.transfer = Transfer.RUNNING
        return [self.wanted]

    def may_install(self, record: m.Record) -> bool:
        """Whether a fetched state is named on this connection, and the one wanted or newer than what is held."""
        if self.wanted is None or record.position not in self.named:
            return False
        return record.position == self.wanted.position or self.record is None or record.version > self.record.version

    def install(self, record: m.Record) -> bool:
        """Whether a fetched state `may_install`; if so it is being installed from now on."""
        may = self.may_install(record)
        if may:
            self.transfer = Transfer.INSTALLING
        return may

    def installed(self, record: m.Record) -> None:
        """HOLDS; or FETCHING still, when another state has come to be wanted meanwhile."""
        assert self.installing
        later = self.wanted if self.wanted is not None and self.wanted.position != record.position else None
        self.transfer, self.named = Transfer.NONE, []
        self.become_holding(record)
        if later is not None:
            self.named = [later.position]
            self.become_fetching(later)

    def not_fetched(self) -> bool:
        """The transfer came to nothing; whether its state was still wanted."""
        wanted, self.transfer = self.state is State.FETCHING, Transfer.NONE
        self.end_fetch()
        return wanted
