"""The figures of a run with their names, for tables of one run or of several side by side."""

from __future__ import annotations

from ftopt.common.plural import count
from ftopt.watch.account import places, unreported
from ftopt.watch.jsonl import data_of
from ftopt.watch.report.lives import BROKE_OFF
from ftopt.watch.report.losses import held_out
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import listed, real, share, size, span, whole
from ftopt.watch.report.words import not_committed
from ftopt.watch.sentences import REASONS


def figures(run: Run) -> dict[str, str]:
    """Where every inner step went, and the other figures of ``summary.json``; unknown ones are left out."""
    s, waits = run.summary, run.fold.waits.values()
    decided, executed = run.facts.decided, s["inner_steps_executed"]  # None: a replica's report is missing
    counted = decided and executed is not None
    known, of_known = run.ended and counted, _of_known(run)
    tests, sent, stall = held_out(run), sum(run.sent().values()), s["stall_s"]
    found = {
        "state": "interrupted"
        if run.interruption is not None
        else "ended"
        if run.ended
        else "going on"
        if run.going_on
        else "no end on record",
        "replicas": whole(len(run.members())),
        "time": span(run.ran_s),
        "committed inner step": whole(s["inner_step"]) if decided else None,
        "inner steps executed": _known(executed),
        "inherited from a checkpoint or a copy": _some(s["inner_steps_inherited"]),
        "committed: in the model": whole(s["inner_steps_committed"]) if decided else None,
        "share in the model": share(s["inner_steps_committed"], executed + s["inner_steps_inherited"]) + of_known
        if counted
        else None,
        "pending at the end": whole(s["inner_steps_pending"]) if known else None,
        "of these: came too late for the last outer step": _some(s["inner_steps_too_late"]) if known else None,
        f"lost with dead replicas{'' if run.ended else ' so far'}": whole(s["dead_inner_steps_lost"])
        if counted
        else None,
        "of dead replicas, not reported": _at_most(s["dead_inner_steps_unreported"]) if counted else None,
        **{f"dropped: {REASONS.get(why, why)}": _some(n) for why, n in s["inner_steps_discarded"].items()},
        "lost by survivors": whole(s["survivor_inner_steps_lost"]) if known else None,
        "counted twice": whole(s["inner_steps_counted_twice"]) if known else None,
        "not committed when the record ends": None if run.ended else _known(not_committed(run)),
        "outer steps": whole(s["outer_steps"]) if decided else None,
        "attempts": _known(s["attempts"]),
        "attempts that failed and were repeated": _known(s["attempts_aborted"]),
        "deaths": None if run.facts.named(BROKE_OFF) else whole(len(s["deaths"])),
        "wait for an outer step, median": span(stall["median"]) if stall else None,
        "longest wait": span(max(each.every.most for each in waits)) if waits else None,  # dead replicas', too
        "sent": size(sent) if sent else None,
        "samples in the model": _known(s["samples_committed"]),
        "samples used twice": _known(s["samples_duplicated"]),
        "samples lost": _known(s["samples_lost"]),
        "inner steps redone for dead replicas": whole(s["replay"]["steps"]) if s["replay"] else None,
        "time for that": span(s["replay"]["seconds"]) if s["replay"] else None,
        "versions decided twice": listed([str(version) for version in s["chain_conflicts"]]) or None,
        "held-out loss at the end": real(tests[-1].loss) if tests else None,
        **_outer(run),
        **_final_weights(run),
    }
    return {name: text for name, text in found.items() if text is not None}


def account(run: Run) -> list[tuple[str, str, int, str]]:
    """Where every inner step went: classes of the style sheet, places with some steps, numbers and shares. Empty where
    it is not known."""
    s = run.summary
    if not run.facts.decided or run.partly:
        return []
    found = [("kept", "are in the model", s["inner_steps_committed"]), *places(s, ended=run.ended)]
    whole_ = sum(n for *_, n in found)
    return [(look, said, n, share(n, whole_) + _of_known(run)) for look, said, n in found if n > 0]


def _of_known(run: Run) -> str:
    return " of those on record" if unreported(run.summary) else ""


def _known(number: int | None) -> str | None:
    return None if number is None else whole(number)


def _at_most(number: int | None) -> str | None:
    return "not known" if number is None else f"at most {whole(number)}" if number else None


def _some(number: int | None) -> str | None:
    return whole(number) if number else None


def _outer(run: Run) -> dict[str, str]:
    """The settings of the outer optimizer that the newest replica has begun with."""
    told = [data for event in run.facts.named("started") if "outer_gain" in (data := data_of(event))]
    if not told:
        return {}
    found = {"outer rate, momentum": f"{told[-1]['outer_lr']:g}, {told[-1]['outer_momentum']:g}"}
    found["outer gain: rate / (1 - momentum)"] = f"{told[-1]['outer_gain']:.3g}"
    if (memory := told[-1].get("outer_memory")) is not None:
        found["outer memory: period / (1 - momentum)"] = count(round(memory), "inner step")
    return found


def _final_weights(run: Run) -> dict[str, str]:
    digests, told = run.summary["anchor_digests"], [data_of(event) for event in run.facts.named("final")]
    if len(digests) > 1:
        replicas, same = len(digests), len(set(digests.values())) == 1
    elif told:  # of replicas started by scripts
        replicas, same = len(told[-1]["replicas"]), bool(told[-1]["identical"])
    else:
        return {}
    return {f"final weights of {count(replicas, 'replica')}": "identical" if same else "NOT IDENTICAL"}
