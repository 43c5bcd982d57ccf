"""The live page in a real browser, headless Chromium: what it shows, and that what replicas say is text.

Skipped where there is no Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from html.parser import HTMLParser
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.watch.page import page as static_page
from tests.sync.server.access import TOKEN, Scripted, coordinator, identity, no_errors_logged, scripted, status

from .browser import Page, browser, find

IN_A_BROWSER = pytest.mark.skipif(find() is None, reason="no chromium here; apt-get install chromium")
HOSTILE = "<img src=x onerror=window.struck=1>"
STATE = "<script>window.struck=1</script>?[2J?again"
"""One that holds characters that cannot be printed is refused."""


@asynccontextmanager
async def _crowd(
    url: str, *replicas: str, job: str = "job", token: str | None = TOKEN
) -> AsyncIterator[list[Scripted]]:
    """A job whose replicas have joined and train."""
    settings = {"start_replicas": len(replicas), "dead_after_s": 60.0, "evict_after_s": 90.0, "grace_s": 40.0}
    async with contextlib.AsyncExitStack() as stack:
        crowd = [
            await stack.enter_async_context(scripted(url, identity(job, name, settings=settings), token=token))
            for name in replicas
        ]
        await asyncio.gather(*(x.join() for x in crowd))
        for step, x in enumerate(crowd):
            await x.send(m.Heartbeat("training", 40 + step, 0.25, loss=2.0 + step))
        yield crowd


def _shows(text: str) -> str:
    return f"document.body.innerText.includes({text!r})"


@pytest.fixture(scope="module")
def in_browser() -> Iterator[Any]:
    """Runs coroutines with one tab that all tests of this module share."""
    with asyncio.Runner() as runner:
        opened = browser()
        tab = runner.run(opened.__aenter__())

        def run(test: Any) -> None:
            tab.errors.clear()
            runner.run(test(tab))

        try:
            yield run
        finally:
            runner.run(_end(opened))


async def _end(opened: contextlib.AbstractAsyncContextManager[Page]) -> None:
    await opened.__aexit__(None, None, None)


UNFOLD = "document.querySelectorAll('details').forEach((x) => { x.open = true; })"
VERDICT = "document.getElementById('verdict').innerText"


async def _two_replicas(tab: Page) -> None:
    async with coordinator() as url, _crowd(url, "r0", "r1") as (first, _):
        await tab.open(f"{url}/#token={TOKEN}&steps=400")
        await tab.until(f"{VERDICT} === 'Running well: 2 of 2 replicas connected, none slow or late.'")
        assert await tab.value("location.hash") == "#steps=400", "the token is out of the address bar"
        tiles = (
            "Object.fromEntries([...document.querySelectorAll('#tiles > div')].map((x) => [x.querySelector('dt')"
            ".innerText, x.querySelector('b').innerText + '; ' + x.querySelector('.note').innerText]))"
        )
        shown = await tab.value(tiles)
        assert (shown["Inner step"], shown["Loss"]) == ("41; of 400", "2.500; mean; from 2.000 to 3.000")
        await tab.value(UNFOLD)
        assert await tab.value("[...document.querySelectorAll('#members tbody tr')].map((x) => x.innerText)") == [
            "r0\ttraining\t40\t4\t2.000\t0\t1\t-", "r1\ttraining\t41\t4\t3.000\t0\t1\t-",
        ]  # fmt: skip
        await tab.until("document.title === 'job, inner step 0 - ftopt'")
        record = first.machine.fragments[0].record
        assert record is not None
        for effect in first.machine.propose(m.Contribution(0, record.version, 5, 5, 5.0)):
            await first.send(effect.message)  # type: ignore[union-attr]
        await tab.until(_shows("1 of 2 have proposed; it waits for r1"))
        assert await tab.value("document.querySelector('tr.awaited') === null"), "normal for some seconds"
        await _losses(tab, first)
        await tab.until("document.querySelector('tr.awaited')?.innerText.startsWith('r1\\ttraining, awaited')")
        await tab.until(_shows("r0, r1 joined"))
        counts = await tab.value("document.getElementById('counts').innerText")
        assert "2 joins" in counts and "0 lost connections" in counts
        assert "takes inner steps" in await tab.value("document.querySelector('#members .state').title")
        await tab.until("document.querySelectorAll('#lanes .training').length > 0")
        assert await tab.value("document.querySelectorAll('#lanes .dead').length") == 0, "no red where nothing is"
        assert await tab.value(_shows("None so far."))
        await tab.size(360, 800)
        heads = "[...document.querySelectorAll('thead th:not(#fragment-head)')].every((x) => x.offsetWidth > 0)"
        assert await tab.value(heads), "a narrow page has all columns"
        fits = "[...document.querySelectorAll('.scroll')].every((x) => x.scrollWidth <= x.clientWidth)"
        assert await tab.value(fits), "and none of them is cut"
        shadow = await tab.value("getComputedStyle(document.querySelector('.scroll')).backgroundAttachment")
        assert shadow.startswith("local, local, scroll, scroll"), "a table shows that there is more of it"
        assert tab.errors == []


async def _losses(tab: Page, first: Scripted) -> None:
    """A line per replica, in the colour beside its name; a loss that is not finite in words."""
    keys = "[...document.querySelectorAll('#losses .legend button')]"
    await tab.until(f"{keys}.map((x) => x.innerText).join() === 'r0,r1'")
    await first.send(m.Heartbeat("training", 40, 0.25, loss=2.0, counts=m.Counts(40, tested=2.5, tested_step=40)))
    await tab.until(f"{keys}.map((x) => x.innerText).join() === 'r0,r1,held-out'")
    await tab.until(_shows("at inner step 40"))
    assert await tab.value("document.querySelectorAll('#losses canvas').length") == 1
    beside = "getComputedStyle(document.querySelectorAll('#members th.name')[1]).borderLeftColor"
    assert await tab.value(f"getComputedStyle({keys}[1].querySelector('i')).backgroundColor === {beside}")
    await first.send(m.Heartbeat("training", 41, 0.25, loss="nan"))
    await tab.until("document.querySelector('#members .bad')?.innerText === 'NaN'")
    await tab.until(f"{VERDICT} === 'The loss of replica r0 is not finite.'")
    await first.send(m.Heartbeat("training", 42, 0.25, loss=2.0))


async def _one_dies(tab: Page) -> None:
    """Red from its loss to its successor's first step; then what it cost."""
    async with coordinator() as url, _crowd(url, "r0") as _:
        settings = {"start_replicas": 1, "dead_after_s": 60.0, "evict_after_s": 90.0, "grace_s": 40.0}
        async with scripted(url, identity("job", "r1", settings=settings)) as doomed:
            await doomed.join()
            await doomed.send(m.Heartbeat("training", 9, 0.25, counts=m.Counts(9, 4)))
            await tab.open(f"{url}/#token={TOKEN}")
            await tab.until(_shows("Running well: 2 of 2"))
            await tab.until("document.querySelectorAll('#lanes .training').length > 0")
        await tab.until(f"{VERDICT} === 'Replica r1 is away; the other replica trains on.'")
        risk = "its last 4 inner steps, in no version, are lost unless it comes back with them"
        told = f"/r1 was lost at .*; down for .*; {risk}/"
        await tab.until(f"{told}.test(document.querySelector('#failures .now')?.innerText)")
        await tab.until(_shows("\u2265 56 %") + " && " + _shows("0 of 9 lost or dropped, 4 of r1 at risk"))
        async with scripted(url, identity("job", "r1", settings=settings)) as next_one:
            await next_one.join()
            await next_one.send(m.Heartbeat("training", 9, 0.25))
            await tab.until(f"{VERDICT}.startsWith('Replica r1 is back, and about to train.')")
            await next_one.send(m.Heartbeat("training", 10, 0.25))
            await tab.until(_shows("Running well"))
            told = await tab.text("document.querySelector('#failures li:not(.now)')")
            assert re.search(r"and 4 inner steps with it; .* until its successor's first inner step", told), told
            assert await tab.value(_shows("4 of 9 lost or dropped"))
            await tab.value("location.reload()")
            await tab.until("/and 4 inner steps with it/.test(document.querySelector('#failures')?.innerText)")
            await tab.until("document.querySelectorAll('#lanes .dead').length > 0")
        assert tab.errors == []


