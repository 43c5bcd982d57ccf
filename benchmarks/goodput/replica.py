"""A replica of the real job: it trains the tiny model until the job is over, and leaves in good order on SIGTERM."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import ftopt
from ftopt.events import Event, Subscribers
from ftopt.run.subscribers import CurrentStep, step_log
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines
from tests.sync.processes.job import tiny_model


def replica(folder: Path, url: str, name: str, started: float, options: Mapping[str, Any], go: Any, over: Any) -> None:
    """Runs in a process of its own. An inner step is a wait of ``options["step_s"]``.

    It joins, and begins when ``go`` is set. ``over`` is set when the job ends: all hand in what they have, by one more
    round.
    """
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / f"log-{name}", format="%(asctime)s %(name)s: %(message)s")
    files = RunFolder(folder)
    events, record = EventLog(JsonLines(files.events, started)), CurrentStep()
    on_event = Subscribers([events, step_log(record, [JsonLines(files.steps(name), started).write])])
    model = tiny_model()
    group = ftopt.connect(url, name, policy=options["policy"], on_event=on_event, connect_s=10.0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = ftopt.wrap(inner, model, options["method"], group=group, leave_on_signals=True)
    reason = "left"
    try:
        with optimizer:
            go.wait()
            data = torch.Generator().manual_seed(group.incarnation)
            while not over.is_set():
                x = torch.randn(4, 8, generator=data)
                loss = (model(x) - x.flip(1)).square().mean()
                loss.backward()
                record.loss, record.local_step = float(loss.detach()), optimizer.local_steps + 1
                time.sleep(options["step_s"])  # an inner step of known length
                optimizer.step()
                optimizer.zero_grad()
            optimizer.sync()
            reason = "done"
    finally:
        pending = {"pending_steps": optimizer.pending_steps, "pending_by_fragment": optimizer.status.pending_steps}
        told = {"reason": reason, "local_steps": optimizer.local_steps, **pending}
        on_event(Event("end", name, group.incarnation, inner_step=optimizer.inner_step, data=told))
