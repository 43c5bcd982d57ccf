"""A coordinator that does not know the job or its protocol takes the place of the one that let the replicas in."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.effects import GiveUp, Notice
from ftopt.sync.protocol.replica.identity import Identity
from ftopt.sync.protocol.replica.machine import Replica
from ftopt.sync.replica.link import Channel
from ftopt.sync.replica.websocket import WebSocketLink
from tests.ports import hold_port
from tests.sync.server.access import coordinator, coordinator_thread, identity, scripted

LIMIT_S = 60.0
POLICY = ftopt.FaultPolicy(start_replicas=2, grace_s=5.0, heartbeat_s=0.1, dead_after_s=1.0, recovery_s=2.0)


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


class Trainer:
    """A replica that trains on a thread until it is told to end."""

    def __init__(self, url: str, replica: str, *, sync_every: int = 5) -> None:
        self.url, self.replica, self.method = url, replica, ftopt.LocalSGD(sync_every=sync_every)
        self.ends = threading.Event()
        self.error: Exception | None = None
        self.inner_step = self.version = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._train()
        except Exception as error:
            self.error = error

    def _train(self) -> None:
        model = nn.Linear(4, 2)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        group = ftopt.connect(self.url, job="job", replica=self.replica, policy=POLICY)
        optimizer = ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, self.method, group=group)
        with optimizer:
            while not self.ends.is_set():
                optimizer.zero_grad()
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                self.inner_step, self.version = optimizer.inner_step, optimizer.status.versions[0]
                time.sleep(0.01)
            optimizer.close(timeout_s=2.0)  # there may be no coordinator that takes its last steps

    def end(self) -> None:
        self.ends.set()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive() and self.error is None, self.error


@contextmanager
def two(url: str) -> Iterator[list[Trainer]]:
    trainers = [Trainer(url, name) for name in ("r0", "r1")]
    try:
        wait_until(lambda: all(x.version >= 2 for x in trainers))
        yield trainers
    finally:
        for x in trainers:
            x.ends.set()
            x.thread.join(LIMIT_S)


def train_on(trainers: list[Trainer], *, together: bool = False) -> None:
    """They take 20 more steps each; ``together``: and are in new versions."""
    before = [(x.inner_step, x.version) for x in trainers]

    def do() -> bool:
        assert all(x.error is None for x in trainers), [x.error for x in trainers]
        steps = all(x.inner_step >= step + 20 for x, (step, _) in zip(trainers, before, strict=True))
        return steps and (not together or all(x.version > v for x, (_, v) in zip(trainers, before, strict=True)))

    wait_until(do)


def test_an_upgraded_coordinator_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It speaks another protocol, on the same journal; then the former one is back."""
    caplog.set_level(logging.WARNING)
    options: dict[str, Any] = {"token": None, "journal": tmp_path / "journal.sqlite"}
    with hold_port() as holder, ExitStack() as stack:
        port = holder.getsockname()[1]
        with coordinator_thread(port=port, **options) as url:
            trainers = stack.enter_context(two(url))
        with monkeypatch.context() as patch:
            patch.setattr(m, "protocol_of", lambda text: ("r0", m.PROTOCOL + 1))
            with coordinator_thread(port=port, **options):
                train_on(trainers)
                wait_until(lambda: "does not let it in" in caplog.text)
        assert "different versions of ftopt" in caplog.text and "no coordinator answers" not in caplog.text
        with coordinator_thread(port=port, new=False, **options):
            train_on(trainers, together=True)
            for x in trainers:
                x.end()


async def _come_first(url: str) -> None:
    """A newcomer of the same job name, with another model."""
    async with scripted(url, identity("job", "r9"), token=None) as replica:
        await replica.join()


@pytest.mark.long
def test_a_job_of_other_settings_under_the_name_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator was started anew, and a newcomer with other settings has come first."""
    caplog.set_level(logging.WARNING)
    cut, connect = threading.Event(), WebSocketLink.open

    async def unless_cut(self: WebSocketLink, receive: Callable[[str], None]) -> Channel:
        if cut.is_set():
            raise ConnectionError("cut")
        return await connect(self, receive)

    monkeypatch.setattr(WebSocketLink, "open", unless_cut)
    with hold_port() as holder, ExitStack() as stack:
        port = holder.getsockname()[1]
        with coordinator_thread(token=None, port=port) as url:
            trainers = stack.enter_context(two(url))
            cut.set()
        with coordinator_thread(token=None, port=port) as url:
            asyncio.run(_come_first(url))
            cut.clear()
            train_on(trainers)
            wait_until(lambda: "does not fit job" in caplog.text)
            train_on(trainers)
            for x in trainers:
                x.end()


def test_a_hello_of_another_protocol_hears_of_versions_whatever_else_is_in_it() -> None:
    async def answers() -> list[m.FromCoordinator]:
        async with coordinator(token=None) as url:
            found = []
            for protocol in (m.PROTOCOL - 1, m.PROTOCOL + 1):
                async with scripted(url, token=None) as replica:
                    await replica.send(json.dumps({"type": "Hello", "protocol": protocol, "replica": "r9", "new": {}}))
                    found.append(await replica.receive())
            return found

    for answer in asyncio.run(answers()):
        assert isinstance(answer, m.Refuse) and answer.kind == "misfit"
        assert "different versions of ftopt" in answer.reason


@pytest.mark.parametrize("kind", ["misfit", "unreadable"])
def test_a_newcomer_gives_up_and_who_was_let_in_trains_on(kind: str) -> None:
    def answer(incarnation: int) -> list[object]:
        replica = Replica(Identity("j", "r0", {}, {}, "aa"), incarnation=incarnation)
        replica.connect()
        return list(replica.receive(m.Refuse(kind, "why")))

    assert answer(0) == [GiveUp("why")]
    assert answer(3) == [Notice("why")]