@pytest.mark.long
@IN_A_BROWSER
def test_the_page_shows_a_death_and_what_it_cost(in_browser: Any) -> None:
    in_browser(_one_dies)


@pytest.mark.long
@IN_A_BROWSER
def test_the_page_shows_a_job_and_what_its_round_waits_for(in_browser: Any) -> None:
    in_browser(_two_replicas)


async def _ended(tab: Page) -> None:
    async with coordinator() as url, _crowd(url, "r0", "r1") as crowd:
        await tab.open(f"{url}/#token={TOKEN}")
        await tab.until("document.querySelectorAll('#losses .legend button').length === 2")
        while not json.loads((await status(url, path="/live"))[1])["job"]["count"]:
            await asyncio.sleep(0.1)
        for x in crowd:
            await x.send(m.Bye())
            assert await x.ended()
        await tab.until(_shows("None is connected."))
        assert await tab.value("document.querySelectorAll('#losses .legend button').length") == 2
        assert tab.errors == []


@pytest.mark.long
@IN_A_BROWSER
def test_the_page_of_a_job_that_has_ended_says_what_its_lines_are(in_browser: Any) -> None:
    in_browser(_ended)


async def _hostile(tab: Page) -> None:
    async with coordinator(token=None) as url, _crowd(url, HOSTILE, "x" * 128, job=HOSTILE, token=None) as (first, _):
        await first.send(m.Heartbeat(STATE, 1, 0.1))
        await tab.open(f"{url}/")
        await tab.until(_shows(HOSTILE))
        await tab.value(UNFOLD)
        await tab.until(_shows("<script>window.struck=1</script>?[2J?"))
        assert await tab.value("window.struck === undefined && document.images.length === 0")
        assert await tab.value("document.scripts.length") == 2, "the page's own, and its data, which are null"
        await tab.size(360, 800)
        assert await tab.value("document.documentElement.scrollWidth") == 360, "long names do not widen the page"
        async with _crowd(url, "r0", job="b&job=c#%2F", token=None):
            await tab.until("document.querySelectorAll('#jobs button').length === 2")
            await tab.value("document.querySelectorAll('#jobs button')[1].click()")
            await tab.until("document.getElementById('job').innerText === 'b&job=c#%2F'")
            await tab.value("location.reload()")  # the address names the job
            await tab.until("document.getElementById('job').innerText === 'b&job=c#%2F'")
        assert tab.errors == []


