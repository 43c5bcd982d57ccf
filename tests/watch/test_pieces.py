"""A file of lines in pieces: all lines stay, in order, whoever dies while the next piece is begun."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftopt.watch.jsonl import JsonLines, Tail, pieces, read_lines

_SMALL = 200


def writer(path: Path, piece_bytes: int = _SMALL) -> JsonLines:
    return JsonLines(path, 0.0, clock=lambda: 0.0, piece_bytes=piece_bytes)


def of(lines: list[dict[str, Any]], who: str) -> list[int]:
    return [line["n"] for line in lines if line["who"] == who]


def test_a_full_file_goes_on_in_the_next_piece_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = writer(path)
    for number in range(50):
        lines.write({"n": number})
    names = [each.name for each in pieces(path)]
    assert names[:3] == ["events.jsonl", "events.jsonl.000002", "events.jsonl.000003"]
    assert names == sorted(names)  # so a shell's `cat events.jsonl*` has the lines in order
    assert all(_SMALL <= each.stat().st_size < _SMALL + 30 for each in pieces(path)[:-1])
    assert [line["n"] for line in read_lines(path)] == [line["n"] for line in Tail(path).each()] == list(range(50))


def test_a_writer_that_comes_back_goes_on_in_the_newest_piece(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(50):
        writer(path).write({"n": number})
    assert len(pieces(path)) > 3
    assert [line["n"] for line in read_lines(path)] == list(range(50))


def test_files_of_other_names_are_no_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = writer(path)
    for number in range(20):
        lines.write({"n": number})
    there = pieces(path)
    for name in ("events.jsonl.bak", "events.jsonl.1", "events.jsonl.000001", "events.jsonl2", "events.jsonl.00000x"):
        (tmp_path / name).write_text('{"n": 99}\n')
    assert pieces(path) == there
    assert [line["n"] for line in read_lines(path)] == list(range(20))


def test_a_tail_follows_over_pieces(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail, lines = Tail(path), writer(path)
    got: list[int] = []
    for number in range(40):
        lines.write({"n": number})
        got += [line["n"] for line in tail.more()] if number % 3 else []
    got += [line["n"] for line in tail.more()]
    assert got == list(range(40))


def test_a_tail_reads_the_line_of_a_writer_that_was_stopped_while_the_piece_became_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    slow, fast, tail = writer(path), writer(path), Tail(path)
    write = os.write

    def stopped(fd: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        for number in range(20):
            fast.write({"n": number})
        assert len(tail.more()) == 20
        return write(fd, data)

    monkeypatch.setattr(os, "write", stopped)
    slow.write({"n": 99})
    assert [line["n"] for line in tail.more()] == [99]
    assert sorted(line["n"] for line in read_lines(path)) == [*range(20), 99]


def test_the_cut_end_of_a_piece_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = writer(path)
    for number in range(20):
        lines.write({"n": number})
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])  # as after a loss of power
    first = whole.count(b"\n")
    assert [line["n"] for line in read_lines(path)] == [*range(first - 1), *range(first, 20)]


class Died(BaseException):
    """The process has gone."""


@pytest.mark.parametrize("call", ["fstat", "open", "dup2", "close", "write"])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_call_loses_no_line(
    call: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call in turn, before and after it takes effect; then the process comes back."""
    for at in range(40):
        path = tmp_path / f"{at}.jsonl"
        lines, written, calls = writer(path), 0, 0
        real: Callable[..., Any] = getattr(os, call)

        def die(*arguments: Any, real: Callable[..., Any] = real, at: int = at, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != at + 1:
                return real(*arguments, **named)
            if after:
                real(*arguments, **named)
            raise Died

        with monkeypatch.context() as patch:
            patch.setattr(os, call, die)
            try:
                for written in range(20):
                    lines.write({"n": written})
                written = 20
            except Died:
                pass
        for number in range(100, 120):
            writer(path).write({"n": number})
        got = [line["n"] for line in read_lines(path)]
        unsaid = [written] if call == "write" and after and written < 20 else []
        assert got == [*range(written), *unsaid, *range(100, 120)]


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "device"])
def test_what_lies_in_the_next_pieces_place_is_not_written_to(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, there, elsewhere = tmp_path / "events.jsonl", tmp_path / "events.jsonl.000002", tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    lines = writer(path)
    if what == "link":
        there.symlink_to(elsewhere)
    elif what == "folder":
        there.mkdir()
    elif what == "pipe":
        os.mkfifo(there)
    else:
        there.symlink_to("/dev/null")
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            lines.write({"n": number})
    (record,) = caplog.records
    assert "lines go on in the piece before, which is full" in record.getMessage()
    assert path.read_bytes().count(b"\n") == 20
    assert elsewhere.read_text() == "mine"
    there.rmdir() if what == "folder" else there.unlink()
    for number in range(20, 30):
        lines.write({"n": number})
    assert [line["n"] for line in read_lines(path)] == list(range(30))
    assert len(pieces(path)) > 1


def test_a_process_without_free_descriptors_stays_in_its_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events.jsonl"
    lines = writer(path)

    def none_left(*arguments: object) -> int:
        raise OSError(24, "Too many open files", str(arguments[0]))

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        for number in range(20):
            lines.write({"n": number})
    assert len(caplog.records) == 1
    lines.write({"n": 20})
    assert len(pieces(path)) == 2
    assert [line["n"] for line in read_lines(path)] == list(range(21))


_WRITER = """
import sys
from pathlib import Path
from ftopt.watch.jsonl import JsonLines
path, who, first, count = sys.argv[1:]
lines = JsonLines(Path(path), 0.0, piece_bytes=20_000)
for number in range(int(first), int(first) + int(count)):
    lines.write({"who": who, "n": number})
"""


def started(path: Path, who: str, first: int, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _WRITER, path, who, str(first), str(count)])


def test_processes_write_in_pieces_while_one_is_killed_and_another_reads(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail, got = Tail(path), list[dict[str, Any]]()
    with started(path, "a", 0, 5_000) as steady, started(path, "b", 0, 1_000_000) as victim:
        while len(of(got, "b")) < 2_000:
            got += tail.more()
        victim.kill()
        victim.wait()
        got += tail.more()
        again_at = of(got, "b")[-1] + 1
        with started(path, "b", again_at, 1_000) as again:
            while None in (steady.poll(), again.poll()):
                got += tail.more()
    assert (steady.returncode, again.returncode) == (0, 0)
    got += tail.more()
    assert len(pieces(path)) > 10
    for lines in (got, read_lines(path)):
        assert of(lines, "a") == list(range(5_000))
        assert of(lines, "b") == list(range(again_at + 1_000))
