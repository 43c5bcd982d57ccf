"""Payloads and states can go by another network interface than control."""

from __future__ import annotations

import logging
import weakref

import pytest

import ftopt
from ftopt._connect import _Log
from ftopt.errors import UserError
from ftopt.events import Event
from ftopt.net import interfaces

URL = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FTOPT_HOST", "FTOPT_INTERFACE"):
        monkeypatch.delenv(name, raising=False)


def test_an_interface_is_its_address() -> None:
    assert interfaces.address_of("lo") == "127.0.0.1"
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("192.0.2.77") is None


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"interface='eth77': there is none of that name; this machine has lo \(127\."):
        ftopt.connect(URL, "r0", interface="eth77")


@pytest.mark.parametrize(
    ("up", "address", "said"),
    [(False, "10.0.0.1", "it is down; this machine has none"), (True, None, "it has no addr")],
)
def test_an_interface_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, up: bool, address: str | None, said: str
) -> None:
    monkeypatch.setattr(interfaces, "_is_up", lambda name: up)
    monkeypatch.setattr(interfaces, "_address", lambda name: address)
    with pytest.raises(UserError, match=f"interface='lo': {said}"):
        interfaces.address_of("lo")


def test_one_of_host_and_interface_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"host='localhost' and interface='lo'; give one of them"):
        ftopt.connect(URL, "r0", host="localhost", interface="lo")
    monkeypatch.setenv("FTOPT_INTERFACE", "eth77")
    with pytest.raises(UserError, match="interface='eth77': there is none"):
        ftopt.connect(URL, "r0")
    ftopt.connect(URL, "r0", host="localhost")  # an argument comes before all settings
    monkeypatch.setenv("FTOPT_HOST", "localhost")
    with pytest.raises(UserError, match="FTOPT_HOST='localhost' and FTOPT_INTERFACE='eth77'; give one of them"):
        ftopt.connect(URL, "r0")
    ftopt.connect(URL, "r0", interface="lo")


def test_the_log_has_the_interface_and_the_rate_when_it_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Log, "_all", weakref.WeakSet())  # other tests may have left theirs
    log = _Log("10.0.0.1 (eth1)")
    with caplog.at_level(logging.INFO, "ftopt"):
        for sent, seconds in ((1000, 0.1), (10_000_000, 1.0), (20_000_000, 1.5), (10_000_000, 4.0), (10_000_000, 3.0)):
            log(Event("prepare", "r0", data={"bytes": sent, "seconds": seconds}))
        log(Event("fetched", "r0", data={"bytes": 50_000_000, "seconds": 0.5}))
    assert [record.getMessage() for record in caplog.records] == [
        "replica r0: payloads: 10.0 MB in 1.00 s, 10.0 MB/s, by 10.0.0.1 (eth1)",
        "replica r0: payloads: 10.0 MB in 4.00 s, 2.5 MB/s, by 10.0.0.1 (eth1)",
        "replica r0: a fetched state: 50.0 MB in 0.50 s, 100.0 MB/s, by 10.0.0.1 (eth1)",
    ]
