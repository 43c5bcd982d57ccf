"""What becomes of an island when a rank dies or does something else than the others, and of the islands beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from ftopt.watch.jsonl import read_lines
from tests.island.running import Torchrun, coordinator
from tests.run.running import alive

pytestmark = pytest.mark.timeout(240)


@contextmanager
def two(folder: Path, steps: int, *hows: str, restarts: int = 0) -> Iterator[list[Torchrun]]:
    """Two islands of two ranks; ``hows``: of the first one, and of the second one."""
    with coordinator(folder, "--folder", str(folder / "job")) as url, ExitStack() as ends:
        runs = []
        for i, each in enumerate([*hows, ""][:2]):
            options = (f"--max-restarts={restarts}",) if restarts else ()
            runs.append(
                Torchrun(folder, url, f"r{i}", 2, "-m", "tests.island.dying", str(steps), each, options=options)
            )
            ends.callback(runs[-1].end)
        yield runs


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def committed(folder: Path, replica: str) -> int:
    """Inner steps of a replica's first life that were committed."""
    rows = [
        row
        for event in read_lines(folder / "job" / "events.jsonl")
        if event["event"] == "decide"
        for row in event["data"]["members"]
    ]
    return sum(steps for name, life, steps, _, _, counted in rows if (name, life) == (replica, 1) and counted)


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_dies_and_the_island_comes_back(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"  # else a fast survivor has left before the other island is back
    monkeypatch.setenv("GATE", str(gate))
    with two(tmp_path, 400, "", restarts=2) as (first, second):
        until(lambda: "step 10 " in first.said())
        pid = re.search(rf"rank {rank} pid (\d+)", first.said())
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        until(lambda: first.said().count("rank 0 pid") == 2)
        gate.touch()
        assert (first.wait(), second.wait()) == (0, 0), first.said()
        starts = [int(start) for start in re.findall(r"rank 0 pid \d+ starts at (\d+)", first.said())]
        assert starts[0] == 0
        assert re.search(r"rank 1 ends at 40\d", second.said()), "its place in the job may leap with the other island's"
    assert committed(tmp_path, "r1") == 400  # the survivor's, all of them


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("rates", "parameter group 0 has lr=0.05 on rank 0 and 0.01 on rank 1; the ranks of a replica take each step"),
        ("one-syncs", "rank 0 was in sync() while rank 1 called step(); all ranks of an island make the same calls"),
        ("raises", "the batch of rank 1 is bad"),
    ],
)
def test_an_island_whose_ranks_do_not_do_the_same_ends_and_says_why(tmp_path: Path, how: str, text: str) -> None:
    with two(tmp_path, 40, how) as (first, second):
        assert first.wait() == 1
        assert text in first.said()
        assert second.wait() == 0, second.said()
    assert committed(tmp_path, "r1") == 40


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "ddp"])
def test_an_outer_step_may_wait_longer_than_the_process_groups_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv("GROUP_TIMEOUT_S", "4")
    monkeypatch.setenv("GRACE_S", "30")
    with two(tmp_path, 12, "is-slow", layout) as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert committed(tmp_path, "r0") == committed(tmp_path, "r1") == 12


@pytest.mark.slow
def test_ddp_ranks_that_have_drifted_apart_are_told_and_made_equal(tmp_path: Path) -> None:
    with two(tmp_path, 20, "ddp-drift") as (first, second):
        assert (first.wait(), second.wait()) == (0, 0), first.said()
        assert "ranks that hold the same tensors do not hold them alike: " in first.said()
        assert "alike True" in first.said()


