"""Figures are taken in turns, told with their spread, and written where the page has a place for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.speed import NAMES, copies, equal, paft, recovery, report, reuse, utilization
from benchmarks.speed.figures import Spread, drawn, in_turns, plain, ratio, table
from benchmarks.speed.shown import SHOWN, Shown


def test_works_take_turns_in_changing_order_and_the_first_rounds_do_not_count() -> None:
    order: list[str] = []

    def work(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = in_turns({"a": lambda: work("a"), "b": lambda: work("b")}, 2, warm=1)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_a_ratio_is_of_neighbours() -> None:
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == Spread(2.0, 2.0, 2.0, 3)


def test_rows_become_a_table_json_and_a_picture() -> None:
    rows = [{"way": "bare", "n": 1000, "ms": Spread(12.34, 11.0, 13.0, 9)}, {"way": "ours", "n": 2, "ms": None}]
    assert table(rows) == [
        "| way | n | ms |",
        "|---|---|---|",
        "| bare | 1,000 | 12.3 (11.0-13.0) |",
        "| ours | 2 |  |",
    ]
    assert plain(rows)[0]["ms"] == {"median": 12.34, "low": 11.0, "high": 13.0, "repetitions": 9}
    assert drawn(rows, "ms") == {"bare": (12.34, 11.0, 13.0)}
    rows = [{"way": "bare", "n": n, "ms": float(n)} for n in (1, 2000)]
    assert drawn(rows, "ms") == {"bare, 1 n": (1.0, 1.0, 1.0), "bare, 2,000 n": (2000.0, 2000.0, 2000.0)}


_MODULES = (copies, equal, paft, recovery, reuse, utilization)
ELSEWHERE = {module.__name__.rpartition(".")[2]: module.PAGE for module in _MODULES}
"""The pages of the tables that are not in the page of the others."""
IN_PAGE = [name for name in NAMES if name not in ELSEWHERE]


def test_a_death_costs_the_steps_after_the_newest_copy_or_commit() -> None:
    events = [
        {"event": "decide", "t_s": 2.5, "data": {"members": [("a", 1, 2, 2, 2.0, True)]}},
        {"event": "copied", "t_s": 4.5, "replica": "a"},
        {"event": "kept", "t_s": 6.5, "replica": "a"},
    ]
    assert copies.to_do_again("a", events, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == [1, 2, 3, 4, 3]


def test_the_page_keeps_its_text_and_has_a_place_for_every_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "performance.md"
    page.write_text(report.PAGE.read_text())
    monkeypatch.setattr(report, "PAGE", page)
    facts = {"cores": 2, "load_before": 0.1, "wall_s": 3.0, "date": "2026-11-30", "commit": "abc"}
    for turn in ("first", "second"):
        for name in IN_PAGE:
            report.write_page(name, [{"way": f"{turn} {name}"}], facts)
    text = page.read_text()
    assert all(f"| second {name} |" in text and f"first {name} " not in text for name in IN_PAGE)
    assert "## How" not in text and text.startswith("# Performance")
    (tmp_path / "drawn.png").write_bytes(b"picture")
    report.write_page("scale", [{"way": "third"}], facts, tmp_path / "drawn.png")
    assert "| third |\n\n![scale](pictures/scale.png)\n\n(`run scale`: 2 cores" in page.read_text()
    assert (tmp_path / "pictures" / "scale.png").read_bytes() == b"picture"
    with pytest.raises(LookupError, match="no place for other"):
        report.write_page("other", [{"way": ""}], facts)


def test_a_page_shows_medians_and_a_column_for_each_value_across() -> None:
    rows = [
        {"way": way, "Mbit/s": rate, "share": Spread(rate / 100, 0.0, 1.0, 9), "best": best, "more": 1}
        for way, rate, best in (("ours", 30, 5.0), ("ours", 3, 5.0), ("theirs", 30, None), ("theirs, once", 30, None))
    ]
    shown = Shown(("way",), ("share",), across="Mbit/s", unit=" Mbit/s", last=("best",), leave_out="once")
    assert shown.of(rows) == [
        {"way": "ours", "3 Mbit/s": "0.03", "30 Mbit/s": "0.3", "best": 5.0},
        {"way": "theirs", "3 Mbit/s": None, "30 Mbit/s": "0.3", "best": None},
    ]
    assert Shown(("way",), ("share", "more"), across="Mbit/s").of(rows[:1]) == [
        {"way": "ours", "30, share": "0.3", "30, more": 1}
    ]
    with pytest.raises(KeyError, match="none"):
        Shown(("none",), ("share",)).of(rows)


def test_the_page_has_the_columns_that_it_is_to_show() -> None:
    assert "<!-- copies -->\n" in report.PAGE.with_name(copies.PAGE).read_text()
    for name, shown in SHOWN.items():
        assert name in NAMES
        text = report.PAGE.with_name(ELSEWHERE.get(name, report.PAGE.name)).read_text()
        head = text.split(f"<!-- {name} -->\n")[1].split("\n")[0].strip("| ").split(" | ")
        assert tuple(head[: len(shown.columns)]) == shown.columns
        figures = head[len(shown.columns) :]
        assert figures if shown.across else tuple(figures) == shown.values + shown.last


def test_a_slow_link_leaves_time_for_fewer_steps_unless_a_delay_or_a_codec_hides_it() -> None:
    def left(way: str) -> list[int]:
        return [equal.steps(equal.WAYS[way].method, mbit, 5.0) for mbit in (200, 50)]

    assert left("SyncSGD") == [96, 34]  # 20 ms a step, and 31.5 or 126 ms for 0.79 MB
    assert left("DiLoCo") == [232, 193]
    assert left("Streaming") == [250, 250]


def test_the_difference_of_parameters_is_relative_to_the_largest_of_their_tensor() -> None:
    whole = [torch.tensor([1.0, -4.0]), torch.tensor([0.5])]
    assert recovery.difference(whole, whole) == 0
    assert recovery.difference([torch.tensor([1.0, -3.0]), torch.tensor([0.5])], whole) == 0.25
