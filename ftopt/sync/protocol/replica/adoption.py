"""ADOPT, on the side of a newcomer: the predecessor's work with which it has begun."""

from __future__ import annotations

from ftopt.sync.protocol import messages as m


class Adoption:
    """The predecessor whose pending work this incarnation has adopted, and how much of it was counted by then."""

    def __init__(self) -> None:
        self._predecessor: m.IncarnationId | None = None
        self._counted: dict[int, int] = {}
        """Fragment -> the predecessor's last inner step that was counted at the adoption."""

    def adopt(self, predecessor: m.IncarnationId) -> None:
        """Notes that this incarnation adopts the pending work of ``predecessor``."""
        self._predecessor = predecessor

    def is_counted_again(self, held: m.Record | None, fetched: m.Record) -> bool:
        """Whether ``fetched`` counts more of the predecessor than the state with which its work was adopted. If so, the
        predecessor went on at another coordinator, and its work pending here is in ``fetched``. ``held``: the record
        before the fetch."""
        if self._predecessor is None:
            return False
        counted = fetched.counted_step(*self._predecessor)
        first = counted if held is None else held.counted_step(*self._predecessor)
        return counted > self._counted.setdefault(fetched.fragment, first)
