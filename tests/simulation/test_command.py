"""``python -m tests.simulation``: what it prints, and its exit status."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import main
from tests.sync.planted import rules as planted


def test_it_counts_histories_and_what_they_cover(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--histories", "5", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("5 histories (seeds 3 to 7), ")
    assert any(line.split() == ["join", "100.0%"] for line in lines)
    assert lines[-1] == "every invariant holds"


def test_it_replays_a_history_to_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", "7"]) == 0
    first = capsys.readouterr().out
    assert main(["--replay", "7"]) == 0
    assert capsys.readouterr().out == first
    assert "process starts" in first


def test_a_history_that_breaks_a_rule_is_printed_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.count_off(monkeypatch)
    assert main(["--histories", "50"]) == 1
    told = capsys.readouterr()
    seed = told.err.split("--replay ")[1].strip()
    assert "I2: " in told.err
    assert "process starts" in told.out
    assert main(["--replay", seed]) == 1


@pytest.mark.parametrize("words", [["--histories", "0"], ["--replay", "-1"], ["--seed", "-1"]])
def test_wrong_input_is_one_message_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "must be an integer of at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seed", "text"),
    [(205_046_844, "version 11, every invariant holds"), (207_004_939, "version 2, every invariant holds")],
    ids=["only parts of the state are held", "a checkpoint lies between two fragments' last rounds"],
)
def test_histories_that_once_failed(seed: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The states are rare: the version shows that a history still is the one that it was."""
    assert main(["--replay", str(seed)]) == 0
    assert text in capsys.readouterr().out
