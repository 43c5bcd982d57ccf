"""A replica of the benchmark of joins, as a program of its own: torch is imported as in a user's script."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from typing import Any

CONNECTS = (
    "ftopt.transport.state_transfer",
    "ftopt.sync.replica.client",
    "ftopt.sync.replica.websocket",
    "ftopt.transport.gloo",
)
"""What `ftopt.connect` imports when it is called, aiohttp with it."""


def main() -> None:
    """Trains until it is ended; tells what is asked for on stdin."""
    told = json.loads(sys.argv[1])
    import torch

    import ftopt
    from benchmarks.speed.models import of_size
    from benchmarks.speed.orders import obey
    from ftopt.events import Event

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first one imports the rest of torch
    names = (ftopt.connect, ftopt.wrap, ftopt.DiLoCo, ftopt.FaultPolicy)
    assert all(names)
    for name in CONNECTS:
        importlib.import_module(name)
    moments: dict[str, float] = {"imported": time.time()}
    boundaries: list[tuple[float, float]] = []
    waits: list[float] = []
    fetches: list[float] = []
    committed, stepped, held = threading.Event(), threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        now = time.time()
        if event.event == "fetch":
            fetches.append(now)
            moments.setdefault("first fetch", now)
        elif event.event == "fetched" and "commit" not in moments:  # the last one before the first contribution
            moments.update({"fetch": fetches[-1], "fetched": now})
        else:
            moments.setdefault(event.event, now)
        if event.event == "commit":
            committed.set()
        if event.event == "fetched":
            held.set()
        elif event.event == "stall":
            waits.append(event.data["stall_s"])

    model = of_size(told["parameters"])
    moments["made"] = time.time()
    group = ftopt.connect(
        told["url"],
        told["replica"],
        policy=ftopt.FaultPolicy(**told["policy"]),
        on_event=on_event,
        standby=told.get("standby", False),
    )
    optimizer = ftopt.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=told["sync_every"]), group=group
    )

    def train() -> None:
        with optimizer:
            moments["entered"] = time.time()
            while True:
                began = time.time()
                time.sleep(told["step_s"])  # an inner step; without gradients the inner optimizer has nothing to do
                optimizer.step()
                boundaries.append((began, time.time()))
                moments.setdefault("stepped", time.time())
                stepped.set()

    threading.Thread(target=train, daemon=True).start()

    def carry_out(verb: str, *_: int) -> dict[str, Any]:
        if verb in ("first", "held", "stepped"):
            {"first": committed, "held": held, "stepped": stepped}[verb].wait()
            return {name: at_s - told["started_s"] for name, at_s in moments.items()}
        if verb == "count":
            return {"steps": len(boundaries)}
        found, waited = list(boundaries), list(waits)
        del boundaries[: len(found)], waits[: len(waited)]
        return {"steps": found, "waits": waited}

    obey(carry_out)


if __name__ == "__main__":
    main()
