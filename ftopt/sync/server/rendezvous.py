"""The rendezvous store of a job: where the members of a process group leave their addresses for each other.

Keys begin with their group's name, up to the first ``/``; the keys of the newest groups are kept. A request for a key
that is not set yet is answered when it is set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ftopt.sync.server.limits import Exceeded, Limits


class Rendezvous:
    """The store of one job. ``answer`` is called with connection, key and value for each answer."""

    def __init__(self, limits: Limits, answer: Callable[[int, str, str], None]) -> None:
        self._limits = limits
        self._answer = answer
        self._groups: OrderedDict[str, dict[str, str]] = OrderedDict()
        self._keys = 0
        self._bytes = 0
        self._waiting: dict[str, dict[int, None]] = {}
        self._asked: dict[int, dict[str, None]] = {}

    def set(self, key: str, value: str) -> None:
        """Stores ``value`` at ``key``.

        Raises:
            Exceeded: there is no room, although older groups were dropped; the newest group is unchanged.
        """
        name = key.partition("/")[0]
        group = self._groups.get(name)
        before = None if group is None else group.get(key)
        more = len(value) - len(before or "")
        while self._full(before is None, more) and next(iter(self._groups), name) != name:
            self._drop_oldest()
        if self._full(before is None, more):
            raise Exceeded(
                f"a rendezvous of more than {self._limits.store_keys} keys or {self._limits.store_bytes} bytes"
            )
        if group is None:
            group = self._groups[name] = {}
        group[key] = value
        self._keys += before is None
        self._bytes += more
        while len(self._groups) > self._limits.groups:
            self._drop_oldest()
        for conn in list(self._waiting.get(key, ())):
            self._withdraw(conn, key)
            self._answer(conn, key, value)

    def get(self, conn: int, key: str) -> None:
        """Answers when the key is set. Beyond the limit, a connection's oldest requests are forgotten."""
        value = self._groups.get(key.partition("/")[0], {}).get(key)
        if value is not None:
            self._answer(conn, key, value)
            return
        asked = self._asked.setdefault(conn, {})
        asked[key] = None
        self._waiting.setdefault(key, {})[conn] = None
        if len(asked) > self._limits.waiting_keys:
            self._withdraw(conn, next(iter(asked)))

    def forget(self, conn: int) -> None:
        """Forgets the requests of a connection that has ended."""
        for key in list(self._asked.get(conn, ())):
            self._withdraw(conn, key)

    def _withdraw(self, conn: int, key: str) -> None:
        del self._waiting[key][conn], self._asked[conn][key]
        if not self._waiting[key]:
            del self._waiting[key]
        if not self._asked[conn]:
            del self._asked[conn]

    def _full(self, is_new: bool, more: int) -> bool:
        return self._keys + is_new > self._limits.store_keys or self._bytes + more > self._limits.store_bytes

    def _drop_oldest(self) -> None:
        _, group = self._groups.popitem(last=False)
        self._keys -= len(group)
        self._bytes -= sum(map(len, group.values()))