@IN_A_BROWSER
def test_what_replicas_say_is_text_and_no_html(in_browser: Any) -> None:
    in_browser(_hostile)


async def _token(tab: Page) -> None:
    async with coordinator() as url, _crowd(url, "r0"):
        await tab.open(f"{url}/")
        await tab.until(_shows("Token of this coordinator"))
        assert not await tab.value(_shows("r0"))
        for token, text in (("x" * 20, "does not accept this token"), ("\u2603", "no characters beyond ASCII")):
            await _log_in(tab, token)
            await tab.until(_shows(text))
        await _log_in(tab, TOKEN)
        await tab.until(_shows("1 of 1 replica connected"))
        await tab.value("location.reload()")  # the tab keeps it
        await tab.until(_shows("1 of 1 replica connected"))
        assert TOKEN not in await tab.value("location.href")
        assert tab.errors == []


async def _log_in(tab: Page, token: str) -> None:
    await tab.value(f"document.getElementById('token').value = {token!r}")
    await tab.value("document.querySelector('#login button').click()")


@IN_A_BROWSER
def test_without_the_token_the_page_asks_for_it(in_browser: Any) -> None:
    in_browser(_token)


async def _away(tab: Page, port: int) -> None:
    async with coordinator(token=None, port=port) as url:
        await tab.open(f"{url}/")
        await tab.until(_shows("No jobs yet"))
        async with _crowd(url, "r0", token=None):
            await tab.until(_shows("1 of 1 replica connected"))
    await tab.until("/no answer since \\d\\d:\\d\\d:\\d\\d \\(not reachable\\)/.test(document.body.innerText)")
    assert await tab.value(_shows("Inner steps/s")), "what was known stays"
    assert (await tab.value(VERDICT)).startswith("The coordinator has not answered since ")
    assert await tab.value("document.title.startsWith('no answer since ')")
    async with coordinator(token=None, port=port) as url, _crowd(url, "new", token=None):
        await tab.value(UNFOLD)
        await tab.until("document.querySelector('#members tbody').innerText.startsWith('new')")
        await tab.until("document.getElementById('connection').innerText.includes('live, ')")
        assert await tab.value("document.querySelectorAll('#events li').length") == 2, "another history"


