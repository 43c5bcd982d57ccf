"""The connections of an island's ranks besides those of the training threads: rank 0 with each other rank.

The training threads talk in collective calls (`ftopt.sync.island`), which block. The job's decisions arrive at any
time, on other threads, and travel by these connections. Rank 0 admits only processes that know the island's secret,
which it has sent to the others in a collective call. When a connection ends, the island has lost a rank, and every
call that waits for a rank raises.
"""

from __future__ import annotations

import pickle
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from ftopt.errors import FtoptError
from ftopt.sync.island import Island, RankLost

_COME_S = 60.0
_ANSWER_S = 5.0
_LOSS_S = 2.0
_MEET = "meet"
UNLIKE = "rank 0 was in another call; all ranks of an island make the same calls in the same order"
Scope = tuple[object, ...]


class RankLinks:
    """This rank's connections. Any thread, unless said otherwise.

    Args:
        island: the ranks; its calls are collective, on the training threads.
        host: this machine's address, as the other ranks reach it; only rank 0's is used.

    """

    def __init__(self, island: Island, host: str) -> None:
        self.rank, self.size = island.rank, island.size
        self._heard: Callable[[int, Any], None] = lambda rank, what: None
        self._lost: Callable[[FtoptError], None] = lambda error: None
        self._listens, self._over = threading.Event(), threading.Event()
        self._connections: dict[int, Connection[Any, Any]] = {}
        self._sending: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._brought: dict[Scope, dict[int, Any]] = {}
        self._waiting: dict[Scope, queue.SimpleQueue[Any]] = {}
        self._stopped: set[Scope] = set()
        self._error: FtoptError | None = None
        self._closed = self._leaving = False
        self._here = threading.local()
        self._training: tuple[Scope, list[int]] = (("training",), [0])
        self._threads: list[threading.Thread] = []
        secret = secrets.token_bytes(32)
        if island.leads:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._lead(island, host, family, secret)
        else:
            told = island.hear()
            if told[0] != _MEET:
                raise FtoptError(f"rank {self.rank}: {UNLIKE}")
            address, secret = told[1:]
            self._add(0, Client(tuple(address), authkey=secret))
            self._connections[0].send_bytes(pickle.dumps(self.rank))
        island.gather(None)
        for rank in self._connections:
            thread = threading.Thread(target=self._read, args=(rank,), name=f"ftopt-rank-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def listen(self, heard: Callable[[int, Any], None], lost: Callable[[FtoptError], None]) -> None:
        """Sets the callbacks: ``heard`` gets a sender's rank and its message, on that connection's thread; ``lost`` is
        called once, when a rank is gone."""
        self._heard, self._lost = heard, lost
        self._listens.set()
        if self._error is not None:
            lost(self._error)

    def _lead(self, island: Island, host: str, family: int, secret: bytes) -> None:
        name = "AF_INET" if family == socket.AF_INET else "AF_INET6"
        with Listener((host, 0), family=None if name == "AF_INET" else name, backlog=self.size) as room:
            inside: socket.socket = room._listener._socket  # type: ignore[attr-defined]
            inside.settimeout(_COME_S)
            island.say((_MEET, room.address, secret))
            while len(self._connections) < self.size - 1:
                try:
                    connection = room.accept()
                except ConnectionAbortedError:
                    continue
                except TimeoutError:  # no rank has connected
                    came = ", ".join(map(str, sorted(self._connections))) or "none"
                    text = f"of {self.size - 1} other ranks those that have connected to {host} in time are: {came}"
                    raise FtoptError(f"{text}; do all ranks reach that address? Else: {UNLIKE}") from None
                try:
                    with _hung_up_after(connection, _ANSWER_S):
                        deliver_challenge(connection, secret)
                        answer_challenge(connection, secret)
                        rank = pickle.loads(connection.recv_bytes())
                except (AuthenticationError, EOFError, OSError):  # a stranger, such as a port scanner
                    connection.close()
                    continue
                self._add(rank, connection)

    def _add(self, rank: int, connection: Connection[Any, Any]) -> None:
        with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as inside:
            inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            inside.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections[rank], self._sending[rank] = connection, threading.Lock()

    # Sending.

    def send(self, rank: int, what: Any) -> None:
        """Sends to one rank; ranks other than 0 send to rank 0 alone. Raises RankLost if it is gone."""
        data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending[rank]:
                self._connections[rank].send_bytes(data)
        except (OSError, ValueError) as error:
            self._lose(rank, error)
            raise self._error or RankLost("closed") from error

    def tell(self, what: Any) -> None:
        """Rank 0: sends to all others."""
        for rank in self._connections:
            self.send(rank, what)

    # All together.

    @contextmanager
    def within(self, *scope: object) -> Iterator[None]:
        """Names this thread's calls within the block, by the same name on all ranks; see `all`."""
        with self._in((scope, [0])):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Marks this thread's calls within the block as part of the user's loop, the same on all ranks; see `all`."""
        with self._in(self._training):
            yield

    @contextmanager
    def _in(self, scope: tuple[Scope, list[int]]) -> Iterator[None]:
        before = getattr(self._here, "scope", None)
        self._here.scope = scope
        try:
            yield
        finally:
            self._here.scope = before

    def all(self, value: Any) -> list[Any]:
        """Returns all ranks' values, by rank. All ranks make the same calls, in threads that are `within` one name.

        Raises:
            RankLost: a rank is gone.
            InterruptedError: the name was stopped.
        """
        scope, count = self._here.scope
        count[0] += 1
        tag: Scope = (*scope, count[0])
        box: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._check(scope)
            self._waiting[tag] = box
        if self.rank:
            self.send(0, ("all", tag, value))
        else:
            self._bring(0, tag, value)
        found = box.get()
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[no-any-return]

    def leave(self) -> None:
        """All ranks leave together: the end of a connection is no loss any more."""
        self._leaving = True
        self.all(None)

    def part(self) -> None:
        """This rank leaves in good order, by itself. The end of its connection is no failure to the others, which come
        to their end as well; a rank that goes on instead raises in its next call."""
        self._leaving = True
        with suppress(FtoptError):  # the others have left before
            if self.rank:
                self.send(0, ("part",))
            else:
                self.tell(("part",))

    def fail(self, why: str) -> None:
        """Ends the island, since this rank cannot go on: the others raise RankLost with this reason."""
        for rank in self._connections:
            with suppress(FtoptError):
                self.send(rank, ("failed", why))
        with self._lock:
            self._closed = True
        for connection in self._connections.values():
            _hang_up(connection, socket.SHUT_WR)
        self._join(_LOSS_S)  # until the others have read it: closing a connection before may lose it
        self.close()

    def loss(self) -> FtoptError | None:
        """Why a connection has ended. Waits for that: a collective call may fail a moment earlier of the same cause."""
        self._over.wait(_LOSS_S)
        return self._error

    def stop(self, *scope: object) -> None:
        """Rank 0: ends the calls under this name, and those still to come, on all ranks."""
        self._stop(scope)
        with suppress(FtoptError):
            self.tell(("stop", scope))

    def forget(self, *scope: object) -> None:
        """Forgets a name that is not used again on this rank."""
        with self._lock:
            self._stopped.discard(scope)
            for tag in [tag for tag in self._brought if tag[:-1] == scope]:
                del self._brought[tag]

    def _bring(self, rank: int, tag: Scope, value: Any) -> None:
        with self._lock:
            if tag[:-1] in self._stopped:
                return
            brought = self._brought.setdefault(tag, {})
            brought[rank] = value
            if len(brought) < self.size:
                return
            del self._brought[tag]
            own = self._waiting.pop(tag, None)  # it is decided: a rank that hears it may close its connection at once
        found = [brought[rank] for rank in range(self.size)]
        with suppress(FtoptError):  # the loss is known and reported already
            self.tell(("found", tag, found))
        if own is not None:  # last: this rank may close its connections, too
            own.put(found)

    def _resolve(self, tag: Scope, found: Any) -> None:
        with self._lock:
            box = self._waiting.pop(tag, None)
        if box is not None:
            box.put(found)

    def _stop(self, scope: Scope) -> None:
        with self._lock:
            self._stopped.add(scope)
            waiting = [tag for tag in self._waiting if tag[:-1] == scope]
        for tag in waiting:
            self._resolve(tag, InterruptedError("another rank of this island has failed, or the attempt was stopped"))

    def check(self) -> None:
        """Raises RankLost if a rank is gone."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RankLost("this rank has left its island")

    def _check(self, scope: Scope) -> None:
        self.check()
        if scope in self._stopped:
            raise InterruptedError("another rank of this island has failed, or the attempt was stopped")

    # Listening.

    def _read(self, rank: int) -> None:
        connection = self._connections[rank]
        try:
            while True:
                what = pickle.loads(connection.recv_bytes())
                match what:
                    case ("all", tag, value):
                        self._bring(rank, tag, value)
                    case ("found", tag, found):
                        self._resolve(tag, found)
                    case ("stop", scope):
                        self._stop(scope)
                    case ("part",):
                        self._leaving = True
                    case ("failed", why):
                        raise FtoptError(why)
                    case _:
                        self._listens.wait()
                        self._heard(rank, what)
        except (EOFError, OSError, ValueError) as error:
            self._lose(rank, error)
        except BaseException as error:
            self._lose(rank, error)
            _hang_up(connection)  # else the other rank would wait for this one

    def _lose(self, rank: int, error: BaseException) -> None:
        with self._lock:
            if self._closed or self._error is not None:
                return
            wrong = f": {error}" if not isinstance(error, EOFError | OSError) else ""
            self._error = found = RankLost(
                f"rank {self.rank} of {self.size}: rank {rank} of this replica is gone{wrong}; a replica is whole or "
                "not at all: start it again, as torchrun --max-restarts does"
            )
            found.__cause__ = error
            boxes = list(self._waiting.values())
            self._waiting.clear()
        self._over.set()
        for box in boxes:
            box.put(found)
        if not self._leaving:
            self._lost(found)

    def close(self) -> None:
        """Ends the connections: the other ranks lose this one unless they have closed theirs. Idempotent."""
        self._listens.set()
        self._over.set()
        with self._lock:
            self._closed = True
            boxes = list(self._waiting.values())
            self._waiting.clear()
        for box in boxes:
            box.put(RankLost("this rank has left its island"))
        for connection in self._connections.values():
            _hang_up(connection)
        self._join(5.0)
        for connection in self._connections.values():
            connection.close()

    def _join(self, timeout_s: float) -> None:
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout=timeout_s)


def _hang_up(connection: Connection[Any, Any], how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError), socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as inside:
        inside.shutdown(how)


@contextmanager
def _hung_up_after(connection: Connection[Any, Any], seconds: float) -> Iterator[None]:
    """Ends the connection if the block takes longer."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as inside:

        def hang_up() -> None:
            with suppress(OSError):
                inside.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, hang_up)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
