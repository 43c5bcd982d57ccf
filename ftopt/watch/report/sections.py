"""The data of a report: texts, tables and pictures of each run, and of several side by side."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ftopt.common.plural import count
from ftopt.watch.jsonl import data_of, significant
from ftopt.watch.lanes import Lane
from ftopt.watch.report.blocks import HUES, SINCE_START, Block, bar, chart, line, section, table, text
from ftopt.watch.report.compare import comparison
from ftopt.watch.report.facts import COORDINATOR
from ftopt.watch.report.figures import account, figures
from ftopt.watch.report.losses import losses
from ftopt.watch.report.rounds import Round, Rounds
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import DASH, listed, share, size, span, whole
from ftopt.watch.report.timeline import STATES
from ftopt.watch.report.words import story
from ftopt.watch.sentences import clock
from ftopt.watch.thin import ends

_SHOWN_S = 0.001
"""States that lasted for less than this in all are not in the table."""
_WHOM = "mostly for"
_ABOUT = {"began": "began", "host": "machine", "ftopt": "ftopt", "torch": "torch", "python": "Python"}


def report(runs: Sequence[Run]) -> Block:
    """The whole report: one run, or a comparison of several and then each of them."""
    names = _names(runs)
    return {
        "title": names[0] if len(runs) == 1 else f"{len(runs)} runs compared",
        "made": f"Made by ftopt report, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}.",
        "sections": [comparison(runs, names)] if len(runs) > 1 else [],
        "runs": [_run(run, name, budget=1 / len(runs)) for run, name in zip(runs, names, strict=True)],
    }


def _names(runs: Sequence[Run]) -> list[str]:
    """The folders' names; with their parents if two names are the same."""
    twice = Counter(run.name for run in runs)
    return [f"{run.folders[0].resolve().parent.name}/{run.name}" if twice[run.name] > 1 else run.name for run in runs]


def _run(run: Run, name: str, *, budget: float) -> Block:
    skipped = f"{count(run.skipped, 'line')} of the files could not be read; the figures are without them."
    made = [
        _account(run),
        _replicas(run),
        losses(run, budget=budget),
        _happened(run),
        _outer_steps(run),
        _waits(run),
        _staleness(run),
        _recipe(run),
    ]
    return {
        "name": name,
        "folders": listed([str(folder.absolute()) for folder in run.folders]),
        "story": story(run),
        "notes": [*run.notes, *([skipped] if run.skipped else [])],
        "sections": [each for each in made if each is not None],
    }


def _account(run: Run) -> Block:
    parts = account(run)
    known = [row for row in figures(run).items() if row[1] != "0" or row[0] == "lost by survivors"]
    label = ", ".join(f"{number:,} {said}" for _, said, number, _ in parts)
    title = "Where every inner step went"
    shown = bar(f"{title.lower()}: {label}", parts) if parts else None
    every = table(["what", "figure"], known, "All figures", fold="closed" if parts else "open")
    return section(title, shown, every, wide=True)


def _replicas(run: Run) -> Block:
    """The timeline, and how long each replica was in each state."""
    states, made, aborted = run.fold.states, run.fold.rounds.moments, run.fold.aborted
    at = {name: row for row, name in enumerate(states)}
    rows = [
        (name, [y for x in states[name] for y in (significant(x.start), significant(x.stop), x.state)])
        for name in states
    ]
    used = [state for state in STATES if any(lane.seconds.get(state) for lane in states.values())]
    faults = [
        (e["t_s"], at.get(e["replica"], len(at)), f"fault: {data_of(e).get('do')}") for e in run.facts.named("fault")
    ]
    entries = [(f"block {state}", STATES[state][0]) for state in used] + [("block decided", "outer step")]
    entries += [("block aborted", "failed attempt")] if aborted.count else []
    entries += [("round fault", "fault")] if faults else []
    over_time: Block = {
        "kind": "timeline",
        "label": "timeline of the replicas",
        "rows": rows,
        "states": {state: label for state, (label, _) in STATES.items()},
        "span": [0, run.end_s, "clock"],
        "marks": [(look, list(map(significant, x.points))) for look, x in (("decided", made), ("aborted", aborted))],
        "last": "outer steps",
        "faults": faults,
        "entries": entries,
    }
    thinned = any(lane.spans.stride > 1 for lane in states.values())
    means: Block = {"kind": "list", "items": [STATES[x] for x in used], "title": "What the states mean"}
    means["fold"] = "closed"
    return section(
        "Replicas over time",
        over_time,
        _zero(run),
        text("Where states change quickly, the picture shows what took most of the time.", "note") if thinned else None,
        _in_state(run, states, used),
        means,
        wide=True,
    )


