"""The coordinator's events in words, for the live page. What happens in every round is not worth a line."""

from __future__ import annotations

from collections.abc import Sequence

from ftopt.common.plural import count, times
from ftopt.events import Event

MAX_CHARS = 300
NAMED = 5
"""Replicas that a sentence names; the others are counted."""
_JOB_ENDED = "the job has ended"
_NAME_CHARS = 32
"""So much is shown of each id where there are several."""
SILENT = frozenset(
    {
        "halt",
        "call_in",
        "quorum",
        "decide",
        "held_open",
        "frozen",
        "hurry",
        "equalized",
        "plan",
        "kept",
        "void",
        "losses",
        "counts",
    }
)
"""Events without a sentence: they happen in good rounds too, or another line says it (``halt``: the job's, which also
halts without the event)."""

OLD_NEWS = ", gone before"
"""With this ends the reason of ``gone`` when a replica that comes back tells of one that had ended before: the
coordinator of that time has told it, and counted it."""

LEFT_EARLY = "has left before its part of the job was done (an error, a signal, or its own decision)"
TOGETHER = {
    "join": ("has joined", "have joined"),
    "return": ("is back", "are back"),
    "lost": ("has lost its connection", "have lost their connections"),
    "leave": ("has left", "have left"),
    "spare": ("stands by", "stand by"),
    "stalled": (
        "is stalled: its training thread takes no step, and the outer step is made without it",
        "are stalled: their training threads take no step, and the outer step is made without them",
    ),
}
"""Events that many replicas have at a time, which is one line: what one does, and what several do."""


def in_words(event: Event) -> str | None:
    """A sentence without a full stop, printable and `MAX_CHARS` long at most; None: the event is not worth one."""
    if event.event in SILENT or (event.event == "gone" and event.data.get("reason") == "left"):
        return None
    if event.event == "final" and len(event.data.get("replicas", ())) < 2:
        return None
    return printable(_sentence(event), MAX_CHARS)


def is_death(event: Event) -> bool:
    """Whether ``gone`` is of a replica that has not left in good order, and is news."""
    reason = str(event.data.get("reason"))
    return reason != "left" and not reason.endswith(OLD_NEWS)


def comes_too_late(event: Event) -> bool:
    """Whether a replica was turned away since its job has ended (END)."""
    return event.event in ("refuse", "over") and str(event.data["reason"]).startswith(_JOB_ENDED)


def of_several(event: str, names: Sequence[str], count: int) -> str:
    """The line of `TOGETHER` about ``count`` replicas, of which ``names`` are the first ones."""
    cut = [printable(name, _NAME_CHARS) for name in names]
    return printable(f"{listed(cut, count)} {TOGETHER[event][1]}", MAX_CHARS)


def listed(names: Sequence[str], count: int | None = None) -> str:
    """Names with commas; of many, the first ones and how many more there are. ``count``: of them all."""
    more = (len(names) if count is None else count) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def epochs_done(first: int, last: int) -> str:
    """The line of `epoch_done` about these epochs."""
    return f"epoch {last} of the data is done" if first == last else f"epochs {first} to {last} of the data are done"


def printable(text: str, most: int) -> str:
    """``text`` without control and format characters, cut: it may come from a replica."""
    shown = "".join(char if char.isprintable() else "?" for char in text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def _sentence(event: Event) -> str:
    data, who = event.data, event.replica
    again = f" (incarnation {event.incarnation})" if event.incarnation > 1 else ""
    version = f"version {event.version}"
    reason = data.get("reason", "no reason given")
    match event.event:
        case "start" | "recover" if data.get("undone"):
            return str(data["undone"])
        case "start":
            return "the job has started"
        case "recover":
            return f"the job goes on; its newest version is {event.version}, inner step {event.inner_step}"
        case "restore":
            return f"no connected replica holds the job's state: {who} restores its checkpoint of {version}"
        case "leave" if data.get("reason"):
            return f"{who} has left before its part of the job was done, by an error: {reason}{again}"
        case "leave" if data.get("early"):
            return f"{who} {LEFT_EARLY}{again}"
        case name if (does := TOGETHER.get(name)) is not None:
            return f"{who} {does[0]}{again}"
        case "gone" if str(reason).endswith(OLD_NEWS):
            return f"incarnation {event.incarnation} of {who} had ended before this coordinator began"
        case "gone" if str(reason).startswith("superseded"):
            return f"{who} was started again; its incarnation {event.incarnation} is gone for good"
        case "gone":
            return f"{who} is gone for good{again}: {reason}"
        case "promoted":
            return f"{who}, a spare, trains in the place of {data.get('in_place_of')}"
        case "over" if str(reason).startswith(_JOB_ENDED):
            return f"{who} comes too late: {reason}"
        case "over":
            return f"{who}, a spare, is not needed any more"
        case "stop":
            return f"{data.get('by')} has stopped the job: {reason}"
        case "final":
            same = "identical" if data.get("identical") else "NOT IDENTICAL"
            return f"final weights of {count(len(data.get('replicas', ())), 'replica')}: {same}"
        case "refuse":
            return f"{who} was refused: {reason}"
        case "abort":
            return f"{version}: an attempt failed: {reason}"
        case "awaited":
            names = listed(list(data.get("for", [])))
            return f"outer steps and joins wait for {names}: no connected replica holds the newest version"
        case "job_failed":
            return f"the job has failed, since {who} was lost (sync.on_loss=fail): {reason}"
        case "keep_failed":
            return (
                f"{data.get('keeper')} could not fetch the newest copy of {who}, which its replay would need: {reason}"
            )
        case "fork":
            return f"{who} is on another branch of the history: its work cannot be merged"
        case "rollback" if data.get("connected") == 0:
            return f"no replica is connected any more; the last version is {event.version}"
        case "rollback":
            return f"no replica holds {version} any more: the job goes back to what the replicas hold"
        case "mismatch":
            return f"{version}: the replicas' results differ; the attempt is repeated"
        case "evicted":
            return f"{version}: the result of {who} differs again; it fetches what the others hold"
        case "kept_out":
            names, pause_s = listed(list(data.get("replicas", []))), data.get("seconds", 0)
            return f"{names} sit out for {pause_s:.3g} s, and keep their steps: reductions fail ({who}: {reason})"
        case "outlier":
            return f"the contribution of {who} to {version} is out of line, and has weight zero: {reason}"
        case "slow":
            follows = "outer steps call it in early" if data.get("called_in") else "outer steps wait for it"
            return f"{who} is slow: a step takes {times(data.get('factor', 0))} as long as usual; {follows}"
        case "up_to_speed":
            return f"{who} is up to speed again"
        case "unlike" | "diverged" | "not_kept":
            return str(reason)
        case "epoch_done":
            return epochs_done(data.get("epoch", 0), data.get("epoch", 0))
        case "data_ended":
            after = f" after {count(data['epochs'], 'epoch')}" if data.get("epochs") else ""
            return f"the data have ended{after}: {count(data.get('units', 0), 'unit is', 'units are')} done"
        case "held_twice":
            return f"{who} holds samples that another replica holds too"
        case other:
            return f"{other}: {who}{again}"
