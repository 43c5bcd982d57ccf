"""One job of a coordinator: performs the machine's effects, and keeps its timer and its groups' rendezvous keys."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ftopt.events import Event, OnEvent, guarded
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.entry.admission import makes_no_sense, misfit
from ftopt.sync.protocol.coordinator.machine import Coordinator
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.protocol.coordinator.status import status
from ftopt.sync.server.dated import Ends, dated, event_of, failure
from ftopt.sync.server.journal import Journal, JournalError
from ftopt.sync.server.limits import Limits
from ftopt.sync.server.outbox import Outbox
from ftopt.sync.server.remembered import ended, ended_at, idle
from ftopt.sync.server.rendezvous import Rendezvous
from ftopt.sync.server.sampler import Sampler
from ftopt.sync.server.trace import Trace
from ftopt.sync.server.under_way import under_way
from ftopt.watch.prometheus import Exposition, JobMetrics
from ftopt.watch.rings import History

_log = logging.getLogger(__name__)
_WARNED = ("diverged", "not_kept", "unlike")
_TICK_S = 0.02  # the least time between two looks at what is due
_HALTED_S = 1.0
"""Seconds for which a halted job refuses all replicas, so that two coordinators of it do not take turns too quickly."""


class Peer(NamedTuple):
    """A job's view of one connection."""

    send: Callable[[str], None]
    close: Callable[[], None]


