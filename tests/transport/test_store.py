from __future__ import annotations

import struct
import threading
import time

import pytest

from ftopt.transport.store import PeerLost, RendezvousStore, is_address

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


def address(host: bytes = b"vm", family: bytes = b"\x02\x00", members: int = 3) -> bytes:
    """A member's address as Gloo writes it: host, socket's address, a number for each member."""
    return struct.pack("<Q", len(host)) + host + struct.pack("<Q", 136) + family + bytes(134) + bytes(8 * members)


def test_an_address_has_the_form_of_ones_own() -> None:
    own = address()
    for good in (own, address(b""), address(b"a-much-longer-name.example.org"), address(family=b"\x0a\x00")):
        assert is_address(good, own)
    damaged = (b"", b"\xff" * 16, b"\xff" * len(own), own[:-1], own + b"x", own[:20], own[1:], bytes(len(own)))
    for bad in (*damaged, address(members=2), address(family=b"\x01\x00"), address(b"x" * 300)):
        assert not is_address(bad, own)
    assert is_address(b"of another Gloo", b"unknown")
    assert not is_address(b"", b"unknown")


def test_a_value_that_is_no_address_names_the_rank() -> None:
    store = RendezvousStore(ops := DictOps(), "a", timeout_s=60.0)
    store.set("0/0", address())
    ops.set("a/0/1", b"")
    with pytest.raises(PeerLost, match=r"what is stored as the address of rank 1 is none \(0 bytes\)") as caught:
        store.wait(["0/1"])
    assert caught.value.rank == 1


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
