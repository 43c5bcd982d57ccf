"""The invariants I1 to I6 of ``docs/protocol.md``, checked after each event, on what it changed.

I4 is checked by `tests.simulation.walk` at the end of a history, and by limits on events and ticks. I6 is I1 and I2
with a coordinator that restarts: after a restart with its journal they hold as ever. A history may fork only where two
coordinators have decided one version and one of them is *excused*: it had no memory and went on without a living
replica that it could not hear in time although the rule WAIT was kept, or it decided while a replica followed another
one. Each branch by itself must hold I1, and the fork must be healed at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster.effects import Decided, Replaced
from ftopt.sync.protocol.intervals import Ranges, contains, end, intersect, subtract, union
from ftopt.sync.protocol.replica.effects import COUNTED_AND_GONE, COUNTED_ELSEWHERE
from tests.simulation.host import Content
from tests.simulation.loader import Loader
from tests.simulation.world import Conn, Process, Server, Term, Violation, World


@dataclass(frozen=True, slots=True)
class SimVersion:
    """One committed version as the first replica that held it reports it."""

    parent: str
    version: int
    content: Content


class Checks:
    """What is known of the history so far.

    ``gone``: incarnations that some coordinator has declared gone. ``deciders``: the terms in which a version was
    decided, the first one first. ``excused``: terms that may have forked the history, and why. ``shared``: whether with
    that two replicas may use one unit. ``founded``: where the first global batch of a start begins, by the beginning of
    its chains. ``relieved``: whom a spare has replaced, and which one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.versions: dict[tuple[int, str], SimVersion] = {}
        self.gone: set[m.IncarnationId] = set()
        self.decisions: dict[tuple[int, str], Decided] = {}
        self.deciders: dict[tuple[int, str], list[Term]] = {}
        self.excused: dict[Term, str] = {}
        self.shared = False
        self.founded: dict[str, int] = {}
        self.relieved: dict[m.IncarnationId, m.IncarnationId] = {}
        self.at_end: set[m.IncarnationId] = set()
        """Those that have ended with the newest version."""

    def counts(self, process: Process) -> bool:
        """Whether a process is a living replica that has not been given up."""
        return process.alive and process.machine.incarnation > 0 and process.incarnation_id not in self.gone

    # ------------------------------------------------------------ I1

    def moved(self, process: Process, fragment: int, parent: str) -> None:
        """A replica has taken up another committed state, made from that of chain ``parent`` ("": fetched)."""
        shard, record = process.shards[fragment], process.machine.fragments[fragment].record
        assert record is not None
        holds = f"{process.name} holds version {record.version}"
        if shard.record != record:
            raise Violation("I1", f"{process.name}'s optimizer holds {shard.record}, its protocol {record}")
        if not fragment and self.world.knobs.samples is not None:
            self._units(process, record, shard.content)
        if shard.content.flaw:
            raise Violation("I2", f"version {record.version} of fragment {fragment}: {shard.content.flaw}")
        for whose, low, high in shard.content.gaps:
            given_up = set(range(low, high + 1)) <= self.world.discarded.get((fragment, whose), set())
            if not given_up and not self._void(fragment, parent, whose, high):
                raise Violation("I2", f"inner steps {low}..{high} of {whose[0]}#{whose[1]} are counted never")
        key = (fragment, record.chain)
        known = self.versions.setdefault(key, SimVersion(parent, record.version, shard.content))
        if known.content.digest != shard.content.digest or known.version != record.version:
            raise Violation("I1", f"{holds}, chain {record.chain[:6]}, with other content")
        for replica, incarnation, _, last_step, *_ in self.decisions[key].members if key in self.decisions else ():
            if (has := shard.content.steps.get((replica, incarnation))) != last_step:
                decided = f"was decided with steps of {replica}#{incarnation} up to {last_step}"
                raise Violation("I1", f"version {record.version} {decided}, and has them up to {has}")
        if key not in self.deciders:
            raise Violation("I1", f"{holds}, and no journal has it")
        machine, conn = self.world.server.machine, process.conn
        past = machine is None or (conn is not None and conn.server_life != self.world.server.life)
        if past and any(server.forgot for server in self.world.servers) and not parent:
            # A message of a coordinator that has lost its memory arrives late: no process could know of it.
            self.excuse(self.deciders[key][0], f"{process.name} was started late by this coordinator of the past")
        if not self.counts(process):
            return
        for other in self.world.processes.values():
            if other is process or not self.counts(other) or not other.machine.fragments[fragment].sound:
                continue  # what is void or in doubt is replaced
            theirs = other.machine.fragments[fragment].record
            if (theirs is not None and not theirs.version and not other.machine.ready) or not process.machine.ready:
                continue  # half of a cold start, not trained from yet, may be begun anew
            if theirs is not None and not self.one_history(fragment, record.chain, theirs.chain):
                others = f"{other.name} {theirs.version} ({theirs.chain[:6]})"
                raise Violation("I1", f"{holds} ({record.chain[:6]}), {others}: not of one history")

    def decided(self, decision: Decided, server: Server) -> None:
        """A decision is in the journal; what it says of its members must be what the version consists of.

        While two coordinators live, a replica that has not heard of the newer epoch may follow the older one.
        """
        if self.world.contested:
            for process in self.world.processes.values():
                if self.counts(process) and process.follows != server.term:
                    self.excuse(server.term, f"{process.name} follows another coordinator")
        for replica, incarnation, *_ in decision.members:
            if (replica, incarnation) in self.at_end:
                raise Violation("END", f"{replica} was at its end before version {decision.version}")
        self.decisions.setdefault((decision.fragment, decision.chain), decision)
        self.deciders.setdefault((decision.fragment, decision.chain), []).append(server.term)

    def ended(self, process: Process, end: m.End) -> None:
        """END: it holds the version that it is to end with, and is in no later one."""
        self.world.coverage["an end together" if len(end.alike) > 1 else "an end alone"] += 1
        positions = tuple(f.record.position for f in process.machine.fragments if f.record is not None)
        if end.whole and positions != end.positions:
            raise Violation("END", f"{process.name} holds {positions}, and is to end with {end.positions}")
        if end.whole and not any(x.base_step < process.local_steps for x in process.shards):
            self.at_end.add(process.incarnation_id)  # else what it could not hand in in time may still come

    def end_sent(self, end: m.End, machine: Coordinator | None) -> None:
        """END: who goes, and is told that it holds the newest version, does."""
        if machine is not None and end.whole and end.positions != tuple(r.at for r in machine.rounds):
            raise Violation("END", f"{', '.join(end.alike)} end with {end.positions}, which is not the newest version")

    def excuse(self, term: Term, why: str, *, shared: bool = True) -> None:
        """Another coordinator may decide otherwise than the one of this term."""
        self.excused.setdefault(term, why)
        self.shared |= shared

    def all_died(self, kept: Iterable[m.Record]) -> None:
        """Versions that no checkpoint contains are void, and may be made again."""
        lines = {(x.fragment, chain) for x in kept for chain in self._line(x.fragment, x.chain).values()}
        self.versions = {key: version for key, version in self.versions.items() if key in lines}

    def one_history(self, fragment: int, a: str, b: str) -> bool:
        """Whether one of two chains is the other's past, or where they part is excused."""
        if a == b:
            return True
        lines = [self._line(fragment, chain) for chain in (a, b)]
        forks = [v for v in lines[0].keys() & lines[1].keys() if lines[0][v] != lines[1][v]]
        if not forks:
            return lines[0].keys() <= lines[1].keys() or lines[1].keys() <= lines[0].keys()
        ones, others = (self.deciders[(fragment, line[min(forks)])] for line in lines)
        return any(a != b and not self.excused.keys().isdisjoint((a, b)) for a in ones for b in others)

    def _line(self, fragment: int, chain: str) -> dict[int, str]:
        """Version -> chain, from the first one on."""
        line = {}
        while chain:
            known = self.versions[(fragment, chain)]
            line[known.version], chain = chain, known.parent
        return line

    def _void(self, fragment: int, chain: str, whose: m.IncarnationId, high: int) -> bool:
        """Whether the steps of a dead replica up to ``high`` were in a version that is not in ``chain``'s past: it is
        void, and they with it. Later ones may come in all the same, of a copy that others had kept (ADOPT)."""
        if any(x.incarnation_id == whose and self.counts(x) for x in self.world.processes.values()):
            return False
        past = set(self._line(fragment, chain).values())
        others = (x for key, x in self.versions.items() if key[0] == fragment and key[1] not in past)
        return any(x.content.steps.get(whose, 0) >= high for x in others)

    def replaced(self, entry: Replaced, server: Server) -> None:
        """SPARE: one loss promotes one spare, unless a coordinator without memory decides."""
        before = self.relieved.setdefault(entry.lost, entry.spare)
        if before != entry.spare and not server.forgot and not self.world.contested:
            raise Violation("SPARE", f"{entry.by} takes the place of {entry.lost}, which {before} has taken before")

    # ------------------------------------------------------------ I2

    def standing(self, process: Process) -> None:
        """Each inner step of a living replica is in its committed state once, or pending."""
        if not self.counts(process):
            return
        for fragment, shard in enumerate(process.shards):
            if shard.record is None or shard.reset or process.machine.fragments[fragment].reset:
                continue
            key = (fragment, process.incarnation_id)
            inside = shard.content.steps.get(process.incarnation_id, self.world.floor.get((*key, process.life), 0))
            if inside == shard.base_step:
                continue
            low, high = sorted((inside, shard.base_step))
            if inside < shard.base_step and set(range(low + 1, high + 1)) <= self.world.discarded.get(key, set()):
                continue
            what = "committed and pending" if inside > shard.base_step else "neither committed nor pending"
            raise Violation("I2", f"{process.name}'s inner steps {low + 1}..{high} of fragment {fragment} are {what}")

    def let_in(self, conn: Conn, incarnation: int, here: frozenset[int]) -> None:
        """A process is welcomed; ``here``: the connections that the coordinator had until now. STICKY."""
        first = self.world.processes[conn.process.name]
        own = first.conn
        if conn.process is first or not first.alive or not first.machine.welcomed or own is None or not own.works:
            return
        if self.world.now >= own.heard_s + self.world.knobs.dead_after_s - 1e-6:
            return  # it was silent for too long
        if own.server is conn.server and own.number in here and first.machine.incarnation == incarnation:
            raise Violation("I2", f"two processes are let in as {first.name}#{incarnation}")

    def superseded(self, incarnation_id: m.IncarnationId, heard: Iterable[m.Hello]) -> None:
        """A newcomer has taken a replica's place; ``heard``: the hellos of open connections. STICKY. An address is one
        process': where a newcomer has that of the hello before, whoever sent that one has ended."""
        hellos = [h for h in heard if h.replica == incarnation_id[0]]
        newcomers = {h.address for h in hellos if not h.incarnation}
        if any(h.incarnation == incarnation_id[1] and h.was_let_in and h.address not in newcomers for h in hellos):
            raise Violation("I2", f"{incarnation_id[0]}'s place is another process', although it is heard")

    def holder_superseded(self, server: Server, process: Process, incarnation: int) -> None:
        """The place of a living process that has fallen silent, and whose connection has not ended, is given away:
        before ``evict_after_s`` not where it alone holds a version, and the coordinator has heard no other since, which
        may have died meanwhile. ROLLBACK."""
        since_s = server.silent_since.get(process.name, -math.inf)
        evict_after_s = float(self.world.knobs.settings["evict_after_s"] or 0)
        lives = process.alive and process.machine.incarnation == incarnation and not self.world.contested
        lives &= not self.world.coverage["a second process resumes"]  # it holds what its first process did
        if not lives or server.machine is None or self.world.now >= since_s + evict_after_s - 1e-6:
            return
        lost_s = since_s + self.world.knobs.dead_after_s
        others = [x for x in self.world.processes.values() if x is not process]
        others = [x for x in others if (x.alive and not x.gone) or server.silent_since.get(x.name, -math.inf) >= lost_s]
        for r in server.machine.rounds:
            held = any(self._holds(x, r.at) for x in others)
            if self._holds(process, r.at) and not held and r.at.version:
                raise Violation("ROLLBACK", f"{r.at} is given up, and {process.name}, which holds it, lives")

    def _holds(self, process: Process, at: m.Position) -> bool:
        record = process.machine.fragments[at.fragment].record
        return record is not None and record.position == at and not process.machine.fragments[at.fragment].reset

    def given_up(self, server: Server, process: Process, incarnation: int) -> None:
        """Of a replica that has done nothing with the last units it must not be that others kept it waiting; unless it
        is at another coordinator. TAIL."""
        conn, settings = process.conn, self.world.knobs.settings
        here = process.alive and process.machine.incarnation == incarnation
        if not here or conn is None or not conn.works or conn.server is not server:
            return
        tail_s = float(settings["evict_after_s"] or 0)
        if (waited_s := process.still_s()) > tail_s:
            raise Violation("I2", f"{process.name} is given up, and has waited for its peers for {waited_s:.1f} s")

    def was_reset(self, process: Process, reason: str) -> None:
        """A replica resets itself; only a fork can have brought it there, or that the job began anew."""
        if reason == COUNTED_ELSEWHERE and not self.excused:
            raise Violation("I2", f"{process.name} finds steps counted that it never offered")
        starts = sum(not fragment and not x.version for (fragment, _), x in self.versions.items())
        if reason == COUNTED_AND_GONE and not self.excused and starts < 2:
            raise Violation("I2", f"{process.name}'s steps were counted, and are no more")

    # ------------------------------------------------------------ I3

    def _units(self, process: Process, record: m.Record, content: Content) -> None:
        """A committed state has each unit once, and its record says which. BATCH: of a global batch, all so far."""
        samples, has = self.world.knobs.samples, f"has units {content.units}"
        if record.done != content.units:
            raise Violation("I3", f"{process.name}'s version {record.version} {has}, and says {record.done}")
        if samples is not None and self.world.knobs.global_batch:
            stop = self.founded.setdefault(record.chain[:8], end(content.units))
            stop += record.version * self.world.knobs.global_batch
            stop = stop if samples.units is None else min(stop, samples.units)
            if end(content.units) != stop or len(content.units) > 1 or content.twice:
                units = f"{content.units}, {content.twice} of them twice"
                raise Violation("I3", f"version {record.version} is made of units {units}; its batches end at {stop}")
        if content.twice and not self.shared:
            raise Violation("I3", f"version {record.version} has units {content.twice} twice")

    def offered(self, process: Process, loader: Loader, start: int, contribution: m.Contribution) -> None:
        """A contribution names the units of its steps, and besides them those of steps that were not finite."""
        if self.shared:
            return
        used, named = loader.used(start, contribution.last_step), contribution.ranges
        spent = self.world.discarded.get((0, process.incarnation_id), set())
        allowed = union(used, loader.inherited, *(loader.used(step - 1, step) for step in spent))
        if not contains(named, used) or not contains(allowed, named):
            raise Violation("I3", f"{process.name} offers units {named} with steps that have used {used}")

    def granted(self, conn: Conn, ranges: Ranges, machine: Coordinator | None) -> None:
        """Granted units are held by no other living replica that has not been given up."""
        if self.shared or self.world.contested or machine is None:
            return
        for process in self.world.processes.values():
            if process is conn.process or not self.counts(process):
                continue
            member = machine.roster.current(process.incarnation_id)
            if member is not None and member.address not in ("", process.machine.identity.address):
                continue  # another process has resumed as it; it is given up when it comes back
            if both := intersect(ranges, process.machine.lease.held):
                raise Violation("I3", f"{conn.process.name} is granted {both}, and {process.name} holds them")

    def leases(self, server: Server) -> None:
        """Units that the coordinator counts as leased are held or on their way: none is lost."""
        assert server.machine is not None
        ledger = server.machine.assignment.ledger
        if ledger is None:
            return
        roster = server.machine.roster
        if lost := sorted(ledger.unheard - {x.incarnation_id for x in roster.away()}):
            raise Violation("I3", f"{lost} are waited for in vain")
        for incarnation_id, lease in ledger.leases.items():
            member = roster.members.get(incarnation_id[0])
            if member is None or member.incarnation_id != incarnation_id:
                raise Violation("I3", f"{incarnation_id} is gone, and holds {lease}")
            conn = server.conns.get(member.conn or 0)
            if conn is None or not conn.works or conn.process.conn is not conn:
                continue
            held = union(conn.granted, conn.process.machine.lease.held)
            record = conn.process.machine.fragments[0].record
            if record is not None and (missing := subtract(subtract(lease, held), record.done)):
                raise Violation("I3", f"{incarnation_id[0]} is taken to hold {missing}, and does not")

    # ------------------------------------------------------------ I5

    def quorum(self, conn: Conn, quorum: m.Quorum, machine: Coordinator | None) -> None:
        """Members of an attempt hold the state that it builds on."""
        process = conn.process
        if self.world.contested and conn is not process.conn:
            return  # it follows another coordinator by now, and this one has not noticed
        if conn.life != process.life:
            return  # it has died, and come back as it was in a checkpoint: likewise
        record = process.machine.fragments[quorum.fragment].record
        if machine is None or not self.counts(process):
            return
        at = machine.rounds[quorum.fragment].at
        if record is None or record.position != at or process.machine.fragments[quorum.fragment].fetching:
            held = record.position if record else None
            raise Violation("I5", f"{process.name} is a member on {at}, and holds {held}")

    def served(self, source: Process, fragment: int) -> None:
        """A source of state holds an undamaged one."""
        shard = source.shards[fragment]
        if shard.record is None or source.machine.fragments[fragment].reset:
            raise Violation("I5", f"{source.name} serves a state that it does not hold")
        known = self.versions.get((fragment, shard.record.chain))
        if known is None or known.content.digest != shard.content.digest:
            raise Violation("I5", f"{source.name} serves a damaged state")

    # ------------------------------------------------------------ I6

    def opened(self, server: Server, heard: list[m.Hello], *, anew: bool) -> None:
        """A coordinator ends its startup: has it heard each living holder of a version? ``anew``: by a cold start."""
        assert server.machine is not None
        remembers, server.remembers = server.remembers, True
        again, server.opened = server.opened, True  # after a rollback it knows what those hold whom it does not hear
        knows = (server.life == 1 or remembers) and not self.world.contested
        if knows and not server.forgot:
            return
        if anew and self.world.contested:
            self.excuse(server.term, "another coordinator may start the job as well, with other newcomers")
        processes = {(h.replica, h.incarnation, h.address) for h in heard if h.incarnation}
        incarnation_ids = {(replica, incarnation) for replica, incarnation, _ in processes}
        # A newcomer's connection may have broken unnoticed, and the newcomer been let in by the other coordinator.
        fresh = {h.replica for h in heard if not h.incarnation and self.world.contested}
        told = {incarnation_id for h in heard for incarnation_id in h.roster}
        state_holders = any(h.positions for h in heard)
        for process in self.world.processes.values():
            incarnation_id = process.returning  # from a checkpoint: it is not there yet, and holds a version
            if incarnation_id is None:
                lives = process.alive and process.machine.incarnation > 0
                holds = lives and (process.restoring or any(shard.record for shard in process.shards))
                incarnation_id = process.incarnation_id if holds else None
            if incarnation_id in self.gone and len(self.world.servers) > 1:
                self.excuse(server.term, f"{process.name} has followed another coordinator since this one gave it up")
            if incarnation_id is None or incarnation_id in self.gone:
                continue
            address = process.machine.identity.address if hasattr(process, "machine") else process.name
            if (*incarnation_id, address) in processes:
                continue
            if incarnation_id in incarnation_ids:  # a second process of its id, which a coordinator takes for it
                self.excuse(server.term, f"{process.name} was not heard, but a second process of its id")
                continue
            waited_s = self.world.now - server.first_hello_s
            knobs = self.world.knobs
            patience_s = knobs.dead_after_s if server.has_journal else knobs.recovery_s
            # One that this coordinator has given up it need not hear, whatever another one may do with it.
            waits = incarnation_id in told and process.name not in fresh
            waits &= not server.machine.roster.is_gone(incarnation_id)
            # Nor one that another coordinator has let in, and that to this one is of those that it has forgotten.
            waits &= not (self.world.contested and server.machine.roster.horizon.may_cover(incarnation_id))
            if state_holders and not again and not knows and waits and waited_s < patience_s - 1e-6:
                raise Violation("I6", f"the coordinator has not waited for {process.name}")
            if anew and not again and self.world.now < server.reachable_s + knobs.recovery_s - 1e-6:
                raise Violation("I6", f"the job starts anew, and {process.name} has not had recovery_s to come back")
            # CURSOR: of one that comes out of a checkpoint those who have come know how far units were granted.
            known = waits and not self.world.contested and (process.returning is not None or process.restoring)
            self.excuse(server.term, f"{process.name} was not heard", shared=not known)
