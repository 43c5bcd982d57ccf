"""The parts of a page about one run, besides its losses: pictures, and the same figures as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ftopt.common.plural import count
from ftopt.watch.jsonl import data_of
from ftopt.watch.report.html import Html, el, table
from ftopt.watch.report.losses import COLORS
from ftopt.watch.report.plot import Plot, axis, durations, legend, times
from ftopt.watch.report.rounds import Round, Rounds
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import clock, cut, listed, share, size, some, span, whole
from ftopt.watch.report.timeline import STATES, Lane
from ftopt.watch.report.words import REASONS, not_committed, versions

_SHOWN_S = 0.001
"""A state that has lasted for less in all is not in the table."""


def account(run: Run) -> Html:
    """Where every inner step went, and the other figures of ``summary.json``."""
    s = run.summary
    partly = run.partly
    rows: list[tuple[str, object]] = [] if partly else [("inner steps executed", whole(s["inner_steps_executed"]))]
    if s["inner_steps_inherited"]:
        rows.append(("inherited from a checkpoint or a copy", whole(s["inner_steps_inherited"])))
    if run.decided:
        rows += [("committed: in the model", whole(s["inner_steps_committed"]))]
        if run.ended and not partly:
            rows += [
                ("pending at the end", whole(s["inner_steps_pending"])),
                *(
                    [("of these: came too late for the last outer step", whole(s["inner_steps_too_late"]))]
                    if s["inner_steps_too_late"]
                    else []
                ),
                ("lost with dead replicas", whole(s["dead_inner_steps_lost"])),
                *(
                    (f"dropped: {REASONS.get(why, why)}", whole(n))
                    for why, n in s["inner_steps_discarded"].items()
                    if n
                ),
                ("lost by survivors (must be 0)", whole(s["survivor_inner_steps_lost"])),
                ("counted twice (must be 0)", whole(s["inner_steps_counted_twice"])),
            ]
        elif not partly:
            rows += [
                ("lost with dead replicas so far", whole(s["dead_inner_steps_lost"])),
                *(
                    (f"dropped: {REASONS.get(why, why)}", whole(n))
                    for why, n in s["inner_steps_discarded"].items()
                    if n
                ),
                ("not committed when the record ends", whole(not_committed(run))),
            ]
        rows += [
            ("outer steps", whole(s["outer_steps"])),
            ("attempts", whole(s["attempts"])),
            ("attempts that failed and were repeated", whole(s["attempts_aborted"])),
        ]
    if s["samples_committed"] is not None:
        rows += [
            ("samples in the model", whole(s["samples_committed"])),
            ("samples used twice", whole(s["samples_duplicated"])),
            ("samples lost", whole(s["samples_lost"])),
        ]
    if (replay := s["replay"]) is not None:
        rows += [
            ("inner steps redone for dead replicas", whole(replay["steps"])),
            ("time for that", span(replay["seconds"])),
        ]
    if s["chain_conflicts"]:
        rows.append(("versions decided twice (must be none)", listed([str(v) for v in s["chain_conflicts"]])))
    if len(digests := s["anchor_digests"]) > 1:
        alike = "identical" if len(set(digests.values())) == 1 else "NOT IDENTICAL"
        rows.append((f"final weights of {len(digests)} replicas", alike))
    elif ends := run.named("final"):  # of scripts
        data = data_of(ends[-1])
        alike = "identical" if data["identical"] else "NOT IDENTICAL"
        rows.append((f"final weights of {count(len(data['replicas']), 'replica')}", alike))
    return el("section", el("h3", "Where every inner step went"), table(["what", "figure"], rows))


def replicas(run: Run) -> Html:
    """The timeline, and how long each replica was in each state."""
    states, made, aborted = run.fold.states, run.fold.rounds.moments, run.fold.aborted
    names = list(states)
    height = max(6, min(22, 1400 // max(1, len(names))))
    x = times(0.0, run.end_s)
    lanes = len(names) + 1
    plot = Plot(x, height=height * lanes)
    used: set[str] = set()
    thinned = False
    for lane, name in enumerate(names):
        top, bottom = (lane + 0.12) / lanes, (lane + 0.88) / lanes
        total, drawn = states[name].seconds, list(states[name])
        for state in STATES:
            parts = [(span_.start, span_.stop) for span_ in drawn if span_.state == state]
            if parts:
                used.add(state)
                plot.blocks(parts, top, bottom, state, f"{name}: {STATES[state][0]} for {span(total[state])} in all")
        thinned = thinned or states[name].thinned
    for event in run.named("fault"):  # those of the coordinator are where its outer steps are
        lane = names.index(event["replica"]) if event["replica"] in states else len(names)
        said = f"fault: {data_of(event).get('do')} {event['replica']} at {clock(event['t_s'])}"
        plot.dots([(event["t_s"], (lane + 0.5) / lanes)], "fault", said)
    low = (lanes - 0.8) / lanes
    plot.marks(made, low, 1.0, "decided", f"{count(made.count, 'outer step')} committed")
    plot.marks(aborted, low, 1.0, "aborted", f"{count(aborted.count, 'attempt')} failed")
    entries = [(f"b {state}", label) for state, (label, _) in STATES.items() if state in used]
    entries += [("b decided", "outer step")]
    entries += [("b aborted", "failed attempt")] if aborted.count else []
    entries += [("round fault", "fault")] if run.named("fault") else []
    labels = [
        cut(name, 14) if height >= 12 or number % 4 == 0 else "" for number, name in enumerate([*names, "outer steps"])
    ]
    picture = el("figure", plot.html("timeline of the replicas", rows=labels), el("figcaption", "time since the start"))
    note = el("p", "A column of the picture shows what took most of its time.", class_="note") if thinned else None
    return el("section", el("h3", "Replicas over time"), legend(entries), picture, note, _in_state(run, states, used))


def happened(run: Run) -> Html | None:
    """What happened, line by line."""
    lines, left = run.fold.log.some()
    if not lines:
        return None
    rows = [[clock(t_s), text] for t_s, text in lines]
    shown = table(["time", "what"], rows)
    return el(
        "section", el("details", el("summary", f"What happened, line by line{left}"), shown, open=len(rows) <= 30)
    )


def outer_steps(run: Run) -> Html | None:
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
            span(x.seconds) if x.bytes_sent else whole(None), whole(x.aborted),
        ]
        for x in some_rounds
    ]  # fmt: skip
    head = ["version", *(["fragment"] if several else []), "time", "inner step", "inner steps of each replica", "sent"]
    shown = table([*head, "reduction", "failed before"], rows)
    return el(
        "section",
        el("h3", "Outer steps and what they sent"),
        _sent_over_time(run, made),
        _bytes(run, made),
        el("details", el("summary", f"Each outer step{left}"), shown, open=len(rows) <= 12),
    )


def waits(run: Run) -> Html | None:
    """How long outer steps kept the training threads."""
    of = run.fold.waits
    if not of:
        return _waits_told(run)
    names = [name for name in run.replicas() if name in of]
    few = len(names) <= COLORS
    most = max(each.every.most for each in of.values())
    plot = Plot(times(0.0, run.end_s), durations(1.05 * most), height=200)
    rows = []
    for number, name in enumerate(names):
        values = of[name].every
        plot.dots(of[name].drawn.points, f"c{number}" if few else "many", name)
        rows.append([name, whole(values.count), *map(span, values.of()), span(values.total)])
    if lasting := run.lasting_waits:
        who = "all but those that died" if run.named("death") else "all"
        rows.append([who, whole(lasting.count), *map(span, lasting.of()), span(lasting.total)])
    entries = (
        [(f"round c{n}" if few else "round many", name) for n, name in enumerate(names)]
        if few
        else [("round many", "a replica each")]
    )
    return el(
        "section",
        el("h3", "Waiting for outer steps"),
        el("p", "How long each outer step kept a replica's training thread from its next inner step."),
        legend(entries),
        el("figure", plot.html("waits over time"), el("figcaption", "time since the start")),
        table(["replica", "waits", "median", "99 %", "longest", "in all"], rows),
    )


def _waits_told(run: Run) -> Html | None:
    """The same of replicas that have told no more than how long they have waited in all."""
    waited = run.waits_told()
    if not waited:
        return None
    rows = [[name, span(waited_s)] for name, waited_s in waited.items()]
    rows.append(["all", span(sum(waited.values()))])
    return el(
        "section",
        el("h3", "Waiting for outer steps"),
        el("p", "How long outer steps kept each replica's training thread from its next inner step, as it has told."),
        table(["replica", "in all"], rows),
    )


def staleness(run: Run) -> Html | None:
    """How old contributions were: outer steps missed before, and inner steps until the result was applied."""
    counts, delays = run.fold.staleness.ages, run.fold.staleness.delays
    if not counts and not delays:
        return None
    total = sum(counts.values())
    rows = [[whole(n), whole(counts[n]), share(counts[n], total)] for n in sorted(counts)]
    aged = table(["outer steps missed before", "contributions", "share"], some(rows)[0]) if counts else None
    applied = None
    if delays:
        median, p99, most = delays.of()
        applied = el(
            "p",
            f"From a contribution's snapshot until its result was applied, a replica took {median:g} inner steps at "
            f"the median, {p99:g} at the 99th percentile, {most:g} at most.",
        )
    text = "A contribution is stale when outer steps were committed without its replica since its previous one."
    return el("section", el("h3", "Staleness"), el("p", text) if counts else None, aged, applied)


def recipe(run: Run) -> Html:
    """The recipe, and the versions."""
    known = versions(run)
    about = (
        table(["", ""], known) if known else el("p", "The folder does not tell the versions (it has no about.json).")
    )
    text: Html = el("p", "The folder has no recipe.yaml.")
    if run.recipe is not None:
        text = el("details", el("summary", "The recipe, as it was resolved"), el("pre", run.recipe[:50_000]))
    return el("section", el("h3", "Recipe and versions"), text, about)


def _members(x: Round) -> str:
    if not x.steps:
        return listed([*x.bytes_sent])
    if len(x.steps) > COLORS:
        least, most = min(x.steps.values()), max(x.steps.values())
        return f"{count(len(x.steps), 'replica')}, {least:,}" + (f" to {most:,} each" if most > least else " each")
    return ", ".join(f"{replica} {steps:,}" for replica, steps in x.steps.items())


def _in_state(run: Run, states: Mapping[str, Lane], used: set[str]) -> Html:
    shown_states = [state for state in STATES if state in used]
    rows = []
    in_model = _in_model(run) if run.unrecorded else None  # of scripts the coordinator's decisions alone tell
    for name, spans in states.items():
        total = spans.seconds
        steps = whole(len(run.steps.get(name, ())) if in_model is None else in_model[name])
        lasted = [total.get(state, 0.0) for state in shown_states]
        rows.append([name, steps, *(span(seconds_) if seconds_ >= _SHOWN_S else "" for seconds_ in lasted)])
    head = [
        "replica",
        "inner steps" if in_model is None else "inner steps in the model",
        *(STATES[state][0] for state in shown_states),
    ]
    words = el("ul", [el("li", el("b", STATES[state][0]), f": {STATES[state][1]}") for state in shown_states])
    return el("div", table(head, rows), el("details", el("summary", "What the states mean"), words))


def _in_model(run: Run) -> Counter[str]:
    """Of each replica, the inner steps that decisions have counted."""
    found = Counter[str]()
    for (replica, _), steps in run.facts.told.committed.items():
        found[replica] += steps
    return found


def _sent_over_time(run: Run, made: Rounds) -> Html | None:
    total, points = made.total, made.sent.points
    if not total:
        return None
    stride = max(1, len(points) // 2000)
    points = [*points[::stride], (run.end_s, total / 1e6)]
    plot = Plot(times(0.0, run.end_s), axis(0.0, 1.05 * total / 1e6, ticks=4), height=160)
    plot.line(points, "c0", "sent by all replicas")
    return el(
        "figure", plot.html("bytes sent over time"), el("figcaption", "MB sent in committed outer steps, over time")
    )


def _bytes(run: Run, made: Rounds) -> Html | None:
    of_fragment = made.sizes
    rows = []
    for fragment, sizes in sorted(of_fragment.items()):
        if sizes:
            median, _, most = sizes.of()
            name = (
                "one replica, per outer step"
                if len(of_fragment) == 1
                else f"one replica, per outer step of fragment {fragment}"
            )
            rows.append([name, size(median), size(sizes.least), size(most), size(sizes.total)])
    per_replica = run.sent()
    if not rows and not sum(per_replica.values()):
        return None
    totals = [[name, size(sent)] for name, sent in per_replica.items()]
    totals.append(["all", size(sum(per_replica.values()))])
    says = "In all, failed attempts included"
    head = ["sent by", "median", "least", "most", "all replicas, all outer steps"]
    sizes_table = table(head, rows) if rows else None
    if len(totals) > COLORS + 1:
        return el("div", sizes_table, el("details", el("summary", says), table(["replica", "sent"], totals)))
    return el("div", sizes_table, table(["replica", "sent"], totals, caption=says))
