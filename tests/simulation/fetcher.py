"""How a modelled replica fetches the committed state from others, and installs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftopt.sync.protocol import messages as m
from tests.simulation.check import Checks
from tests.simulation.host import Content
from tests.simulation.world import Process


class SimFetcher:
    """Of one life of a process. ``moved``: told the record of a state that is installed, and its parent's chain."""

    def __init__(self, process: Process, checks: Checks, moved: Callable[[m.Record, str], None]) -> None:
        self._process, self._world, self._checks, self._moved = process, process.world, checks, moved

    def fetch(self, fragment: int, failed: tuple[str, ...] = ()) -> None:
        """Asks the sources that the machine names one after the other, but for those that have ``failed``."""
        fetch = self._process.machine.fragments[fragment].wanted
        for name in fetch.sources if fetch else ():
            source = self._world.processes.get(name)
            cut = frozenset((name, self._process.name)) in self._world.cuts
            if name in failed or source is None or not source.alive or source.frozen or cut:
                continue
            record = source.machine.fragments[fragment].serves()
            if record is None:
                continue
            self._checks.served(source, fragment)
            content, record = source.shards[fragment].content, replace(record)
            self._process.later(self._world.fetch_s(), self._fetched, record, content, name, source.life, failed)
            return
        self._process.act(self._process.machine.fetch_failed(fragment))

    def _fetched(self, record: m.Record, content: Content, name: str, life: int, failed: tuple[str, ...]) -> None:
        fragment, source = record.fragment, self._world.processes[name]
        if not source.alive or source.life != life:
            self.fetch(fragment, (*failed, name))
            return
        reset = self._process.machine.fragments[fragment].reset
        if not self._process.machine.install(record):
            self._process.act(self._process.machine.fetch_failed(fragment))
            return
        self._process.installing.add(fragment)
        self._process.later(self._world.delay(), self._installed, record, content, reset)

    def _installed(self, record: m.Record, content: Content, reset: bool) -> None:
        fragment = record.fragment
        self._process.installing.discard(fragment)
        shard = self._process.shards[fragment]
        shard.reset = shard.reset or reset
        shard.advance(record, content, self._process.machine.counted_step(record))
        effects = self._process.machine.fetched(record)
        self._moved(record, "")
        self._process.act(effects)
