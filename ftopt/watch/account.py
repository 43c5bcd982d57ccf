"""The result of a run in words, from its ``summary.json``: last lines of a command, and sentences of a report."""

from __future__ import annotations

from typing import Any

from ftopt.common.plural import count
from ftopt.watch.sentences import REASONS, figure

Summary = dict[str, Any]
"""The content of ``summary.json``."""


def closing_lines(summary: Summary, *, asked: int | None = None) -> list[str]:
    """Returns a summary as a few lines of text. For the folder of a single replica: what that replica knows.
    ``asked``: ``train.inner_steps`` of a run that came to its end; steps beyond it are explained."""
    digests = summary["anchor_digests"]
    same = "identical" if len(set(digests.values())) == 1 else "NOT IDENTICAL"
    return [
        _outer_steps(summary, asked),
        where_steps_are(summary, survived=not summary["deaths"] or _survived(summary)),
        *([f"final weights of {len(digests)} replicas: {same}"] if len(digests) > 1 else []),
        _lives(summary),
        *_waits(summary),
        *(scores(summary) if summary["val_loss_final"] is not None else []),
    ]


def where_steps_are(
    summary: Summary, share: str = "", *, survived: bool = True, ended: bool = True, rest: str = ""
) -> str:
    """Says where every inner step is. Zeros are left out, except for survivors' losses when some step is not in the
    model.

    Args:
        share: text after the number of steps that are in the model, in parentheses.
        survived: some replica has not died.
        ended: the run has ended.
        rest: for a run that has not ended, what to say of steps that are neither in the model nor given up.
    """
    inherited, survivors = summary["inner_steps_inherited"], summary["survivor_inner_steps_lost"]
    if not summary["inner_steps_executed"] and not inherited:
        return "no inner step was taken"
    taken = count(summary["inner_steps_executed"], "inner step")
    taken += " of this replica" if survivors is None else ""
    taken += f" and {inherited:,} that came from a checkpoint or a copy" if inherited else ""
    late = summary["inner_steps_too_late"] if ended else 0
    taken += " on record" if (more := unreported(summary)) else ""
    found = places(summary, ended=ended, rest=rest)
    parts = [f"{n:,} {where if n > 1 else where.replace('were ', 'was ', 1)}" for _, where, n in found]
    if not parts:
        return f"all {taken} are in the model{more}"
    kept = f"of {taken}, {summary['inner_steps_committed']:,}{share} are in the model, {', '.join(parts)}"
    none = "no others" if late or any(summary["inner_steps_discarded"].values()) else "none"
    return f"{kept}{f'; survivors lost {none}' if survived and ended and survivors == 0 else ''}{more}"


def _survived(summary: Summary) -> bool:
    """Whether some replica came to its end."""
    return bool(summary["anchor_digests"] or summary["stall_s"] or summary["inner_steps_pending"])


def unreported(summary: Summary) -> str:
    """What dead replicas may have taken from their last reports until contact was lost; "": nothing."""
    if (most := summary.get("dead_inner_steps_unreported", 0)) == 0:
        return ""
    more = "more steps" if most is None else f"up to {count(most, 'more step')}"
    who = f"replicas that {_ended(summary)}"
    return f"; before contact was lost, {who} may have taken {more} than they reported, which are lost"


def _ended(summary: Summary) -> str:
    """How replicas have ended that did not leave: in a list of which the one that ends the run kills some."""
    killed = summary.get("killed_at_the_end")
    return "died" if not killed else "died or were killed" if summary["deaths"] else "were killed"


