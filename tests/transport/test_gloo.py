"""GlooTransport with members in threads (one process, several groups) and in processes of their own."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from ftopt.transport.gloo import GlooCollective, GlooTransport
from ftopt.transport.sockets import _address
from ftopt.transport.staging import CopyStaging, staging_for
from ftopt.transport.store import PeerLost

from .helpers import DictOps, Late, TcpOps, in_threads, members, survivors_of_a_kill, tcp_store, wait_until

SOON_S = 60.0
"""Far above what is measured (hundredths of a second), far below the time-outs (150 s): the machine may be busy."""
NEVER_S = 150.0


def test_a_group_of_one_makes_no_process_group() -> None:
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=0, size=1, ops=DictOps())
    flat = torch.ones(3)
    collective.open()
    collective.all_reduce_(flat)
    assert flat.tolist() == [1.0] * 3
    assert collective.exchange([7, 8]) == [[7, 8]]
    collective.close()
    with pytest.raises(InterruptedError):
        collective.all_reduce_(flat)


@pytest.mark.parametrize(
    "staging", [staging_for, Late, lambda device: CopyStaging()], ids=["in place", "staged", "copied"]
)
@pytest.mark.parametrize("numel", [0, 1, 3, 10_001, 32_768, 32_769, 33_023, 33_024, 33_025])
def test_pieces_of_every_length_are_summed(numel: int, staging: Any) -> None:
    _sums_are_right(numel, staging, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [0, 1, 3, 10_001, 32_768, 32_769, 33_024, 1_000_003])
def test_pieces_from_a_gpu_are_summed(numel: int) -> None:
    _sums_are_right(numel, staging_for, torch.device("cuda"))


@pytest.mark.parametrize("value", [b"", b"\xff" * 16, b"\xff" * 178], ids=["empty", "short", "long"])
def test_bytes_that_a_member_stores_in_place_of_an_address_end_the_attempt_alone(value: bytes) -> None:
    """Gloo itself would end the process."""

    class Bad(DictOps):
        def get(self, key: str, timeout_s: float) -> bytes:
            found = super().get(key, timeout_s)
            return value if key.endswith("/1") else found

    ops = Bad()

    def work(rank: int) -> object:
        collective = GlooTransport("127.0.0.1", 5.0).connect(key="a", rank=rank, size=2, ops=ops)
        try:
            collective.open()
        except OSError as error:
            return error
        finally:
            collective.close()
        return None

    error, _ = in_threads(2, work)
    assert isinstance(error, PeerLost)
    assert error.rank == 1


def _sums_are_right(numel: int, staging: Any, device: torch.device) -> None:
    ops = DictOps()

    made: list[GlooCollective] = []  # closed when all are through: who closes while others connect breaks the group

    def work(rank: int) -> torch.Tensor:
        transport = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1024, staging=staging)
        made.append(collective := transport.connect(key="a", rank=rank, size=2, ops=ops))
        flat = torch.arange(numel, dtype=torch.float32, device=device) * (rank + 1)
        for _ in range(2):
            collective.all_reduce_(flat)
        return flat.cpu()

    for got in in_threads(2, work):
        assert torch.equal(got, torch.arange(numel, dtype=torch.float32) * 6)
    for collective in made:
        collective.close()


@pytest.mark.parametrize(("numel", "sent"), [(1, 8), (32_768, 262_144), (32_769, 174_768)])
def test_small_payloads_go_to_each_member_and_are_added_in_rank_order(numel: int, sent: int) -> None:
    """Up to 128 KiB, if a member sends at most 1 MiB in all; a ring's sums have another order."""
    transport, ops = GlooTransport("127.0.0.1", NEVER_S), DictOps()
    payloads = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    made: list[GlooCollective] = []

    def work(rank: int) -> tuple[torch.Tensor, int, list[list[int]]]:
        made.append(collective := transport.connect(key="a", rank=rank, size=3, ops=ops))
        flat = payloads[rank].clone()
        collective.tell([rank, 2**62])
        collective.all_reduce_(flat)
        return flat, collective.sent_bytes, collective.told()

    expected, (first, *others) = (payloads[0] + payloads[1]) + payloads[2], in_threads(3, work)
    assert torch.equal(first[0], expected) or sent < 2 * 4 * numel
    assert torch.allclose(first[0], expected, atol=1e-5)
    assert first[1:] == (sent, [[0, 2**62], [1, 2**62], [2, 2**62]])
    for flat, *rest in others:
        assert torch.equal(flat, first[0])
        assert rest == list(first[1:])
    for collective in made:
        collective.close()


