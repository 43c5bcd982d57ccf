"""Traces: what files say, and what is wrong in them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.simulate import traces
from ftopt.errors import UserError


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_of_changes_says_which_machines_are_there_when(tmp_path: Path) -> None:
    trace = traces.read(written(tmp_path, "0,add,a\n0,add,b\n30000,remove,a\n60000,add,a\n90000,remove,b\n"))
    assert trace.end_s == 90
    assert [(x.node, x.start_s, x.stop_s, x.removed) for x in trace.stays()] == [
        ("a", 0, 30, True),
        ("b", 0, 90, True),
        ("a", 60, 90, False),
    ]
    assert trace.machine_seconds() == 30 + 90 + 30
    assert trace.sizes() == [(0, 2), (30, 1), (60, 2), (90, 1)]
    assert trace.removals() == [(30, 1), (90, 1)]
    assert trace.cut(50).machine_seconds() == 30 + 50


def test_a_trace_of_sizes_draws_which_machines_go(tmp_path: Path) -> None:
    text = "2021-12-11, 11:00:00, 3\n2021-12-11, 11:01:00, 2\n2021-12-12, 11:00:00, 4\n"
    trace = traces.read(written(tmp_path, text), seed=1)
    assert trace.end_s == 86400
    assert trace.sizes() == [(0, 3), (60, 2), (86400, 4)]
    assert trace == traces.read(tmp_path / "trace.csv", seed=1)


def test_a_trace_may_come_from_a_spreadsheet_and_name_time_zones(tmp_path: Path) -> None:
    text = "\ufeff2021-12-11, 11:00:00+01:00, 3\n2021-12-11, 11:00:00, 2\n"
    assert traces.read(written(tmp_path, text)).end_s == 3600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("0,add\n", "a line is `ms,add|remove,node`"),
        ("0,start,a\n", "a line is `ms,add|remove,node`"),
        ("-1,add,a\n", "'-1' is no time"),
        (f"0,add,{'x' * 200_000}\n", "field larger than field limit"),
        (f"0,start,{'x' * 1_000}\n", "...'; a line is `ms,add|remove,node`"),
        ("soon,add,a\n", "'soon' is no time"),
        ("nan,add,a\n", "'nan' is no time"),
        ("10,add,a\n5,add,b\n", "line 2: '5,add,b'; it is earlier than the line before"),
        ("0,add,a\n5,add,a\n", "that machine is there already"),
        ("0,add,a\n5,remove,b\n", "that machine is not there"),
        ("0,add,a\n", "nothing after its first moment"),
        ("2021-12-11, 11:00:00, many\n", "a line is `date, time, machines`"),
        ("2021-12-11, 11:00:00, 3\n2021-12-11, 10:00:00, 3\n", "times go up"),
        (
            "2021-12-11, 11:00:00, 3\n2021-12-11, 12:00:00, 9999999\n",
            "line 2: '2021-12-11, 12:00:00, 9999999'; with it",
        ),
    ],
)
def test_a_wrong_trace_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        traces.read(written(tmp_path, text))
    assert said in str(error.value)


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        traces.read(tmp_path / "none.csv")


def test_what_may_never_end_or_is_too_large_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", traces.MOST_BYTES + 1_000_000)
    said = {"pipe": "is a pipe or a device; name a regular file", "large": "has 251 MB; at most 250 are read"}
    for name, text in {**said, "/dev/zero": said["pipe"], ".": "Is a directory"}.items():
        with pytest.raises(UserError, match=text):
            traces.read(tmp_path / name)


def test_a_fleet_whose_machines_fail_keeps_its_size_but_for_those_on_their_way() -> None:
    trace = traces.poisson(20, mtbf_s=600, hours=10, back_s=60, together=2, seed=3)
    assert max(size for _, size in trace.sizes()) == 20
    assert all(count == 2 for _, count in trace.removals())
    assert 40 <= len(trace.removals()) <= 80
    lost_s = 20 * trace.end_s - trace.machine_seconds()
    assert lost_s == pytest.approx(60 * sum(count for _, count in trace.removals()), rel=0.05)
    assert traces.poisson(3, mtbf_s=math.inf, hours=1, back_s=60).machine_seconds() == 3 * 3600
