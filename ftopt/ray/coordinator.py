"""The coordinator as a Ray actor, which Ray restarts; the ranks of an island also find each other through it."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import ray

from ftopt.errors import UserError
from ftopt.events import Event, OnEvent, ignore
from ftopt.ray.progress import Progress
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.watch.jsonl import EventLog, JsonLines
from ftopt.watch.sentences import comes_too_late

T = TypeVar("T")
_log = logging.getLogger("ray.train.ftopt")
_TAKEN_S = 30.0
"""How long a former process may keep the port or the journal after Ray has noticed its end."""
_RETRY_S = 0.5
_SILENT_S = 5.0
"""A waiting rank of an island asks several times per second; one that is silent for this long has died."""


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Coordinator:
    """A coordinator at a fixed address.

    Args:
        host, port: Ray restarts the actor with the same arguments, so that replicas find it at the same address.
        journal: its journal's file, on this node; its events go to ``events.jsonl`` next to it. None: neither.
        run, started: name and start of the run, for metrics and events.
    """

    def __init__(self, host: str, port: int, journal: str | None, token: str, run: str, started: float) -> None:
        self._islands: dict[str, Island] = {}
        self._seen: set[str] = set()
        self._log: OnEvent = ignore
        self._tried = threading.Event()
        self._failed = self._job_failed = self._job_ended = ""
        file = None if journal is None else Path(journal)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._log = EventLog(JsonLines(file.with_name("events.jsonl"), started))

        def make() -> CoordinatorServer:
            # With a journal, "new" is right for a restart, too: the journal has its decisions.
            new, on_event = file is not None, self._on_event
            return CoordinatorServer(
                host, port, journal=file, new=new, token=token, open_status=True, on_event=on_event
            )

        threading.Thread(target=self._serve, args=(make,), name="ftopt coordinator", daemon=True).start()
        Progress(url_of(host, port), run).start()

    def _serve(self, make: Callable[[], CoordinatorServer]) -> None:
        """Serves; if the coordinator fails, its process ends, and Ray starts the next one."""
        try:
            server = self._once_free(make)
            self._once_free(lambda: server.run(ready=lambda _: self._tried.set()))
        except BaseException:
            _log.exception("the coordinator has failed; Ray starts it again")
            logging.shutdown()
        finally:
            os._exit(1)

    def _once_free(self, call: Callable[[], T]) -> T:
        """Retries until the former process has released the journal and the port."""
        until_s = time.monotonic() + _TAKEN_S
        while True:
            try:
                return call()
            except UserError as error:
                if time.monotonic() > until_s:
                    self._failed, until_s = str(error), math.inf
                    _log.error("the coordinator cannot start, and tries again: %s", error)
                    self._tried.set()
                time.sleep(_RETRY_S)

    def _on_event(self, event: Event) -> None:
        self._seen.add(event.replica)
        if event.event in ("start", "recover"):
            self._job_failed = self._job_ended = ""
        elif comes_too_late(event):
            self._job_ended = str(event.data["reason"])
        elif event.event == "job_failed":
            self._job_failed = f"replica {event.replica} was lost (policy.on_loss=fail): {event.data['reason']}"
        self._log(event)

    def ready(self) -> None:
        """Returns when the coordinator can be reached. UserError: it cannot start."""
        self._tried.wait()
        if self._failed:
            raise UserError(self._failed)

    def has_seen(self, replica: str) -> bool:
        return replica in self._seen

    def job_failed(self) -> str:
        """Why the job has failed for all; "" while it goes on."""
        return self._job_failed

    def job_ended(self) -> str:
        """The message to a replica that came after the job had ended; "" if none has come."""
        return self._job_ended

    def meet(self, island: str, size: int, rank: int, life: str, address: str | None) -> str | None:
        """Registers a rank that waits for the others of its island; it asks again until it gets an answer.

        Args:
            life: id of this life of the rank.
            address: address of rank 0's store.

        Returns:
            The address of rank 0's store once all ranks are there; None before.
        """
        return self._islands.setdefault(island, Island()).meet(size, rank, life, address)


@dataclass
class Island:
    """The ranks that wait for each other; and the lives of the last ones that have met, with rank 0's address."""

    waiting: dict[int, tuple[str, str | None, float]] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    address: str | None = None

    def meet(self, size: int, rank: int, life: str, address: str | None) -> str | None:
        """See `Coordinator.meet`."""
        if life in self.met:
            return self.address
        now_s = time.monotonic()
        self.waiting[rank] = (life, address, now_s)
        self.waiting = {r: seen for r, seen in self.waiting.items() if now_s - seen[2] < _SILENT_S}
        if len(self.waiting) < size:
            return None
        self.met = {life for life, _, _ in self.waiting.values()}
        self.address = self.waiting[0][1]
        self.waiting = {}
        return self.address


CoordinatorActor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Coordinator)
