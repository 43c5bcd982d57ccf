"""Folders that several machines have written of one job, made one run.

Each machine counts seconds from its own start, by its own clock. Folders are of one job when they have recorded the
same attempts to average, and the times of these attempts differ by the same amount: that amount is the difference of
their clocks and starts, and is taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from ftopt.report.run import Run, Steps, figures, ordered
from ftopt.report.text import listed, span
from ftopt.telemetry.jsonl import Line

_APART_S = 5.0
"""The times of one attempt on two machines may differ so much from the usual difference of the two."""

Attempt = tuple[int, int]


def merged(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of one job made one; in the order of the first folder of each."""
    left = list(runs)
    done: list[Run] = []
    while left:
        first, rest = left.pop(0), left
        parts: list[tuple[Run, float, float]] = [(first, 0.0, 0.0)]
        times = _times(first)
        while found := next(((run, gap) for run in rest if (gap := _gap(times, run, parts)) is not None), None):
            run, (ahead_s, apart_s) = found
            rest.remove(run)
            parts.append((run, ahead_s, apart_s))
            times = {**{attempt: t_s - ahead_s for attempt, t_s in _times(run).items()}, **times}
        done.append(_one(parts) if len(parts) > 1 else first)
    return done


def _times(run: Run) -> dict[Attempt, float]:
    """When the run's first member began to reduce in each attempt."""
    found: dict[Attempt, float] = {}
    for event in run.named("reduce", "quorum"):
        if "attempt" in event:
            found.setdefault((event.get("fragment", 0), event["attempt"]), event["t_s"])
    return found


def _gap(
    times: dict[Attempt, float], run: Run, parts: Sequence[tuple[Run, float, float]]
) -> tuple[float, float] | None:
    """How much later a run says that the same thing happened, and how far single times are from that; None if it is of
    another job. Two folders with the coordinator's events are two jobs."""
    if run.decided and any(part.decided for part, _, _ in parts):
        return None
    own = _times(run)
    gaps = [own[attempt] - times[attempt] for attempt in own.keys() & times.keys()]
    if not gaps:
        return None
    usual = statistics.median(gaps)
    apart = max(abs(gap - usual) for gap in gaps)
    return (usual, apart) if apart <= _APART_S else None


def _one(parts: Sequence[tuple[Run, float, float]]) -> Run:
    events: list[Line] = []
    steps: dict[str, Steps] = {}
    for run, ahead_s, _ in parts:
        events += [{**event, "t_s": event["t_s"] - ahead_s} for event in run.events]
        for replica, own in run.steps.items():
            into = steps.setdefault(replica, Steps())
            for t_s, incarnation, inner_step, loss in zip(
                own.t_s, own.incarnation, own.inner_step, own.loss, strict=True
            ):
                into.add(t_s - ahead_s, incarnation, inner_step, loss)
    first_s = min([0.0, *(event["t_s"] for event in events)])  # the first folder's start, or what came before it
    events = ordered({**event, "t_s": event["t_s"] - first_s} for event in events)
    for own in steps.values():
        for number in range(len(own)):
            own.t_s[number] -= first_s
    runs = [run for run, _, _ in parts]
    apart = max(apart_s for _, _, apart_s in parts)
    note = (
        f"Merged from {len(parts)} folders of one job ({listed([run.name for run in runs])}). Their clocks and starts "
        f"differ; times are aligned by the reductions that they share, and agree to within {span(apart)} there."
    )
    told = next((run for run in runs if run.recipe is not None), runs[0])
    return replace(
        runs[0],
        folders=[folder for run in runs for folder in run.folders],
        events=events,
        steps=steps,
        summary=figures(events, steps, runs[0].folders[0]),
        ended=all(run.ended or _all_ended(run) for run in runs),
        recipe=told.recipe,
        about=told.about,
        skipped=sum(run.skipped for run in runs),
        age_s=min(run.age_s for run in runs),
        notes=[*(note_ for run in runs for note_ in run.notes), note],
    )


def _all_ended(run: Run) -> bool:
    """Of a machine without a runner: each of its replicas has told its end, or it is the coordinator's."""
    return {event["replica"] for event in run.named("end")} >= set(run.replicas())
