"""A coordinator's status as text: tables, the picture that ``--watch`` redraws, and one line per job for a log."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ftopt.common.plural import count, natural, times

Job = Mapping[str, Any]
"""A job as ``GET /status`` shows it."""
NO_JOBS = "no jobs yet; a job starts when its first replica connects"
_FRAGMENTS_SHOWN = 4
_GAP = "  |  "


def describe(job: Job) -> str:
    """Returns one job's status as text: a line, a table of its fragments, a table of its replicas."""
    parts = [_head(job)]
    if fragments := _fragments_of(job):
        head = ["fragment", "version", "round", "attempts", "failed"]
        parts.append("\n".join(_table(head, [[number, *_fragment(x)] for number, x in enumerate(fragments)])))
        if doing := _doing(fragments):
            parts.append("\n".join(doing))
    if job["replicas"]:
        parts.append("\n".join(_replicas(job["replicas"])))
    return "\n\n".join(parts)


def picture(jobs: Sequence[Job], width: int, height: int) -> str:
    """Returns all jobs as text of ``width`` columns and, if that is possible, ``height`` lines.

    Replicas stand in several columns where there is room; of more than fit, those that a round waits for, that are
    stalled, slow or not connected are shown.
    """
    if not jobs:
        return NO_JOBS
    heads = [_above(job, width) for job in jobs]
    left = height - sum(map(len, heads)) - (len(jobs) - 1)
    blocks = []
    for number, (job, head) in enumerate(zip(jobs, heads, strict=True)):
        rows = max(3, left // (len(jobs) - number))
        replicas = _fitted(job, width, rows)
        left -= len(replicas)
        blocks.append("\n".join(line[:width] for line in [*head, *replicas]))
    return "\n\n".join(blocks)


def line(job: Job) -> str:
    """Returns a job's status as one line."""
    states = Counter(_state(x) for x in job["replicas"])
    there = len(job["replicas"]) - states.pop("away", 0)
    known = f"; {there} of {count(len(job['replicas']), 'replica')} connected" if job["replicas"] else ""
    doing = _doing(_fragments_of(job))
    return f"{_head(job)}{known}{_counted(states, ': ')}{'; ' if doing else ''}{'; '.join(doing)}"


def shown(text: str) -> str:
    """Replaces control characters: text that comes from replicas must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _head(job: Job) -> str:
    fragments = _fragments_of(job)
    step = f", inner step {fragments[0]['inner_step']}" if fragments else ""
    left = ", no replica is connected" if fragments and all(x["state"] == "away" for x in job["replicas"]) else ""
    return shown(f"job {job['job']}: {job['phase']}{step}{left}")


def _fragments_of(job: Job) -> Sequence[Mapping[str, Any]]:
    return job["fragments"] if job["phase"] == "running" else []


def _fragment(x: Mapping[str, Any]) -> list[object]:
    doing = f"{len(x['proposed'])} proposed" if x["attempt"] is None else "reducing"
    return [x["version"], doing, x["attempts"], x["attempts_aborted"]]


def _doing(fragments: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rounds under way are at, in words; of many fragments only the first ones that have a round."""
    busy = [(f, x) for f, x in enumerate(fragments) if "doing" in x and (x["proposed"] or x["attempt"] is not None)]
    of = "fragment {}, " if len(fragments) > 1 else ""
    return [shown(f"{of.format(f)}version {x['version'] + 1}: {x['doing']}") for f, x in busy[:_FRAGMENTS_SHOWN]]


def _state(x: Mapping[str, Any]) -> str:
    if x["stalled"] and x["state"] != "away":
        return "stalled"
    return "slow" if x.get("slow") and x["state"] == "training" else str(x["state"])


def _replicas(replicas: Sequence[Mapping[str, Any]], waits_for: set[str] | None = None, most: int = 128) -> list[str]:
    """A table of replicas; their ids are cut to ``most`` characters."""
    told = any(x.get("loss") is not None for x in replicas)
    head = ["replica", "state", "incarnation", "inner step", "steps/s", *(["loss"] if told else []), "version"]
    rows = []
    for x in replicas:
        state = _state(x)
        state += f" ({times(x['factor'])})" if state == "slow" else ""
        state += ", no copy kept" if x.get("not_kept") and x["state"] != "away" else ""
        state += ", awaited" if waits_for and x["replica"] in waits_for else ""
        name = x["replica"] if len(x["replica"]) <= most else f"{x['replica'][: most - 1]}…"
        speed = f"{1 / x['step_s']:.3g}" if x["step_s"] and x["state"] != "away" else "-"
        loss = [_loss(x)] if told else []
        step = "-" if x["state"] == "standby" else x["inner_step"]  # it takes none
        rows.append([name, state, x["incarnation"], step, speed, *loss, _versions(x["versions"])])
    return _table(head, rows)


def _loss(x: Mapping[str, Any]) -> str:
    """A replica's loss: four digits, a word where it is not finite, "-" where none is known."""
    loss = x.get("loss")
    if not isinstance(loss, float) or x["state"] == "away":
        return "-" if loss is None or x["state"] == "away" else str(loss)
    return f"{loss:.4g}"


def _versions(held: Sequence[int | None]) -> str:
    """Returns the version of each fragment, "-" where unknown; of many fragments only the range."""
    known = [version for version in held if version is not None]
    if len(held) > _FRAGMENTS_SHOWN and known:
        return f"{min(known)} to {max(known)}"
    return " ".join("-" if version is None else str(version) for version in held[:_FRAGMENTS_SHOWN])


def _above(job: Job, width: int) -> list[str]:
    """What stands above a job's replicas."""
    fragments = _fragments_of(job)
    texts = [_head(job), *_doing(fragments)]
    if fragments:
        versions, attempts = _versions([x["version"] for x in fragments]), sum(x["attempts"] for x in fragments)
        failed = sum(x["attempts_aborted"] for x in fragments)
        texts.insert(1, f"version {versions}; {count(attempts, 'attempt')}, {failed} failed")
    return [row for text in texts for row in textwrap.wrap(text, width, subsequent_indent="  ")]


def _fitted(job: Job, width: int, height: int) -> list[str]:
    """The table of replicas in ``height`` lines, if they fit, in as many columns as ``width`` has room for."""
    waits_for = {name for x in _fragments_of(job) for name in x.get("waits_for", [])}
    replicas = sorted(job["replicas"], key=lambda x: natural(x["replica"]))
    if not replicas:
        return []
    table = _replicas(replicas, waits_for, most=max(12, width // 3))
    columns = max(1, (width + len(_GAP)) // (max(map(len, table)) + len(_GAP)))
    room = (height - 1) * columns
    more = []
    if len(replicas) > room:
        trouble = ("stalled", "away", "slow")
        first = sorted(replicas, key=lambda x: (_state(x) not in trouble, x["replica"] not in waits_for))
        kept = {x["replica"] for x in first[: max(columns, (height - 2) * columns)]}
        rest = Counter(_state(x) for x in replicas if x["replica"] not in kept)
        table = [table[0], *(row for x, row in zip(replicas, table[1:], strict=True) if x["replica"] in kept)]
        more = [f"{sum(rest.values())} more replicas{_counted(rest, ': ')}"]
    return _side_by_side(table, columns) + more


def _side_by_side(table: Sequence[str], columns: int) -> list[str]:
    head, *rows = table
    columns = min(columns, len(rows))
    length, widest = -(-len(rows) // columns), max(map(len, table))
    parts = [[head, *rows[i : i + length]] for i in range(0, len(rows), length)]
    return [_GAP.join(f"{x:<{widest}}" for x in row).rstrip() for row in zip_longest(*parts, fillvalue="")]


def _counted(states: Mapping[str, int], before: str) -> str:
    counted = [f"{n} {state}" for state, n in sorted(states.items(), key=lambda x: (-x[1], x[0]))]
    return shown(before + ", ".join(counted[:6]) + (", ..." if len(counted) > 6 else "")) if counted else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table with columns as wide as their widest cell, numbers aligned right."""
    cells = [[shown(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [
        any(isinstance(x, int) for x in column) and all(isinstance(x, int) or x == "-" for x in column)
        for column in zip(*rows, strict=True)
    ]
    columns = [f">{width}" if to_right else f"<{width}" for width, to_right in zip(widths, right, strict=True)]
    lines = ["  ".join(map(format, row, columns)) for row in [head, *cells]]
    return [line.rstrip() for line in lines]
