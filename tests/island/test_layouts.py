"""Islands of any layout do what replicas of one process do, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.island.running import islands, plain
from tests.island.training import METHODS, Case

FSDP = ("fsdp", "fsdp")


def check(folder: Path, ranks: tuple[int, ...], cases: list[Case], tolerance: float = 0.0) -> None:
    """The islands have what replicas of one process have, and the same state. (By shard the committed state differs in
    one number, the norm of contributions, which is added up slice by slice: digests are compared among the islands.)"""
    found = islands(folder, ranks, cases)
    wrong = []
    for case in cases:
        if len({island[case.name]["digest"] for island in found}) > 1:
            wrong.append((case.name, "digests"))
        for ours, theirs in zip((island[case.name] for island in found), plain(case), strict=True):
            apart = max(
                abs(a - b)
                for name, values in theirs["parameters"].items()
                for a, b in zip(ours["parameters"][name], values, strict=True)
            )
            if apart > tolerance or any(ours[key] != theirs[key] for key in ("versions", "local_steps", "pending")):
                wrong.append((case.name, apart, ours["versions"], theirs["versions"], ours["pending"]))
            if not (tolerance or "shard" in case.island) and ours["digest"] != theirs["digest"]:
                wrong.append((case.name, "digest"))
    assert not wrong


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_islands_of_two_ranks_are_two_replicas(tmp_path: Path) -> None:
    cases = [Case(name, name, FSDP) for name in METHODS]
    cases += [Case("sgd", "diloco", FSDP, inner="sgd"), Case("sync_sgd", "syncsgd", FSDP, inner="sgd")]
    cases += [Case("bf16", "diloco", FSDP, codec="bf16"), Case("fp4", "streaming", FSDP, codec="fp4")]
    cases += [Case("half", "localsgd", FSDP, dtype="bfloat16"), Case("tied", "diloco", FSDP, model="tied")]
    cases += [Case("ddp", "diloco", ("fsdp", "ddp")), Case("calls", "diloco", FSDP, calls=True)]
    check(tmp_path, (2, 2), cases)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_islands_of_unlike_sizes_and_layouts_meet(tmp_path: Path) -> None:
    cases = [
        Case(f"{method}-{second}", method, ("fsdp", second))
        for method in ("diloco", "streaming")
        for second in ("hsdp", "tp", "ddp")
    ]
    cases += [Case("sync-tp", "syncsgd", ("fsdp", "tp")), Case("sync-hsdp", "syncsgd", ("fsdp", "hsdp"))]
    check(tmp_path, (2, 4), cases, tolerance=1e-6)  # tensor parallelism adds in another order
