"""A report in a real browser: what its data become, and that what a run calls its things is text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.watch.browser import browser, find
from tests.watch.report.recorded import page_of, record
from tests.watch.report.test_report import reported

HOSTILE = "</script><img src=x onerror=window.struck=1>"
pytestmark = pytest.mark.skipif(find() is None, reason="no chromium here; apt-get install chromium")


async def _looks(report: Path, tables: list[list[list[str]]]) -> None:
    async with browser() as tab:
        await tab.open(report.as_uri())
        await tab.until("document.querySelectorAll('#report section').length >= 8")
        await tab.value("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
        shown = await tab.value(
            "[...document.querySelectorAll('#report table')].map((x) => [...x.rows]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent.replaceAll('\\u00a0', ' '))))"
        )
        assert shown == tables
        drawn = "[...document.querySelectorAll('#report svg')].map((x) => x.getAttribute('aria-label'))"
        assert await tab.value(drawn) == [
            "timeline of the replicas",
            "losses by inner step",
            "losses by time since the start",
            "bytes sent over time",
            "waits over time",
        ]
        wrong = (
            "[...document.querySelectorAll('#report path')].filter((x) => /NaN|undefined/.test(x.getAttribute('d')))"
        )
        assert await tab.value(f"{wrong}.length") == 0
        states = "[...document.querySelectorAll('#report svg path.dead title')].map((x) => x.textContent)"
        assert await tab.value(states) == [f"{HOSTILE.replace('/', '-')}: dead for 2\u00a0s in all"]
        assert await tab.value("window.struck === undefined && document.images.length === 0")
        assert await tab.value("document.getElementById('data').hidden && document.getElementById('login').hidden")
        assert await tab.value("document.title.startsWith('run') && document.querySelector('h1').textContent === 'run'")
        await tab.size(360, 800)
        assert await tab.value("document.documentElement.scrollWidth") == 360, "long names do not widen the page"
        assert tab.errors == []


@pytest.mark.long
def test_a_report_draws_its_data_and_shows_names_as_text(tmp_path: Path) -> None:
    run = record(tmp_path / "run", ("r0", HOSTILE.replace("/", "-"), "r2"))
    run.files.recipe.write_text(HOSTILE, encoding="utf-8")
    assert reported(tmp_path / "run") == 0
    report = tmp_path / "run" / "report.html"
    asyncio.run(_looks(report, page_of(report).tables))
