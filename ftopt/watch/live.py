"""The answer to ``GET /live``: the data of the live page, small however large the job is.

It has one job in full, and one line for each other job. The page asks every two seconds, says what it already has, and
gets the rest: ``job`` (its name), ``range`` (index in `rings.RANGES`), ``history`` (id of the history that its rows are
from), ``after`` (how many of its rows the page has), ``told`` (how many events), ``tests`` (how many evaluations),
``lanes`` (to which second the replicas' states). Invalid values count as missing. The format is the page's own, and may
change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ftopt.common.printable import printable
from ftopt.watch.lanes import Awaited, level
from ftopt.watch.rings import COLUMNS, RANGES, SAMPLE_S, History
from ftopt.watch.status import is_trouble, is_under_way, state_of

MAX_REPLICAS = 256
"""Replicas that are shown one by one; awaited ones and those in trouble come first."""
MAX_FRAGMENTS = 32
_PHASE_CHARS = 400


def live(jobs: Mapping[str, tuple[Mapping[str, Any], History]], query: Mapping[str, str]) -> dict[str, Any]:
    """The answer. ``jobs``: name -> `Job.live_status`, and the history."""
    names = sorted(jobs)
    lines = {x: _line(jobs[x][0]) for x in names}
    name = query.get("job") if query.get("job") in jobs else _first(lines)
    return {
        "sample_s": SAMPLE_S,
        "columns": COLUMNS,
        "ranges": [text for text, *_ in RANGES],
        "jobs": list(lines.values()),
        "job": None if name is None else _job(*jobs[name], query),
    }


def _first(lines: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The job to show when none is asked for: preferably one with connected replicas, then one that runs."""
    return min(lines, key=lambda x: (not lines[x]["connected"], lines[x]["phase"] != "running"), default=None)


def _replicas(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The replicas that the job knows, and those connected before it runs (of a new one nothing else is known)."""
    known = {x["replica"]: x for x in status["replicas"]}
    for name, incarnation in sorted(status["waiting"].items()):
        new = {"replica": name, "incarnation": incarnation, "inner_step": None, "step_s": 0.0, "loss": None}
        known.setdefault(name, {"versions": (), **new, "state": "connected", "stalled": False})
    return list(known.values())


def _line(status: Mapping[str, Any]) -> dict[str, Any]:
    states = [level(x) for x in _replicas(status)]
    return {
        "job": status["job"],
        "phase": printable(status["phase"], _PHASE_CHARS),
        "replicas": len(states),
        "connected": len(states) - states.count("away"),
        "stalled": states.count("stalled"),
    }


def _job(status: Mapping[str, Any], history: History, query: Mapping[str, str]) -> dict[str, Any]:
    ring = min(_number(query, "range"), len(RANGES) - 1)
    known = query.get("history") == str(history.began_s)
    rows = history.rings[ring].after(_number(query, "after") if known else 0)
    told = _number(query, "told") if known else -1
    tests = _number(query, "tests") if known else -1
    lanes_s = _number(query, "lanes") if known else -1
    fragments = status["fragments"] if status["phase"] == "running" else []
    evaluations = history.evaluations.found
    members = _members(_replicas(status), fragments, history.awaited)
    return _line(status) | {
        "epoch": status["epoch"],
        "inner_step": fragments[0]["inner_step"] if fragments else None,
        "fragments": _fragments(fragments),
        "fragments_in_all": len(fragments),
        "last_version": status["last_version"],
        **_steps(status["replicas"]),
        "members": members,
        "lanes": history.lanes.after(lanes_s, [x["replica"] for x in members]),
        "failures": list(history.lanes.failures),
        "tested": evaluations.count,
        "tests": evaluations.points if tests != evaluations.count else None,
        "began_s": history.began_s,
        "history": str(history.began_s),
        "count": history.rings[ring].count,
        "rows": rows,
        "recent": history.recent(ring, status["replicas"]),
        "told": history.told,
        "events": history.events() if told != history.told else None,
    }


def _steps(replicas: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The inner steps that the present incarnations have taken, and those that they have dropped."""
    counts = [x["counts"] for x in replicas if x.get("counts")]
    return {"taken": sum(x["steps"] for x in counts), "dropped": sum(sum(x["dropped"].values()) for x in counts)}


def _fragments(fragments: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fragments, those with something under way first."""
    order = sorted(range(len(fragments)), key=lambda f: (not is_under_way(fragments[f]), f))
    return [
        {key: fragments[f][key] for key in ("version", "doing", "attempts", "attempts_aborted", "age_s")}
        | {"fragment": f}
        for f in order[:MAX_FRAGMENTS]
    ]


def _members(
    replicas: Iterable[Mapping[str, Any]], fragments: Iterable[Mapping[str, Any]], waits: Awaited
) -> list[dict[str, Any]]:
    awaited = {name for x in fragments for name in x["waits_for"]}
    proposed = {name for x in fragments if x["attempt"] is None for name in x["proposed"]}
    reducing = {name for x in fragments if x["attempt"] is not None for name in x["proposed"]}
    shown = sorted(replicas, key=lambda x: (x["replica"] not in awaited, not is_trouble(x)))
    return [
        {
            "replica": x["replica"],
            "incarnation": x["incarnation"],
            "level": level(x),
            "state": state_of(x),
            "factor": x["factor"] if state_of(x) == "slow" else None,
            "inner_step": x["inner_step"],
            "step_s": x["step_s"],
            "loss": x["loss"],
            "waited": waits.told(x),
            "versions": _span(x["versions"]),
            "round": "awaited" if x["replica"] in awaited
            else "reducing" if x["replica"] in reducing
            else "proposed" if x["replica"] in proposed
            else "",
        }
        for x in shown[:MAX_REPLICAS]
    ]  # fmt: skip


def _span(versions: Iterable[int | None]) -> list[int]:
    """The lowest and the highest version that it holds; empty while none is known."""
    known = [x for x in versions if x is not None]
    return [min(known), max(known)] if known else []


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else 0
