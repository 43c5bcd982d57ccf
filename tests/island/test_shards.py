"""Islands by shard do what replicas of one process do."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import ftopt
from ftopt.checkpoint.reader import find, whole
from tests.island.resuming import run
from tests.island.running import Torchrun, coordinator
from tests.island.test_layouts import check
from tests.island.training import Case

FSDP, SHARD = ("fsdp", "fsdp"), ("shard", "shard")


@pytest.mark.long
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
    saved = tmp_path / "saved"
    cases += [Case("calls", "diloco", FSDP, calls=True, model="wide", island=SHARD, saved=str(saved))]
    check(tmp_path, (2, 2), cases)
    (checkpoint,) = whole(saved)  # the version that they have left, though no checkpoint was due
    assert find(checkpoint).manifest.inner_step == 14


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_checkpoint_is_resumed_in_any_size(tmp_path: Path) -> None:
    saved, steps = tmp_path / "saved", (10, 18, 26)
    with coordinator(tmp_path) as url, ExitStack() as ends:
        found = []
        for ranks, upto in zip((2, 3, 1), steps, strict=True):
            out = tmp_path / f"{upto}.json"
            arguments = ("-m", "tests.island.resuming", str(saved), str(upto), str(out))
            run_ = Torchrun(tmp_path, url, "r0", ranks, *arguments)
            ends.callback(run_.end)
            assert run_.wait() == 0, run_.said()
            found.append(json.loads(out.read_text()))
    assert [each["start"] for each in found] == [0, 10, 18]  # each has saved the version that it has left
    for upto, ours in zip(steps, found, strict=True):
        theirs: Any = run(tmp_path / "plain", upto, lambda mesh: ftopt.solo(), "plain", "mirror")
        assert ours["start"] == theirs["start"]
        assert ours["resumed"] == (upto > 10)
        for name, values in theirs["parameters"].items():
            assert torch.allclose(torch.tensor(ours["parameters"][name]), torch.tensor(values), atol=1e-5), name


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_islands_by_shard_of_unlike_sizes_and_layouts_meet_mirrors(tmp_path: Path) -> None:
    cases = [
        Case(f"{method}-{second}", method, ("fsdp", second), model="uneven", island=SHARD)
        for method in ("diloco", "streaming")
        for second in ("fsdp", "hsdp", "ddp")
    ]
    cases += [Case("tp", "diloco", ("fsdp", "tp"), "sgd", model="wide", island=SHARD)]
    cases += [
        Case(f"{island[0]}-{codec}", "streaming", FSDP, codec=codec, model="uneven", island=island)
        for codec in ("fp32", "int8")
        for island in (("shard", "mirror"), ("mirror", "shard"))
    ]
    check(tmp_path, (2, 4), cases, tolerance=1e-5)  # tensor parallelism adds in another order


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_islands_by_shard_meet_plain_processes(tmp_path: Path) -> None:
    ranks = (2, 1, 4)
    layouts = tuple("fsdp" if n > 1 else "plain" for n in ranks)
    cases = [
        Case(f"three-{codec}", "diloco", layouts, codec=codec, model="uneven", island=("shard",) * len(ranks))
        for codec in ("fp32", "bf16", "fp4")
    ]
    check(tmp_path, ranks, cases, tolerance=1e-6)  # Gloo adds three up in another order


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_happens_to_one_rank_by_shard_happens_to_its_island(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        run_ = Torchrun(tmp_path, url, "r0", 2, "-m", "tests.island.slicing")
        ends.callback(run_.end)
        assert run_.wait() == 0, run_.said()