def _zero(run: Run) -> Block | None:
    """When second 0 was. The commands that start a coordinator count from there, too; other logs have dates."""
    began = run.utc(0.0, "%Y-%m-%d %H:%M:%S")
    own = any(event["replica"] == COORDINATOR for event in run.facts.named("spawn"))
    as_in = f", as in the output of `ftopt {'launch' if run.recipe is None else 'run'}`" if own else ""
    return text(f"Times count from {began} UTC{as_in}.", "note") if began else None


def _in_state(run: Run, states: Mapping[str, Lane], used: Sequence[str]) -> Block:
    in_model = Counter[str]()
    for (replica, _), steps in run.fold.figures.decisions.result()[0].committed.items():
        in_model[replica] += steps
    of_scripts = bool(run.facts.unrecorded)  # their steps are only in the coordinator's decisions
    rows = []
    for name, lane in states.items():
        known = in_model[name] if of_scripts else len(run.steps.get(name, ()))
        lasted = [lane.seconds.get(state, 0.0) for state in used]
        rows.append([name, whole(known), *(span(seconds) if seconds >= _SHOWN_S else "" for seconds in lasted)])
    head = f"inner steps{' in the model' if of_scripts else ''}"
    return table(
        ["replica", head, *(STATES[x][0] for x in used)], rows, "How long each was in each state", fold="closed"
    )


def _happened(run: Run) -> Block | None:
    """The notable events, line by line."""
    lines, left = run.fold.log.some()
    if not lines:
        return None
    rows = [[clock(t_s), run.utc(t_s), said] for t_s, said in lines]
    fold = "open" if len(rows) <= 30 else "closed"
    return section("Events", table(["time", "UTC", "what"], rows, f"What happened, line by line{left}", fold=fold))


def _outer_steps(run: Run) -> Block | None:
    """The outer steps: when, whose steps, bytes, seconds; bytes over time."""
    made = run.fold.rounds
    some_rounds, left = made.shown.some()
    if not some_rounds:
        return None
    several = len(made.sizes) > 1
    rows = [
        [
            whole(x.version), *([whole(x.fragment)] if several else []), clock(x.t_s), whole(x.inner_step), _members(x),
            size(sum(x.bytes_sent.values()) if x.bytes_sent else None),
            span(x.seconds) if x.bytes_sent else DASH, whole(x.aborted),
        ]
        for x in some_rounds
    ]  # fmt: skip
    head = ["version", *(["fragment"] if several else []), "time", "inner step", "inner steps of each replica", "sent"]
    return section(
        "Outer steps and what they sent",
        _sent_over_time(run, made),
        *_bytes(run, made),
        table([*head, "reduction", "failed before"], rows, f"Each outer step{left}", fold="closed"),
    )


def _waits(run: Run) -> Block | None:
    """How long outer steps kept the training threads."""
    of, title = run.fold.waits, "Waiting for outer steps"
    if not of:
        return _waits_told(run, title)
    names, waited_for = [name for name in run.replicas() if name in of], run.waited_for()
    few = len(names) <= HUES
    hues = [f"l{n}" if few else "many" for n in range(len(names))]
    rows = []
    for name in names:
        values = of[name].every
        rows.append([name, whole(values.count), *map(span, values.of()), span(values.total), _whom(waited_for[name])])
    if lasting := run.lasting_waits:
        who = "all but those that died" if run.facts.named("death") else "all"
        rows.append([who, whole(lasting.count), *map(span, lasting.of()), span(lasting.total), ""])
    drawn = [
        line("dots", hue, name if few else "a replica", of[name].drawn.points)
        for hue, name in zip(hues, names, strict=True)
    ]
    return section(
        title,
        text("How long each outer step kept a replica from its next inner step."),
        chart("waits over time", drawn, axes=[(*SINCE_START, [0, run.end_s])], y="s", height=200),
        table(
            ["replica", "waits", "median", "99 %", "longest", "in all", _WHOM],
            rows,
            "Waits of each replica",
            fold="closed",
        ),
    )


