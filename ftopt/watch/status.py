"""Jobs and replicas as text: tables, the picture that a terminal redraws, and one line per job for a log.

A replica is a mapping with the keys of ``GET /status``; `Story.replicas` makes the same mapping from a run's events,
and adds ``rate``, ``unit`` and ``waited_s``.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from ftopt.common.plural import count, natural, times
from ftopt.common.printable import printable
from ftopt.watch.sentences import figure

Job = Mapping[str, Any]
"""A job as ``GET /status`` shows it."""
Replica = Mapping[str, Any]
NO_JOBS = "no jobs yet; a job starts when its first replica connects"
_FRAGMENTS_SHOWN = 4
_GAP = "  |  "
_USUAL = ("training", "waiting")
_STATE_CHARS = 40
_NUMBER = re.compile(r"[\d.e+-]+[kMG]?( s)?|-|-?inf|nan")


def state_of(x: Replica) -> str:
    """A replica's state to show: ``away`` if it is not connected, ``stalled``, ``slow``, or the state it reports."""
    if x["stalled"] and x["state"] != "away":
        return "stalled"
    return "slow" if x.get("slow") and x["state"] == "training" else printable(str(x["state"]), _STATE_CHARS)


def is_trouble(x: Replica) -> bool:
    """Whether a replica should be shown before others, apart from those that a round waits for."""
    return state_of(x) in ("stalled", "away", "slow")


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
    """Returns all jobs as text of ``width`` columns and, if possible, ``height`` lines."""
    if not jobs:
        return NO_JOBS
    heads = [_above(job, width) for job in jobs]
    left = height - sum(map(len, heads)) - (len(jobs) - 1)
    blocks = []
    for number, (job, head) in enumerate(zip(jobs, heads, strict=True)):
        awaited = {name for x in _fragments_of(job) for name in x.get("waits_for", [])}
        replicas = fitted(job["replicas"], width, max(3, left // (len(jobs) - number)), awaited)
        left -= len(replicas)
        blocks.append("\n".join(line[:width] for line in [*head, *replicas]))
    return "\n\n".join(blocks)


def line(job: Job) -> str:
    """Returns a job's status as one line."""
    states = Counter(state_of(x) for x in job["replicas"])
    there = len(job["replicas"]) - states.pop("away", 0)
    states.pop("connected", 0)
    known = f"; {there} of {count(len(job['replicas']), 'replica')} connected" if job["replicas"] else ""
    doing = _doing(_fragments_of(job))
    return f"{_head(job)}{known}{_counted(states)}{'; ' if doing else ''}{'; '.join(doing)}"


def fitted(replicas: Sequence[Replica], width: int, height: int, awaited: Collection[str] = ()) -> list[str]:
    """The table of replicas in ``height`` lines, if they fit, in as many columns as ``width`` has room for.

    If not all fit, it shows those that a round waits for, and those that neither train nor wait.
    """
    if not replicas:
        return []
    replicas = sorted(replicas, key=lambda x: natural(x["replica"]))
    table = _replicas(replicas, awaited, width)
    columns = max(1, (width + len(_GAP)) // (max(map(len, table)) + len(_GAP)))
    room = (height - 1) * columns
    more = []
    if len(replicas) > room:
        first = sorted(replicas, key=lambda x: (not is_trouble(x), x["replica"] not in awaited, state_of(x) in _USUAL))
        kept = {x["replica"] for x in first[: max(columns, (height - 2) * columns)]}
        rest = [x for x in replicas if x["replica"] not in kept]
        table = [table[0], *(row for x, row in zip(replicas, table[1:], strict=True) if x["replica"] in kept)]
        losses = [loss for x in rest if isinstance(loss := x.get("loss"), float)]
        told = f"; loss {figure(min(losses))} to {figure(max(losses))}" if losses else ""
        more = [f"{len(rest)} more replicas{_counted(Counter(map(state_of, rest)))}{told}"]
    return _side_by_side(table, columns) + more


def _head(job: Job) -> str:
    fragments = _fragments_of(job)
    step = f", inner step {fragments[0]['inner_step']}" if fragments else ""
    left = ", no replica is connected" if fragments and all(x["state"] == "away" for x in job["replicas"]) else ""
    return printable(f"job {job['job']}: {job['phase']}{step}{left}")


def _fragments_of(job: Job) -> Sequence[Mapping[str, Any]]:
    return job["fragments"] if job["phase"] == "running" else []


def _fragment(x: Mapping[str, Any]) -> list[object]:
    doing = f"{len(x['proposed'])} proposed" if x["attempt"] is None else "reducing"
    return [x["version"], doing, x["attempts"], x["attempts_aborted"]]


def is_under_way(fragment: Mapping[str, Any]) -> bool:
    """Whether a round of the fragment has begun."""
    return bool(fragment["proposed"]) or fragment["attempt"] is not None


def _doing(fragments: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rounds under way are doing, in words; of many fragments only the first ones that have a round."""
    busy = [(f, x) for f, x in enumerate(fragments) if "doing" in x and is_under_way(x)]
    of = "fragment {}, " if len(fragments) > 1 else ""
    return [printable(f"{of.format(f)}version {x['version'] + 1}: {x['doing']}") for f, x in busy[:_FRAGMENTS_SHOWN]]


def _replicas(replicas: Sequence[Replica], awaited: Collection[str] = (), width: int = 384) -> list[str]:
    """A table of replicas; ids are cut to a third of ``width``, and columns that few replicas need are left out."""
    units = {x["unit"] for x in replicas if x.get("rate")}
    columns = {
        "replica": True,
        "state": True,
        "incarnation": width >= 100 or not units,
        "inner step": True,
        "steps/s": True,
        **{f"{unit}/s": True for unit in units},
        "loss": any(x.get("loss") is not None for x in replicas),
        "waited": width >= 72 and any("waited_s" in x for x in replicas),
        "version": True,
    }
    head = [name for name, shown in columns.items() if shown]
    return _table(head, [[_cells(x, awaited, max(12, width // 3)).get(name, "-") for name in head] for x in replicas])


def _cells(x: Replica, awaited: Collection[str], most: int) -> dict[str, object]:
    state, here = state_of(x), x["state"] != "away"
    said = f"{state} ({times(x['factor'])})" if state == "slow" and "factor" in x else state
    said += ", no copy kept" if x.get("not_kept") and here else ""
    said += ", awaited" if x["replica"] in awaited else ""
    name = x["replica"] if len(x["replica"]) <= most else f"{x['replica'][: most - 1]}…"
    loss = x.get("loss") if here else None
    return {
        "replica": name,
        "state": said,
        "incarnation": x["incarnation"] or "-",
        "inner step": "-" if x["state"] == "standby" and "rate" not in x else x["inner_step"],
        "steps/s": f"{1 / x['step_s']:.3g}" if x["step_s"] and here else "-",
        "loss": "-" if loss is None else f"{loss:.4g}" if isinstance(loss, float) else str(loss),
        "version": _versions(x["versions"]),
        **({f"{x['unit']}/s": short(x["rate"])} if x.get("rate") else {}),
        **({"waited": f"{x['waited_s']:.1f} s"} if "waited_s" in x else {}),
    }


def short(number: float) -> str:
    """``950``, ``12.3k``, ``4.5M``."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.1f}{letter}"
    return f"{number:.0f}"


def _versions(held: Sequence[int | None]) -> str:
    """Returns the version of each fragment, "-" where unknown; of many fragments only the range."""
    known = [version for version in held if version is not None]
    if len(held) > _FRAGMENTS_SHOWN and known:
        return f"{min(known)} to {max(known)}"
    return " ".join("-" if version is None else str(version) for version in held[:_FRAGMENTS_SHOWN])


def _above(job: Job, width: int) -> list[str]:
    """The lines above a job's replicas."""
    fragments = _fragments_of(job)
    texts = [_head(job), *_doing(fragments)]
    if fragments:
        versions, attempts = _versions([x["version"] for x in fragments]), sum(x["attempts"] for x in fragments)
        failed = sum(x["attempts_aborted"] for x in fragments)
        texts.insert(1, f"version {versions}; {count(attempts, 'attempt')}, {failed} failed")
    return [row for text in texts for row in textwrap.wrap(text, width, subsequent_indent="  ")]


def _side_by_side(table: Sequence[str], columns: int) -> list[str]:
    head, *rows = table
    columns = min(columns, len(rows))
    length, widest = -(-len(rows) // columns), max(map(len, table))
    parts = [[head, *rows[i : i + length]] for i in range(0, len(rows), length)]
    return [_GAP.join(f"{x:<{widest}}" for x in row).rstrip() for row in zip_longest(*parts, fillvalue="")]


def _counted(states: Mapping[str, int]) -> str:
    counted = [f"{n} {state}" for state, n in sorted(states.items(), key=lambda x: (-x[1], x[0]))]
    return f": {', '.join(counted[:6])}{', ...' if len(counted) > 6 else ''}" if counted else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Returns the lines of a table with columns as wide as their widest cell, numbers aligned right."""
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    columns = [f">{width}" if to_right else f"<{width}" for width, to_right in zip(widths, right, strict=True)]
    lines = ["  ".join(map(format, row, columns)) for row in [head, *cells]]
    return [line.rstrip() for line in lines]
