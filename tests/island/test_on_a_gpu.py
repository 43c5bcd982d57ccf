"""FSDP2 over NCCL on one card: what the same replicas do on the CPU.

A card can be one rank of NCCL alone, so that each replica is an island of one rank. The unmarked case runs the same
code on the CPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.island.running import islands, plain
from tests.island.training import Case


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_fsdp2_of_one_rank_is_a_replica(tmp_path: Path, device: str) -> None:
    layouts = ("fsdp", "fsdp")
    cases = [Case(method, method, layouts, device=device) for method in ("diloco", "streaming", "syncsgd")]
    cases += [Case("bf16", "diloco", layouts, codec="bf16", dtype="bfloat16", device=device)]
    found = islands(tmp_path, (1, 1), cases)
    for case in cases:
        ours = [island[case.name] for island in found]
        assert ours[0]["digest"] == ours[1]["digest"]
        assert [replica["versions"] for replica in ours] == [replica["versions"] for replica in plain(case)]


@pytest.mark.slow
def test_fsdp2_of_one_rank_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The inner state is of DTensors, as the parameters are."""
    command = [sys.executable, "-m", "tests.island.one_rank", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.split() == ["sync_sgd", "True", "diloco", "True", "slowmo", "True"], done.stderr