@pytest.mark.slow
def test_calls_in_one_island_are_alike_on_all_ranks_and_errors_in_them_end_it(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        run = Torchrun(tmp_path, url, "r0", 2, "-m", "tests.island.lasting")
        ends.callback(run.end)
        assert run.wait(200.0) == 0, run.said()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_no_rank_waits_for_ever_for_one_that_fails_alone_and_each_hears_why(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        run = Torchrun(tmp_path, url, "r0", 2, "-m", "tests.island.failing")
        ends.callback(run.end)
        assert run.wait(200.0) == 0, run.said()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_rank_of_an_island_answers_to_each_call_at_any_time_as_a_single_process_does(tmp_path: Path) -> None:
    with coordinator(tmp_path) as url, ExitStack() as ends:
        run = Torchrun(tmp_path, url, "r", 2, "-m", "tests.island.asking", str(tmp_path / "answers.json"))
        ends.callback(run.end)
        assert run.wait(280.0) == 0, run.said()
    answers = json.loads((tmp_path / "answers.json").read_text())
    unlike = []
    for kind, ranks in answers.items():
        single, *_ = answers[f"single {kind.split()[1]}"]
        assert len(ranks) == 2 and all(each.keys() == single.keys() for each in ranks)
        for rank, each in enumerate(ranks):
            for phase, expected in single.items():
                unlike += [
                    (kind, rank, phase, call, answer, each[phase][call])
                    for call, answer in expected.items()
                    if kind_of(each[phase][call]) != kind_of(answer)
                ]
    # Each step changes the whole model then, and a digest of it would cost a pass over it in each step.
    known = {(f"{kind} syncsgd", 1, "in the job", "anchor_digest") for kind in ("island", "fsdp")}
    assert not [each for each in unlike if each[:4] not in known]


def kind_of(answer: object) -> object:
    """Of an error its class: islands may say more in the message."""
    return answer.split(":")[0] if isinstance(answer, str) and "Error: " in answer else answer


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "whom", "number", "said"),
    [
        pytest.param("leaves", "torchrun", signal.SIGTERM, "replica r0 leaves its job: SIGTERM", id="sigterm"),
        pytest.param(
            "leaves", "rank 1", signal.SIGTERM, "rank 1: SIGTERM", id="sigterm-to-one", marks=pytest.mark.slow
        ),
        pytest.param("", "torchrun", signal.SIGKILL, r"torchrun, is gone", id="sigkill", marks=pytest.mark.slow),
    ],
)
def test_an_island_that_is_ended_hands_its_steps_in(
    tmp_path: Path, how: str, whom: str, number: signal.Signals, said: str
) -> None:
    with two(tmp_path, 200, how, restarts=1) as (first, second):
        until(lambda: "step 10 " in first.said())
        pids = [int(pid) for pid in re.findall(r"rank \d pid (\d+)", first.said())]
        rank = re.search(r"rank 1 pid (\d+)", first.said())
        assert rank is not None
        os.kill(first.process.pid if whom == "torchrun" else int(rank[1]), number)
        until(lambda: not any(map(alive, pids)))
        status = first.wait()
        assert (status == 0) == (whom == "rank 1"), first.said()  # torchrun itself always dies of its own signal
        text = first.out.read_text()
        assert said in text, text
        assert second.wait() == 0, second.said()
    done = max(int(steps) for steps in re.findall(r"step \d+ \(\d+,\) (\d+)", text))
    assert text.count("rank 0 pid") == 1  # it was not started again
    assert committed(tmp_path, "r0") in (done, done + 1)  # the last step ends the loop before its line
    assert committed(tmp_path, "r1") == 200


@pytest.mark.slow
def test_where_a_loss_ends_the_job_all_ranks_of_the_other_island_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ON_LOSS", "fail")
    with two(tmp_path, 100_000, "") as (first, second):
        until(lambda: "step 10 " in first.said())
        first.end()
        assert second.wait() == 1
        raised = re.findall(
            r"^\[rank(\d)\]:.*JobFailed: job '\w+' has failed, since replica r0 was lost", second.said(), re.M
        )
        assert sorted(raised) == ["0", "1"], second.said()


@pytest.mark.slow
def test_where_a_loss_ends_the_job_an_island_that_comes_to_its_end_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ON_LOSS", "fail")
    with coordinator(tmp_path, "--folder", str(tmp_path / "job")) as url, ExitStack() as ends:
        runs = []
        for name, steps in (("r0", "8"), ("r1", "300")):
            runs.append(Torchrun(tmp_path, url, name, 2, "-m", "tests.island.dying", steps, ""))
            ends.callback(runs[-1].end)
        for run in runs:
            assert run.wait() == 0, run.said()


@pytest.mark.slow
def test_an_island_that_stands_by_takes_the_place_of_one_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("START_REPLICAS", "1")
    gate = tmp_path / "gate"  # else the job may be over before the spare is there
    monkeypatch.setenv("GATE", str(gate))

    def told(name: str) -> list[dict[str, Any]]:
        return [x for x in read_lines(tmp_path / "job" / "events.jsonl") if x["event"] == name]

    with coordinator(tmp_path, "--folder", str(tmp_path / "job")) as url, ExitStack() as ends:

        def held(replica: str) -> int:
            with urlopen(f"{url}/status") as answer:
                (job,) = json.load(answer)["jobs"]
            return max((x["versions"][0] or 0 for x in job["replicas"] if x["replica"] == replica), default=0)

        runs = []
        for name, how in (("r0", ""), ("r1", "spare")):
            runs.append(Torchrun(tmp_path, url, name, 2, "-m", "tests.island.dying", "80", how))
            ends.callback(runs[-1].end)
        active, spare = runs
        until(lambda: "step 10 " in active.said())
        until(lambda: held("r1") > 1)
        active.end()
        gate.touch()
        assert spare.wait() == 0, spare.said()
    (promoted,) = told("promoted")
    assert (promoted["replica"], promoted["data"]) == ("r1", {"in_place_of": "r0"})
    found = {rank: what for rank, *what in re.findall(r"rank (\d) has (\w+) of chain (\w+)", spare.said())}
    decided = told("decide")[-1]
    assert decided["data"]["inner_step"] == 80
    assert found["0"][0] == found["1"][0]
    assert found["0"][1] == decided["data"]["chain"]


ENDING = """
import atexit, os
def threads():
    print(len(os.listdir("/proc/self/task")))
atexit.register(threads)  # runs after what ftopt has registered
import torch.distributed as dist
from ftopt.sync.island import Island
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
island = Island([0])
threads()
"""


def test_the_threads_of_an_islands_group_have_ended_before_python_ends(tmp_path: Path) -> None:
    environment = os.environ | {"STORE": str(tmp_path / "store")}
    out = subprocess.run(
        [sys.executable, "-c", ENDING], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    while_it_lives, at_the_end = map(int, out.split())
    assert at_the_end < while_it_lives