def test_several_groups_of_one_transport_work_at_once() -> None:
    transport, ops = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=4096), DictOps()
    made: list[GlooCollective] = []

    def work(number: int) -> float:
        group, rank = divmod(number, 2)
        made.append(collective := transport.connect(key=f"fragment{group}", rank=rank, size=2, ops=ops))
        flat = torch.full((50_000,), 10.0**group)
        collective.all_reduce_(flat)
        return float(flat[-1])

    assert in_threads(6, work) == [2.0, 2.0, 20.0, 20.0, 200.0, 200.0]
    for collective in made:
        collective.close()


def test_keys_of_another_attempt_are_not_seen() -> None:
    ops = DictOps()
    early = GlooTransport("127.0.0.1", NEVER_S).connect(key="attempt1", rank=0, size=2, ops=ops)
    late = GlooTransport("127.0.0.1", 0.1).connect(key="attempt2", rank=1, size=2, ops=ops)
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        late.open()
    early.close()
    assert all(key.startswith(("attempt1/", "attempt2/")) for key in ops.values)


def test_stop_ends_a_connect_that_waits_for_an_absent_peer() -> None:
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=0, size=2, ops=DictOps())
    threading.Timer(0.05, collective.stop).start()
    before_s = time.monotonic()
    with pytest.raises(InterruptedError):
        collective.open()
    collective.close()
    assert time.monotonic() - before_s < SOON_S


def test_losing_the_coordinator_ends_a_connect() -> None:
    ops = DictOps()
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=0, size=2, ops=ops)
    threading.Timer(0.05, ops.lose).start()
    before_s = time.monotonic()
    with pytest.raises(ConnectionError, match="link to the coordinator"):
        collective.all_reduce_(torch.zeros(1))
    assert time.monotonic() - before_s < SOON_S
    with pytest.raises(InterruptedError):
        collective.open()


@pytest.mark.long
@pytest.mark.parametrize("failure", ["absent", "lost", "stopped", "closed"])
def test_a_connect_that_failed_leaves_no_listening_port_and_nothing_for_the_garbage_collector(failure: str) -> None:
    ops = DictOps()
    transport = GlooTransport("127.0.0.1", NEVER_S if failure == "lost" else 2.0)
    collective = transport.connect(key="a", rank=0, size=2, ops=ops)
    wait_until(lambda: bool(ops.values))
    address = _address(next(iter(ops.values.values())))
    assert address is not None
    assert not _refused(address)
    gc.disable()
    try:
        if failure != "absent":
            {"lost": ops.lose, "stopped": collective.stop, "closed": collective.close}[failure]()
        with pytest.raises((OSError, InterruptedError)):
            collective.exchange([1])
        collective.close()
        left = weakref.ref(collective)
        del collective
        wait_until(lambda: left() is None and _refused(address))
    finally:
        gc.enable()


def _refused(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == errno.ECONNREFUSED


def test_what_is_told_comes_beside_a_reduction() -> None:
    ops, transport = DictOps(), GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1024)
    collectives = [transport.connect(key="a", rank=rank, size=3, ops=ops) for rank in range(3)]

    def work(rank: int) -> list[object]:
        found: list[object] = []
        for turn in range(5):
            flat = torch.ones(1000)
            collectives[rank].tell([rank, turn, 2**62])
            collectives[rank].all_reduce_(flat)
            found += [collectives[rank].told(), collectives[rank].exchange([turn]), float(flat.sum())]
        return found

    expected: list[object] = []
    for turn in range(5):
        expected += [[[rank, turn, 2**62] for rank in range(3)], [[turn]] * 3, 3000.0]
    assert in_threads(3, work) == [expected] * 3
    for collective in collectives:
        collective.close()


