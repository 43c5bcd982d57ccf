"""Checkpoints of islands: what each rank's loop has is saved and restored for each rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.island.running import Torchrun, coordinator


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_rank_gets_its_own_state_back_and_another_number_of_ranks_what_all_have(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        for which, ranks in (("first", 2), ("second", 2), ("other", 3)):
            run = Torchrun(tmp_path, url, "r0", ranks, "-m", "tests.island.including", str(tmp_path / "saved"), which)
            ends.callback(run.end)
            assert run.wait() == 0, run.said()
            if which == "other":
                assert "only rank 0's random number generators go on from there" in run.out.read_text()
