"""Lines: whole, in one write each, readable while they are written."""

import json
import logging
import math
import os
import resource
import signal
from pathlib import Path

import pytest

from ftopt.events import Event
from ftopt.watch.jsonl import EventLog, JsonLines, Tail, read_lines


def test_an_event_is_one_line_with_its_time_and_without_empty_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(JsonLines(path, 100.0, clock=lambda: 102.5))
    log(Event("propose", "r0", 1, fragment=0, version=3, inner_step=150, data={"norm": 1.5}))
    log(Event("inner", "r0", 1))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "t_s": 2.5,
        "event": "propose",
        "replica": "r0",
        "incarnation": 1,
        "fragment": 0,
        "version": 3,
        "inner_step": 150,
        "data": {"norm": 1.5},
    }


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    JsonLines(path, 0.0, clock=lambda: 0.0).write({"loss": math.nan, "more": [math.inf, 1.0]})
    assert read_lines(path) == [{"t_s": 0.0, "loss": None, "more": [None, 1.0]}]


def test_two_writers_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    writers = [JsonLines(path, 0.0, clock=lambda: 0.0) for _ in range(2)]
    for number in range(10):
        writers[number % 2].write({"n": number})
    assert [line["n"] for line in read_lines(path)] == list(range(10))


def test_a_tail_gives_new_whole_lines_and_waits_for_the_rest_of_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path)
    assert tail.more() == []
    path.write_bytes(b'{"n": 1}\nnot json\n[2]\n{"n": ')
    assert tail.more() == [{"n": 1}]
    with path.open("ab") as file:
        file.write(b"3}\n")
    assert tail.more() == [{"n": 3}]


def test_a_write_that_fails_is_said_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(tmp_path / "lines", 0.0)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        lines.write({"n": 1})
        lines.write({"n": 2})
    assert lines.lines_lost == 2
    assert len(caplog.records) == 1


def test_a_line_that_a_full_disk_has_cut_spoils_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    one, other = (JsonLines(path, 0.0, clock=lambda: 0.0) for _ in range(2))
    write, room = os.write, [1000, 12, 1000, 9, 1000, 1000]

    def nearly_full(fd: int, data: bytes) -> int:
        return write(fd, data[: room.pop(0)])

    monkeypatch.setattr(os, "write", nearly_full)
    for number, lines in enumerate((one, one, one, one, other, one)):
        lines.write({"n": number, "data": {"t_s": 1}})
    assert [line["n"] for line in read_lines(path)] == [0, 2, 4, 5]
    assert one.lines_lost == 2


def test_an_events_file_on_a_disk_that_was_full_for_a_while_is_read_to_its_end(tmp_path: Path) -> None:
    """With a real limit of the file's size, which cuts a write as a full disk does."""
    path = tmp_path / "lines"
    lines = JsonLines(path, 0.0, clock=lambda: 0.0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
        for number in range(4):
            lines.write({"n": number, "text": "x" * 10})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    lines.write({"n": 4})
    assert [line["n"] for line in read_lines(path)] == [0, 4]
    assert lines.lines_lost == 3
