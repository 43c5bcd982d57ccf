"""What a report says of a run that a signal has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftopt.watch.jsonl import data_of
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import listed


def interrupted(run: Run) -> str:
    """By what a run was interrupted and where, what became of its replicas and of others'; "": it was not
    interrupted."""
    if run.interruption is None:
        return ""
    data, killed = data_of(run.interruption), killed_by(run)
    planned = data.get("planned") or max(
        (x.counts.get("planned", 0) for x in run.facts.lives.of.values() if x.counts), default=0
    )
    of = f" of {planned:,}" if planned else ""
    at = run.interruption.get("inner_step", run.summary["inner_step"])  # others may have trained on
    where = f" at inner step {int(at):,}{of}" if run.facts.decided else ""
    told = [f"It was interrupted by {data['by']}{where}"]
    if left := sorted(_left(run) & set(data.get("asked", ()))):
        told.append(f"{listed(left)} left")
    told += [f"{listed(sorted(who))} {'was' if len(who) == 1 else 'were'} killed by {by}" for by, who in killed.items()]
    text = f"{told[0]}{': ' if told[1:] else ''}{', and '.join(told[1:])}."
    return " ".join([text, *_others(data.get("others", ()), data.get("untrained", ()))])


def _others(holders: Sequence[str], untrained: Sequence[str]) -> Iterator[str]:
    """What the replicas of other launches did then."""
    did = {"trained on": [x for x in holders if x not in untrained]}
    did["had not begun to train"] = [x for x in holders if x in untrained]
    for what, who in did.items():
        if who:
            yield f"{listed(who)} of other launches {what}, and {'holds' if len(who) == 1 else 'hold'} the model."
    if without := [x for x in untrained if x not in holders]:
        yield f"{listed(without)} of other launches had not begun to train."


def killed_by(run: Run) -> dict[str, list[str]]:
    """What has ended replicas at once with the run, such as the second Ctrl-C -> these replicas."""
    found: dict[str, list[str]] = {}
    for event in run.facts.named("death"):
        if by := data_of(event).get("by"):
            found.setdefault(str(by), []).append(event["replica"])
    return found


def _left(run: Run) -> set[str]:
    return {
        event["replica"]
        for event in run.facts.named("leave", "end")
        if event["event"] == "leave" or data_of(event).get("reason") == "left"
    }
