"""Each verb of ``python -m benchmarks`` does its work: here in its smallest form, and without the packages that
the documented installs do not bring: ``bench`` has no pytest, ``dev`` no matplotlib."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import VERBS, main, parser
from benchmarks.speed import NAMES
from tests.forkserver import CONTEXT, die_with_parent
from tests.pages import PAGES, named, text_of

CELL = "DiLoCo/adamw/fp32/3/params/30/boundary/late/stays"
SMALLEST = {
    "run": [f"run {name} --quick" for name in NAMES],
    "guard": ["guard sgd bf16 --write --limits FOLDER/limits.json"],
    "plan": ["plan --published", "plan --earlier", "plan --quick"],
    "codecs": ["codecs --elements 100_000 --repeat 1"],
    "methods": ["methods --quick"],
    "grid": ["grid --quick"],
    "paft": ["paft --quick", "paft --quick --net resnet"],
    "faults": ["faults --only propose kill"],
    "honest": ["honest --count 2 --jobs 1"],
    "harm": ["harm --clean 1 --jobs 1", f"harm --cells {CELL} --jobs 1"],
    "chaos": ["chaos DiLoCo --runs 1 --seconds 2 --ledger without --recover drop --resume without"],
    "simulate": ["simulate --models --hours 1"],
    "goodput": ["goodput --seeds 1 --seconds 5"],
    "stragglers": ["stragglers watch cost --seeds 1 --replicas 2", "stragglers job --seeds 1 --target 2 --factor 1.2"],
    "soak": ["soak --minutes 0.2"],
}
"""A verb without one fails the first test. ``FOLDER``: an empty one."""


def test_each_verb_of_the_benchmarks_has_a_smallest_form() -> None:
    assert SMALLEST.keys() == VERBS.keys()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_commands_of_a_page_that_call_benchmarks_exist(page: Path) -> None:
    for command in re.findall(r"python -m benchmarks\s+([a-z][^`#\n]*(?:\n[a-z]+(?=`))?)", text_of(page)):
        given = parser().parse_args(re.sub(r" \[.*\]|\\$", "", command).split())  # without what is optional
        if given.verb == "run":
            assert set(given.names) <= set(NAMES), f"{named(page)}: {command}"


def _do(line: str, out: Path) -> None:
    die_with_parent()
    told = os.open(out, os.O_WRONLY | os.O_CREAT)
    os.dup2(told, 1)
    os.dup2(told, 2)
    for name in ("pytest", "hypothesis", "matplotlib"):
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails
    sys.exit(main(shlex.split(line)))


@pytest.mark.long
@pytest.mark.timeout(450)
@pytest.mark.parametrize("line", [line for lines in SMALLEST.values() for line in lines])
def test_a_benchmark_in_its_smallest_form_comes_to_its_end(line: str, tmp_path: Path) -> None:
    process = CONTEXT.Process(target=_do, args=(line.replace("FOLDER", str(tmp_path)), out := tmp_path / "said.txt"))
    process.start()
    try:
        process.join(400.0)
        said = out.read_text()
        if lacking := re.search(
            r".* is (?:not )?measured: (?:no network namespaces|ip and tc are missing|torch finds no CUDA).*", said
        ):
            pytest.skip(lacking.group())
        bad = said.rstrip().rpartition("bad: ")[2].split("; ")
        too_short = process.exitcode == 1 and all(x.endswith("too few to judge growth") for x in bad)
        assert process.exitcode == 0 or too_short, said
    finally:
        process.kill()
        process.join()
