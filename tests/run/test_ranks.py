"""``ftopt run`` with replicas of several ranks: real torchrun, FSDP2 within a replica, DiLoCo between two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ftopt.watch.jsonl import read_lines
from tests.island.running import coordinator
from tests.run.running import TINY, Start, alive, events_of, folder_of, summary_of, text, until

TWO = ("replicas=2", "ranks=2", "policy.min_replicas=2", "train.threads=1")


def ranks_of(folder: Path) -> Mapping[str, list[int]]:
    """Replica -> the processes of its ranks, rank 0 first."""
    found = {}
    for event in events_of(folder, "spawn"):
        if event["replica"] != "coordinator":
            pid = event["data"]["pid"]
            found[event["replica"]] = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return found


def trained(folder: Path, rounds: int) -> bool:
    """Whether so many outer steps are decided."""
    return any(folder.glob("runs/*")) and len(events_of(folder, "decide")) >= rounds


@pytest.mark.long
@pytest.mark.timeout(240)
def test_an_island_one_of_whose_ranks_is_killed_starts_again(tmp_path: Path, start: Start) -> None:
    run = start(tmp_path, *TWO, "restarts=1", "train.inner_steps=300")
    until(lambda: trained(tmp_path, 2), 120.0)
    ranks = ranks_of(tmp_path)
    os.kill(ranks["r1"][1], signal.SIGKILL)
    until(lambda: not any(map(alive, ranks["r1"])))
    status, error = run.wait(200.0)
    assert status == 0, error
    got = summary_of(tmp_path)
    assert got["survivor_inner_steps_lost"] == got["inner_steps_counted_twice"] == 0
    assert [(death["replica"], death["status"]) for death in got["deaths"]] == [("r1", "exit status 1")]
    assert sorted((join["replica"], join["incarnation"]) for join in got["joins"]) == [("r0", 1), ("r1", 1), ("r1", 2)]
    assert {(line["samples"], line["tokens"]) for line in read_lines(folder_of(tmp_path).steps("r0"))} == {(4, 4 * 16)}
    assert len(set(got["anchor_digests"].values())) == 1
    assert set(got["anchor_digests"]) == {"r0", "r1"}
    assert got["val_loss_final"] < got["val_loss_initial"] - 1.0
    assert "rank 1 of 2 has died (SIGKILL)" in folder_of(tmp_path).log("r1").read_text(encoding="utf-8")
    assert len(events_of(tmp_path, "evaluate")) == 3, "the first one's, and both at the end: of rank 0 alone"
    assert not any(alive(pid) for pids in ranks.values() for pid in pids)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_an_island_that_a_fault_kills_comes_back(tmp_path: Path, start: Start, parallel: str) -> None:
    fault = "{replica: 1, at_step: 60, point: reduce, do: kill, rejoin_s: 0}"
    more = ("data.sampling=random", f"parallel={parallel}", f"faults=[{fault}]", "train.accumulate=2")
    status, error = start(tmp_path, *TWO, *more, "train.inner_steps=200", fresh=True).wait(200.0)
    assert status == 0, error
    got = summary_of(tmp_path)
    assert got["survivor_inner_steps_lost"] == got["inner_steps_counted_twice"] == 0
    assert got["dead_inner_steps_lost"] == 20
    assert [death["data"]["by_fault"] for death in events_of(tmp_path, "death")] == [True]
    assert len(got["joins"]) == 3
    assert len(set(got["anchor_digests"].values())) == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_islands_hand_everything_in(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    run = start(tmp_path, *TWO, "train.inner_steps=100000")
    until(lambda: trained(tmp_path, 3), 120.0)
    ranks = ranks_of(tmp_path)
    run.signal(number)
    status, error = run.wait()
    assert status == 128 + number
    assert "interrupted" in error
    folder = folder_of(tmp_path).path.relative_to(tmp_path)
    assert f"to resume: ftopt resume {folder}\n" in (tmp_path / "stdout.txt").read_text()  # it is saved
    got = summary_of(tmp_path)
    assert got["deaths"] == []
    assert got["survivor_inner_steps_lost"] == got["inner_steps_pending"] == 0
    assert [event["data"]["reason"] for event in events_of(tmp_path, "end")] == ["left", "left"]
    assert not any(alive(pid) for pids in ranks.values() for pid in pids)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_rank_outlives_a_run_that_is_interrupted_twice_or_killed(tmp_path: Path, start: Start) -> None:
    for number, folder in ((signal.SIGINT, tmp_path / "twice"), (signal.SIGKILL, tmp_path / "killed")):
        folder.mkdir()
        run = start(folder, *TWO, "train.inner_steps=100000", fresh=True)
        until(lambda folder=folder: trained(folder, 1), 120.0)  # type: ignore[misc]
        pids = [event["data"]["pid"] for event in events_of(folder, "spawn")]
        pids += [pid for ranks in ranks_of(folder).values() for pid in ranks]
        assert len(pids) == 7
        if number == signal.SIGINT:  # ranks that cannot leave
            for ranks in ranks_of(folder).values():
                os.kill(ranks[1], signal.SIGSTOP)
        run.signal(number)
        if number == signal.SIGINT:
            until(lambda folder=folder: "interrupted" in (folder / "stdout.txt").read_text())  # type: ignore[misc]
            run.signal(number)
            run.wait()
            assert not any(map(alive, pids))
        until(lambda pids=pids: not any(map(alive, pids)))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_islands_go_on_from_a_checkpoint(tmp_path: Path, start: Start) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    settings = (*TWO, "data.sampling=random", "checkpoint.every=2")
    status, error = start(first, *settings, "train.inner_steps=160").wait(200.0)
    assert status == 0, error
    resume = f"checkpoint.resume={folder_of(first).checkpoints}"
    status, error = start(second, *settings, resume, "train.inner_steps=320").wait(200.0)
    assert status == 0, error
    assert events_of(second, "decide")[0]["inner_step"] > 160
    assert summary_of(second)["survivor_inner_steps_lost"] == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_island_trains_as_one_process_does(tmp_path: Path, start: Start) -> None:
    """The ranks share each batch, so that their mean gradient is the batch's; only the sums differ in their order."""
    losses = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        settings = ("replicas=1", f"ranks={ranks}", "data.drop_last=true", "train.inner_steps=60")
        status, error = start(folder, *settings).wait(200.0)
        assert status == 0, error
        losses.append([line["loss"] for line in read_lines(folder_of(folder).steps("r0"))])
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_all_ranks_find_wrong_is_said_once(tmp_path: Path, start: Start) -> None:
    status, error = start(tmp_path, *TWO, "model.context=17", "data.drop_last=false").wait(100.0)
    assert status == 2
    assert error.count("shares must be equal") == 1
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_island_that_is_refused_says_why_and_nothing_else(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 32)
    with coordinator(tmp_path, "--token-file", str(token)) as url:
        command = [
            sys.executable,
            "-m",
            "ftopt",
            "replica",
            "--coordinator",
            url,
            "--id",
            "r0",
            "diloco_bytes",
            "ranks=2",
        ]
        done = subprocess.run(
            [*command, *TINY, text(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert "token" in done.stderr
    assert "Traceback" not in done.stderr
    assert all(line.startswith("ftopt: ") for line in done.stderr.splitlines())
