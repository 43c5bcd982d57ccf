"""A report in a real browser: what its data become, and that what a run calls its things is text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.watch.browser import Page, browser, find
from tests.watch.report.recorded import page_of, record
from tests.watch.report.test_report import reported

HOSTILE = "</script><img src=x onerror=window.struck=1>"
pytestmark = pytest.mark.skipif(find() is None, reason="no chromium here; apt-get install chromium")


POINTED = """(x, y) => {
    const area = document.querySelector('.area'), box = area.getBoundingClientRect();
    const clientX = box.left + x * box.width, clientY = box.top + y * box.height;
    area.dispatchEvent(new PointerEvent('pointermove', { clientX, clientY }));
    return area.querySelector('.tip').textContent;
}"""
"""What the timeline says of a point, given as parts of its width and height."""


async def _values(tab: Page) -> None:
    """The arrow keys move along a chart, whose names can be hidden, and whose scale and axis can be chosen."""
    chart = "document.querySelector('.chart')"
    key = f"{chart}.dispatchEvent(new KeyboardEvent('keydown', {{ key: 'ArrowRight' }}))"
    await tab.value(key)
    assert (await tab.value(f"{chart}.querySelector('.tip').textContent")).startswith("inner step 0held-out5.500")
    pressed = (
        "[...document.querySelectorAll('.choices')[0].querySelectorAll('[aria-pressed=true]')].map((x) => x.innerText)"
    )
    assert await tab.value(pressed) == ["Linear", "inner step"]
    for name in ("Log", "time"):
        named = f"[...document.querySelectorAll('.choices button')].find((x) => x.innerText === {name!r})"
        await tab.until(f"{named} !== undefined")
        await tab.value(f"{named}.click()")
    await tab.until(f'JSON.stringify({pressed}) === \'["Log","time"]\'')
    await tab.value("document.querySelector('.curves .legend button').click()")
    assert await tab.value("document.querySelectorAll('.curves .legend [aria-pressed=false]').length") == 1


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
        named = "[...document.querySelectorAll('#report [role=img], #report .chart')].map((x) => x.ariaLabel)"
        (parts, *drawn) = await tab.value(named)
        assert parts == ("where every inner step went: 70 are in the model, 10 were lost with replicas that died")
        keys = "; the arrow keys show its values"
        charts = [f"{x}{keys}" for x in ("losses", "bytes sent over time", "waits over time")]
        assert drawn == ["timeline of the replicas", *charts]
        assert await tab.value("document.querySelectorAll('.chart canvas').length") == 3
        await _values(tab)
        wrong = (
            "[...document.querySelectorAll('#report path')].filter((x) => /NaN|undefined/.test(x.getAttribute('d')))"
        )
        assert await tab.value(f"{wrong}.length") == 0
        down = f"{HOSTILE.replace('/', '-')}: down for 2\u00a0s, from 0:02 to 0:04"
        assert await tab.value(f"({POINTED})(0.8, 0.5 / 4)") == down
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
