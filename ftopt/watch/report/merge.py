"""Merges the folders that several machines have written of one job into one run.

Each machine counts seconds from its own start, by its own clock. Folders are of one job if they have recorded the same
attempts, and the times of these attempts differ by a constant amount: that amount is the difference of their clocks and
starts, and is subtracted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ftopt.watch.folder import BEGAN
from ftopt.watch.report.facts import Attempt, gather
from ftopt.watch.report.run import Run
from ftopt.watch.report.steps import Steps
from ftopt.watch.report.stream import Again, shifted
from ftopt.watch.report.text import listed, span

_APART_S = 5.0
"""Maximum, at the median, by which the times of an attempt on two machines may deviate from their usual difference."""


class Gap(NamedTuple):
    """How much later a folder dates the same events; how far single times deviate from that: the median and the
    maximum."""

    ahead_s: float
    apart_s: float
    most_s: float


Part = tuple[Run, Gap]
"""A folder of a job, compared with the job's first one."""


def merged(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of one job merged into one; in the order of the first folder of each."""
    left = list(runs)
    done: list[Run] = []
    while left:
        first, rest = left.pop(0), left
        parts = [(first, Gap(0.0, 0.0, 0.0))]
        times = dict(first.facts.attempts)
        while found := next(((run, gap) for run in rest if (gap := _gap(times, run, parts)) is not None), None):
            run, gap = found
            rest.remove(run)
            parts.append(found)
            times = {**{at: t_s - gap.ahead_s for at, t_s in run.facts.attempts.items()}, **times}
        done.append(_one(parts) if len(parts) > 1 else first)
    return done


def _gap(times: dict[Attempt, float], run: Run, parts: Sequence[Part]) -> Gap | None:
    """How much later a run dates the same events; None if it is of another job.

    Two folders are of different jobs if both have the coordinator's events, or if they give different names. Two with
    the same incarnation of a replica are of one job only if it was resumed: they give the same name, and have different
    attempts of that incarnation.
    """
    for other, _ in parts:
        if (run.facts.decided and other.facts.decided) or len({run.job, other.job} - {None}) > 1:
            return None
        own, others = run.facts.took, other.facts.took
        lives = own.keys() & others.keys()
        same_attempt = any(own[life].keys() & others[life].keys() for life in lives)
        if lives and (run.job is None or run.job != other.job or same_attempt):
            return None
    attempts = run.facts.attempts
    gaps = [attempts[at] - times[at] for at in attempts.keys() & times.keys()]
    if not gaps:
        return None
    usual = statistics.median(gaps)
    apart = [abs(gap - usual) for gap in gaps]
    gap = Gap(usual, statistics.median(apart), max(apart))
    return gap if gap.apart_s <= _APART_S else None


def _one(parts: Sequence[Part]) -> Run:
    steps: dict[str, Steps] = {}
    for run, (ahead_s, _, _) in parts:
        for replica, own in run.steps.items():
            into = steps.setdefault(replica, Steps())
            for t_s, incarnation, inner_step, loss in zip(
                own.t_s, own.incarnation, own.inner_step, own.loss, strict=True
            ):
                into.add(t_s - ahead_s, incarnation, inner_step, loss)
    # Time 0: the first folder's start, or an earlier event.
    first_s = min([0.0, *(run.facts.first_s - gap.ahead_s for run, gap in parts)])
    for own in steps.values():
        for number in range(len(own)):
            own.t_s[number] -= first_s
    events = Again(lambda: shifted([(run.facts.lives.within(run.events), gap.ahead_s) for run, gap in parts], first_s))
    runs = [run for run, _ in parts]
    apart, most = max(gap.apart_s for _, gap in parts), max(gap.most_s for _, gap in parts)
    note = (
        f"Merged from {len(parts)} folders of one job ({listed([run.name for run in runs])}). Their clocks and starts "
        "differ; times are aligned by the reductions that they share, and differ there by "
        f"{span(apart)} at the median, {span(most)} at most."
    )
    told = next((run for run in runs if run.recipe is not None), runs[0])
    return replace(
        runs[0],
        job=next((run.job for run in runs if run.job is not None), None),
        folders=[folder for run in runs for folder in run.folders],
        events=events,
        steps=steps,
        facts=gather(events, steps),
        summarized=all(run.summarized for run in runs if run.facts.named("spawn"))
        and any(run.summarized for run in runs),
        recipe=told.recipe,
        about=told.about | {"began": runs[0].utc(first_s, BEGAN)},
        skipped=sum(run.skipped for run in runs),
        age_s=min(run.age_s for run in runs),
        notes=[*(note_ for run in runs for note_ in run.notes), note],
    )
