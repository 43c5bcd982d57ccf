"""The trace of a coordinator: what people read to see why a job waits."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from ftopt.errors import UserError
from ftopt.sync.server.trace import Trace
from tests.sync.server.access import coordinator, identity, scripted


async def _two_outer_steps(trace: Trace) -> None:
    async with coordinator(trace=trace) as url, scripted(url) as r0:
        await r0.join()
        assert await r0.outer_step() == 1
        async with scripted(url, identity("other", "r7")) as r7:
            await r7.join()
        assert await r0.outer_step() == 2


def _traced(path: Path) -> list[str]:
    asyncio.run(_two_outer_steps(Trace(path)))
    return path.read_text(encoding="utf-8").splitlines()


def test_each_message_is_followed_by_what_the_coordinator_does(tmp_path: Path) -> None:
    lines = _traced(tmp_path / "trace")
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d{3} (job|other) ( {2}[>#!=]|<) ", line) for line in lines)
    texts = [line.split(" ", 1)[1] for line in lines if " job " in line]
    at = next(n for n, text in enumerate(texts) if text.startswith("job < r0 Prepared(fragment=0"))
    caused = "\n".join(texts[at + 1 : texts.index(next(x for x in texts[at + 1 :] if x.startswith("job <")))])
    assert "job   # Decided(fragment=0, version=1" in caused
    assert "job   > r0 Commit(fragment=0, version=1" in caused
    assert "job   ! decide coordinator fragment 0 version 1" in caused
    assert "job   = fragment 0: no replica has proposed yet" in caused
    assert texts[-2:] == ["job < r0 (its connection has ended)", "job   ! lost r0"]


def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--trace .*: No such file or directory; give a file that can be written to"):
        Trace(tmp_path / "none" / "trace")


def test_a_full_disk_ends_the_trace_and_no_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        asyncio.run(_two_outer_steps(Trace(Path("/dev/full"))))
    assert [x.getMessage() for x in caplog.records] == ["the trace /dev/full ends: No space left on device"]
