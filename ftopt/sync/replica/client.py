"""The outer-sync layer as the training thread calls it.

It sees the machine through `ftopt.sync.replica.view`. The *network thread* runs the machine
(`ftopt.sync.replica.session`), the *reducer thread* reduces; a hung trainer blocks neither of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from ftopt.errors import FtoptError, UserError, thread_failed
from ftopt.events import EmitEvent, wants_gradients, wants_steps
from ftopt.sync.group import Committed, Contribution, Fingerprint, Foreign, Held, Host, Island, Shards
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import MAX_READING
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.protocol.samples import Samples
from ftopt.sync.replica.global_batch import GlobalBatch
from ftopt.sync.replica.log.rounds import LONG_S
from ftopt.sync.replica.replica_copy import AdoptedWork, ReplicaCopy
from ftopt.sync.replica.session import Session
from ftopt.sync.replica.standing_by import leave_unneeded, stand_by
from ftopt.sync.replica.units import Units
from ftopt.sync.replica.view import FragmentView

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
_AWAY_S = 3.0
"""Seconds within which a restarted coordinator is back."""
_END_SLACK_S = 0.5
"""Extra seconds, so that the coordinator, which knows for whom a replica waits, ends the wait first."""
_END_S = 10.0
"""Seconds for closing connections and threads, which takes milliseconds unless the machine is very busy."""


class Client:
    """A `ReplicaGroup` over ``session``."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.replica, self.policy = session.replica, session.policy
        self.standby = session.standby
        self.emit: EmitEvent = session.emit
        self.check: Callable[[], None] = session.view.check_open
        self.tells_steps = wants_steps(session.on_event)
        self.tells_gradients = wants_gradients(session.on_event)
        self.units: Units | None = None
        self.global_batch: GlobalBatch | None = None
        self.island: Island | None = None
        self.joins: Callable[[], object] | None = None
        self.shards: Shards | None = None
        self._accumulate = 1
        self._view, self._network = session.view, session.network
        self._joined = False
        self._leaving = False
        self._resumed: Held | None = None
        self._restore: Callable[[], Held] | None = None

    @property
    def incarnation(self) -> int:
        return self._view.incarnation

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> Units:
        if self._is_free_for(samples):
            self.units = self.session.units = Units(samples)
            self._accumulate = accumulate
        assert self.units is not None
        return self.units

    def keep_global_batch(self, samples: Samples, *, at_once: int = 1) -> GlobalBatch:
        if self._is_free_for(samples):
            self.global_batch = self.session.global_batch = GlobalBatch(samples, at_once=at_once)
        assert self.global_batch is not None
        return self.global_batch

    def _is_free_for(self, samples: Samples) -> bool:
        """Whether no samples are handed out yet; raises UserError if other samples are, or it is too late."""
        handed_out = self.session.samples
        if handed_out is None and self._joined:
            raise UserError("this replica has joined its job already; make its data loader before `with optimizer:`")
        if handed_out not in (None, samples):
            raise UserError(
                f"the job hands out {handed_out}, and this loader asks for {samples}; a group has one data "
                "set to train on: give a loader for evaluation no group"
            )
        return handed_out is None

    def start(self, host: Host, fingerprint: Fingerprint) -> list[Committed]:
        session, network = self.session, self._network
        if self._joined:
            raise UserError(
                f"the group of replica {self.replica!r} is in use by another optimizer, or was closed; a group is for "
                "one ftopt.wrap(): make another one, and give several inner optimizers of one model as a list"
            )
        self._joined = True
        try:
            network.acquire(session.fail_network)
            session.emitter.training_thread = threading.get_ident()
            self._view.fragments = [FragmentView()] * fingerprint.fragments
            self._begin_samples(fingerprint)
            session.reducer.start()
            self._on_network(session.open(host, fingerprint, self._resumed))
            if session.standby:
                stand_by(session)
            while self._has_to_restore():  # JobOver: the job has ended
                assert self._restore is not None
                self._on_network(session.restored(self._restore()))
            self._restore = None  # it holds a reference to the optimizer
            return self._on_network(session.committed())
        except BaseException:
            try:
                if session.standby and self._view.failure is None and not self._view.over:
                    self.leave(timeout_s=0.0, early=True)
            finally:
                self.close()
            raise

    def _begin_samples(self, fingerprint: Fingerprint) -> None:
        if self.units is not None:
            steps = fingerprint.period
            round_units = steps * self._accumulate if steps else None
            self.units.begin(partial(self.session.act, Replica.ask), round_units=round_units, check=self._view.check)
        if self.global_batch is not None:
            self.global_batch.begin(self._view.check)

    def _has_to_restore(self) -> bool:
        """Waits until this replica may train (False) or has to restore a checkpoint (True); else raises."""
        view = self._view
        view.changed.wait_for(
            lambda: view.may_train or view.restoring or bool(view.over) or view.failure is not None or view.closed
        )
        view.check_open()
        if view.over:
            leave_unneeded(self.replica, view.over)
        return view.restoring

    def held(self) -> Held:
        machine, units = self.session.machine, self.units
        me, forgotten = (self.replica, self.incarnation), machine.known.horizon.life
        held = Held(*me, machine.epoch, dict(machine.known.gone), samples=self.session.samples, forgotten=forgotten)
        if units is None:
            return held
        used, queue = units.kept()
        return replace(held, cursor=machine.lease.cursor, used=used, queue=queue)

    def resume(self, held: Held) -> None:
        assert not self._joined, "resume() after start()"
        samples = self.session.samples
        if held.samples != samples:
            raise Foreign(f"its job handed out {held.samples or 'no samples'}, and this one {samples or 'none'}")
        if self.units is not None:
            self.units.put_back(held.used, held.queue)
        self._resumed = held

    def fall_back(self, newest: Callable[[], m.Position | None], restore: Callable[[], Held]) -> None:
        self.session.newest, self._restore = newest, restore

    def offer_copy(self, versions: tuple[int, ...], text: str, tensors: Mapping[str, Tensor]) -> None:
        used, queue = self.units.kept() if self.units is not None else ((), ())
        copy = ReplicaCopy((self.replica, self.incarnation), versions, used, queue, text, tensors)
        self._view.copies += 1
        self._network.soon(self.session.copies.offer, copy)

    def check_copies(self, check: Callable[[str, Mapping[str, Tensor]], None]) -> None:
        self.session.copies.check = check

    @property
    def copy_settled(self) -> bool:
        return self._view.copies == self.session.copies.settled

    def adopted_work(self) -> AdoptedWork | None:
        adopted, self.session.adopted = self.session.adopted, None
        return adopted

    def propose(self, contribution: Contribution, *, now: bool = False) -> None:
        try:
            self._view.propose(contribution.fragment)
            self._network.soon(self.session.accept, contribution, now)
        except BaseException:
            # Whether it was sent or not: this follows it, and then no proposal is on its way.
            self._network.soon(self._view.drop, contribution.fragment, 1)
            raise

    def wait(self, fragment: int, *, timeout_s: float | None = None, until: Callable[[], bool] | None = None) -> bool:
        view, stopped = self._view, self._view.fragments[fragment].stopped

        def decided() -> bool:
            return not view.fragments[fragment].outstanding or view.closed

        def interrupted() -> bool:
            return until is not None and until()

        def ended() -> bool:
            f = view.fragments[fragment]
            released = f.released and not f.proposed
            failed = timeout_s is not None and f.stopped != stopped
            return view.failure is not None or decided() or released or failed or interrupted()

        view.waiting = True
        try:
            if timeout_s is None and not view.changed.wait_for(ended, LONG_S):
                session = self.session
                session.rounds_log.waits(self._next(fragment), LONG_S, session.peers.last(fragment))
            view.changed.wait_for(ended, timeout_s)
            view.check()
            machine = self.session.machine  # one that fetches a newer state logs a fetch that fails
            if not (decided() or interrupted()) and machine.welcomed and machine.ready and (why := self.obstacle()):
                self.session.rounds_log.goes_on(self._next(fragment), why, self.session.pending())
            return decided()
        finally:
            view.waiting = False

    def _next(self, fragment: int) -> int:
        record = self.session.machine.fragments[fragment].record
        return record.version + 1 if record is not None else 1

    def catch_up(self, *, timeout_s: float | None = None) -> bool:
        view = self._view
        limit_s = self.policy.dead_after_s if timeout_s is None else timeout_s
        ended = view.changed.wait_for(lambda: view.ready or view.closed or view.failure is not None, limit_s)
        view.check()
        return ended

    def obstacle(self) -> str:
        machine, least = self.session.machine, self.policy.min_replicas
        if self.closed:
            return "its group was closed before its optimizer"
        if not machine.welcomed:
            told = self.session.connection.kept_out
            return f"a coordinator answers, and does not let it in ({told})" if told else "no coordinator answers"
        if not machine.ready:
            return "the newest version is not fetched yet"
        if least > 1 and any(f.released for f in self._view.fragments):
            return f"fewer than policy.min_replicas={least} replicas were there for a round"
        return ""

    def outstanding(self, fragment: int) -> bool:
        return self._view.fragments[fragment].outstanding

    def members(self, fragment: int) -> frozenset[str]:
        return self.session.peers.last(fragment)

    def called_in(self, fragment: int) -> bool:
        return self._view.fragments[fragment].called_in

    def share(self, reading: m.Reading) -> None:
        if all(abs(value) <= MAX_READING for value in reading.values):  # not NaN, either
            self.session.heartbeats.readings[reading.fragment] = reading

    def tell_loss(self, loss: float | Tensor) -> None:
        self.session.heartbeats.losses.add(loss)

    def means(self, fragment: int) -> m.Means | None:
        return self._view.fragments[fragment].means

    def report(self, state: str) -> None:
        self.session.heartbeats.state = state
        if state == "leaving" and not self._leaving:
            self._leaving = True
            if self.session.opened:
                self.session.act(lambda machine: machine.say(m.Leaving()))

    def finish(self) -> None:
        if self.session.opened:
            self.session.act(lambda machine: machine.say(m.Finished()))

    def stop(self, reason: str) -> None:
        if self.session.opened and self._view.stopped is None:
            self._view.stopped = m.JobStopped(reason, self.replica)
            self.session.act(lambda machine: machine.say(m.StopJob(reason, self.replica)))

    @property
    def stopped(self) -> m.JobStopped | None:
        return self._view.stopped

    def wait_for_end(
        self, inner_step: int, *, but: Sequence[str], timeout_s: float, until: Callable[[], bool]
    ) -> m.End | None:
        view, since_s = self._view, time.monotonic()
        if not self.session.opened or view.closed:
            return None
        view.end = None
        self.session.act(lambda machine: machine.say(m.AtEnd(inner_step, timeout_s, tuple(but))))
        away_s, deadline = since_s, since_s + timeout_s + _END_SLACK_S
        while (now := time.monotonic()) < deadline and not until():
            away_s = now if self.session.machine.welcomed else away_s
            if now > away_s + _AWAY_S:  # no coordinator is there to say when the others have come
                break
            if view.changed.wait_for(lambda: view.end is not None or view.failure is not None or view.closed, _LOOK_S):
                break
        view.check()
        return view.end

    def leave(self, *, timeout_s: float, early: bool = False, reason: str = "") -> None:
        view = self._view
        if not self.session.opened or view.closed or view.failure is not None:
            return
        self.report("leaving")
        view.changed.wait_for(
            lambda: view.closed or view.failure is not None or not any(f.outstanding for f in view.fragments),
            timeout_s,
        )
        limit_s = 3.0 + (self.policy.derived.recovery_s if self.policy.on_loss == "fail" else 0.0)
        try:
            heard = self._on_network(self.session.bye(early, reason), timeout_s=limit_s)
        except TimeoutError:
            heard = False
        if not heard:
            _log.warning("replica %s: the coordinator did not hear the goodbye", self.replica)

    @property
    def closed(self) -> bool:
        return self._view.closed

    def close(self) -> None:
        if not self._view.close():
            return
        if self.units is not None:
            self.units.close()
        if self.global_batch is not None:
            self.global_batch.close()
        if not self._network.serves(self.session.fail_network):  # it was never started
            return
        self.session.reducer.stop()
        try:
            self._on_network(self.session.end(), timeout_s=_END_S)
        except TimeoutError:
            _log.warning("replica %s: its connections are not closed after %g s, which goes on", self.replica, _END_S)
        except FtoptError as error:
            if self._view.failure is None:  # else that is reported, and this may follow from it
                raise
            _log.warning("replica %s: could not be put away in order: %s", self.replica, error)
        finally:
            self._network.release(self.session.fail_network)
            self.session.let_go()

    def _on_network(self, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """The result of ``work`` on the network thread. FtoptError: it has failed. TimeoutError: it still runs."""
        done = self._network.submit(work)
        if (error := done.exception(timeout_s)) is not None:  # not result(): tells its errors from this thread's own
            raise thread_failed(self.replica, "the network thread", error)
        return done.result()

    def cut(self, for_s: float) -> None:
        """Cuts this replica off for ``for_s`` seconds, for fault injection. Any thread."""
        self.session.cut(for_s)