class Job:
    """Runs the machine of one job: performs its effects, and keeps its timer and its groups' rendezvous keys.

    It *halts* when the machine says so (EPOCH), or when the journal fails (JOURNAL). The machine is then ahead of the
    disk, so nothing that it knows is sent, to members or to ``/status``. All connections are closed, and a new machine
    starts from the journal. Trainers train on meanwhile.

    ``reachable_s``: since when replicas can reach it (`time.monotonic`); minus infinity for a new job.
    """

    def __init__(
        self,
        name: str,
        journal: Journal,
        on_event: OnEvent,
        *,
        limits: Limits | None = None,
        reachable_s: float = -math.inf,
        trace: Trace | None = None,
    ) -> None:
        self.name, self._journal, self._trace = name, journal, trace
        self._on_event = guarded(on_event)
        self._peers: dict[int, Peer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next = self._looks = 0
        self._reachable_s, self._limits = reachable_s, limits or Limits()
        self._since_1970_s = time.time() - time.monotonic()
        self.metrics, self.history = JobMetrics(), History()
        self._rendezvous = Rendezvous(self._limits, lambda conn, *pair: self._send(conn, m.StoreValue(*pair)))
        self._sampler = Sampler(self.history, self._say)
        self._outbox = Outbox(name, journal, self._cannot_write)
        self._exit: BaseException | None = None  # an on_event has raised it to end the process
        self.halted = ""
        """Why the job has halted; "" while it runs."""
        self.ended = ""
        """Where the job has ended, with no replica left; "" before, and as soon as it starts again."""
        self._last: e.Decided | None = None
        """The last decision of a job that has ended."""
        self.machine = Coordinator(name)
        self._start_anew()

    @property
    def connected(self) -> int:
        """Number of its connections."""
        return len(self._peers)

    @property
    def unused(self) -> bool:
        """Whether it has no connection and was never defined, since all its hellos were refused."""
        known = self.machine.defined or self.machine.remembers or self.machine.roster.members
        return not (self.halted or self.ended or self._peers or known)

    def open(self, peer: Peer) -> int:
        """Adds a connection; returns its number."""
        self._next += 1
        self._peers[self._next] = peer
        return self._next

    def receive(self, conn: int, message: m.FromReplica) -> None:
        """Takes a message that has arrived.

        Raises:
            Exceeded: a limit is exceeded; nothing has been changed.
        """
        if conn not in self._peers:
            return  # closed meanwhile
        if self.halted:
            self._send(conn, m.Hold(f"the coordinator has halted: {self.halted}"))
            self._peers.pop(conn).close()
            return
        if isinstance(message, m.Hello):
            self._look()
        if isinstance(message, m.Hello) and self._outbox:  # a decision not sent yet may be the job's end
            self._outbox.add([], lambda: self._receive(conn, message))
        else:
            self._receive(conn, message)

    def _receive(self, conn: int, message: m.FromReplica) -> None:
        match message:
            case _ if conn not in self._peers:
                return  # closed meanwhile
            case m.StoreSet() | m.StoreGet() if self.machine.roster.by_conn(conn) is None:
                return
            case m.StoreSet(key=key, value=value):
                self._rendezvous.set(key, value)
            case m.StoreGet(key=key):
                self._rendezvous.get(conn, key)
            case m.Hello() if reason := self._limits.refuses(message, self.machine):
                self._send(conn, m.Refuse("final", reason))
                self._peers.pop(conn).close()
            case m.Hello(incarnation=0, standby=True) if self.ended:
                reason = f"job {self.name!r} has {self.ended}; start replicas that train before a spare"
                self._send(conn, m.Over(reason))
                self._peers.pop(conn).close()
            case m.Hello(incarnation=0, checkpoint=None) if self.ended and not self.machine.members.ended:
                todo = "a checkpoint can be resumed; a replica that connects without one starts it over"
                self._send(conn, m.Hold(f"job {self.name!r} has {self.ended}; {todo}"))
                self._take(conn, message)
            case m.Hello(resumed=True) if self._takes_up(message):
                self._forget(conn)
                if not self.halted:
                    self._take(conn, message)
            case _:
                self._take(conn, message)

    def _take(self, conn: int, message: m.FromReplica) -> None:
        """Gives the machine a message. With several fragments, one look follows all messages of a turn of the loop."""
        at_once, owed = len(self.machine.rounds) < 2, self.machine.owes_look
        self._step(lambda: self.machine.receive(time.monotonic(), conn, message, look=at_once), message, conn)
        if self.machine.owes_look and not owed:
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        if self.machine.owes_look and not self.halted:
            self._step(lambda: self.machine.look(time.monotonic()), "(messages have come)")

    def lost(self, conn: int) -> None:
        """Notes that a connection has ended."""
        self._look()
        self._rendezvous.forget(conn)
        if self._peers.pop(conn, None) is None or self.halted:
            return
        self._step(lambda: self.machine.lost(time.monotonic(), conn), "(its connection has ended)", conn)

    def give_up(self, replica: str) -> None:
        """Notes that the replica is not started again."""
        self._step(lambda: self.machine.give_up(time.monotonic(), replica), f"({replica} is not started again)")

    def end(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def status(self) -> dict[str, Any]:
        """The job's part of ``GET /status``."""
        if self.halted:
            return idle(self.name, None, f"halted: {self.halted}")
        if self._outbox:
            return idle(self.name, self.machine.epoch, "waits for the disk of its journal")
        if self.ended and not self._peers:
            return idle(self.name, self.machine.epoch, self.ended)
        shown, now = status(self.machine, time.monotonic()), time.monotonic()
        for fragment, r in zip(shown["fragments"], self.machine.rounds, strict=True):
            fragment |= under_way(r, self.machine.roster) | {"age_s": round(self.metrics.age_s(r.fragment, now), 1)}
        return shown

    def live_status(self) -> dict[str, Any]:
        """`status`, and what the live page shows of a job that does not run. ``waiting``: connected replicas and their
        incarnations (0: a newcomer). ``last_version``: of a job that has ended; None otherwise."""
        startup = None if self.halted else self.machine.startup
        waiting = {} if startup is None else {x.replica: x.incarnation for x in startup.hellos.values()}
        last = self._last.version if self.ended and self._last is not None else None
        return self.status() | {"waiting": waiting, "last_version": last}

    def sample(self) -> None:
        """Adds a row to the history; call it every `SAMPLE_S` seconds."""
        known = () if self.halted else self.machine.roster.members.values()
        self._sampler.sample(known, time.monotonic())
        self._leave()

    def show(self, to: Exposition) -> None:
        """Adds the job's part of ``GET /metrics``."""
        to.add("ftopt_job_halted", bool(self.halted), job=self.name)
        to.add("ftopt_job_connections", self.connected, job=self.name)
        self.metrics.show(to, self.status(), time.monotonic())

    def _step(self, step: Callable[[], e.Effects], cause: m.FromReplica | str, conn: int = 0) -> None:
        """Takes a step of the machine. After an error in it the machine cannot be trusted, and a new one starts from
        the journal. The error is still raised, for the log."""
        try:
            effects = step()
            if self._trace is not None:
                self._trace.step(self.name, self.machine, conn, cause, effects)
            says = dated(effects, self.machine)
            self._outbox.add(effects, lambda: self._do(says))
            if self.machine.looks != self._looks and not self.halted:  # a heartbeat makes nothing due earlier
                self._set_timer()
        except Exception as error:
            self._halt(f"an error of its own, {error!r}; please report it")
            raise

    def _do(self, effects: list[e.CoordinatorEffect | Ends]) -> None:
        try:
            self._perform(effects)
        except Exception as error:
            self._halt(f"an error of its own, {error!r}; please report it")
            raise
        self._leave()

    def _leave(self) -> None:
        """Ends the process, if an ``on_event`` has asked for it."""
        leaves, self._exit = self._exit, None
        if leaves is not None:
            raise leaves

    def _perform(self, effects: list[e.CoordinatorEffect | Ends]) -> None:
        """Performs effects; those to be journalled are on the disk."""
        sent, text = None, ""
        for effect in effects:
            match effect:
                case e.SendTo(conn=conn, message=message):
                    if message is not sent:  # the same message often goes to many in a row
                        sent, text = message, m.encode(message)
                    self._send_text(conn, text)
                case e.Close(conn=conn):
                    if peer := self._peers.pop(conn, None):
                        peer.close()
                case e.Emit():
                    self._emit(effect)
                case Ends(last=last):
                    self._has_ended(last)
                case e.Halt(reason=reason):
                    self._halt(reason)
                    return

    def _cannot_write(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, JournalError) else f"an error of its own, {error!r}; please report it"
        if not self.halted:
            self._say(Event("halt", "coordinator", data={"reason": reason}))
        self._halt(reason)
        self._leave()

    async def written(self) -> None:
        """Waits until all decisions so far are on the disk and sent, or the job has halted."""
        await self._outbox.written()

    def close(self) -> None:
        """Stops the job: nothing more is done or sent. Records what replicas have counted: they train on, not lost."""
        self.end()
        self._sampler.count(() if self.halted else self.machine.roster.members.values(), math.inf)
        self._peers.clear()
        self._outbox.clear()
        self.machine.owes_look = False

    def _halt(self, reason: str) -> None:
        """Turns all replicas away for `_HALTED_S`; logged once, however long the halt lasts."""
        if not self.halted:
            _log.error("job %s has halted: %s; it starts anew from the journal when it can", self.name, reason)
            self.history.add_line(f"the job has halted: {reason}", ("halt", self.name))
        self.halted = reason
        self._outbox.clear()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()
        self.end()
        self._timer = asyncio.get_running_loop().call_later(_HALTED_S, self._start_anew)

    def _start_anew(self) -> None:
        """Makes a new machine from the journal, as if the process had been started again.

        After a halt its epoch is written first: while that fails, no replica need be let in.
        """
        self._timer = None  # the timer of `_halt` has called this
        try:
            saved, now = self._journal.load(self.name), time.monotonic()
            if self.halted:
                self._journal.check_room()
            since_s, life = now if self.halted else self._reachable_s, time.time()
            self.machine = Coordinator(
                self.name, saved=saved, now=now, life=life, reachable_s=since_s, since_1970_s=self._since_1970_s
            )
            self._looks = self.machine.looks
            if (failed := self.machine.failed) is not None:  # each life of a coordinator says so
                self._say(failure(failed))
            if (last := ended_at(saved)) is not None:
                self._has_ended(last)
        except JournalError as error:
            self._halt(str(error))
            return
        if self.halted:
            self._outbox.add([e.Epoch(self.machine.epoch)], self._goes_on)

    def _goes_on(self) -> None:
        _log.warning("job %s starts anew from the journal", self.name)
        self.history.add_line("the job starts again from the journal", ("anew", self.name))
        self.halted = ""

    def _takes_up(self, hello: m.Hello) -> bool:
        """Whether a sound replica resumes a checkpoint of a job that has ended, or has failed (LOSS), with no other
        replica in it."""
        sound = hello.incarnation > 0 and len(hello.positions) == hello.fragments
        alone = (bool(self.ended) and not self.machine.roster.members) or self.machine.failed is not None
        return sound and alone and not (makes_no_sense(self.name, hello) or misfit(self.name, None, hello, None))

    def _forget(self, conn: int) -> None:
        """Starts a machine without replicas: all have left, and that of ``conn`` resumes a checkpoint. To the old
        machine its incarnation is gone; the new one takes the job up from checkpoints, as a new coordinator does.
        Waiting newcomers are to come again."""
        for other in self._peers.keys() - {conn}:
            self._peers.pop(other).close()
        if (failed := self.machine.failed) is not None:
            self.ended = f"failed at version {failed.versions[0]}, inner step {failed.inner_step}"
            decided = saved.decided if (saved := self._journal.load(self.name)) is not None else ()
            self._last = next((d for d in reversed(decided) if not d.fragment), None)
        try:
            self._journal.forget_replicas(self.name)
        except JournalError as error:
            self._halt(str(error))
            return
        life = max(time.time(), self.machine.epoch + 1)
        self.machine = Coordinator(
            self.name, lost=self._last, now=time.monotonic(), life=life, since_1970_s=self._since_1970_s
        )
        self._looks = self.machine.looks
        _log.info("job %s had %s; a checkpoint of it is resumed", self.name, self.ended)
        self.ended = ""

    def _emit(self, x: e.Emit) -> None:
        if text := x.data["reason"] if x.event in _WARNED else x.data.get("undone"):
            _log.warning("job %s: %s", self.name, text)
        if x.event in ("start", "recover"):
            self.ended = ""
        self._say(event_of(x))

    def _has_ended(self, last: e.Decided) -> None:
        self.ended, self._last = ended(last.version, last.inner_step), last

    def _say(self, event: Event) -> None:
        event, now = replace(event, job=self.name), time.monotonic()
        self.metrics.count(event, now)
        self.history.note(event, now)
        try:
            self._on_event(event)
        except BaseException as error:  # also sys.exit() in an on_event: the event takes effect first
            self._exit = error

    def _set_timer(self) -> None:
        """Sets the timer to `_TICK_S` from now at the latest: what a message makes due waits as long, and many messages
        come meanwhile. An earlier timer stays, or they would put it off forever."""
        loop = asyncio.get_running_loop()
        self._looks, at_s = self.machine.looks, loop.time() + _TICK_S
        if self._timer is None or self._timer.when() > at_s:
            self.end()
            self._timer = loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._step(self._tick, "(time has passed)")

    def _tick(self) -> e.Effects:
        """Ticks, or sets the timer to the machine's deadline."""
        left_s = self.machine.deadline_s() - (now := time.monotonic())
        if left_s <= 0:
            return self.machine.tick(now)
        if left_s < 1e6:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._ring)
        return []

    def _send(self, conn: int, message: m.FromCoordinator) -> None:
        self._send_text(conn, m.encode(message))

    def _send_text(self, conn: int, text: str) -> None:
        if peer := self._peers.get(conn):
            self.metrics.message("sent", len(text))
            peer.send(text)
