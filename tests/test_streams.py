"""Work beside training is in order: on streams that do nothing before somebody waits, in the place of CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from ftopt.common import streams
from ftopt.common.streams import SideStream, follow, publish, reached

CUDA = torch.device("cuda", 0)


class Stream:
    """Does what is queued when it must."""

    def __init__(self, device: object = None) -> None:
        self._queue: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def record_event(self) -> Callable[[], None]:
        return partial(_do, self._queue, len(self._queue))

    def wait_event(self, event: Callable[[], None]) -> None:
        self._queue.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        _do(self._queue, len(self._queue))


def _do(queue: list[Callable[[], None]], upto: int) -> None:
    for place in range(upto):
        work, queue[place] = queue[place], lambda: None
        work()


class Cuda:
    """What of `torch.cuda` is used."""

    Stream, Event = Stream, object

    def __init__(self) -> None:
        self.default = self.current = Stream()

    def current_stream(self, device: object) -> Stream:
        return self.current

    def default_stream(self, device: object) -> Stream:
        return self.default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(streams.torch, "cuda", made)
    return made


def test_work_beside_comes_after_its_point_is_complete_and_leaves_the_rest_undone(cuda: Cuda) -> None:
    done: list[str] = []
    training = cuda.current
    training.add(lambda: done.append("frozen"))
    point = reached(CUDA)
    training.add(lambda: done.append("the next step"))
    with SideStream().after(point, CUDA):
        assert cuda.current is not training
        cuda.current.add(lambda: done.append("reduced"))
        assert not done
    assert done == ["frozen", "reduced"]
    assert cuda.current is training


def test_work_beside_that_fails_is_waited_for_too(cuda: Cuda) -> None:
    done: list[str] = []

    def fail() -> None:
        with SideStream().after(None, CUDA):
            cuda.current.add(lambda: done.append("begun"))
            raise ConnectionError("a peer is gone")

    with pytest.raises(ConnectionError):
        fail()
    assert done == ["begun"]


def test_a_stream_of_its_own_is_made_once(cuda: Cuda) -> None:
    beside, seen = SideStream(), set[int]()
    for _ in range(2):
        with beside.after(None, CUDA):
            seen.add(id(cuda.current))
    assert len(seen) == 1


def test_what_is_published_comes_before_what_others_queue_on_the_default_stream(cuda: Cuda) -> None:
    done: list[str] = []
    with cuda.stream(Stream()):
        cuda.current.add(lambda: done.append("captured"))
        publish(CUDA)
    cuda.default.add(lambda: done.append("written"))
    cuda.default.synchronize()
    assert done == ["captured", "written"]


def test_who_follows_waits_for_no_more_than_the_point(cuda: Cuda) -> None:
    done: list[str] = []
    training, point = cuda.current, reached(CUDA)
    training.add(lambda: done.append("later"))
    with cuda.stream(Stream()):
        follow(CUDA, point)
        cuda.current.add(lambda: done.append("read"))
        cuda.current.synchronize()
    assert done == ["read"]


def test_on_other_devices_there_is_nothing_to_wait_for() -> None:
    cpu = torch.device("cpu")
    assert reached(cpu) is None
    with SideStream().after(reached(cpu), cpu):
        publish(cpu)