@pytest.mark.parametrize("how", ["stopped", "closed"])
def test_who_waits_for_what_the_others_tell_can_be_stopped(how: str) -> None:
    ops, transport = DictOps(), GlooTransport("127.0.0.1", NEVER_S)
    idle = transport.connect(key="a", rank=0, size=2, ops=ops)
    collective = transport.connect(key="a", rank=1, size=2, ops=ops)
    collective.tell([1])
    threading.Timer(0.05, {"stopped": collective.stop, "closed": collective.close}[how]).start()
    before_s = time.monotonic()
    with pytest.raises(InterruptedError):
        collective.told()
    assert time.monotonic() - before_s < SOON_S
    idle.close()


def test_what_was_told_and_never_asked_for_keeps_no_group() -> None:
    ops, transport = DictOps(), GlooTransport("127.0.0.1", NEVER_S)
    idle = transport.connect(key="a", rank=0, size=2, ops=ops)
    collective = transport.connect(key="a", rank=1, size=2, ops=ops)
    collective.tell([1])
    idle.open()
    collective.close()
    with pytest.raises(ConnectionError):
        idle.exchange([0])  # members do the same things in the same order
        idle.all_reduce_(torch.zeros(1_000_000))
    assert not collective._group.told


def test_a_peer_that_brings_no_piece_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = DictOps()
    transport = GlooTransport("127.0.0.1", NEVER_S)
    idle = transport.connect(key="a", rank=0, size=2, ops=ops)
    collective = transport.connect(key="a", rank=1, size=2, ops=ops)
    collective.open()
    monkeypatch.setattr(collective._group, "_timeout_s", 0.3)  # from now on: connecting may take longer
    with pytest.raises(TimeoutError, match="no piece"):
        collective.all_reduce_(torch.zeros(10))
    idle.close()