def places(summary: Summary, *, ended: bool = True, rest: str = "are not in it yet") -> list[tuple[str, str, int]]:
    """Where the inner steps are that are not in the model: classes of the style sheet, places with some, numbers."""
    survivors, late = summary["survivor_inner_steps_lost"], summary["inner_steps_too_late"] if ended else 0
    left = summary["inner_steps_pending"] - late + (0 if ended else survivors or 0)
    died = f"were lost {'when its process died' if survivors is None else f'with replicas that {_ended(summary)}'}"
    found = [
        ("late", "came too late for the last outer step", late),
        ("pending", "were in no outer step" if ended else rest, left),
        ("dead", died, summary["dead_inner_steps_lost"]),
        *(("dropped", f"were dropped ({REASONS.get(x, x)})", n) for x, n in summary["inner_steps_discarded"].items()),
        ("missing", "of survivors CANNOT BE FOUND, which must not happen: please report it", survivors if ended else 0),
    ]
    return [(look, said, n) for look, said, n in found if n and (n > 0 or look == "missing")]


def scores(summary: Summary, unit: str = "") -> list[str]:
    """Returns the final evaluation, and the first one if it is different, with inner steps if the first was not at the
    job's start. ``unit``: of the loss."""
    first, last = summary["val_step_initial"], summary["val_step_final"]
    at, then = (f" (step {first})", f" (step {last})") if first else ("", "")

    def line(name: str, before: str, after: str) -> str:
        return f"held-out {name} {after}{then}" if first == last else f"held-out {name} {before}{at} -> {after}{then}"

    loss = [figure(summary[f"val_loss_{when}"], 5) for when in ("initial", "final")]
    lines = [line("loss", *loss) + unit]
    if summary["val_accuracy_final"] is not None and summary["val_accuracy_initial"] is not None:
        lines.append(line("accuracy", *(f"{summary[f'val_accuracy_{when}']:.3f}" for when in ("initial", "final"))))
    metrics = summary["val_metrics_initial"] or {}
    lines += [line(x, str(metrics.get(x)), str(value)) for x, value in (summary["val_metrics_final"] or {}).items()]
    return lines


def _outer_steps(summary: Summary, asked: int | None) -> str:
    failed, made = summary["attempts_aborted"], count(summary["outer_steps"], "outer step")
    tried = f", with {count(failed, 'failed attempt')}" if failed else ""
    made = f"took part in {made}" if summary["survivor_inner_steps_lost"] is None else made  # of one replica
    beyond = asked is not None and summary["inner_step"] > asked
    why = f" (train.inner_steps={asked}: a job ends with an outer step)" if beyond else ""
    return f"{made}{tried}; the model is at inner step {summary['inner_step']}{why}"


def _lives(summary: Summary) -> str:
    took = f"{summary['wall_s']:.1f} s"
    if summary["survivor_inner_steps_lost"] is None:
        if not (died := len(summary["deaths"])):
            return f"{took} from the replica's first start to its end"
        return f"{took} passed since the replica's first start, with {count(died, 'death')} and the time away"
    joins, resumed = len(summary["joins"]), summary["resumed"]
    parts = [f"{count(resumed, 'replica')} resumed"] if resumed else []
    parts += [count(joins, "join")] if joins or not resumed else []
    if early := summary["ended_before_joining"]:
        parts.insert(0, f"{count(early, 'replica')} ended before joining")
    parts.append(count(len(summary["deaths"]), "death"))
    if killed := len(summary.get("killed_at_the_end", ())):
        parts.append(f"{count(killed, 'replica')} killed at the end")
    return f"{', '.join(parts)}; the run took {took}"


def _waits(summary: Summary) -> list[str]:
    lines = []
    if (stall := summary["stall_s"]) is not None:
        lines.append(f"sync wait per outer step: median {stall['median']:.3f} s, max {stall['max']:.3f} s")
    if (replay := summary["replay"]) is not None:
        lines.append(
            f"replay: {count(replay['steps'], 'inner step')} of {count(replay['replicas'], 'dead replica')} redone in "
            f"{replay['seconds']:.1f} s, copies fetched in {replay['fetch_s']:.2f} s; "
            f"{count(replay['copies'], 'copy', 'copies')} of "
            f"{replay['copy_bytes'] / replay['copies'] / 1e6:.1f} MB took {replay['copy_s']:.2f} s of training time"
        )
    return lines
