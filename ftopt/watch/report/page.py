"""The page: one run, or several compared and then one after the other."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ftopt.common.plural import count
from ftopt.watch.report import losses, sections
from ftopt.watch.report.compare import comparison
from ftopt.watch.report.html import Html, el, with_code
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import listed
from ftopt.watch.report.words import story

_STYLE = Path(__file__).with_name("style.css")

MADE_BY = '<meta name="generator" content="ftopt report">'
"""In the first lines of every report: by it an older one is told from a file of somebody else."""


def page(runs: Sequence[Run]) -> str:
    """A whole HTML document without a reference to anything outside it."""
    names = _names(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    head = [
        Html(MADE_BY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", f"{title}: ftopt report"),
        el("style", Html(_STYLE.read_text(encoding="utf-8"))),
    ]
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    parts: list[object] = [
        el("h1", title),
        el("p", f"Made by ftopt report, {made}.", class_="by"),
    ]
    if len(runs) > 1:
        links = [el("a", name, href=f"#run-{number}") for number, name in enumerate(names)]
        parts += [el("nav", links, aria_label="runs"), comparison(runs, names)]
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        heading = el("h2", name, id=f"run-{number}") if len(runs) > 1 else None
        parts.append(_run(run, heading, budget=1 / len(runs)))
    body = el("body", el("main", parts))
    return f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{"".join(head)}</head>\n{body}</html>\n'


def _run(run: Run, heading: Html | None, *, budget: float) -> Html:
    skipped = f"{count(run.skipped, 'line')} of the files could not be read; the figures are without them."
    notes = [*run.notes, *([skipped] if run.skipped else [])]
    folders = listed([str(folder.absolute()) for folder in run.folders])
    return el(
        "article",
        heading,
        el("p", folders, class_="by"),
        [el("p", with_code(sentence), class_="story") for sentence in story(run)],
        [el("p", note, class_="note warn") for note in notes],
        sections.replicas(run),
        sections.account(run),
        losses.section(run, budget=budget),
        sections.happened(run),
        sections.outer_steps(run),
        sections.waits(run),
        sections.staleness(run),
        sections.recipe(run),
    )


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names; with their parents where two are the same."""
    twice = Counter(run.name for run in runs)
    return [f"{run.folders[0].resolve().parent.name}/{run.name}" if twice[run.name] > 1 else run.name for run in runs]
