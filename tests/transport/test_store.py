from __future__ import annotations

import threading
import time

import pytest

from ftopt.transport.store import RendezvousStore

from .helpers import DictOps, TcpOps, tcp_store


def test_keys_are_prefixed_and_values_come_back() -> None:
    ops = DictOps()
    store = RendezvousStore(ops, "job/0/7", timeout_s=1.0)
    store.set("0/1", b"address")
    store.wait(["0/1"])
    assert store.get("0/1") == b"address"
    assert ops.values == {"job/0/7/0/1": b"address"}
    assert store.values == {"0/1": b"address"}


def test_get_waits_for_a_value_that_comes_later() -> None:
    ops = DictOps()
    threading.Timer(0.02, ops.set, ("a/0/3", b"late")).start()
    assert RendezvousStore(ops, "a", timeout_s=30.0).get("0/3") == b"late"


def test_a_value_that_never_comes_names_the_rank() -> None:
    with pytest.raises(TimeoutError, match=r"rank 3 has not come to the group within 0\.02 s"):
        RendezvousStore(DictOps(), "a", timeout_s=0.02).get("0/3")


def test_a_lost_link_ends_a_get_at_once() -> None:
    ops = DictOps()
    threading.Timer(0.02, ops.lose).start()
    before_s = time.monotonic()
    with pytest.raises(ConnectionError):
        RendezvousStore(ops, "a", timeout_s=60.0).get("0/0")
    assert time.monotonic() - before_s < 30.0


def test_a_stopped_store_does_nothing_more() -> None:
    store = RendezvousStore(DictOps(), "a", timeout_s=60.0, stopped=lambda: True)
    with pytest.raises(InterruptedError):
        store.set("0/0", b"")
    with pytest.raises(InterruptedError):
        store.get("0/0")


def test_it_works_over_a_socket() -> None:
    with tcp_store() as port:
        RendezvousStore(TcpOps(port), "a", timeout_s=5.0).set("0/0", b"\x00\xff")
        assert RendezvousStore(TcpOps(port), "a", timeout_s=5.0).get("0/0") == b"\x00\xff"
        with pytest.raises(TimeoutError, match="rank 1"):
            RendezvousStore(TcpOps(port), "a", timeout_s=0.05).get("0/1")