@pytest.mark.long
@IN_A_BROWSER
def test_the_page_says_since_when_nobody_answers_and_recovers(in_browser: Any, port: int) -> None:
    with no_errors_logged():
        in_browser(partial(_away, port=port))


def test_the_coordinator_prints_where_its_page_is() -> None:
    command = [sys.executable, "-m", "ftopt", "coordinator", "--bind", "127.0.0.1:0", "--new"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        with process.stdout as said:
            found = re.search(r"http://127\.0\.0\.1:\d+", said.readline())
            assert found is not None
            with urllib.request.urlopen(found[0], timeout=60) as answer:
                assert answer.read() == static_page()[0]
    finally:
        process.terminate()
        assert process.wait(60) == 0


async def _not_running(tab: Page) -> None:
    async with coordinator(token=None) as url:
        who = identity("alpha", settings={"start_replicas": 1, "start_s": 600.0})
        other = identity("alpha", "r1", settings={"start_replicas": 2, "start_s": 600.0})
        async with scripted(url, other, token=None) as waits:
            for effect in waits.machine.connect():
                await waits.send(effect.message)  # type: ignore[union-attr]
            await waits.until(m.Hold)
            await tab.open(f"{url}/")
            await tab.until(_shows("1 of 2 replicas connected; the job starts in"))
            await tab.value(UNFOLD)
            assert await tab.text("document.querySelector('#members tbody')") == "r1\tconnected\t-\t-\t-\t-\t-"
        async with scripted(url, who, token=None) as replica:
            await replica.join()
            await replica.outer_step()
            await replica.send(m.Bye())
            await replica.ended()
        await tab.until(_shows("Ended at version 1, inner step 5: no replica is left."))
        assert await tab.value(_shows("None while the job does not run; the last version is 1."))
        assert await tab.value(_shows("No loss in the time shown."))
        assert not await tab.value(_shows("0 of 0"))
        async with _crowd(url, "r0", job="beta", token=None):
            await tab.until("document.querySelectorAll('#jobs button').length === 2")
            assert await tab.value(_shows("Ended at")), "it stays with the job that it shows"
            await tab.open(f"{url}/?")
            await tab.until("document.getElementById('job').innerText === 'beta'")
        assert tab.errors == []


@pytest.mark.long
@IN_A_BROWSER
def test_a_job_that_does_not_run_is_shown_as_it_is_and_one_that_runs_is_opened(in_browser: Any) -> None:
    in_browser(_not_running)


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_writes_no_html() -> None:
    body, headers = static_page()
    text, elements = body.decode(), _Elements()
    elements.feed(text)
    for tag, attributes in elements.found:
        assert not {"src", "style", "onclick", "onload", "action"} & attributes.keys(), tag
        assert attributes.get("href", "data:,") == "data:,", tag
    named = r"https?://(?!www\.w3\.org/2000/svg|github\.com/leeoniya/uPlot \(v)"  # a name of XML, and of a licence
    assert re.findall(rf"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|{named}", text) == []
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert len(body) < 130_000


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_contrast_in_light_and_dark() -> None:
    """WCAG 2, level AA: 4.5 to 1."""
    found = [
        dict(re.findall(r"--(\w+): (#\w{6});", x))
        for x in re.split(r":root(?:.not.+?)? {", static_page()[0].decode())[1:3]
    ]
    assert len(found) == 2
    for colours in found:
        lines = [f"l{i}" for i in range(2, 7)]
        for text in ("text", "soft", "good", "warn", "bad", *lines):
            for ground in ("ground", "card", *(["bar"] if text == "text" else [])):
                low, high = sorted((_luminance(colours[text]), _luminance(colours[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground, colours)
