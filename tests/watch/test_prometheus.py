"""``GET /metrics``: Prometheus' text format, and numbers that are right, beside a running job."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest

from ftopt.events import Event
from ftopt.net.token import authorization
from ftopt.sync.protocol import messages as m
from ftopt.sync.server.limits import Limits
from ftopt.watch.prometheus import FAMILIES, STATES, Exposition, JobMetrics
from tests.sync.server.access import TOKEN, coordinator, identity, no_errors_logged, scripted, status, touchstone
from tests.test_events_page import emitted

ROOT = Path(__file__).resolve().parents[2]
LABEL = r'[a-z]+="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"(ftopt_[a-z_]+)(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """The samples of a text in the exposition format 0.0.4; AssertionError where it is none."""
    found: Samples = {}
    family = ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line.split()[2:] == [family, FAMILIES[family][0]]
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == family, "a family's samples stand together"
            pairs = re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            labels = frozenset((key, re.sub(r"\\(.)", _unescaped, value)) for key, value in pairs)
            assert (family, labels) not in found
            found[family, labels] = float(match[3])
    return found


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def _metrics(url: str) -> Samples:
    code, text = await status(url, path="/metrics")
    assert code == 200
    return parse(text)


@pytest.mark.parametrize("name", ['a"b', "back\\slash", "line\nbreak", "\\n", '",x="', "ünï {☃}", "}"])
def test_any_name_can_be_a_label(name: str) -> None:
    shown = Exposition()
    shown.add("ftopt_job_up", True, job=name)
    shown.add("ftopt_replica_step_seconds", 0.125, job=name, replica=name)
    assert parse(shown.text()) == {
        ("ftopt_job_up", frozenset({("job", name)})): 1.0,
        ("ftopt_replica_step_seconds", frozenset({("job", name), ("replica", name)})): 0.125,
    }


async def _a_job(journal: Path) -> None:
    async with coordinator(journal=journal) as url:
        assert at(await _metrics(url), "ftopt_connections") == 0
        async with scripted(url, identity('j"1')) as replica:
            await replica.join()
            for version in (1, 2):
                assert await replica.outer_step() == version
            samples = await _metrics(url)
        job = {"job": 'j"1'}
        one = job | {"fragment": "0"}
        assert at(samples, "ftopt_job_up", **job) == at(samples, "ftopt_job_connections", **job) == 1
        assert at(samples, "ftopt_job_halted", **job) == 0
        assert at(samples, "ftopt_fragment_version", **one) == 2
        assert at(samples, "ftopt_job_inner_step", **job) == 10
        assert 0 <= at(samples, "ftopt_fragment_round_age_seconds", **one) < 60
        assert at(samples, "ftopt_replica_connected", **job, replica="r0") == 1
        for event, count in {"join": 1, "decide": 2, "quorum": 2, "abort": 0, "lost": 0}.items():
            assert at(samples, "ftopt_events_total", **job, event=event) == count
        assert at(samples, "ftopt_messages_total", **job, direction="received") == 5, "hello, 2 x (propose, prepared)"
        assert at(samples, "ftopt_message_bytes_total", **job, direction="sent") > 500
        on_disk = sum(path.stat().st_size for path in journal.parent.glob("journal*"))
        assert at(samples, "ftopt_journal_bytes") == on_disk > 0
        assert at(samples, "ftopt_resident_memory_bytes") > 1e7
        async with asyncio.timeout(60):
            while at(samples, "ftopt_replica_connected", **job, replica="r0"):
                samples = await _metrics(url)
        assert at(samples, "ftopt_replicas", **job, state="away") == 1
        assert at(samples, "ftopt_events_total", **job, event="lost") == 1
        assert at(samples, "ftopt_deaths_total", **job) == 0, "being lost is no death"
        async with scripted(url, identity('j"1')) as successor:
            await successor.send(successor.machine.hello())
            await successor.receive()
            assert at(await _metrics(url), "ftopt_deaths_total", **job) == 1, "superseded"
        assert {name for name, _ in samples} == set(FAMILIES) - {"ftopt_replica_loss"}, "none was told"


def test_a_jobs_numbers(tmp_path: Path) -> None:
    asyncio.run(_a_job(tmp_path / "journal"))


async def _refusals() -> None:
    limits = Limits(connections=2, patience_s=2.0, byte_burst=10_000, bytes_per_s=1.0)
    async with coordinator(limits=limits) as url, touchstone(url), aiohttp.ClientSession() as session:
        for _ in range(3):
            assert (await status(url, None, "/metrics"))[0] == 401
        async with scripted(url) as replica:
            with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
                async with scripted(url):
                    pass
            await replica.send("nonsense")
            assert await replica.ended()
        async with asyncio.timeout(60):
            while at(await _metrics(url), "ftopt_connections") > 1:  # the next one needs its place
                await asyncio.sleep(0.01)
        async with scripted(url) as replica:
            await replica.send("x" * 20_000)
            assert await replica.ended()
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        samples = await _metrics(url)
        counts = {dict(labels)["reason"]: n for (name, labels), n in samples.items() if "refused" in name}
        assert counts == {"token": 3, "page": 0, "connections": 1, "message": 1, "limit": 1, "accept_queue": 1}
        async with session.get(f"{url}/metrics", headers=authorization(TOKEN)) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_who_was_refused_is_counted_by_reason() -> None:
    with no_errors_logged():
        asyncio.run(_refusals())


def test_states_are_told_by_known_names_alone() -> None:
    row = {"replica": "r", "state": "training", "stalled": False, "inner_step": 1, "step_s": 0.1, "loss": None}
    rows = [row, row | {"stalled": True}, *(row | {"state": f"lunch {i}"} for i in range(50))]
    status = {"job": "j", "epoch": 1, "phase": "startup", "fragments": [], "replicas": []} | {"replicas": rows[:2]}
    shown = Exposition()
    JobMetrics().show(shown, status | {"replicas": [r | {"replica": f"r{i}"} for i, r in enumerate(rows)]}, 0.0)
    samples = parse(shown.text())
    states = {dict(labels)["state"]: n for (name, labels), n in samples.items() if name == "ftopt_replicas"}
    assert states == {"training": 1, "stalled": 1, "other": 50, "waiting": 0, "away": 0}
    assert set(states) <= STATES | {"other"}


def test_a_loss_is_told_as_the_format_has_it_also_one_that_is_not_finite() -> None:
    row = {"state": "training", "stalled": False, "inner_step": 1, "step_s": 0.1}
    rows = [row | {"replica": str(loss), "loss": loss} for loss in (2.5, "nan", "inf", "-inf", None)]
    shown = Exposition()
    JobMetrics().show(shown, {"job": "j", "epoch": 1, "phase": "startup", "fragments": [], "replicas": rows}, 0.0)
    found = re.findall(r'ftopt_replica_loss\{job="j",replica="(.*)"\} (.*)', shown.text())
    assert found == [("2.5", "2.5"), ("nan", "NaN"), ("inf", "+Inf"), ("-inf", "-Inf")]


def test_the_age_of_a_round_counts_from_its_fragments_last_decision() -> None:
    metrics, shown = JobMetrics(), Exposition()
    metrics.count(Event("start", "coordinator"), 10.0)
    metrics.count(Event("decide", "coordinator", fragment=1), 14.0)
    fragments = [{"version": 0, "inner_step": 0, "proposed": []}, {"version": 1, "inner_step": 5, "proposed": ["r"]}]
    metrics.show(shown, {"job": "j", "epoch": 1, "phase": "running", "fragments": fragments, "replicas": []}, 15.5)
    samples = parse(shown.text())
    ages = [at(samples, "ftopt_fragment_round_age_seconds", job="j", fragment=str(f)) for f in (0, 1)]
    assert ages == [5.5, 1.5]
    assert at(samples, "ftopt_fragment_proposals", job="j", fragment="1") == 1


def test_every_metric_is_on_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []
    assert [name for name in re.findall(r"`(ftopt_[a-z_]+)`", page) if name not in FAMILIES] == []


def _queries() -> list[str]:
    """Every query of the Grafana dashboard."""
    dashboard = json.loads((ROOT / "docs" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


async def _exposed() -> dict[str, dict[str, set[str]]]:
    """Metric -> label -> values, of a coordinator with a job."""
    async with coordinator() as url, scripted(url) as replica:
        await replica.join()
        await replica.send(m.Heartbeat("training", 1, 0.1, loss=2.0))
        found: dict[str, dict[str, set[str]]] = {}
        for name, labels in await _metrics(url):
            for label, value in labels:
                found.setdefault(name, {}).setdefault(label, set()).add(value)
            found.setdefault(name, {})
        return found


def test_the_dashboard_asks_for_what_the_coordinator_exports() -> None:
    exposed, used = asyncio.run(_exposed()), set[str]()
    for query in _queries():
        for name, selectors in re.findall(r"(ftopt_[a-z_]+)(?:\{([^}]*)\})?", query):
            used.add(name)
            assert name in exposed, query
            for label, value in re.findall(r"(\w+)=~?\"([^\"]*)\"", selectors or ""):
                assert label in exposed[name], query
                assert value == "$job" or value in exposed[name][label], query
            is_rate = re.search(rf"(rate|increase)\({name}\b[^)]*\[\$__rate_interval\]\)", query) is not None
            assert is_rate == (FAMILIES[name][0] == "counter"), query
        for label in re.findall(r"by \((\w+)\)", query):
            assert any(label in exposed[name] for name in re.findall(r"ftopt_[a-z_]+", query)), query
    assert {"ftopt_job_up", "ftopt_replicas", "ftopt_events_total", "ftopt_deaths_total"} <= used
    assert set(re.findall(r'event="(\w+)"', " ".join(_queries()))) <= emitted().keys()
