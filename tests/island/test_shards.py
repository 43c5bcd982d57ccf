"""Islands by shard do what replicas of one process do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.island.test_layouts import check
from tests.island.training import Case

FSDP, SHARD = ("fsdp", "fsdp"), ("shard", "shard")


@pytest.mark.timeout(400)
def test_two_islands_by_shard_are_two_replicas(tmp_path: Path) -> None:
    cases = [
        Case(method, method, FSDP, model="uneven", island=SHARD)
        for method in ("diloco", "streaming", "streaming_mix", "localsgd", "slowmo")
    ]
    cases += [Case("sgd", "diloco", FSDP, inner="sgd", model="wide", island=SHARD)]
    cases += [
        Case(codec, "streaming" if codec == "fp4" else "diloco", FSDP, codec=codec, model="uneven", island=SHARD)
        for codec in ("bf16", "int8", "fp4", "top_k")
    ]
    cases += [Case("half", "localsgd", FSDP, dtype="bfloat16", model="uneven", island=SHARD)]
    cases += [Case("tied", "diloco", FSDP, model="tied", island=SHARD)]  # all of it is in the first slice
    cases += [Case("empty", "streaming", FSDP, island=SHARD), Case("ddp", "diloco", ("fsdp", "ddp"), island=SHARD)]
    cases += [Case("mirror", "streaming", FSDP, model="wide", island=("shard", "mirror"))]
    cases += [Case("calls", "diloco", FSDP, calls=True, model="wide", island=SHARD)]
    check(tmp_path, (2, 2), cases)
