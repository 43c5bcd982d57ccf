"""The ranks of an island on their own connections: values of all, names that are stopped, ranks that are lost."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ftopt.errors import FtoptError
from ftopt.sync import rank_links
from ftopt.sync.rank_links import RankLinks, RankLost


class Told:
    """An island whose ranks are threads: what `RankLinks` needs of it."""

    def __init__(self, rank: int, size: int, boxes: list[queue.SimpleQueue[Any]], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.leads = rank, size, rank == 0
        self._boxes, self._barrier = boxes, barrier

    def say(self, what: object) -> None:
        """To all others."""
        for box in self._boxes[1:]:
            box.put(what)

    def hear(self) -> Any:
        """What rank 0 says."""
        return self._boxes[self.rank].get(timeout=30.0)

    def gather(self, what: object) -> list[Any]:
        """Waits for all."""
        self._barrier.wait(30.0)
        return []


def in_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives on a thread of each rank."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@contextmanager
def linked(size: int) -> Iterator[list[RankLinks]]:
    """The links of so many ranks."""
    boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(size)]
    barrier = threading.Barrier(size)
    links = in_ranks(size, lambda rank: RankLinks(Told(rank, size, boxes, barrier), "127.0.0.1"))  # type: ignore[arg-type]
    try:
        yield links
    finally:
        for each in links:
            each.close()


def test_all_ranks_get_what_each_gives_under_one_name_whatever_else_goes_on() -> None:
    with linked(3) as links:

        def work(rank: int) -> list[Any]:
            found: list[Any] = []

            def beside() -> None:
                with links[rank].within("work", 7):
                    found.append([links[rank].all((rank, turn)) for turn in range(20)])

            thread = threading.Thread(target=beside)
            thread.start()
            with links[rank].training():
                mine = [links[rank].all(10 * turn + rank) for turn in range(20)]
            thread.join(30.0)
            return [mine, *found]

        for mine, beside in in_ranks(3, work):
            assert mine == [[10 * turn, 10 * turn + 1, 10 * turn + 2] for turn in range(20)]
            assert beside == [[(0, turn), (1, turn), (2, turn)] for turn in range(20)]


def test_a_name_that_is_stopped_ends_all_that_wait_and_no_other() -> None:
    with linked(3) as links:

        def work(rank: int) -> list[int]:
            if rank:
                with links[rank].within("work", 1), pytest.raises(InterruptedError):
                    links[rank].all(rank)  # rank 0 does not come
            else:
                links[0].stop("work", 1)
                with links[0].within("work", 1), pytest.raises(InterruptedError):
                    links[0].all(0)
            with links[rank].within("work", 2):
                return links[rank].all(rank)

        assert in_ranks(3, work) == [[0, 1, 2]] * 3


def test_a_rank_that_is_lost_ends_all_that_wait_for_it_and_is_told_once() -> None:
    with linked(3) as links:
        lost: list[FtoptError] = []
        told = threading.Event()

        def note(error: FtoptError) -> None:
            lost.append(error)
            told.set()

        links[0].listen(lambda rank, what: None, note)

        def work(rank: int) -> None:
            if rank == 2:
                links[2].close()
                return
            with links[rank].training(), pytest.raises(RankLost, match=r"gone|left"):
                links[rank].all(rank)
            links[rank].close()  # as a rank does whose call has failed

        in_ranks(3, work)
        assert told.wait(30.0)
        assert len(lost) == 1 and "rank 2 of this replica is gone" in str(lost[0])


def test_ranks_that_leave_together_lose_none() -> None:
    with linked(2) as links:
        lost: list[FtoptError] = []
        for each in links:
            each.listen(lambda rank, what: None, lost.append)

        def work(rank: int) -> None:
            with links[rank].training():
                links[rank].leave()
            links[rank].close()

        in_ranks(2, work)
        assert not lost


def test_what_comes_before_a_rank_listens_is_kept() -> None:
    with linked(2) as links:
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        links[0].send(1, ("change", 1))
        links[1].listen(lambda rank, what: heard.put((rank, what)), lambda error: None)
        assert heard.get(timeout=30.0) == (0, ("change", 1))


@pytest.mark.long
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_stranger_keeps_no_rank_out(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_links, "_ANSWER_S", 30.0 if hangs_up else 4.0)
    strangers: list[socket.socket] = []

    class Visited(Told):
        def say(self, what: Any) -> None:
            strangers.append(socket.create_connection(what[1], timeout=30.0))
            if hangs_up:
                strangers[0].close()
            super().say(what)

    boxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(2)]
    barrier = threading.Barrier(2)
    links = in_ranks(2, lambda rank: RankLinks(Visited(rank, 2, boxes, barrier), "127.0.0.1"))  # type: ignore[arg-type]
    for each in (*links, *strangers):
        each.close()


def test_a_rank_that_fails_at_what_it_hears_is_lost_to_the_other_one() -> None:
    with linked(2) as links:
        lost: queue.SimpleQueue[FtoptError] = queue.SimpleQueue()
        links[0].listen(lambda rank, what: None, lost.put)

        def fails(rank: int, what: Any) -> None:
            raise MemoryError("no room for a piece")

        links[1].listen(fails, lambda error: None)
        links[0].send(1, ("piece", 1))
        assert "rank 1 of this replica is gone" in str(lost.get(timeout=30.0))
        with pytest.raises(RankLost, match="no room for a piece"):
            links[1].check()
