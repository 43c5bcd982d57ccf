"""The network thread: one asyncio loop on a daemon thread, for work that must go on while the trainer computes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ftopt.errors import UserError
from ftopt.net.descriptors import AcceptErrors

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_WORKERS = 4
"""Threads for work that would block the loop: name look-ups, copying, parsing or installing states. All start at once,
so that growth in threads is a leak (asyncio's own pool grows with each concurrent task, up to cores + 4)."""

_START_S = 10.0


OnFailure = Callable[[BaseException], None]


class LoopThread:
    """An asyncio loop on a thread of its own, shared by reference counting: the last user's release ends it.

    The thread starts with the first user or coroutine, so that an unused group leaves no thread.

    No caller sees the exceptions of callbacks, so all users are notified of them. The loop goes on, so that users can
    leave in good order, also after `SystemExit` and `KeyboardInterrupt`, which would end asyncio's own loop.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, name: str = "ftopt-network") -> None:
        self._users: list[OnFailure] = []
        self._accept_errors = AcceptErrors(_log)
        self._begun = self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _begin(self) -> None:
        if not self._begun:
            self.loop = asyncio.new_event_loop()
            self.loop.set_default_executor(_pool(f"{self._thread.name}-worker"))
            self._thread.start()
            self._begun = True

    def acquire(self, on_failure: OnFailure) -> None:
        """Adds a user. ``on_failure``: called on the loop's thread when a callback, or the loop, has failed. Raises
        UserError if the loop has ended, with its last user."""
        with self._lock:
            if self._ended:
                raise UserError(
                    "the job of this group is over: all other groups that were made with it are closed; make new ones "
                    "with ftopt.local_groups(), and close none before all have joined"
                )
            self._begin()
            self._users.append(on_failure)

    def serves(self, on_failure: OnFailure) -> bool:
        """Whether the user with this ``on_failure`` is registered."""
        with self._lock:
            return on_failure in self._users

    def release(self, on_failure: OnFailure) -> None:
        """Removes the user with this ``on_failure``; the last one ends the thread."""
        with self._lock:
            self._users.remove(on_failure)
            last = self._ended = not self._users
        if last:
            self.stop()

    def stop(self) -> None:
        """Ends the loop and its thread; cancels pending tasks. Idempotent."""
        if not self._begun or self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def soon(self, call: Callable[..., object], *args: object) -> bool:
        """Calls ``call`` on the loop's thread; False when the loop has not begun, or has ended."""
        if not self._begun:
            return False
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Runs ``coroutine`` on the loop; the result can be waited for on another thread."""
        with self._lock:
            self._begin()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._on_exception)
        try:
            while not self._run_once():
                pass
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            if pending:
                self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def _run_once(self) -> bool:
        """Runs the loop; True when it was stopped."""
        try:
            self.loop.run_forever()
        except BaseException as error:
            self._tell(error)
            return False
        return True

    def _on_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Reports exceptions of callbacks to the users. A task's exception is seen by the code that awaits it, and a
        connection's is the other side's fault."""
        error = context.get("exception")
        if self._accept_errors.takes(context):
            return
        if error is not None and "handle" in context and self._users:
            self._tell(error)
        else:
            loop.default_exception_handler(context)

    def _tell(self, error: BaseException) -> None:
        with self._lock:
            users = list(self._users)
        for on_failure in users:
            on_failure(error)


def _pool(name: str) -> ThreadPoolExecutor:
    pool, all_there = ThreadPoolExecutor(_WORKERS, thread_name_prefix=name), threading.Barrier(_WORKERS)
    for _ in range(_WORKERS):
        pool.submit(all_there.wait, _START_S)
    return pool
