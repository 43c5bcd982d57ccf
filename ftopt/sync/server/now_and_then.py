"""When an event about all replicas is told again: as often as the size of a record that goes on for weeks allows."""

from __future__ import annotations

import math
from collections.abc import Mapping


class NowAndThen:
    """One kind of event. ``each_s``: it takes that long per replica that it tells of."""

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s
        self._told: Mapping[str, object] = {}
        self._at_s = -math.inf

    def is_due(self, news: Mapping[str, object], now: float) -> bool:
        """Whether ``news``, of each replica, is told now: when there is any, and it has changed."""
        if not news or news == self._told or now < self._at_s:
            return False
        self._told, self._at_s = news, now + len(news) * self._each_s
        return True
