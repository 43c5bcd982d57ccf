"""What a terminal shows: nothing is broken within a word or a path, and nothing else is there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ftopt.cli.main import VERBS, main
from ftopt.cli.shared import output
from ftopt.common.paths import near


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(output, "columns", lambda stream: 80)


def test_help_and_the_list_of_recipes_fit_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ls"]) == 0
    for verb in ("", *VERBS):
        with pytest.raises(SystemExit):
            main([*([verb] if verb else []), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


@pytest.mark.usefixtures("terminal")
def test_sentences_are_broken_between_words_and_commands_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    output.explain(f"first {'word ' * 20}\n  * second {'runs/a-b-c/checkpoint/' * 4} {'word ' * 5}")
    assert capsys.readouterr().out.splitlines() == [
        "first word word word word word word word word word word word word word word word",
        "  word word word word word",
        "  * second",
        f"    {'runs/a-b-c/checkpoint/' * 4}",
        "    word word word word word",
    ]
    output.show_command("to resume:", "ftopt resume runs/a")
    output.show_command("to get the model from it:", command := f"ftopt export {'x' * 40} model.safetensors")
    assert capsys.readouterr().out.splitlines() == [
        "to resume: ftopt resume runs/a",
        "to get the model from it:",
        f"  {command}",
    ]
    output.complain(f"{'word ' * 20}")
    assert [len(line) <= 80 for line in capsys.readouterr().err.splitlines()] == [True, True]


def test_a_pipe_gets_whole_lines_and_no_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output.explain("word " * 40)
    output.complain("word " * 40)
    output.tell("reading")
    with output.working("reading", after_s=0.0):
        pass
    shown = capsys.readouterr()
    assert shown.out.count("\n") == shown.err.count("\n") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    output.tell("reading")
    assert capsys.readouterr().err == "reading\n"


def test_a_path_is_shown_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert near(tmp_path / "runs" / "a") == Path("runs/a")
    assert near(tmp_path.parent) == tmp_path.parent
    assert near(Path("runs")) == Path("runs")
