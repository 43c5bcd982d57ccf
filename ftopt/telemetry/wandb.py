"""Mirrors one replica's run to wandb. The one file that imports it.

Everything of wandb happens on a thread of its own that starts at the first inner step: training waits neither for its
import nor for its service, and no error of it reaches the loop. The JSON lines are the record; this is a copy.
"""

from __future__ import annotations

import logging
import netrc
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftopt.events import Event

_log = logging.getLogger("ftopt.telemetry")
_EVERY = 10
"""Inner steps between two points of the inner curves."""


def resolve(mode: str) -> str:
    """``auto`` as ``online`` with a key, else ``offline``; ``WANDB_MODE`` has its say. Others unchanged."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted in ("online", "offline"):
        return wanted
    if wanted == "disabled":
        return "off"
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        return "online" if netrc.netrc().authenticators("api.wandb.ai") is not None else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class WandbMirror:
    """One wandb run for one replica, grouped by job.

    Args:
        mode: ``online`` or ``offline``.
        folder: offline files go to ``wandb`` below it.
        job: the job's name: the group, and the first part of the run's id.
        replica: this replica's id.
        config: the resolved recipe.
    """

    def __init__(self, mode: str, folder: Path, *, job: str, replica: str, config: Mapping[str, Any]) -> None:
        self._settings = {
            "mode": mode,
            "dir": str(folder),
            "group": job,
            "job_type": "replica",
            "name": replica,
            "id": f"{job}-{replica}",
            "resume": "allow" if mode == "online" else None,
            "project": "ftopt",
            "config": dict(config),
        }
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=10_000)
        self._thread: threading.Thread | None = None

    def step(self, inner_step: int, *, loss: float, lr: float) -> None:
        """Tells an inner step. Does not block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ftopt-wandb", daemon=True)
            self._thread.start()
        if inner_step % _EVERY == 0:
            self._put({"inner/step": inner_step, "inner/loss": loss, "inner/lr": lr})

    def __call__(self, event: Event) -> None:
        """Tells an event. Does not block."""
        if event.event == "apply":
            self._put({"outer/version": event.version, "outer/inner_step": event.inner_step})
        elif event.event == "evaluate":
            self._put({"inner/step": event.inner_step, "inner/val_loss": event.data["loss"]})
        elif event.event == "stall":
            self._put({"inner/step": event.inner_step, "inner/stall_s": event.data["stall_s"]})

    def finish(self, timeout_s: float) -> None:
        """Waits at most so many seconds for wandb to take what is there; then it is left behind."""
        if self._thread is None:
            return
        self._put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("wandb did not finish within %g s; its copy of the run may lack the end", timeout_s)

    def _put(self, point: dict[str, Any] | None) -> None:
        try:
            self._queue.put_nowait(point)
        except queue.Full:  # wandb is stuck or has failed; the JSON lines have it all.
            return

    def _work(self) -> None:
        try:
            self._mirror()
        except Exception as error:  # Whatever wandb raises, training goes on.
            _log.warning("wandb: %s: %s; the run goes on without it", type(error).__name__, error)

    def _mirror(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
        run = wandb.init(settings=settings, **self._settings)  # type: ignore[arg-type]
        run.define_metric("inner/*", step_metric="inner/step")
        run.define_metric("outer/*", step_metric="outer/version")
        while (point := self._queue.get()) is not None:
            run.log(point)
        run.finish()
