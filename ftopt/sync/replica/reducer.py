"""The reducer thread: builds process groups and reduces, so that a hung trainer delays no other replica (step 3)."""

from __future__ import annotations

import base64
import queue
import sys
import threading
import time
from concurrent.futures import Future

from ftopt.sync.group import AttemptView, Collective, Damaged, Implausible, bits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica import effects as e
from ftopt.sync.replica.shell import Shell
from ftopt.transport.interface import Transport


class Reducer:
    """The reducer thread, its process groups, and the rendezvous store that they are built with."""

    def __init__(self, shell: Shell, transport: Transport) -> None:
        self._shell = shell
        self._transport = transport
        self._jobs: queue.SimpleQueue[e.StartReduce | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._attempts: dict[int, AttemptView] = {}
        self._aborted: set[int] = set()
        self._groups: dict[int, tuple[int, Collective]] = {}
        self._users: dict[int, Collective] = {}
        self._values: dict[str, Future[bytes]] = {}
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._work, name="ftopt-reducer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._jobs.put(None)
        self.fail_store()
        self.cut()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def begin(self, start: e.StartReduce, inner_step: int) -> None:
        """Queues a reduction. Network thread. ``inner_step``: the fragment's committed inner step."""
        q, c = start.quorum, start.contribution
        attempt = AttemptView(
            q.fragment, q.version, q.attempt, q.rank, q.size, c.weight, q.total_weight, q.contributors, inner_step
        )
        with self._lock:
            self._attempts = {n: a for n, a in self._attempts.items() if a.fragment != q.fragment}
            self._attempts[q.attempt] = attempt
            self._aborted &= self._attempts.keys()
        self._jobs.put(start)

    def cut(self) -> None:
        """Ends all groups at once, as if the network were gone. Any thread."""
        with self._lock:
            groups = [group for _, group in self._groups.values()]
            self._groups.clear()
        for group in groups:
            group.close()

    def started(self, attempt: int) -> AttemptView:
        """The last attempt begun under this number."""
        with self._lock:
            return self._attempts[attempt]

    def abort(self, attempt: int) -> None:
        """Ends a reduction that is under way or queued. Network thread."""
        with self._lock:
            self._aborted.add(attempt)
            group = self._users.get(attempt)
        if group is not None:
            group.stop()

    def _work(self) -> None:
        while (start := self._jobs.get()) is not None:
            try:
                self._reduce(start)
            except BaseException as error:
                self._shell.fail("the reducer thread", error)
            del start

    def _reduce(self, start: e.StartReduce) -> None:
        shell, q = self._shell, start.quorum
        with self._lock:
            attempt = self._attempts.get(q.attempt)
        if attempt is None:
            return
        try:
            shell.emit("reduce", fragment=q.fragment, version=q.version, attempt=q.attempt)
            group = self._group(q)
            before, received, since_s = group.sent_bytes, group.received_bytes, time.perf_counter()
            c = start.contribution
            group.tell([c.last_step, *bits([attempt.weight, float(c.steps), c.norm, c.peak, c.behind, c.reach])])
            reduced = shell.host.reduce(attempt, group)
            rows = [row[:1] for row in group.told()]
            self._sent_bytes += group.sent_bytes - before
            data = {
                "wire_bytes": self._sent_bytes,
                "bytes": group.sent_bytes - before,
                "received": group.received_bytes - received,
                "seconds": time.perf_counter() - since_s,
                **reduced.metrics,
            }
            shell.emit("prepare", fragment=q.fragment, version=q.version, attempt=q.attempt, data=data)
        except Damaged as error:
            self._drop(q.fragment)
            reason = f"{error}"[:500]
            shell.act(lambda machine: machine.damaged(q.fragment, q.attempt, reason=reason))
        # Errors that may not recur in the next attempt. (An interruption is reported only if it is news.)
        except (Implausible, InterruptedError, ConnectionError, TimeoutError, FloatingPointError) as error:
            rank = getattr(error, "rank", None)
            peer = start.members[rank][0] if rank is not None and 0 <= rank < len(start.members) else ""
            doubts = isinstance(error, Implausible | FloatingPointError)
            bad = ", ".join(start.members[rank][0] for rank in getattr(error, "ranks", ()))
            reason = f"the payload of {bad} holds NaN or Inf" if bad else f"{error}"
            self._failed(q, reason, peer, cause="values" if doubts else "")
        except BaseException as error:  # of a method, the user's or ours: it would recur in every attempt
            shell.fail("the reducer thread", error)
            self._failed(q, f"{error!r}")
        else:
            live, peak = reduced.live, min(reduced.peak, sys.float_info.max)
            shell.act(
                lambda machine: machine.reduced(q.fragment, q.attempt, reduced.digest, rows, live=live, peak=peak)
            )
        finally:
            with self._lock:
                self._users.pop(q.attempt, None)
                self._aborted.discard(q.attempt)

    def _failed(self, q: m.Quorum, reason: str, peer: str = "", *, cause: str = "") -> None:
        self._drop(q.fragment)
        f, attempt, reason = q.fragment, q.attempt, reason[:500]
        self._shell.act(lambda machine: machine.reduce_failed(f, attempt, reason=reason, peer=peer, cause=cause))

    def _group(self, q: m.Quorum) -> Collective:
        with self._lock:
            if q.attempt in self._aborted or q.attempt not in self._attempts:
                raise InterruptedError("the attempt was aborted before it began")
            number, group = self._groups.get(q.fragment, (0, None))
            if group is not None and number != q.group:
                del self._groups[q.fragment]
                group.close()
                group = None
            if group is None:
                key = f"{q.fragment}.{q.group}"
                group = self._transport.connect(key=key, rank=q.rank, size=q.size, ops=self)
                self._groups[q.fragment] = (q.group, group)
            self._users[q.attempt] = group
        return group

    def _drop(self, fragment: int) -> None:
        with self._lock:
            _, group = self._groups.pop(fragment, (0, None))
        if group is not None:
            group.close()

    # The rendezvous store: StoreOps, called on the transport's threads.

    def set(self, key: str, value: bytes) -> None:
        self._shell.send(m.StoreSet(key, base64.b64encode(value).decode()))

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._lock:
            future = self._values.setdefault(key, Future())
        self._shell.send(m.StoreGet(key))
        try:
            return future.result(timeout=timeout_s)
        finally:
            with self._lock:
                self._values.pop(key, None)

    def store_value(self, key: str, value: bytes) -> None:
        """Takes the answer to a `get`. Network thread."""
        with self._lock:
            future = self._values.get(key)
        if future is not None and not future.done():
            future.set_result(value)

    def fail_store(self) -> None:
        """Fails all waits for keys at once, since the coordinator is away."""
        with self._lock:
            futures = list(self._values.values())
        for future in futures:
            if not future.done():
                future.set_exception(ConnectionError("the coordinator is away"))
