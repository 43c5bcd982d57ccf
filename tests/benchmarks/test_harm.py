"""The table of flipped bits: its design covers what it says, and its judgement sees what is wrong."""

from __future__ import annotations

import itertools
import math
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.harm import CLEAN_RUNS, Run, chosen, clean, clean_runs, do, hung
from benchmarks.harm import cells as cells_of
from benchmarks.harm.cells import BITS, FACTORS, METHODS, TARGETS, TRIPLES, WORST, Cell, named
from benchmarks.harm.play import Outcome
from benchmarks.harm.table import MARGIN, PEAK_MARGIN, Band, judge, tables
from benchmarks.harm.workers import in_processes

CELL = named("DiLoCo/adamw/fp32/3/params/30/boundary/late/stays")
CLEAN = Outcome(1.0, True, struck=True, peak=2.0)
BAND = Band.of([CLEAN, replace(CLEAN, loss=1.1)])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a survivor may be late to be equal to the others."""
    monkeypatch.setattr("benchmarks.harm.play._EQUAL_S", 30.0)


def levels(cell: Cell, factors: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(cell, name) for name in factors)


@pytest.mark.long
def test_each_bit_of_each_target_is_in_the_design_for_each_method_and_each_pair_of_levels_too() -> None:
    cells = cells_of.design(3)
    assert cells == cells_of.design(3) and cells != cells_of.design(4)
    assert all(cell.possible for cell in cells) and len(set(cells)) == len(cells)
    places = {(cell.method, cell.target) for cell in cells}
    assert {(c.method, c.target, c.bit) for c in cells} == {(*place, bit) for place in places for bit in BITS}
    assert len(places) == len(METHODS) * len(TARGETS) - 5
    for factors in itertools.combinations(FACTORS, 2):
        had = {levels(cell, factors) for cell in cells}
        for missing in set(itertools.product(*(FACTORS[name] for name in factors))) - had:
            start = dict(zip(factors, missing, strict=True))
            rest = [FACTORS[name] if name not in start else [start[name]] for name in FACTORS if name != "bit"]
            bits = [start.get("bit", 0)]
            rest.insert(list(FACTORS).index("bit"), bits)
            possible = [Cell(*found).possible for found in itertools.product(*rest)]  # type: ignore[arg-type]
            assert not any(possible), missing


@pytest.mark.long
def test_the_worst_bit_meets_every_triple_that_matters() -> None:
    cells = cells_of.worst(0)
    assert {cell.bit for cell in cells} == {WORST}
    for factors in TRIPLES:
        had = {levels(cell, factors) for cell in cells}
        wanted = {levels(replace(cell, bit=WORST), factors) for cell in cells_of.pairs(1)}
        assert wanted <= had


@pytest.mark.long
def test_a_cell_is_found_by_its_name_and_others_by_their_levels() -> None:
    assert named(CELL.name) == CELL
    assert chosen([CELL.name], 0, everything=False) == [CELL]
    found = chosen(["bit=29,30", "method=SlowMo", "target=outer"], 0, everything=False)
    assert (
        found and {(c.method, c.target) for c in found} == {("SlowMo", "outer")} and {c.bit for c in found} == {29, 30}
    )
    for word in ("DiLoCo/adamw", "DiLoCo/adamw/fp32/1/params/30/boundary/late/dies", "byte=3", "bit=40", "bit"):
        with pytest.raises(ValueError, match=r"must have 9 parts|no such cell|use FACTOR=LEVEL"):
            chosen([word], 0, everything=False)


@pytest.mark.parametrize(
    ("outcome", "wrong"),
    [
        (CLEAN, ""),
        (replace(CLEAN, loss=1.1 * MARGIN), ""),
        (replace(CLEAN, loss=1.1 * MARGIN + 0.01), "loss"),
        (replace(CLEAN, loss=math.nan), "loss"),
        (replace(CLEAN, peak=2 * PEAK_MARGIN + 0.1), "a parameter"),
        (replace(CLEAN, equal=False), "survivors differ"),
        (replace(CLEAN, lost=3), "3 steps lost"),
        (replace(CLEAN, struck=False), "never flipped"),
        (hung("hangs"), "hangs"),
    ],
)
def test_a_cell_is_out_of_line_if_anything_is(outcome: Outcome, wrong: str) -> None:
    judged = judge(CELL, outcome, BAND)
    assert wrong in judged.wrong and bool(wrong) == bool(judged.wrong)
    assert judged.detection == ("none" if wrong else "none: harmless")
    assert judge(CELL, replace(outcome, detected=("mismatch", "damaged")), BAND).detection == "mismatch"
    assert any("1 cells" in line for line in tables([judged]))


def work(what: int) -> int:
    if what < 0:
        os._exit(3)
    if not what:
        threading.Event().wait()
    return 2 * what


@pytest.mark.long
def test_a_run_that_hangs_or_ends_its_process_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, looks = dict[int, object](), itertools.count(1)

    def monotonic() -> float:
        """It stands still until all others are done."""
        return 100.0 * next(looks) if len(found) == 4 else 0.0

    monkeypatch.setattr("benchmarks.harm.workers.time", SimpleNamespace(monotonic=monotonic))
    for number, result in in_processes(work, [1, -1, 0, 4, 5], jobs=2, limit_s=60.0, failed=lambda reason: reason):
        found[number] = result
    assert found == {0: 2, 1: "its process ended with status 3", 2: "hangs", 3: 8, 4: 10}


def test_a_run_without_a_flip_is_clean_and_a_flip_in_a_mantissa_is_harmless() -> None:
    run = next(run for run in clean_runs(["LocalSGD/sgd/fp32"]) if run.cell.size == 2)
    undisturbed = do(run)
    assert undisturbed.equal and not undisturbed.detected and not undisturbed.lost and not undisturbed.struck
    cell = named("LocalSGD/sgd/fp32/2/params/3/inner/middle/stays")
    band = Band.of([undisturbed])
    assert judge(cell, do(Run(cell, 0, run.data_seed)), band).wrong == ""


def test_a_result_that_flips_is_found_by_its_digest() -> None:
    outcome = do(Run(named("DiLoCo/sgd/fp32/3/sum/22/reduction/middle/stays"), 0, 0))
    assert outcome.struck and outcome.equal and not outcome.lost
    assert outcome.detected[0] == "mismatch"


def test_a_parameter_of_1e38_is_found_and_does_no_harm() -> None:
    cell = named("DiLoCo/adamw/fp32/3/params/30/boundary/late/stays")
    band = Band.of([do(run) for run in clean_runs(["DiLoCo/adamw/fp32"])[:3]])
    judged = judge(cell, do(Run(cell, 0, 0)), band)
    assert judged.wrong == "" and judged.detection == "outlier"


@pytest.mark.long
def test_an_anchor_whose_payload_no_codec_takes_is_found_and_fetched() -> None:
    outcome = do(Run(named("Streaming-2/sgd/top_k:0.1:4/2/anchor/30/reduction/second/stays"), 0, 16))
    assert not outcome.failed and outcome.equal and "damaged" in outcome.detected


def test_who_dies_takes_no_step_of_the_others_along() -> None:
    outcome = do(Run(named("DiLoCo/sgd/fp32/3/payload/5/reduction/middle/dies"), 0, 0))
    assert outcome.struck and outcome.equal and not outcome.lost and not outcome.failed


def test_clean_runs_go_through_all_scenes_and_have_names() -> None:
    runs = clean.clean_runs(1000, 0, each=False)
    assert {(run.recipe, run.scene) for run in runs} == set(itertools.product(clean.RECIPES, clean.SCENES))
    assert {run.codec for run in runs} == set(cells_of.CODECS) and {run.size for run in runs} == set(cells_of.SIZES)
    assert [clean.named(run.name) for run in runs] == runs
    assert len(clean.clean_runs(3, 0, each=True)) == 3 * len(clean.RECIPES)


@pytest.mark.parametrize(
    "name", ["streaming_bytes/spike/fp32/2/1", "slowmo_bytes/zero-rate/int8/3/2", "two_datacentres/slow/fp32/2/3"]
)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    assert clean.run_clean(clean.named(name)) == []


@pytest.mark.slow
def test_nothing_is_found_in_any_scene() -> None:
    runs = clean.clean_runs(len(clean.SCENES), 0, each=True)
    found = in_processes(clean.run_clean, runs, jobs=2, limit_s=120.0, failed=lambda reason: [reason])
    assert {runs[number].name: what for number, what in found if what} == {}


@pytest.mark.slow
def test_the_worst_bit_does_no_harm() -> None:
    cells = [cell for cell in cells_of.worst(0) if cell.codec == "fp32" and cell.inner == "sgd"]
    bands = {}
    for method in METHODS:
        clean_ones = [do(run) for run in clean_runs([f"{method}/sgd/fp32"])[:CLEAN_RUNS]]
        bands[method] = Band.of(clean_ones)
    runs = [Run(cell, 0, 0) for cell in cells]
    found = dict(in_processes(do, runs, jobs=2, limit_s=120.0, failed=hung))
    judged = [judge(cell, found[number], bands[cell.method]) for number, cell in enumerate(cells)]
    assert [f"{j.cell.name}: {j.wrong}" for j in judged if j.wrong] == []
