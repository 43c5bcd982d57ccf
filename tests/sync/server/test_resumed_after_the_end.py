"""All replicas have left, and a checkpoint of the job is resumed in front of its coordinator, or of the next one."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.resumed import Held
from ftopt.sync.server.journal import Journal
from tests.sync.server.access import coordinator, identity, scripted, status

ALONE = {"start_replicas": 1, "dead_after_s": 30.0, "evict_after_s": 60.0}


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("coordinators", ["without a journal", "with a journal", "started again"])
def test_the_job_goes_on_from_what_the_checkpoint_holds(tmp_path: Path, coordinators: str, finished: bool) -> None:
    journal = None if coordinators == "without a journal" else tmp_path / "journal"

    async def run() -> None:
        async with AsyncExitStack() as running:
            url = await running.enter_async_context(coordinator(token=None, journal=journal))
            async with scripted(url, identity(settings=ALONE), token=None) as replica:
                await replica.join()
                for _ in range(3):
                    await replica.outer_step()
                machine = replica.machine
                if finished:
                    await replica.send(m.Finished())
                await replica.send(m.Bye())
                assert await replica.ended()
            record = machine.fragments[0].record
            assert record is not None and record.version == 3
            if coordinators == "started again":
                await running.aclose()
                url = await running.enter_async_context(coordinator(token=None, journal=journal))
            held = Held("r0", machine.incarnation, machine.epoch, roster={"r0": 1}, records=(record,))
            async with (
                scripted(url, identity(replica="r9", settings=ALONE | {"start_replicas": 2}), token=None) as newcomer,
                scripted(url, identity(settings=ALONE), token=None) as resumed,
            ):
                for effect in newcomer.machine.connect():
                    await newcomer.send(effect.message)  # type: ignore[union-attr]
                await newcomer.until(m.Hold)
                resumed.machine.resume(held)
                for effect in resumed.machine.connect():
                    await resumed.send(effect.message)  # type: ignore[union-attr]
                welcome = await resumed.until(m.Welcome)
                assert welcome.incarnation == 1
                assert await newcomer.ended()  # it comes again
                assert await resumed.outer_step() == 4

    asyncio.run(run())
    if journal is not None:
        again = Journal(journal)
        saved = again.load("job")
        assert saved is not None and saved.gone == () and saved.decided[-1].version == 4
        again.close()


def test_only_a_sound_replica_takes_it_up(tmp_path: Path) -> None:
    async def run() -> None:
        async with coordinator(token=None) as url:
            async with scripted(url, identity(settings=ALONE), token=None) as replica:
                await replica.join()
                await replica.outer_step()
                await replica.send(m.Bye())
                assert await replica.ended()
            async with scripted(url, identity(settings=ALONE), token=None) as other:
                hello = other.machine.hello()
                await other.send(replace(hello, incarnation=1, resumed=True))  # and holds nothing
                assert await other.ended()
            assert "ended at version 1" in (await status(url))[1]

    asyncio.run(run())
