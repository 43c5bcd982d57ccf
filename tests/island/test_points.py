"""A rank is killed at each point of an outer step: the other island loses nothing, and the island comes back."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.island.running import Torchrun, coordinator
from tests.island.test_ends import committed

pytestmark = pytest.mark.timeout(240)

POINTS = (
    "propose", "gather", "reduce", "reduce.after", "prepare", "commit", "apply", "fetch", "checkpointing", "checkpoint",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("method", ["syncsgd", "diloco"])
def test_a_rank_is_killed_at(tmp_path: Path, point: str, rank: int, method: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("METHOD", method)
    struck(tmp_path, point, rank)


def struck(tmp_path: Path, point: str, rank: int) -> None:
    (tmp_path / "saved").mkdir()
    arguments = ("-m", "tests.island.struck", str(tmp_path / "saved"))
    with coordinator(tmp_path, "--folder", str(tmp_path / "job")) as url, ExitStack() as ends:
        begun_s = time.time()
        first = Torchrun(tmp_path, url, "r0", 2, *arguments, str(rank), point, options=["--max-restarts=3"])
        ends.callback(first.end)
        second = Torchrun(tmp_path, url, "r1", 2, *arguments)
        ends.callback(second.end)
        assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    ours, theirs = first.out.read_text(), second.out.read_text()
    deaths = 1 + (point == "fetch")
    strikes, started = (re.findall(rf"^{word} (\S+)", ours, re.MULTILINE) for word in ("strikes", "starts"))
    assert (len(strikes), len(started)) == (deaths, 2)
    back_s, start_s = float(started[-1]) - float(strikes[-1]), float(started[0]) - begun_s
    print(f"\n{point}, rank {rank}: back after {back_s:.1f} s; the start took {start_s:.1f} s")  # noqa: T201
    end = re.search(r"^ends (\d+)", theirs, re.MULTILINE)
    assert end is not None
    assert committed(tmp_path, "r1") == int(end[1])
    digests = [dict(re.findall(r"^step \d+ (\d+) (\S+)", text, re.MULTILINE)) for text in (ours, theirs)]
    common = digests[0].keys() & digests[1].keys()
    assert len(common) > 2
    assert all(digests[0][version] == digests[1][version] for version in common)
