"""The job's progress as Ray's metrics: on the dashboard, and where Ray's own metrics are scraped."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any

from ray.util.metrics import Gauge

from ftopt.net import direct

_EVERY_S = 5.0
_TIMEOUT_S = 5.0
_MOST_BYTES = 256 << 20


def jobs_at(url: str) -> list[dict[str, Any]]:
    """The jobs that the coordinator at ``url`` reports. OSError, ValueError, HTTPException: no answer at present."""
    return list(json.loads(direct.get(f"{url}/status", timeout_s=_TIMEOUT_S, max_bytes=_MOST_BYTES))["jobs"])


class Progress(threading.Thread):
    """Asks the coordinator at ``url`` every few seconds; ``run`` is the metrics' label."""

    def __init__(self, url: str, run: str) -> None:
        super().__init__(name="ftopt progress", daemon=True)
        self._url = url
        self._labels = {"run": run}
        labels = ("run",)
        self._step = Gauge("ftopt_inner_step", "Inner steps that the job's newest version has", labels)
        self._version = Gauge("ftopt_version", "Outer steps committed, of fragment 0", labels)
        self._connected = Gauge("ftopt_replicas_connected", "Replicas that the coordinator hears", labels)

    def run(self) -> None:
        while True:
            try:
                for job in jobs_at(self._url):
                    self._show(job)
            except (OSError, ValueError, http.client.HTTPException):
                pass  # it is starting, or busy: try again later
            threading.Event().wait(_EVERY_S)

    def _show(self, job: dict[str, Any]) -> None:
        if job["fragments"]:
            self._step.set(job["fragments"][0]["inner_step"], self._labels)
            self._version.set(job["fragments"][0]["version"], self._labels)
        connected = sum(replica["state"] not in ("away", "left") for replica in job["replicas"])
        self._connected.set(connected, self._labels)