def _waits_told(run: Run, title: str) -> Block | None:
    """The waits of replicas that have reported only their total waiting time."""
    waited = run.waits_told()
    if not waited:
        return None
    said = "How long outer steps kept each replica from its next inner step, as it has reported."
    waited_for = run.waited_for()
    rows = [[name, span(waited_s), _whom(waited_for[name])] for name, waited_s in waited.items()]
    rows.append(["all", span(sum(waited.values())), _whom(sum(waited_for.values(), Counter()))])
    return section(title, text(said), table(["replica", "in all", _WHOM], rows))


def _whom(waited_for: Counter[str]) -> str:
    """The three for which it has waited longest, and the sum of the others."""
    first = waited_for.most_common(3)
    parts = [*first, ("others", waited_for.total() - sum(waited_s for _, waited_s in first))]
    return ", ".join(f"{whom} {span(waited_s)}" for whom, waited_s in parts if waited_s >= _SHOWN_S)


def _staleness(run: Run) -> Block | None:
    """How old contributions were: outer steps missed before, and inner steps until the result was applied."""
    counts, delays = run.fold.staleness.ages, run.fold.staleness.delays
    blocks: list[Block] = []
    if counts:
        every, stale = sum(counts.values()), sum(counts.values()) - counts[0]
        blocks.append(text("Staleness: outer steps that a replica missed before this contribution."))
        if stale:
            rows = [[whole(n), whole(counts[n]), share(counts[n], every)] for n in sorted(counts)]
            head = ["outer steps missed before", "contributions", "share"]
            most = f"; at most {count(max(counts), 'outer step')} had been missed"
            said = f"{stale:,} of {count(every, 'contribution')} came after a missed outer step{most}."
            blocks += [text(said), table(head, ends(rows)[0], "Contributions by staleness", fold="closed")]
        else:
            blocks.append(text(f"None of {count(every, 'contribution')} was stale."))
    if delays:
        median, p99, longest = delays.of()
        said = (
            f"While a contribution was on its way into the model, its replica took {median:g} more inner steps at the "
            f"median, {p99:g} at the 99th percentile, {longest:g} at most."
        )
        blocks.append(text(said if longest else "Each replica waited until its contribution was in the model."))
    return section("Staleness", *blocks) if blocks else None


def _recipe(run: Run) -> Block:
    known = [(said, str(run.about[name])) for name, said in _ABOUT.items() if run.about.get(name)]
    resolved = text("The folder has no recipe.yaml.")
    if run.recipe is not None:
        resolved = {"kind": "pre", "text": run.recipe[:50_000], "title": "The recipe, as it was resolved"}
        resolved["fold"] = "closed"
    untold = text("The folder does not tell the versions (it has no about.json).")
    return section("Recipe and versions", resolved, table(["", ""], known) if known else untold)


def _members(x: Round) -> str:
    if not x.steps:
        return listed([*x.bytes_sent])
    if len(x.steps) > HUES:
        least, most = min(x.steps.values()), max(x.steps.values())
        return f"{count(len(x.steps), 'replica')}, {least:,}" + (f" to {most:,} each" if most > least else " each")
    return ", ".join(f"{replica} {steps:,}" for replica, steps in x.steps.items())


def _sent_over_time(run: Run, made: Rounds) -> Block | None:
    if not made.total:
        return None
    points = [(0.0, 0.0), *made.sent.points, (run.end_s, made.total / 1e6)]
    drawn = line("stepped", "l0", "MB sent by all replicas, in committed outer steps", points)
    return chart("bytes sent over time", [drawn], axes=[(*SINCE_START, [0, run.end_s])], y="MB", height=200)


def _bytes(run: Run, made: Rounds) -> list[Block]:
    rows = []
    for fragment, sizes in sorted(made.sizes.items()):
        if sizes:
            of = f" of fragment {fragment}" if len(made.sizes) > 1 else ""
            each = (sizes.of()[0], sizes.least, sizes.most, sizes.total)
            rows.append([f"one replica, per outer step{of}", *map(size, each)])
    sent = run.sent()
    if not rows and not sum(sent.values()):
        return []
    totals = [[name, size(number)] for name, number in [*sent.items(), ("all", sum(sent.values()))]]
    head = ["sent by", "median", "least", "most", "all replicas, all outer steps"]
    in_all = table(["replica", "sent"], totals, "Sent by each replica, failed attempts included", fold="closed")
    return [*([table(head, rows, "Sent in an outer step", fold="closed")] if rows else []), in_all]
