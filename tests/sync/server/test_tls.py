"""TLS with certificates of the user's own CA, made by the ``openssl`` program: coordinator, state transfer, errors."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.cli.main import main
from ftopt.errors import FtoptError, Refused, UserError
from ftopt.events import Event
from ftopt.net.tls import Tls, find_tls, is_public
from ftopt.sync.replica.websocket import WebSocketLink
from ftopt.sync.server.coordinator import CoordinatorServer
from tests.problems import seeded

from .access import TOKEN, Certificates, coordinator_thread, identity, no_errors_logged, scripted, touchstone

CALM = ftopt.FaultPolicy(grace_s=30.0, heartbeat_s=0.1, dead_after_s=20.0, start_s=30.0, start_replicas=1)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def files(certificates: Certificates) -> Tls:
    cert, key = certificates.make("here")
    return Tls(cert=cert, key=key, ca=certificates.ca)


async def _link(url: str, tls: Tls | None) -> Exception | None:
    context = tls.client() if tls is not None else None
    link = WebSocketLink(url, token=TOKEN, dead_after_s=2.0, tls=context)
    try:
        channel = await link.open(lambda text: None)
        await channel.close()
    except (FtoptError, OSError) as error:
        return error
    finally:
        await link.end()
    return None


async def _who_is_trusted(certificates: Certificates, files: Tls) -> None:
    server = CoordinatorServer("127.0.0.1", 0, new=True, token=TOKEN, tls=files.server())
    plain = CoordinatorServer("127.0.0.1", 0, token=TOKEN)
    other = CoordinatorServer("127.0.0.1", 0, token=TOKEN, tls=_certificate(certificates, "elsewhere").server())
    old = CoordinatorServer("127.0.0.1", 0, token=TOKEN, tls=_certificate(certificates, "old", days=0).server())
    ports = [await x.start() for x in (server, plain, other, old)]
    try:
        url = f"https://127.0.0.1:{ports[0]}"
        assert await _link(url, files) is None
        for where, tls, words in (
            (url, Tls(), "certificate of .* is not accepted: .*; it must .* FTOPT_CA"),
            (f"https://127.0.0.1:{ports[1]}", files, "the TLS handshake with .*write http://"),
            (f"https://127.0.0.1:{ports[2]}", files, "is not accepted: .*name the host"),
            (f"https://127.0.0.1:{ports[3]}", files, "is not accepted: .*expired"),
        ):
            with pytest.raises(Refused, match=words):
                raise await _link(where, tls) or AssertionError(where)
        assert isinstance(await _link(f"http://127.0.0.1:{ports[0]}", None), ConnectionError)
        async with touchstone(url, tls=files.client()), scripted(url, identity("b"), tls=files.client()) as replica:
            await replica.join()
    finally:
        for x in (server, plain, other, old):
            await x.stop()


def _certificate(certificates: Certificates, name: str, **options: Any) -> Tls:
    options = {"host": "127.0.0.1" if options else "example.org"} | options
    cert, key = certificates.make(name, **options)
    return Tls(cert=cert, key=key)


def test_the_coordinator_is_believed_by_its_certificate_alone(certificates: Certificates, files: Tls) -> None:
    with no_errors_logged():
        asyncio.run(_who_is_trusted(certificates, files))


def _train(
    url: str, name: str, files: Tls, steps: int | None, on_event: Callable[[Event], None], go_on: threading.Event
) -> None:
    with seeded(0):
        model = nn.Linear(4, 4)
    group = ftopt.connect(
        url, name, token=TOKEN, ca=files.ca, cert=files.cert, key=files.key, policy=CALM, on_event=on_event
    )
    method = ftopt.DiLoCo(sync_every=5)
    with ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, method, group=group) as optimizer:
        for _ in itertools.count() if steps is None else range(steps):
            if steps is None and go_on.wait(0.002):
                return
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with optimizer.busy():
            go_on.wait(60)


def test_a_job_under_tls_hands_its_state_over_tls(files: Tls) -> None:
    events, go_on = list[Event](), threading.Event()

    def on_event(event: Event) -> None:
        events.append(event)
        if event.event == "fetched":
            go_on.set()

    with no_errors_logged(), coordinator_thread(tls=files.server()) as url:
        first = threading.Thread(target=_train, args=(url, "a", files, 15, on_event, go_on))
        first.start()
        try:
            while sum(e.event == "commit" for e in list(events)) < 3:
                assert first.is_alive()
                threading.Event().wait(0.01)
            _train(url, "b", files, 1, on_event, go_on)
        finally:
            go_on.set()
            first.join(30)
    assert not first.is_alive()
    assert next(e.replica for e in events if e.event == "serve") == "a"
    assert next(e.replica for e in events if e.event == "fetched") == "b"


def test_an_impostor_does_not_end_the_training(
    files: Tls, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture, port: int
) -> None:
    """In the coordinator's absence somebody else answers at its address: not let in, and nobody ends."""
    events, stop = list[Event](), threading.Event()
    journal = tmp_path / "journal"
    with coordinator_thread(tls=files.server(), port=port, journal=journal) as url:
        trainer = threading.Thread(target=_train, args=(url, "a", files, None, events.append, stop))
        trainer.start()
        try:
            _until(lambda: any(e.event == "commit" for e in list(events)))
        except BaseException:
            stop.set()
            raise
    try:
        with coordinator_thread(tls=_certificate(certificates, "impostor").server(), port=port):
            _until(lambda: "is not accepted" in caplog.text)
        with coordinator_thread(tls=files.server(), port=port, token=TOKEN[::-1]):
            _until(lambda: "does not accept this token" in caplog.text)
        before = sum(e.event == "commit" for e in list(events))
        with coordinator_thread(tls=files.server(), port=port, journal=journal):
            _until(lambda: sum(e.event == "commit" for e in list(events)) > before + 1)
            stop.set()
            trainer.join(30)
    finally:
        stop.set()
        trainer.join(30)
    refused = [r for r in caplog.messages if "is not accepted" in r and "training alone" not in r]
    assert len(refused) == 1  # on a busy machine it trains alone for long enough to say so, and why


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_files_that_cannot_be_used_are_named(certificates: Certificates, files: Tls, tmp_path: Path) -> None:
    cert, key, other = files.cert, files.key, certificates.make("other")[1]
    assert cert is not None
    assert key is not None
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("hello")
    for tls, words in (
        (Tls(cert=cert), "got only a certificate; give the key"),
        (Tls(key=key), "got only a key; give the certificate"),
        (Tls(cert=tmp_path / "none", key=key), "certificate file .*none: No such file"),
        (Tls(cert=cert, key=tmp_path / "none"), "key file .*none: No such file"),
        (Tls(cert=cert, key=other), "(?i)mismatch"),
        (Tls(cert=nonsense, key=key), "nonsense.pem with key"),
    ):
        with pytest.raises(UserError, match=words):
            tls.server()
    assert Tls().server() is None
    for ca, words in ((tmp_path / "none", "CA file .*No such file"), (nonsense, "CA file .*nonsense")):
        with pytest.raises(UserError, match=words):
            Tls(ca=ca).client()


