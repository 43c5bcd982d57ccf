"""A data set, and stand-ins for a job's ledger and its replicas' groups, which tests grant from by hand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftopt.sync.protocol.policy import FaultPolicy
from ftopt.sync.protocol.samples import Samples


class Granted:
    """The units of one replica: what the test has granted."""

    def __init__(self, granted: Iterable[int] = (), *, ended: bool = False) -> None:
        self._changed = threading.Condition()
        self._queue = deque(granted)
        self._ended = ended
        self.taken: list[int] = []
        self.got: list[int] = []
        self.not_mine: set[int] = set()
        self.waits = 0
        """Blocking calls that found nothing at first."""

    def grant(self, units: Iterable[int], *, ended: bool = False) -> None:
        with self._changed:
            self._queue.extend(units)
            self._ended = ended
            self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> int | None:
        with self._changed:
            if not self._queue and not self._ended:
                if timeout_s == 0:
                    raise TimeoutError
                self.waits += 1
                assert self._changed.wait_for(lambda: self._queue or self._ended, 60), "nothing is granted"
            if not self._queue:
                return None
            self.taken.append(self._queue[0])
            return self._queue.popleft()

    @property
    def ended(self) -> bool:
        return self._ended and not self._queue

    def draw(self, unit: int) -> bool:
        if unit in self.not_mine:
            return False
        self.got.append(unit)
        return True


class Numbers:
    """A data set: sample i is i."""

    def __init__(self, samples: int = 60) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class StandIn:
    """A replica's group."""

    units: Granted = field(default_factory=Granted)
    replica: str = "r0"
    incarnation: int = 1
    joins: None = None
    island: None = None
    policy: FaultPolicy = field(default_factory=FaultPolicy)
    ledgers: list[tuple[Samples, int]] = field(default_factory=list)
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def keep_ledger(self, samples: Samples, *, accumulate: int = 1) -> Granted:
        self.ledgers.append((samples, accumulate))
        return self.units

    def keep_global_batch(self, samples: Samples, *, at_once: int = 1) -> Any:
        raise NotImplementedError

    def emit(self, event: str, *, data: Mapping[str, Any] | None = None) -> None:
        self.events.append((event, data or {}))
