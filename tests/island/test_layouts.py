"""Islands of any layout do what replicas of one process do."""

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
from tests.island.running import Torchrun, coordinator, islands, plain
from tests.island.training import METHODS, WHOLE, Case

FSDP = ("fsdp", "fsdp")
CODECS = ("fp32", "bf16", "fp4")


def check(folder: Path, ranks: tuple[int, ...], cases: list[Case], tolerance: float = 0.0) -> None:
    """The islands have what replicas of one process have, and the same state. (In slices the committed state differs in
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
            if case.method in WHOLE and not tolerance and ours["digest"] != theirs["digest"]:
                wrong.append((case.name, "digest"))
    assert not wrong


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_islands_of_two_ranks_are_two_replicas(tmp_path: Path) -> None:
    cases = [Case(method, method, FSDP, model="uneven" if method not in WHOLE else "mlp") for method in METHODS]
    cases += [Case("sgd", "diloco", FSDP, inner="sgd", model="wide"), Case("sync_sgd", "syncsgd", FSDP, inner="sgd")]
    cases += [
        Case(codec, "streaming" if codec == "fp4" else "diloco", FSDP, codec=codec, model="uneven")
        for codec in ("bf16", "int8", "fp4", "top_k")
    ]
    cases += [Case("half", "localsgd", FSDP, dtype="bfloat16", model="uneven")]
    cases += [Case("half_sync", "syncsgd", FSDP, dtype="bfloat16"), Case("tied_sync", "syncsgd", FSDP, model="tied")]
    cases += [Case("tied", "diloco", FSDP, model="tied")]  # all of it is in the first slice
    cases += [Case("empty", "streaming", FSDP), Case("ddp", "diloco", ("fsdp", "ddp"))]
    cases += [Case("calls_sync", "paft", FSDP, calls=True)]
    saved = tmp_path / "saved"
    cases += [Case("calls", "diloco", FSDP, calls=True, model="wide", saved=str(saved))]
    check(tmp_path, (2, 2), cases)
    (checkpoint,) = whole(saved)  # the version that they have left, though no checkpoint was due
    assert find(checkpoint).manifest.inner_step == 14


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (2, 4)], ids=["2 and 2", "2 and 4"])
@pytest.mark.parametrize("inner", ["adamw", "sgd"])
def test_every_method_with_every_codec(tmp_path: Path, ranks: tuple[int, ...], inner: str) -> None:
    cases = [
        Case(f"{method}-{codec}", method, FSDP, inner, codec, model="mlp" if method in WHOLE else "uneven")
        for method in METHODS
        for codec in CODECS[: 1 if method == "slowmo_moments" else None]  # moments are not rounded
    ]
    check(tmp_path, ranks, cases)


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2, 2), (2, 4)], ids=["2 and 2", "2 and 4"])
def test_muon_inside_every_method(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """Of replicated matrices; of shards it multiplies in another order."""
    layouts = ("ddp", "ddp")
    cases = [
        Case(f"{method}-{codec}", method, layouts, "muon", codec)
        for method in METHODS
        for codec in CODECS[: 1 if method == "slowmo_moments" else None]  # moments are not rounded
    ]
    check(tmp_path, ranks, cases)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_checkpoint_is_resumed_in_any_size(tmp_path: Path) -> None:
    for method in ("diloco", "syncsgd"):
        saved, steps = tmp_path / f"saved-{method}", (10, 18, 26)
        with coordinator(tmp_path) as url, ExitStack() as ends:
            found = []
            for ranks, upto in zip((2, 3, 1), steps, strict=True):
                out = tmp_path / f"{upto}.json"
                arguments = ("-m", "tests.island.resuming", str(saved), str(upto), str(out), method)
                run_ = Torchrun(tmp_path, url, "r0", ranks, *arguments)
                ends.callback(run_.end)
                assert run_.wait() == 0, run_.said()
                found.append(json.loads(out.read_text()))
        assert [each["start"] for each in found] == [0, 10, 18]  # each has saved the version that it has left
        for upto, ours in zip(steps, found, strict=True):
            theirs: Any = run(tmp_path / f"plain-{method}", upto, lambda mesh: ftopt.solo(), "plain", method)
            assert ours["start"] == theirs["start"]
            assert ours["resumed"] == (upto > 10)
            for name, values in theirs["parameters"].items():
                assert torch.allclose(torch.tensor(ours["parameters"][name]), torch.tensor(values), atol=1e-5), name


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_islands_of_unlike_sizes_and_layouts_meet(tmp_path: Path) -> None:
    cases = [
        Case(f"{method}-{second}", method, ("fsdp", second), model="uneven")
        for method in ("diloco", "streaming")
        for second in ("fsdp", "hsdp", "ddp")
    ]
    cases += [Case("tp", "diloco", ("fsdp", "tp"), "sgd", model="wide")]
    cases += [Case(f"sync-{second}", "syncsgd", ("fsdp", second)) for second in ("tp", "hsdp")]
    cases += [Case("int8", "streaming", FSDP, codec="int8", model="uneven")]
    check(tmp_path, (2, 4), cases, tolerance=1e-5)  # tensor parallelism adds in another order


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_islands_meet_plain_processes(tmp_path: Path) -> None:
    ranks = (2, 1, 4)
    layouts = tuple("fsdp" if n > 1 else "plain" for n in ranks)
    cases = [
        Case(f"three-{codec}", "diloco", layouts, codec=codec, model="uneven") for codec in ("fp32", "bf16", "fp4")
    ]
    cases += [Case(f"three-{method}", method, layouts) for method in ("syncsgd", "slowmo_moments", "decoupled")]
    check(tmp_path, ranks, cases, tolerance=1e-6)  # Gloo adds three up in another order


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_happens_to_one_rank_happens_to_its_island(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        run_ = Torchrun(tmp_path, url, "r0", 2, "-m", "tests.island.slicing")
        ends.callback(run_.end)
        assert run_.wait() == 0, run_.said()
