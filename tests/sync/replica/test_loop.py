"""The network thread's own threads."""

from __future__ import annotations

import asyncio
import threading

from ftopt.sync.replica.loop import _WORKERS, LoopThread


def test_threads_for_blocking_work_are_few_and_end_with_the_loop() -> None:
    network, go_on, started = LoopThread("ftopt-test"), threading.Event(), threading.Semaphore(0)

    def block() -> None:
        started.release()
        go_on.wait(30.0)

    errors: list[BaseException] = []

    async def many() -> None:
        await asyncio.gather(*(asyncio.to_thread(block) for _ in range(10 * _WORKERS)))

    network.acquire(errors.append)
    done = network.submit(many())
    for _ in range(_WORKERS):
        assert started.acquire(timeout=30.0)
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("ftopt-test-worker")]
    assert len(workers) == _WORKERS
    go_on.set()
    done.result(30.0)
    network.release(errors.append)
    assert not any(thread.is_alive() for thread in workers)
