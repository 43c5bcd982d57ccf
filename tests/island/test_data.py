"""The ranks of an island share its batches out: each sample is on one rank of one island, in one epoch once."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import ftopt
from ftopt.checkpoint.reader import find
from ftopt.errors import UserError
from tests.island.reading import SAMPLES
from tests.island.running import Torchrun, coordinator


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_sample_is_on_one_rank_once_and_a_checkpoint_is_one_replicas(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        runs = [Torchrun(tmp_path, url, f"r{i}", 2, "-m", "tests.island.reading", str(tmp_path)) for i in range(2)]
        for run in runs:
            ends.callback(run.end)
        for run in runs:
            assert run.wait() == 0, run.said()
    seen = [
        [int(number) for number in line.split()[1:]]
        for replica in ("r0", "r1")
        for rank in range(2)
        for line in (tmp_path / f"{replica}.{rank}").read_text().splitlines()
    ]
    assert sorted(number for numbers in seen for number in numbers) == list(range(SAMPLES))
    assert {len(numbers) for numbers in seen} == {2}  # half of a batch of 4
    found = find(tmp_path / "checkpoints")
    assert found.replicas == ("r0", "r1") or list(found.replicas) == ["r0", "r1"]
    done = found.record["done"]
    assert sum(stop - start for start, stop in done) >= SAMPLES // 4 - 2, "the versions contain the units"
    own = found.own("r0")["replica"]
    assert [list(values) for values in own["inner"][0]["state"].values()] == []  # plain SGD keeps none


def test_shares_must_be_equal() -> None:
    data = list(torch.arange(10))
    with pytest.raises(UserError, match="batch_size=3 samples of a replica, for 2 shares; shares must be equal"):
        ftopt.DataLoader(data, batch_size=3, rank_share=(0, 2))
    with pytest.raises(
        UserError, match=r"the last batch of an epoch has 10; .* give a multiple of 4 and drop_last=True"
    ):
        ftopt.DataLoader(data, batch_size=12, rank_share=(0, 4))
    with pytest.raises(UserError, match=r"rank_share=\(2, 2\); the first must be 0 to 1"):
        ftopt.DataLoader(data, batch_size=2, rank_share=(2, 2))
    first, second = (ftopt.DataLoader(data, batch_size=2, rank_share=(i, 2)) for i in range(2))
    assert sorted(int(x) for loader in (first, second) for x in loader) == list(range(10))
