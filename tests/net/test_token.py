"""Where the token comes from, what it may be, and whom it lets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftopt.cli.main import main
from ftopt.errors import UserError
from ftopt.net.token import admits, authorization, find_token, for_state

TOKEN = "0123456789abcdef0123456789abcdef"


def test_the_token_alone_lets_in() -> None:
    assert admits(TOKEN, authorization(TOKEN)["Authorization"])
    for header in ("", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", f"Bearer {TOKEN[:-1]}", "Bearer \udcff\u2603"):
        assert not admits(TOKEN, header)
    assert admits(None, "")
    assert authorization(None) == {}


def test_what_replicas_show_each_other_does_not_open_the_coordinator() -> None:
    shown = for_state(TOKEN)
    assert shown is not None
    assert not admits(TOKEN, authorization(shown)["Authorization"])
    assert for_state(TOKEN[::-1]) != shown
    assert for_state(None) is None


def test_a_token_is_given_in_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nsecond line\n")
    monkeypatch.delenv("FTOPT_TOKEN", raising=False)
    assert find_token() is None
    assert find_token(TOKEN, file) == TOKEN
    monkeypatch.setenv("FTOPT_TOKEN", "x" * 20)
    assert find_token(file=file) == TOKEN
    assert find_token() == "x" * 20


@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "is empty"),
        ("short", "has 5 characters"),
        ("ä" * 20, "non-ASCII"),
        ("a b" * 9, "blanks"),
        ("x" * 2000, "2000"),
    ],
)
def test_a_token_that_would_protect_nothing_is_refused(
    token: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTOPT_TOKEN", token)
    with pytest.raises(UserError, match=f"FTOPT_TOKEN.*{words}"):
        find_token()
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(UserError, match=f"token file .*{words}"):
        find_token(file=file)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing: No such file"):
        find_token(file=tmp_path / "nothing")


@pytest.mark.parametrize(
    "verb", [["coordinator"], ["replica", "diloco_bytes", "--coordinator", "http://h:1"], ["status", "http://h:1"]]
)
def test_a_token_on_the_command_line_is_refused(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--token", TOKEN]) == 2
    error = capsys.readouterr().err
    assert "--token-file" in error
    assert TOKEN not in error


def test_a_token_file_that_all_can_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    assert find_token(file=file) == TOKEN and not caplog.messages
    file.chmod(0o644)
    assert find_token(file=file) == TOKEN
    assert caplog.messages == [f"token file {file} can be read by all users of this machine; chmod 600 it"]
