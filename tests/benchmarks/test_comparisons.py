"""What the benchmarks compute from what they have measured, on figures that are known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.speed import bandwidth, convergence, failure, goodput, stall, utilization
from benchmarks.speed.figures import Spread, plain, table


def test_a_loss_at_a_time_is_on_the_line_between_the_points_around_it() -> None:
    curve = [(0, 0.0, 5.0), (10, 2.0, 3.0), (20, 4.0, 2.0)]
    assert convergence.loss_at(curve, 1.0) == pytest.approx(4.0)
    assert convergence.loss_at(curve, 3.0) == pytest.approx(2.5)
    assert convergence.loss_at(curve, 9.0) == 2.0, "it has ended"
    assert convergence.loss_at(curve, 0.0) == 5.0


def test_convergence_compares_with_sync_sgd_and_keeps_its_curves_out_of_the_table(tmp_path: Path) -> None:
    slow = {"curve": [(0, 0.0, 5.0), (10, 8.0, 2.0)], "sent": 8e6, "seconds": 8.0}
    fast = {"curve": [(0, 0.0, 5.0), (10, 2.0, 2.5)], "sent": 1e6, "seconds": 2.0}
    rows = convergence.rows({"SyncSGD": slow, "DiLoCo": fast}, 50)
    assert rows[1]["to SyncSGD"] == 1.25
    assert rows[1]["SyncSGD's / these"] == 4.0
    assert [row["loss when the first is done"] for row in rows] == [pytest.approx(4.25), 2.5]
    assert "curve" not in table(rows)[0]
    assert plain(rows)[0]["curve"] == slow["curve"]
    pytest.importorskip("matplotlib")
    convergence.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_ideal_utilization_pays_for_the_bytes_that_the_delay_does_not_hide() -> None:
    # 1M fp32 parameters are 32 Mbit; 20 inner steps take 0.6 s
    assert bandwidth.ideal("DiLoCo", 1_000_000, 320, 0.03) == pytest.approx(0.6 / 0.7)
    assert bandwidth.ideal("SyncSGD", 1_000_000, 320, 0.03) == pytest.approx(0.03 / 0.13)
    assert bandwidth.ideal("Streaming", 1_000_000, 320, 0.03) == pytest.approx(0.6 / 0.7)
    assert bandwidth.ideal("+ delay", 1_000_000, 320, 0.03) == 1.0, "0.025 s, and 4 steps hide 0.12 s"
    assert bandwidth.ideal("+ delay", 1_000_000, 40, 0.03) == pytest.approx(0.6 / (0.6 + 4 * 0.08))
    assert bandwidth.ideal("+ fp4", 1_000_000, 40, 0.03) == 1.0


def test_the_rate_for_a_share_is_interpolated_on_logarithms() -> None:
    assert bandwidth.rate_for(0.9, {10: 0.8, 1000: 1.0}) == pytest.approx(100.0)
    assert bandwidth.rate_for(0.9, {10: 0.95, 100: 0.99}) == 10.0
    assert bandwidth.rate_for(0.9, {10: 0.5, 100: 0.6}) is None
    assert bandwidth.rate_for(0.9, {}) is None


def test_a_stall_is_the_worse_of_the_others_and_who_ends_with_an_error_is_told_of() -> None:
    struck = stall.Struck.of([[0.1, 0.7, 0.2], [0.5, 0.4]], lost=20)
    assert struck == stall.Struck(longest_s=0.7, second_s=0.4, lost=20)
    assert stall.row("killed", "ours", 0.01, [struck, struck], 1.0)["lost"] == 21.0
    row = stall.row("hangs", "theirs", 0.01, [stall.Struck.of([[60.0], [59.0]], lost=20, ended=2)])
    assert row["way"] == "theirs: 2 of 2 end with an error"
    assert (row["longest, s"], row["second, s"]) == (60.0, 0.0)


def test_work_that_a_failed_commit_takes_along_is_lost_and_a_deaths_is_dead() -> None:
    def steps(since_s: float, count: int) -> list[dict[str, object]]:
        return [{"event": "step", "t_s": since_s + i} for i in range(count)]

    def outer(t_s: float, committed: bool) -> dict[str, object]:
        return {"event": "round", "t_s": t_s, "committed": committed}

    join = {"event": "join", "t_s": 0.0}
    survivor = [join, *steps(10, 5), outer(15, True), *steps(15, 3), outer(18, False), *steps(18, 2)]
    victim = [join, *steps(10, 4), {"event": "death", "t_s": 14.0}, {"event": "join", "t_s": 16.0}, *steps(16, 2)]
    victim += [outer(18, False)]
    work = goodput.counted({"r0": survivor, "r1": victim}, 10.0, 20.0)
    assert (work.executed, work.dead, work.lost) == (16, 4, 5)
    assert work.lives == {"r0": [(0.0, 20.0)], "r1": [(0.0, 14.0), (16.0, 20.0)]}
    row = goodput.row("theirs", work, [((10.0, 12.0), (14.0, 18.0))] * 2, 1)
    assert row["kept, %"] == pytest.approx(100 * 7 / 12)
    assert row["in the model, %"] == pytest.approx(100 * 7 / 16)
    assert row["rate, %"].median == pytest.approx(100 * (6 / 6) / (4 / 4)), "six steps in six replica-seconds"


def test_noise_of_libraries_goes_to_a_file_and_standard_error_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with run.aside(tmp_path / "log"):
        os.write(2, b"a connection is lost\n")
    os.write(2, b"after it\n")
    assert (tmp_path / "log").read_text() == "a connection is lost\n"
    assert capfd.readouterr().err == "after it\n"
    with pytest.raises(ValueError, match="why"), run.aside(tmp_path / "log"):
        raise ValueError("why")
    assert "ValueError: why" in (tmp_path / "log").read_text()


def test_one_that_cannot_be_measured_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(quick: bool) -> list[dict[str, Spread]]:
        raise RuntimeError("no luck")

    monkeypatch.setattr(run, "place", lambda name, quick: tmp_path / f"{name}.json")
    monkeypatch.setattr("benchmarks.speed.stall.run", fails)
    assert run._measure("stall", quick=True) == 1
    assert "stall is not measured: no luck" in capsys.readouterr().err


def test_a_death_takes_the_steps_that_its_replica_has_not_contributed() -> None:
    steps = [{"t_s": 10.0 + n, "replica": replica, "incarnation": 1} for n in range(1, 11) for replica in ("r0", "r1")]
    members = [["r0", 1, 5, 5, 5.0, True], ["r1", 1, 5, 5, 5.0, True]]
    events = [
        {"t_s": 15.5, "event": "decide", "data": {"members": members}},
        {"t_s": 20.5, "event": "death", "replica": "r1", "incarnation": 1},
    ]
    course = failure.course_of_ftopt(events, steps, 10.0, [20.4], 24.0)
    assert course.lost == 5
    assert course.curve[0] == (0.0, 0.0)
    assert course.curve[-2:] == [(10.0, 20 * failure.BATCH), (10.5, 15 * failure.BATCH)]
    row = failure.row("ftopt", course)
    assert (row["kills"], row["samples"], row["inner steps lost per kill"]) == (1, 15 * failure.BATCH, 5)
    assert row["rate, samples/s"] == 2 * failure.BATCH
    assert row["seconds lost per kill"] == 14.0 - 7.5
    assert row["longest stop, s"] == 4.0


def test_a_restart_takes_what_was_done_since_the_checkpoint_of_all_ranks() -> None:
    starts = [
        {"t_s": 0.0, "rank": 0, "step": 0},
        {"t_s": 14.0, "rank": 1, "step": 50},
        {"t_s": 14.1, "rank": 0, "step": 50},
    ]
    steps = [{"t_s": n / 10, "step": n} for n in range(1, 71)] + [
        {"t_s": 14.0 + n / 10, "step": 50 + n} for n in range(2, 9)
    ]
    course = failure.course_of_ddp(starts, steps, 0.0, [7.05], 15.0)
    assert course.lost == 20 * failure.REPLICAS
    whole = failure.BATCH * failure.REPLICAS
    assert max(samples for at, samples in course.curve if at < 7.05) == 70 * whole
    assert [samples for at, samples in course.curve if at == 7.05] == [50 * whole]
    assert course.curve[-1] == (14.8, 57 * whole)
    assert failure.longest_stop(course) == pytest.approx(7.2)


def test_the_ideal_of_the_grid_sends_a_ring_of_four() -> None:
    # 1M fp32 parameters are 32 Mbit, of which each of four sends 1.5 times; an inner step takes 0.0265 s
    assert utilization.ideal("DiLoCo", 1_000_000, 8, 100) == pytest.approx(0.212 / (0.212 + 0.48))
    assert utilization.ideal("Streaming, delay, fp4", 1_000_000, 8, 100) == 1.0, "0.015 s, and 2 steps hide 0.053 s"