class Sleeps:
    """A work that Gloo has forgotten to wake."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("the slice is over")


def test_a_peer_whose_connection_has_ended_is_noticed_though_gloo_does_not_tell() -> None:
    ops, transport = DictOps(), GlooTransport("127.0.0.1", NEVER_S)
    first, second = (transport.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2))
    in_threads(2, lambda rank: (first, second)[rank].open())
    second.close()
    with pytest.raises(PeerLost, match="has ended, and Gloo has not told"):
        first._group.finish(deque([Sleeps()]), time.monotonic())  # type: ignore[list-item]
    first.close()


def test_connections_that_this_process_has_ended_are_no_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, transport = DictOps(), GlooTransport("127.0.0.1", NEVER_S)
    both = [transport.connect(key="a", rank=rank, size=2, ops=ops) for rank in range(2)]
    in_threads(2, lambda rank: both[rank].open())

    def standing(addresses: object) -> int:
        both[0].close()  # while it looks
        return 0

    monkeypatch.setattr("ftopt.transport.gloo_group.standing", standing)
    with pytest.raises(InterruptedError):
        both[0]._group.finish(deque([Sleeps()]), time.monotonic())  # type: ignore[list-item]
    both[1].close()


def close_or_reduce(pipe: Connection, rank: int, size: int, port: int) -> None:
    """Rank 0 closes and stays; the others tell how long their reductions then took to fail."""
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=rank, size=size, ops=TcpOps(port))
    collective.open()
    pipe.send("open")
    pipe.recv()
    before_s = time.monotonic()
    try:
        collective.exchange([rank])
        if rank == 0:
            collective.close()
        else:
            collective.all_reduce_(torch.zeros(100))
    except PeerLost:
        pipe.send(time.monotonic() - before_s)
    pipe.recv()


def test_a_member_that_closes_ends_the_others_reductions() -> None:
    with tcp_store() as port, members(4, close_or_reduce, port) as started:
        for member in started:
            assert member.receive() == "open"
        for member in started:
            member.pipe.send("go on")
        assert all(member.receive() < SOON_S for member in started[1:])


def test_a_host_that_is_not_this_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"192\.0\.2\.1.*not an address of this machine"):
        GlooTransport("192.0.2.1", 1.0)


def reduce_once(pipe: Connection, rank: int, size: int, port: int) -> None:
    collective = GlooTransport("127.0.0.1", NEVER_S, piece_bytes=1 << 16).connect(
        key="a", rank=rank, size=size, ops=TcpOps(port)
    )
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    collective.all_reduce_(flat)
    pipe.send((flat.numpy().tobytes(), collective.exchange([rank, -rank])))
    collective.close()


def test_three_processes_get_bit_equal_sums() -> None:
    with tcp_store() as port, members(3, reduce_once, port) as started:
        results = [member.receive() for member in started]
    assert len({flat for flat, _ in results}) == 1
    got = torch.frombuffer(bytearray(results[0][0]), dtype=torch.float32)
    expected = sum(torch.randn(100_003, generator=torch.Generator().manual_seed(rank)) for rank in range(3))
    torch.testing.assert_close(got, expected)
    assert [rows for _, rows in results] == [[[0, 0], [1, -1], [2, -2]]] * 3


def reduce_until_it_fails(pipe: Connection, rank: int, size: int, port: int) -> None:
    """Reduces on and on; then tells how it failed, and reduces with those that the test names."""
    transport, ops = GlooTransport("127.0.0.1", NEVER_S), TcpOps(port)
    collective = transport.connect(key="first", rank=rank, size=size, ops=ops)
    collective.open()
    pipe.send(os.getpid())
    flat = torch.zeros(8_000_000)
    try:
        while True:
            collective.all_reduce_(flat)
    except ConnectionError as error:
        pipe.send((type(error).__name__, getattr(error, "rank", None)))
    rank, size = pipe.recv()
    collective = transport.connect(key="second", rank=rank, size=size, ops=ops)
    pipe.send(collective.exchange([rank]))
    collective.close()


@pytest.mark.parametrize("count", [3, 5])
def test_a_killed_member_is_noticed_by_all_and_the_survivors_meet_again(count: int) -> None:
    failures, rows = survivors_of_a_kill(count, reduce_until_it_fails, SOON_S)
    assert {name for name, _ in failures} == {"PeerLost"}
    assert rows == [[[rank] for rank in range(count - 1)]] * (count - 1)


def stop_while_a_peer_hangs(pipe: Connection, rank: int, size: int, port: int) -> None:
    collective = GlooTransport("127.0.0.1", NEVER_S).connect(key="a", rank=rank, size=size, ops=TcpOps(port))
    collective.open()
    pipe.send("open")
    if rank == 1:
        pipe.recv()  # never comes
    told: list[Any] = []
    pipe.recv()
    stopped_s = [0.0]

    def stop() -> None:
        stopped_s[0] = time.monotonic()
        collective.stop()

    threading.Timer(0.1, stop).start()
    try:
        collective.all_reduce_(torch.zeros(4_000_000))
    except InterruptedError:
        told.append(time.monotonic() - stopped_s[0])
    before_s = time.monotonic()
    collective.close()
    told.append(time.monotonic() - before_s)
    pipe.send(told)


def test_a_stopped_peer_blocks_neither_stop_nor_close_nor_the_exit() -> None:
    with tcp_store() as port, members(2, stop_while_a_peer_hangs, port) as started:
        first, second = started
        assert [first.receive(), second.receive()] == ["open", "open"]
        pid = second.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        first.pipe.send("go")
        stop_s, close_s = first.receive()
        assert stop_s < SOON_S
        assert close_s < SOON_S
        first.process.join(60.0)  # a group is still stuck on its background thread
        assert first.process.exitcode == 0
