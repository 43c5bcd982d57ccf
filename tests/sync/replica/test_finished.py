"""`on_loss: fail`: a replica that ends while the coordinator is away repeats its goodbye until it is heard (LOSS)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import ftopt
from ftopt.integrations import finish
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.sync.server.journal import Journal
from tests.run.running import until

POLICY = ftopt.FaultPolicy(on_loss="fail", start_replicas=1, dead_after_s=20.0, recovery_s=60.0)


def served(journal: Path, port: int, *, new: bool = False) -> tuple[int, Callable[[], None]]:
    """A coordinator on a thread of its own: its port, and what stops it."""
    ready: Future[int] = Future()
    over = threading.Event()

    async def serve() -> None:
        server = CoordinatorServer("127.0.0.1", port, journal=journal, new=new)
        ready.set_result(await server.start())
        await asyncio.to_thread(over.wait)
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()

    def stop() -> None:
        over.set()
        thread.join()

    return ready.result(30), stop


@pytest.mark.long
def test_a_goodbye_while_the_coordinator_is_away_is_heard_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    journal = tmp_path / "journal"
    _, stop = served(journal, port, new=True)
    model = torch.nn.Linear(2, 1)
    group = ftopt.connect(f"http://127.0.0.1:{port}", "r0", job="job", policy=POLICY)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(inner, model, ftopt.DiLoCo(sync_every=1), group=group)
    session = group.session  # type: ignore[attr-defined]

    def come_back() -> None:
        until(lambda: session.machine.said.bye)
        stops.append(served(journal, port)[1])

    stops: list[Callable[[], None]] = []
    try:
        with optimizer:
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            stop()
            until(lambda: not session.machine.connected)
            helper = threading.Thread(target=come_back)
            helper.start()
        helper.join()
    finally:
        for each in stops:
            each()
        group.close()
    assert "did not hear the goodbye" not in caplog.text
    again = Journal(journal)
    saved = again.load("job")
    again.close()
    assert saved is not None and (saved.roster, saved.gone, saved.failed) == ((), (("r0", 1),), None)


def test_one_that_closes_in_a_finally_clause_of_an_exception_has_not_finished(tmp_path: Path) -> None:
    port, stop = served(tmp_path / "journal", 0, new=True)
    model = torch.nn.Linear(2, 1)
    group = ftopt.connect(f"http://127.0.0.1:{port}", "r0", job="job", policy=POLICY)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=1), group=group)
    try:
        with pytest.raises(ZeroDivisionError):
            try:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                raise ZeroDivisionError
            finally:
                optimizer.close()
        assert not group.session.machine.said.finished  # type: ignore[attr-defined]
    finally:
        stop()


def test_one_whose_last_steps_are_beyond_the_jobs_end_has_finished() -> None:
    model = torch.nn.Linear(2, 1)
    (group,) = ftopt.local_groups(1, policy=POLICY)
    optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=1), group=group)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    finish(optimizer, planned=1)  # which leaves without another round
    assert group.session.machine.said.finished  # type: ignore[attr-defined]
