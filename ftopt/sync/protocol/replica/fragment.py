"""One fragment of a replica: what it holds, its state, and the transitions between states.

The states are in `ftopt.sync.protocol.replica.states`. A transition is a method, whose docstring says what holds
afterwards. Only transitions write a state's data: `FragmentState.quorum` is set exactly in `State.REDUCING`,
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
    """One fragment's variables in a replica. Only `ftopt.sync.protocol.replica.machine` calls transitions."""

    index: int
    state: State = State.NOTHING
    record: m.Record | None = None
    """The committed state's record; None in `State.NOTHING`, and in `State.FETCHING` before the first state."""
    offer: Offer | None = None
    """Set in `State.OFFERED`, `State.REDUCING` and `State.PREPARED`; maybe in `State.FETCHING`."""
    quorum: m.Quorum | None = None
    prepared: PreparedResult | None = None
    wanted: Fetch | None = None
    """The fetch to do now; its target and sources may have changed since the shell was asked."""
    soundness: Soundness = Soundness.FIRM
    transfer: Transfer = Transfer.NONE
    call: Call = Call.NONE
    named: list[m.Position] = field(default_factory=list)
    """Positions that the coordinator named on this connection since the transfer began; only these are installed."""
    members: tuple[m.IncarnationId, ...] = ()
    """The members of the last quorum on this connection; the next one has only the changes."""
    last_means: m.Means | None = None
    """The last means of readings received, of any version."""

    # ------------------------------------------------------------ questions

    @property
    def position(self) -> m.Position | None:
        """The committed state's position."""
        return self.record.position if self.record is not None else None

    @property
    def contribution(self) -> m.Contribution | None:
        """The outstanding contribution."""
        return self.offer.contribution if self.offer is not None else None

    @property
    def outstanding(self) -> bool:
        """Whether a contribution is outstanding."""
        return self.offer is not None

    @property
    def called_in(self) -> bool:
        """Whether the others wait for a contribution of this replica."""
        return self.call is Call.CALL_IN

    @property
    def released(self) -> bool:
        """Whether the trainer is not to wait for the outstanding contribution."""
        return self.call is Call.TRAIN_ON

    @property
    def fetching(self) -> bool:
        """Whether another state is wanted (I5: no replica votes on a state that it does not hold)."""
        return self.state is State.FETCHING

    @property
    def installing(self) -> bool:
        """Whether a fetched state is being installed, so that the held state is unknown."""
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
        """The means of the replicas' readings; None when there are none of the held version."""
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
        """Whether ``quorum`` is for the version and contribution that this replica, ``own``, holds and has offered."""
        c, members = self.contribution, self.members
        if self.state is not State.OFFERED or c is None or self.record is None:
            return False
        if len(members) != quorum.size or members[quorum.rank : quorum.rank + 1] != (own,):
            return False
        meant = (quorum.version, quorum.last_step, quorum.plan) == (self.record.version + 1, c.last_step, c.plan)
        return meant and (quorum.excludes or contains(quorum.ranges, c.ranges))

    def expects(self, counted: int, held: int) -> bool:
        """FREEZE: whether a fetched state may count this replica's steps up to ``counted``, when the held state counts
        them up to ``held``. Otherwise, only the outstanding contribution can be counted: with its steps, or, as an
        outlier, up to where they begin (past any that this replica has dropped)."""
        known = {0 if self.record is None or self.reset else held}
        if (c := self.contribution) is not None:
            known |= {c.last_step, excluded(c).last_step}
        return counted in known

    # ------------------------------------------------------------ transitions

    def _become(self, state: State) -> None:
        self.state, self.quorum, self.prepared, self.wanted = state, None, None, None

    def become_holding(self, record: m.Record) -> None:
        """HOLDS, from any state: Start, Commit, a fetched state, a checkpoint.

        ``record`` is the committed state and sound. Nothing is outstanding: the contribution is in it, or void, or the
        state tells (COUNT). There is no call about a round until the coordinator names this version.
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

        It ends with the Commit that names the attempt, with Abort, and with the next Quorum or Behind.
        """
        assert self.state is State.REDUCING
        self._become(State.PREPARED)
        self.prepared = result

    def become_fetching(self, wanted: Fetch) -> None:
        """FETCHING, from any state: the committed state differs from the held one, or the held one is in doubt.

        No attempt is under way (`stop` it first); nothing is proposed. The record and the outstanding contribution stay
        as they are until the wanted state, or a newer one, is installed.
        """
        self._become(State.FETCHING)
        self.wanted = wanted

    def become_reset(self) -> list[ReplicaEffect]:
        """HOLDS or NOTHING, from any state: the incarnation is gone; the next one starts from the held state."""
        effects = self.stop()
        self.offer, self.call, self.named = None, Call.NONE, []
        self.soundness = Soundness.RESET if self.record is not None else Soundness.FIRM
        self._rest()
        return effects

    def end_fetch(self) -> None:
        """FETCHING to the state before: OFFERED, HOLDS or NOTHING. Nothing is wanted; a transfer may still run."""
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
        """OFFERED to HOLDS: the contribution is in no attempt and never will be (Void, PLAN). FETCHING remains."""
        self.offer, self.call = None, Call.NONE
        if self.state is not State.FETCHING:
            self._rest()

    def renumber(self, plan: int) -> None:
        """PLAN: moves the outstanding contribution, which is in no attempt, to this plan; it is proposed again."""
        assert self.offer is not None
        self.offer = Offer(replace(self.offer.contribution, plan=plan), self.offer.now)

    def _rest(self) -> None:
        held = State.HOLDS if self.record is not None else State.NOTHING
        self._become(held if self.offer is None else State.OFFERED)

    # ------------------------------------------------------------ soundness

    def doubt(self) -> None:
        """Puts the held state in doubt, unless it is void already."""
        if self.soundness is not Soundness.RESET:
            self.soundness = Soundness.IN_DOUBT

    def tell(self, *, held: bool, all_held: bool) -> None:
        """Notes what a hello reports: ``held``: this fragment's state and contribution; ``all_held``: those of all."""
        if self.offer is not None:
            self.offer.known = held
        if self.sound:
            self.soundness = Soundness.FIRM if all_held else Soundness.TENTATIVE

    def confirm(self) -> None:
        """Notes that no cold start will replace the held state."""
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
        """Makes the outstanding contribution be sent again, since the coordinator does not know it any more."""
        if self.offer is not None:
            self.offer.known = False

    # ------------------------------------------------------------ the connection, and calls

    def connected(self) -> None:
        """Begins a connection. Its coordinator may be another one, on another branch, and names again what to fetch."""
        self.end_fetch()
        self.named = []

    def disconnected(self) -> list[ReplicaEffect]:
        """Ends a connection: a reduction ends; a contribution and a prepared result stay; the trainer goes on."""
        self.members, self.call = (), Call.TRAIN_ON if self.offer is not None else Call.NONE
        return self.stop() if self.state is State.REDUCING else []

    def hush(self) -> None:
        """Clears calls about a round."""
        self.call = Call.NONE

    def receive(self, message: m.CallIn | m.Means | m.TrainOn | m.Void | m.Abort) -> list[ReplicaEffect]:
        """Handles a message that concerns this fragment alone."""
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
        """Reports that the replica does not hold what it should; both ends begin with an empty member list again."""
        self.members = ()
        return [*self.stop(), Send(m.Lacks(self.index))]

    def train_on(self) -> None:
        """Lets the trainer go on without waiting for the outstanding contribution."""
        if self.offer is not None:
            self.call = Call.TRAIN_ON

    # ------------------------------------------------------------ fetches

    def name(self, position: m.Position) -> None:
        """Notes the position that the coordinator names for a fetch: until it is here, no contribution is awaited."""
        if self.called_in:
            self.call = Call.NONE
        self.named = [*self.named[1 - HISTORY :], position] if self.transfer is not Transfer.NONE else [position]

    def start_transfer(self) -> list[ReplicaEffect]:
        """Has the shell fetch the wanted state, unless a fetch runs already or there are no sources."""
        if self.wanted is None or self.transfer is not Transfer.NONE or not self.wanted.sources:
            return []
        self.transfer = Transfer.RUNNING
        return [self.wanted]

    def may_install(self, record: m.Record) -> bool:
        """Whether a fetched state was named on this connection, and is wanted or newer than the held one."""
        if self.wanted is None or record.position not in self.named:
            return False
        return record.position == self.wanted.position or self.record is None or record.version > self.record.version

    def install(self, record: m.Record) -> bool:
        """Begins to install a fetched state if it `may_install`; returns whether it does."""
        may = self.may_install(record)
        if may:
            self.transfer = Transfer.INSTALLING
        return may

    def installed(self, record: m.Record) -> None:
        """HOLDS, after an install; or still FETCHING, if another state is wanted by now."""
        assert self.installing
        later = self.wanted if self.wanted is not None and self.wanted.position != record.position else None
        self.transfer, self.named = Transfer.NONE, []
        self.become_holding(record)
        if later is not None:
            self.named = [later.position]
            self.become_fetching(later)

    def not_fetched(self) -> bool:
        """Ends a failed transfer; returns whether its state is still wanted."""
        wanted, self.transfer = self.state is State.FETCHING, Transfer.NONE
        self.end_fetch()
        return wanted
