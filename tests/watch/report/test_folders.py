"""Folders that are not what a run leaves behind at its end; and files that a report must not replace."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ftopt.cli import report
from ftopt.cli.main import main
from ftopt.watch.folder import RunFolder
from ftopt.watch.report import write as written
from tests.watch.report.recorded import Recorder, page_of, record


def reported(*arguments: str | Path) -> int:
    return main(["report", *map(str, arguments)])


def text_of(path: Path) -> str:
    assert reported(path) == 0
    return page_of(path / "report.html").text


def test_a_run_that_is_still_going_on_says_so(tmp_path: Path) -> None:
    record(tmp_path, ended=False)
    text = text_of(tmp_path)
    assert "The run is still going on: its last line was written" in text
    assert "lost with dead replicas so far" in text


def test_a_killed_run_tells_what_it_had_recorded(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    run.steps("r0", 31, 4)
    with run.files.events.open("a", encoding="utf-8") as file:
        file.write('{"t_s":9.5,"event":"deci')
    for path in (run.files.events, *run.files.replicas.iterdir()):
        os.utime(path, (1e9, 1e9))
    text = text_of(tmp_path)
    assert "The run has no summary.json: it was killed before its end." in text
    assert "4 are not in it and were pending when the record ends" in text
    assert "1 line of the files could not be read" in text


def test_a_run_that_has_recorded_nothing_yet_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    assert "The record covers 0 s, with 0 replicas." in text_of(tmp_path)


def test_files_in_pieces_are_read_as_one(tmp_path: Path) -> None:
    run = record(tmp_path, rounds=20)
    whole = page_of_now(tmp_path)
    for path in (run.files.events, run.files.steps("r0")):
        lines = path.read_bytes().splitlines(keepends=True)
        for number, start in enumerate(range(0, len(lines), 30), 1):
            at = path if number == 1 else path.with_name(f"{path.name}.{number:06}")
            at.write_bytes(b"".join(lines[start : start + 30]))
        assert len(lines) > 100
    assert page_of_now(tmp_path) == whole
    before = json.loads(run.files.summary.read_text(encoding="utf-8"))
    assert run.files.summarize() == before
    assert RunFolder(tmp_path).steps("r0").with_name("r0.jsonl.000002").exists()


def page_of_now(path: Path) -> str:
    assert reported(path) == 0
    return re.sub("Made by ftopt report, .*? UTC", "", (path / "report.html").read_text(encoding="utf-8"))


def test_lines_of_other_shapes_are_left_out(tmp_path: Path) -> None:
    run = record(tmp_path)
    wrong = [
        [],
        {"t_s": "soon", "event": "join", "replica": "r0", "incarnation": 1},
        {"t_s": 1e400, "event": "join", "replica": "r0", "incarnation": 1},
        {"t_s": 1.0, "event": "stall", "replica": "r0", "incarnation": 1, "data": {"stall_s": None}},
        {"t_s": 1.0, "event": "evaluate", "replica": "r0", "incarnation": 1, "data": []},
        {"t_s": 1.0, "event": "join", "replica": "r0", "incarnation": 10**400},
        {"t_s": 1.0, "event": {}, "replica": "r0", "incarnation": 1},
    ]
    with run.files.events.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in wrong)
    with run.files.steps("r0").open("a", encoding="utf-8") as file:
        file.write('{"t_s":null}\n' + "[" * 100_000 + "\n" + '{"t_s":1,"incarnation":1,"inner_step":1},{"loss":2}\n')
        file.write(f'{{"t_s":1,"incarnation":1,"inner_step":{10**400},"loss":{10**400}}}\n')
    assert f"{len(wrong) + 4} lines of the files could not be read" in text_of(tmp_path)


_BEYOND = {"version": 3, "inner_step": 1 << 70, "members": [], "chain": ""}


@pytest.mark.parametrize(
    ("name", "at", "data", "error"),
    [
        ("recover", {"version": 3}, {"decided": [_BEYOND]}, "Overflow"),
        ("decide", {"version": 9, "inner_step": 90}, {}, "Key"),
        ("counts", {}, {"counts": [1, 2]}, "Attribute"),
        ("losses", {}, {"losses": {"r9": [1, 19, "much"]}}, "Value"),
    ],
)  # fmt: skip
def test_an_event_that_no_job_has_is_one_message(
    name: str, at: Any, data: Any, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path).event(name, **at, data=data)
    assert reported(tmp_path) == 2
    assert f"its events are not those of an ftopt run ({error}Error" in capsys.readouterr().err


def test_what_is_no_runs_folder_is_refused_with_a_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "runs" / "mine")
    for path, said in (
        (tmp_path / "nothing", "there is no such folder"),
        (tmp_path / "runs", f"the newest run in it is {tmp_path}/runs/mine"),
        (tmp_path / "runs" / "mine" / "logs", "it has no events.jsonl"),
        (tmp_path / "runs" / "mine" / "summary.json", f"is a file; give the run's folder, {tmp_path}/runs/mine"),
    ):
        assert reported(path) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    assert not list(tmp_path.rglob("*.html"))


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path)
    target = tmp_path / "report.html"
    target.write_text("mine", encoding="utf-8")
    assert reported(tmp_path) == 2
    assert "is not a report of ftopt" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == "mine"
    assert reported(tmp_path, "--force") == 0
    assert reported(tmp_path) == 0, "our own report is"


def test_an_output_that_cannot_be_written_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "run")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for output, said in (
        (tmp_path / "no" / "such.html", "cannot be written: No such file or directory"),
        (tmp_path / "run", "is a folder"),
        (fifo, "is not a plain file"),
        (tmp_path / "run" / "summary.json" / "x", "cannot be written: Not a directory"),
        (tmp_path / ("x" * 300), "cannot be written: File name too long"),
    ):
        assert reported(tmp_path / "run", "--output", output, "--force") == 2
        assert said in capsys.readouterr().err
    assert not [path for path in (tmp_path / "run").iterdir() if "html" in path.name]


def test_the_folders_of_several_machines_are_one_run(tmp_path: Path) -> None:
    """r1's machine started 100 s after the coordinator's, and its clock is 7 s ahead."""
    head, far = Recorder(tmp_path / "head"), Recorder(tmp_path / "far", started=500.0)
    head.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    head.now = 100.0
    for replica in ("r0", "r1"):
        head.event("join", replica, 1)
    for version in (1, 2):
        members = {"r0": (1, 10, 10 * version), "r1": (1, 10, 10 * version)}
        head.steps("r0", 10 * version - 9, 10)
        far.steps("r1", 10 * version - 9, 10)
        head.now, far.now = head.now + 1.0, far.now + 1.0
        head.round(version, members, here=["r0"])
        far.round(version, members, here=["r1"], coordinator=False)
    head.end("r0")
    far.end("r1")
    assert reported(tmp_path / "head", tmp_path / "far") == 0
    found = page_of(tmp_path / "head" / "report.html")
    assert (
        "The job ran for 1 min 43 s (the first 1 min 40 s passed before the first replica joined), with 2" in found.text
    )
    assert "Merged from 2 folders of one job (head and far). Their clocks and starts differ" in found.text
    head.files.about.write_text('{"began": "2026-11-30T10:00:00Z"}', encoding="utf-8")
    far.files.about.write_text('{"began": "2026-11-30T10:01:47Z"}', encoding="utf-8")
    for first, second, began in ((head, far, "10:00:00"), (far, head, "10:00:07")):
        assert reported(first.files.path, second.files.path) == 0
        text = page_of(first.files.path / "report.html").text
        assert f"Times count from 2026-11-30 {began} UTC." in text, "by the first folder's clock"
    assert "All 40 inner steps are in the model." in found.text
    assert [row[1:3] for row in found.table("version", "time")] == [["1:41", "10"], ["1:43", "20"]]


def test_folders_of_replicas_alone_say_what_they_do_not_know(tmp_path: Path) -> None:
    parts = []
    for number in range(2):
        run = Recorder(tmp_path / f"m{number}", started=50.0 * number)
        run.event("hold", f"r{number}", 0, data={"text": "1 of 2 replicas connected"})
        run.steps(f"r{number}", 1, 10)
        run.now += 1.0
        run.round(1, {f"r{number}": (1, 10, 10)}, coordinator=False)
        run.end(f"r{number}", pending=number)
        parts.append(run.files.path)
    assert reported(*parts) == 0
    text = page_of(parts[0] / "report.html").text
    assert "The record covers 1.5 s, with 2 replicas." in text
    assert "20 inner steps are on record, 1 of them pending when their replicas left" in text
    assert "no events of the coordinator" in text


def test_folders_of_ftopt_replica_have_a_report_alone_together_and_with_the_coordinators(tmp_path: Path) -> None:
    members = {"r0": (1, 10, 10), "r1": (1, 10, 10)}
    head = Recorder(tmp_path / "head")
    head.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    head.now = 1.0
    head.round(1, members, here=[])
    parts = []
    for number, replica in enumerate(members):
        run = Recorder(tmp_path / replica, started=50.0 * number)
        data = {"pid": 1, "life": 1, "time": 50.0 * number, "job": "http://head:29410 job"}
        run.event("spawn", replica, 1, data=data)
        run.steps(replica, 1, 10)
        run.now += 1.0
        run.round(1, members, here=[replica], coordinator=False)
        run.end(replica)
        parts.append(run.files.path)
    assert "10 inner steps are on record, 0 of them pending" in text_of(parts[0])
    assert reported(*parts) == 0
    text = page_of(parts[0] / "report.html").text
    assert "Merged from 2 folders" in text and "20 inner steps are on record" in text
    assert reported(head.files.path, *parts) == 0
    found = page_of(head.files.path / "report.html")
    assert "All 20 inner steps are in the model." in found.text
    assert found.figures()["lost by survivors"] == "0"


def test_a_replica_that_came_back_without_an_end_has_died(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.event("join", "r1", 1)
    for replica in ("r0", "r1"):
        run.steps(replica, 1, 14)
    run.now = 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)})
    run.now = 4.0
    run.event("join", "r1", 2)
    run.steps("r0", 15, 6)
    run.steps("r1", 1, 6, incarnation=2, job_step=10)
    run.now = 5.0
    run.round(2, {"r0": (1, 10, 20), "r1": (2, 6, 6)})
    run.end("r0")
    run.end("r1", 2)
    text = text_of(tmp_path)
    assert "1 death: r1 died at 0:01 (killed, crashed or cut off), and 2.6 s later its successor took its first" in text
    assert (
        "Of 40 inner steps, 36 (90.0 %) are in the model, 4 were lost with replicas that died; survivors lost none."
        in text
    )


def test_the_coordinators_folder_alone_tells_deaths_and_the_end_and_says_what_is_not_recorded(tmp_path: Path) -> None:
    """Scripts, which write no folder: r1 is killed 5 s into the job and comes back 3 s later."""
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.event("join", "r1", 1)
    run.now = 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.now = 5.0
    run.event("lost", "r1", 1)
    run.now = 8.0
    run.event("gone", "r1", 1, data={"reason": "superseded by a newcomer"})
    run.event("join", "r1", 2)
    text = text_of(tmp_path)
    assert "The run is still going on" in text and "-" not in text[text.index("committed: in the model") :][:60]
    run.round(2, {"r0": (1, 10, 20), "r1": (2, 6, 6)}, here=[])
    run.event("losses", data={"losses": {"r0": [1, 18, 2.5], "r1": [2, 14, 2.25]}})
    run.event("losses", data={"losses": {"r0": [1, 20, 1.5]}})
    for number, replica in enumerate(("r0", "r1")):
        run.now = 10.0
        run.event("leave", replica, 1 + number)
        run.event("gone", replica, 1 + number, data={"reason": "left"})
    assert reported(tmp_path) == 0
    found = page_of(tmp_path / "report.html")
    assert "going on" not in found.text
    assert "1 death: r1 died at 0:05 (killed, crashed or cut off), and was back 3 s later." in found.text
    assert "36 inner steps are in the model, as the coordinator has decided." in found.text
    assert "not recorded" not in found.text
    figures = found.figures()
    assert "inner steps executed" not in figures
    assert figures["committed: in the model"] == "36"
    assert not [what for what, figure in figures.items() if figure.startswith("-")]
    head, *rows = next(table for table in found.tables if table[0][:2] == ["replica", "inner steps in the model"])
    reducing = {"training, reducing": "0.6 s"}
    assert [dict(zip(head, row, strict=True)) for row in rows] == [
        {"replica": "r0", "inner steps in the model": "20", "training": "9.4 s", **reducing, "down": ""},
        {"replica": "r1", "inner steps in the model": "16", "training": "6.4 s", **reducing, "down": "3 s"},
    ]
    assert {row[5] for row in found.table("version")} == {"\N{EN DASH}"}
    assert "(as the coordinator heard of it, each point the mean of some steps)." in found.text
    assert ["13 to 14", "\N{EN DASH}", "2.250"] in found.table("inner steps")


def test_a_replica_that_is_started_again_after_its_end_goes_on(tmp_path: Path) -> None:
    """Its summary.json is of the first life: what the second one has pending is not lost."""
    run = Recorder(tmp_path)
    run.event("spawn", "r0", 1, data={"job": "http://head:29410 job"})
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.steps("r0", 1, 10)
    run.round(1, {"r0": (1, 10, 10)})
    run.end("r0")
    (tmp_path / "summary.json").write_text("{}")
    assert "going on" not in text_of(tmp_path)
    run.event("spawn", "r0", 2, data={"job": "http://head:29410 job"})
    run.event("join", "r0", 2)
    run.steps("r0", 1, 7, incarnation=2, job_step=10)
    text = text_of(tmp_path)
    assert (
        "The run is still going on" in text and "Of 17 inner steps, 10 (58.8 %) are in the model, 7 are not in" in text
    )


def test_a_replica_without_a_folder_beside_one_with_a_folder_is_named(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.event("join", "r1", 1)
    run.steps("r0", 1, 10)
    run.now = 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=["r0"])
    run.event("leave", "r1", 1)
    run.end("r0")
    text = text_of(tmp_path)
    assert "20 inner steps are in the model, as the coordinator has decided." in text
    assert "going on" not in text


def test_folders_before_and_after_a_resume_are_one_run_which_goes_on_while_one_of_them_does(tmp_path: Path) -> None:
    """r0 was resumed from its checkpoint, in a new folder, as the same incarnation; then it left, and r1 trains on."""
    head, far = Recorder(tmp_path / "head"), Recorder(tmp_path / "r1", started=500.0)
    head.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    far.event("spawn", "r1", 1, data={"job": "http://head:29410 job"})
    for version in (1, 2):
        head.now, far.now = 1.0 * version, 500.0 + version
        own = Recorder(tmp_path / f"r0-{version}", started=90.0 * version)
        own.event("spawn", "r0", 1, data={"job": "http://head:29410 job"})
        members = {"r0": (1, 10, 10 * version), "r1": (1, 10, 10 * version)}
        for run, replica in ((own, "r0"), (far, "r1")):
            run.event("join", replica, 1)
            run.steps(replica, 10 * version - 9, 10)
            run.round(version, members, here=[replica], coordinator=False)
        head.round(version, members, here=[])
        own.end("r0")
        own.summarize()
    far.steps("r1", 21, 4)
    parts = [tmp_path / name for name in ("head", "r0-1", "r0-2", "r1")]
    assert reported(*parts) == 0
    text = page_of(parts[0] / "report.html").text
    assert "Merged from 4 folders of one job" in text and "The run is still going on" in text
    assert "Of 44 inner steps, 40 (90.9 %) are in the model, 4 are not in it yet" in text
    far.end("r1", pending=4)
    assert reported(*parts) == 0
    assert "going on" not in page_of(parts[0] / "report.html").text


def test_jobs_that_happen_to_share_numbers_stay_two_runs(tmp_path: Path) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b")
    assert reported(tmp_path / "a", tmp_path / "b") == 0
    assert "2 runs compared" in page_of(tmp_path / "a" / "report.html").text


def test_a_report_that_fails_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    report.after(tmp_path)
    assert capsys.readouterr().out == ""
    (line,) = caplog.messages
    assert line.startswith(f"no report of {tmp_path}: UserError: ")


def test_a_report_that_a_full_disk_does_not_take_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(target: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    record(tmp_path)
    monkeypatch.setattr(written, "replace_text", full)
    told: list[written.Report] = []
    report.after(tmp_path, told=told.append)
    assert told[0].story and told[0].summary["outer_steps"]
    assert f"no report: {tmp_path / 'report.html'} cannot be written: No space left on device" in caplog.text