def test_files_come_from_the_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FTOPT_CERT", "c"), ("FTOPT_KEY", "k"), ("FTOPT_CA", "")):
        monkeypatch.setenv(name, value)
    assert find_tls() == Tls(cert=Path("c"), key=Path("k"))
    assert find_tls("x", "y", "z") == Tls(cert=Path("x"), key=Path("y"), ca=Path("z"))
    assert find_tls("x") == Tls(cert=Path("x"))  # never half of each


def test_the_command_line_speaks_tls(files: Tls, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    with coordinator_thread(tls=files.server()) as url:
        assert main(["status", url, "--ca", str(files.ca), "--token-file", str(token)]) == 0
        assert "no jobs yet" in capsys.readouterr().out
        assert main(["status", url, "--token-file", str(token)]) == 2
        assert "is not accepted" in capsys.readouterr().err
        assert main(["status", url, "--ca", str(files.ca)]) == 2
        assert "FTOPT_TOKEN" in capsys.readouterr().err
    assert main(["coordinator", "--bind", "127.0.0.1:0", "--cert", str(files.cert)]) == 2
    assert "give the key" in capsys.readouterr().err


def test_payloads_that_leave_private_addresses_are_warned_of_once(
    files: Tls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [is_public(host) for host in ("10.0.0.1", "127.0.0.1", "fd00::1", "100.64.0.1", "8.8.8.8")] == [
        *[False] * 4,
        True,
    ]
    connecting = sys.modules["ftopt._connect"]
    monkeypatch.setattr(connecting, "is_public", lambda host: True)
    connecting._warn_of_open_payloads.cache_clear()
    with caplog.at_level(logging.WARNING):
        for url in ("http://127.0.0.1:1", "https://127.0.0.1:1", "https://127.0.0.1:1"):
            group = ftopt.connect(url, "r", ca=files.ca, cert=files.cert, key=files.key)
            group._network.stop()  # type: ignore[attr-defined]
    assert caplog.text.count("WireGuard") == 1
