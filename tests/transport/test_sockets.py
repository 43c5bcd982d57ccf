from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ftopt.transport.sockets import rank_of, shut_down, standing, unreachable


def address(host: str, port: int) -> bytes:
    """A sockaddr as Gloo leaves it in the store: amid other bytes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    flow = b"\0" * 4 if family == socket.AF_INET6 else b""
    return (
        b"head" + struct.pack("<H", family) + struct.pack(">H", port) + flow + socket.inet_pton(family, host) + b"tail"
    )


ONE_HOST = {f"0/{rank}": address("127.0.0.1", 40_001 + rank) for rank in range(3)}
HOSTS = {f"0/{rank}": address(f"10.0.0.{rank + 1}", 40_001) for rank in range(3)}
HOSTS6 = {f"0/{rank}": address(f"fd00::{rank + 1}", 40_001) for rank in range(3)}


@pytest.mark.parametrize(
    ("message", "addresses", "rank"),
    [
        ("Read error [127.0.0.1]:40003: Connection reset by peer", ONE_HOST, 2),
        (f"Read error [127.0.0.1]:{int.from_bytes((40_003).to_bytes(2, 'big'), 'little')}: reset", ONE_HOST, 2),
        ("Read error [127.0.0.1]:50000: Connection reset by peer", ONE_HOST, None),
        ("Connection closed by peer [10.0.0.3]:50000.", HOSTS, 2),
        ("Connection closed by peer [fd00::2]:50000.", HOSTS6, 1),
        ("Connection closed by peer [127.0.0.1]:50000.", {"0/0": ONE_HOST["0/0"], "0/1": ONE_HOST["0/1"]}, 1),
        ("something else", HOSTS, None),
        ("Timed out [nonsense:]:99999", HOSTS, None),
    ],
)
def test_an_error_names_the_rank_when_its_address_tells(
    message: str, addresses: dict[str, bytes], rank: int | None
) -> None:
    assert rank_of(message, addresses, own=0) == rank


def test_only_the_connections_of_the_named_listeners_are_shut_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as another:
        clients = [socket.create_connection(server.getsockname()) for server in (ours, another)]
        accepted = [server.accept()[0] for server in (ours, another)]
        assert shut_down({"0/0": address(*ours.getsockname())}) == 2
        assert clients[0].recv(1) == b""
        clients[1].sendall(b"x")
        assert accepted[1].recv(1) == b"x"
        for connection in clients + accepted:
            connection.close()


def test_a_connection_stands_until_its_other_side_has_ended_it_and_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        addresses = {"0/0": address(*server.getsockname())}
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client:
            with accepted:
                assert standing(addresses) == 2
                assert standing({"0/0": address("127.0.0.1", 1)}) == 0
                accepted.sendall(b"x")
            assert standing(addresses) == 1
            assert client.recv(1) == b"x"
            assert standing(addresses) == 0
            monkeypatch.setattr("ftopt.transport.sockets.Path", lambda _: Path("/there/is/none"))
            assert standing(addresses) is None
            assert shut_down(addresses) == 0


def listener(end: socket.socket) -> bytes:
    host, port = end.getsockname()
    return b"\x02\x00" + port.to_bytes(2, "big") + socket.inet_aton(host) + bytes(8)


def test_a_host_that_refuses_is_there_and_one_that_does_not_answer_is_not() -> None:
    with ExitStack() as stack:
        listens = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        closed = stack.enter_context(socket.socket())
        closed.bind(("127.0.0.1", 0))
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # from now on its kernel drops what comes, as a cut cable does
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        addresses = {
            "x/0": listener(listens),
            "x/1": listener(closed),
            "x/2": listener(full),
            "x/3": b"no address",
        }
        assert unreachable(addresses, own=0, limit_s=1.0) == [2]
        assert unreachable(addresses, own=2, limit_s=30.0) == []


@contextmanager
def allowed(descriptors: int) -> Iterator[None]:
    """This process may have so many file descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < descriptors:
        pytest.skip(f"this machine allows {before[1]} file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_hosts_are_asked_in_a_process_with_more_than_1024_open_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, allowed(4096), ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert unreachable({"x/0": listener(server)}, own=1, limit_s=30.0) == []


def test_nobody_is_blamed_where_no_file_descriptor_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        last = os.open(os.devnull, os.O_RDONLY)
        os.close(last)
        with allowed(last):
            assert unreachable({"x/0": listener(server)}, own=1, limit_s=30.0) == []
