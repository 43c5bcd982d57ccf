"""The journal's file: what is damaged is refused, what a loss of power has cut off is dropped, one process has it."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftopt.cli.main import main
from ftopt.errors import UserError
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.server import journal as journal_module
from ftopt.sync.server import rows
from ftopt.sync.server.journal import Journal, JournalError
from tests.sync.server.access import coordinator_thread

PART = ("r0", 1, 20, 20, 20.0, True)


def decided(version: int, *, fragment: int = 0) -> e.Decided:
    done = () if fragment else ((0, 4 * version),)
    return e.Decided(fragment, version, 7_000_000 + version, "d" * 8, f"c{version}", 20 * version, (PART,), done)


def filled(path: Path) -> e.JournalState:
    """A journal of two jobs; what it knows of the first one."""
    journal = Journal(path)
    journal.write("j", [e.Epoch(7), e.Known("r0", 1), e.Known('r"1 ☃', 1)])
    journal.write("other", [e.Epoch(8), e.Known("x", 3)])
    for version in range(4):
        journal.write("j", [decided(version), decided(version, fragment=1), e.Cursor(1024 * (1 + version))])
    journal.write("j", [e.Gone("r0", 1), e.Rollback(1, 2)])
    saved = journal.load("j")
    journal.close()
    assert saved is not None
    return saved


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    saved = filled(tmp_path / "journal")
    assert saved.gone == (("r0", 1),)
    assert [d.version for d in saved.decided] == [0, 1, 2, 3, 0, 1, 2]
    assert saved.cursor == 4096
    again = Journal(tmp_path / "journal")
    assert again.load("j") == saved
    assert again.load("unknown") is None
    again.close()


def test_no_bit_can_be_changed_without_notice(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    data = (tmp_path / "journal").read_bytes()
    for at in range(len(data)):
        for changed in {data[at] ^ (1 << bit) for bit in range(8)} | {0, 255, ord(" "), ord("\n"), ord("0")}:
            if changed != data[at]:
                with pytest.raises(rows.Damaged):
                    rows.decode(data[:at] + bytes([changed]) + data[at + 1 :])


def test_a_journal_cut_off_anywhere_is_an_older_copy(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    data = (tmp_path / "journal").read_bytes()
    whole = rows.decode(data).bodies
    seen = set()
    for length in range(len(data)):
        found = rows.decode(data[:length])
        assert found.bodies == whole[: len(found.bodies)]
        seen.add(len(found.bodies))
        grown = rows.decode(data[:length] + bytes(-length % 512 + 512))
        assert grown.bodies == found.bodies, "allocated, and not written"
    assert seen == set(range(len(whole)))


def test_no_row_can_be_doubled_moved_or_left_out(tmp_path: Path) -> None:
    filled(tmp_path / "journal")
    data = (tmp_path / "journal").read_bytes()
    lines = data.splitlines(keepends=True)
    assert len(lines) == len(rows.decode(data).bodies)
    for i in range(len(lines)):
        with pytest.raises(rows.Damaged):
            rows.decode(b"".join([*lines[: i + 1], lines[i], *lines[i + 1 :]]))
        if i + 1 < len(lines):
            with pytest.raises(rows.Damaged):
                rows.decode(b"".join([*lines[:i], *lines[i + 1 :]]))
        for j in range(i + 1, len(lines)):
            swapped = lines[:]
            swapped[i], swapped[j] = lines[j], lines[i]
            with pytest.raises(rows.Damaged):
                rows.decode(b"".join(swapped))


def test_of_a_last_row_of_several_sectors_that_were_not_all_written_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write("j", [e.Epoch(7)])
    before = journal.size()
    journal.write("j", [e.Known(f"r{i}", 1) for i in range(100)])
    journal.close()
    data = path.read_bytes()
    torn = data[:1024] + bytes(512) + data[1536:]
    assert rows.decode(torn).end == before
    followed = torn + rows.encode(rows.decode(data).last, b"{}")[0]
    with pytest.raises(rows.Damaged):
        rows.decode(followed)


def test_a_file_without_a_whole_row_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A crash may leave it, and so may a broken disk."""
    (tmp_path / "journal").write_bytes(bytes(4096))
    journal = Journal(tmp_path / "journal")
    assert journal.load("j") is None
    journal.close()
    assert "has no whole row in its 4096 bytes" in caplog.text


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_row_that_was_cut_off_is_dropped_and_the_next_one_takes_its_place(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    filled(path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path)
    saved = journal.load("j")
    assert saved is not None
    assert saved.gone == ()
    journal.write("j", [e.Known("r9", 4)])
    journal.close()
    again = Journal(path).load("j")
    assert again is not None
    assert again.roster == (('r"1 ☃', 1), ("r0", 1), ("r9", 4))


def test_a_damaged_journal_is_refused_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal"
    filled(path)
    data = bytearray(path.read_bytes())
    data[data.index(b'"inner_step"') + 14] ^= 1
    path.write_bytes(data)
    assert main(["coordinator", "--bind", "127.0.0.1:0", "--journal", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is damaged: row 4, from byte" in said
    assert "an older copy" in said
    assert "start without it" in said
    assert path.read_bytes() == bytes(data), "it is left as it is"


@pytest.mark.parametrize("content", [b"SQLite format 3\0" + bytes(4000), b"my notes", b"x" * 10_000, b"\n"])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is no journal of this version of ftopt; give a file"):
        Journal(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b'["j", [["Unheard", {}]]]', "unknown entry 'Unheard'"),
        (b'["j", [["Known", {"heard": 1}]]]', "Known: unknown field 'heard'"),
        (b'["j"]', "row .*"),
        (b'{"job": "j"}', "row .*"),
        (b'["j", [5]]', "row .*"),
        (b'["j", [["Known", {}, 1]]]', "row .*"),
        (b'["j", [[["Known"], {}]]]', "row .*"),
        (b"[5, []]", "row .*"),
    ],
)
def test_a_journal_of_a_later_version_is_refused(tmp_path: Path, body: bytes, wrong: str) -> None:
    path, last, data = tmp_path / "journal", b"", b""
    for each in (b'"ftopt journal 1"', body):
        row, last = rows.encode(last, each)
        data += row
    path.write_bytes(data)
    with pytest.raises(UserError, match=rf"of another version of ftopt \({wrong}\)"):
        Journal(path)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # a read would wait for ever
    else:
        path.symlink_to("/dev/full")  # and would have no end
    with pytest.raises(UserError, match=r"journal .*: it is no regular file; give a file that can be written"):
        Journal(path)


def test_a_second_coordinator_does_not_get_the_journal_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    with coordinator_thread(journal=path):
        assert main(["coordinator", "--bind", "127.0.0.1:0", "--journal", str(path)]) == 2
    assert "is in use by another coordinator; end that one" in capsys.readouterr().err
    Journal(path).close()


def test_a_process_that_was_killed_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = "import sys,pathlib;from ftopt.sync.server.journal import Journal;j=Journal(pathlib.Path(sys.argv[1]));"
    code += "print('has it', flush=True);sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(UserError, match="in use"):
            Journal(path)
        other.kill()
    Journal(path).close()


def test_a_large_journal_is_written_anew_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_LARGE_BYTES", 20_000)
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    path = tmp_path / "journal"
    journal = Journal(path)
    journal.write("other", [e.Epoch(8), e.Known("x", 3)])
    journal.write("j", [e.Epoch(7), e.Known("r0", 1)])
    sizes = []
    for version in range(3000):
        journal.write("j", [decided(version), e.Cursor(version)])
        sizes.append(journal.size())
    drops = [a for a, b in itertools.pairwise(sizes) if b < a]
    assert drops
    assert max(sizes) < 3000 * 220
    with pytest.raises(UserError, match="in use"):
        Journal(path)
    before = journal.load("j")
    assert before is not None
    journal.close()
    again = Journal(path)
    after = again.load("j")
    assert after is not None
    assert (after.epoch, after.roster, after.cursor) == (7, (("r0", 1),), 2999)
    assert after.decided[-1] == before.decided[-1] == decided(2999)
    assert [(d.version, d.chain) for d in after.decided] == [(d.version, d.chain) for d in before.decided]
    assert len(after.decided) == 1000
    assert again.load("other") == e.JournalState(8, roster=(("x", 3),))
    again.close()


def test_while_a_new_file_cannot_be_written_the_old_one_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_LARGE_BYTES", 1000)
    path = tmp_path / "journal"
    (tmp_path / f".journal.{os.getpid()}.draft").mkdir()
    journal = Journal(path)
    for version in range(100):
        journal.write("j", [e.Epoch(7), decided(version)])
    saved = journal.load("j")
    journal.close()
    assert Journal(path).load("j") == saved


def test_what_needs_no_file_does_not_grow_for_ever() -> None:
    journal = Journal(None)
    for version in range(10_000):
        journal.write("j", [decided(version)])
    assert len(journal._entries["j"]) < 5000
    saved = journal.load("j")
    assert saved is not None
    assert [d.version for d in saved.decided] == list(range(9000, 10_000))


def test_a_write_that_fails_at_any_byte_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    filled(path)
    chooser = random.Random(5)
    pwrite = os.pwrite
    for attempt in range(30):
        journal, room = Journal(path), chooser.randrange(200)

        def short(fd: int, data: bytes, at: int, room: int = room) -> int:
            if not (part := data[:room]):
                raise OSError(28, os.strerror(28))
            pwrite(fd, part, at)
            raise OSError(28, os.strerror(28))

        before = journal.load("j")
        monkeypatch.setattr(os, "pwrite", short)
        monkeypatch.setattr(os, "ftruncate", lambda fd, length: short(fd, b"", 0))
        for _ in range(2):
            with pytest.raises(JournalError, match="No space left on device"):
                journal.write("j", [e.Known(f"r{attempt}", 100 + attempt)])
        monkeypatch.undo()
        assert journal.load("j") == before
        journal.write("j", [e.Epoch(10 + attempt)])
        saved = journal.load("j")
        journal.close()
        assert saved is not None
        assert (saved.epoch, saved.roster) == (10 + attempt, before.roster if before is not None else ())
        again = Journal(path)
        assert again.load("j") == saved
        again.close()


def _deleted(path: Path) -> None:
    path.unlink()


def _moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _replaced(path: Path) -> None:
    path.with_name("older").write_bytes(path.read_bytes()[:300])
    path.with_name("older").replace(path)


def _truncated(path: Path) -> None:
    os.truncate(path, 100)


def _appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("harm", [_deleted, _moved, _replaced, _truncated, _appended])
def test_a_file_that_somebody_changes_while_it_is_written_is_written_anew(
    harm: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    filled(path)
    path.chmod(0o640)
    journal = Journal(path)
    journal.write("j", [e.Epoch(9)])
    harm(path)
    journal.write("j", [decided(9)])
    journal.write("j", [decided(10)])
    saved, other = journal.load("j"), journal.load("other")
    with pytest.raises(UserError, match="in use"):
        Journal(path)
    journal.close()
    assert caplog.text.count("while this coordinator runs; it is written anew") == 1
    assert path.stat().st_mode & 0o777 == 0o640
    again = Journal(path)
    assert again.load("other") == other and other is not None
    found = again.load("j")
    assert found is not None and saved is not None
    assert found.decided[-2:] == saved.decided[-2:] == (decided(9), decided(10)) or found.decided == saved.decided
    again.close()


def test_a_journal_whose_path_another_coordinator_has_taken_is_not_put_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    filled(path)
    journal = Journal(path)
    path.unlink()
    second = Journal(path)
    second.write("k", [e.Epoch(20)])
    with pytest.raises(JournalError, match="another coordinator has its journal there now"):
        journal.write("j", [decided(9)])
    journal.close()
    second.close()
    again = Journal(path)
    assert again.load("k") == e.JournalState(20) and again.load("j") is None
    again.close()


def test_a_link_that_waits_under_the_name_of_the_draft_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_LARGE_BYTES", 1000)
    victim, path = tmp_path / "victim", tmp_path / "journal"
    victim.write_text("precious")
    for name in ("journal.new", f".journal.{os.getpid()}.draft"):
        (tmp_path / name).symlink_to(victim)
    journal = Journal(path)
    for version in range(100):
        journal.write("j", [e.Epoch(7), decided(version)])
    journal.close()
    assert victim.read_text() == "precious" and not path.is_symlink()
