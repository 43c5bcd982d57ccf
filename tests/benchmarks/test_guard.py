"""The guard is red when something is slower than its limit, and says what to do. No test here judges a time but one,
whose outer step is slowed down beyond all noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guard
from benchmarks.__main__ import main
from benchmarks.guard.works import WARM, WORKS, Turn, Work, multiple
from ftopt.codecs.named import CODECS
from ftopt.step.outer.mean import Mean
from ftopt.step.outer.state import CommittedState


@contextmanager
def _taking(multiples: Iterator[float], turns: list[int]) -> Iterator[Turn]:
    ours = next(multiples)

    def turn() -> tuple[float, float]:
        turns[-1] += 1
        return 0.5 * ours, 0.5

    turns.append(0)
    yield turn


def _work(multiples: Sequence[float], turns: list[int] | None = None) -> Work:
    """One that takes another of the multiples each time that it is measured."""
    return Work("a thing", 5, partial(_taking, iter(multiples), [] if turns is None else turns))


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    """The limits of this CPU: 10 for everything."""
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"cpu": guard.cpu(), "limits": {"one": 10.0, "two": 10.0}}))
    return path


def _guard(monkeypatch: pytest.MonkeyPatch, works: Mapping[str, Work], *words: object) -> int:
    monkeypatch.setattr(guard, "WORKS", works)
    return main(["guard", *map(str, words)])


def test_all_is_well_within_the_limits(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guard(monkeypatch, {"one": _work([9.0]), "two": _work([1.0])}, "--limits", limits) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| name | what | times a copy | limit |  |",
        "|---|---|---|---|---|",
        "| one | a thing | 9.00 | 10.0 | ok |",
        "| two | a thing | 1.00 | 10.0 | ok |",
    ]


def test_one_that_is_over_its_limit_twice_is_red_and_the_user_is_told_what_to_do(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _guard(monkeypatch, {"one": _work([1.0]), "two": _work([12.0, 11.0])}, "--limits", limits) == 1
    said = capsys.readouterr()
    assert "| two | a thing | 11.0 | 10.0 | too slow |" in said.out
    assert f"two: too slow; run `python -m benchmarks guard two --limits {limits}` with and without" in said.err


def test_one_that_is_over_its_limit_once_is_measured_again_with_more_turns(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[int] = []
    assert _guard(monkeypatch, {"one": _work([12.0, 9.0], turns)}, "--limits", limits) == 0
    assert turns == [WARM + 5, WARM + 5 * guard.MORE]
    assert "| 9.00 | 10.0 | ok |" in capsys.readouterr().out


def test_another_cpu_may_take_longer(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits.write_text(json.dumps({"cpu": "an older one", "limits": {"one": 10.0}}))
    assert _guard(monkeypatch, {"one": _work([10 * guard.ELSEWHERE - 0.1])}, "--limits", limits) == 0
    assert f"the limits are {guard.ELSEWHERE:g} times those measured on an older one" in capsys.readouterr().out
    assert _guard(monkeypatch, {"one": _work([10 * guard.ELSEWHERE + 0.1] * 2)}, "--limits", limits) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["one", "three"], "three; must be of one, new"),
        (["new"], "has no limit for new; --write"),
        (["one", "--limits", "nowhere.json"], "nowhere.json has no limit for one; --write"),
        (["one", "--limits", __file__], "has no limits that can be read"),
    ],
)
def test_a_wrong_call_has_status_2(
    words: list[str], says: str, limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = {"one": _work([1.0]), "new": _work([1.0])}
    assert _guard(monkeypatch, works, "--limits", limits, *words) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["guard", "--fast"])


def test_write_leaves_room_above_what_is_measured_and_keeps_the_other_limits(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    works = {"one": _work([19.0, 30.0, 20.0, 21.0]), "two": _work([1.0])}
    assert _guard(monkeypatch, works, "one", "--write", "--limits", limits) == 0
    assert "| one | a thing | 20.0 | 26.0 | written |" in capsys.readouterr().out
    assert json.loads(limits.read_text()) == {"cpu": guard.cpu(), "limits": {"one": 26.0, "two": 10.0}}
    assert _guard(monkeypatch, works, "one", "--limits", limits) == 0
    limits.unlink()
    assert _guard(monkeypatch, {"two": _work([1.0] * 3)}, "--write", "--limits", limits) == 0
    assert json.loads(limits.read_text())["limits"] == {"two": 1.3}


def test_limits_of_two_cpus_do_not_get_into_one_file(
    limits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits.write_text(before := json.dumps({"cpu": "an older one", "limits": {"one": 10.0, "two": 10.0}}))
    works = {"one": _work([1.0] * 3), "two": _work([1.0] * 3)}
    assert _guard(monkeypatch, works, "one", "--write", "--limits", limits) == 2
    assert "write all of them" in capsys.readouterr().err
    assert limits.read_text() == before
    assert _guard(monkeypatch, works, "--write", "--limits", limits) == 0


def test_every_work_has_a_limit_and_every_codec_is_guarded() -> None:
    assert list(json.loads(guard.LIMITS.read_text())["limits"]) == list(WORKS)
    assert WORKS.keys() >= CODECS.keys()


@pytest.mark.parametrize("name", WORKS)
def test_a_work_can_be_measured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert math.isfinite(multiple(WORKS[name], 2))
    assert not caplog.records


@pytest.mark.long
def test_an_outer_step_that_sweeps_over_memory_too_often_is_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(self: Mean, attempt: Any, fragment: Any, state: CommittedState, *rest: Any) -> Any:
        for _ in range(40):
            state.anchor.clone()
        return reduce(self, attempt, fragment, state, *rest)

    reduce = Mean.reduce
    monkeypatch.setattr(Mean, "reduce", slow)
    assert _guard(monkeypatch, {"outer": replace(WORKS["outer"], turns=3)}, "outer") == 1
    assert "outer: too slow; run `python -m benchmarks guard outer` with and" in capsys.readouterr().err
