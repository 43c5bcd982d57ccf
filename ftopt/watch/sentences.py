"""Notable events in words, for people who watch a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ftopt.common.plural import count, natural, times
from ftopt.watch.jsonl import Line, data_of

_NAMED = 8


class Note(NamedTuple):
    """A sentence about an event.

    Attributes:
        text: the sentence.
        tone: ``good`` (something works again), ``warn``, ``bad``, or "".
    """

    text: str
    tone: str = ""


_TONES = {
    "good": ("join", "return", "fetched", "checkpoint", "replayed", "restore", "recover", "started",
             "up_to_speed", "promoted"),
    "warn": ("fault", "abort", "lost", "gone", "reset", "awaited", "held_open", "stalled", "damaged", "disconnected",
             "slow", "kept_out"),
    "bad": (
        "death", "refuse", "fork", "mismatch", "evicted", "outlier", "checkpoint_failed", "replay_failed", "halt",
        "rollback", "diverged", "unlike", "implausible", "overflow", "left_out", "discarded",
    ),
}  # fmt: skip
_TONE = {event: tone for tone, events in _TONES.items() for event in events}


def note_of(record: Line) -> Note | None:
    """A notable event in words, None for the others."""
    text = _text(record)
    return Note(text, _TONE.get(record["event"], "")) if text is not None else None


def names(replicas: Iterable[str]) -> str:
    """``r0, r1 and r2``; of very many the first ones."""
    known = sorted(replicas, key=natural)
    if len(known) > _NAMED:
        return f"{', '.join(known[:_NAMED])} and {len(known) - _NAMED} more"
    return " and ".join(filter(None, (", ".join(known[:-1]), *known[-1:])))


def subject(record: Line) -> str:
    """The replica of an event, with its incarnation if it is not the first."""
    life = record["incarnation"]
    return f"{record['replica']} (incarnation {life})" if life > 1 else str(record["replica"])


def figure(number: float, digits: int = 4) -> str:
    """A loss, or the like, with so many significant digits: ``2.000``, ``0.0001234``."""
    return f"{number:#.{digits}g}".rstrip(".")


def score(data: Line) -> str:
    """What an evaluation has found."""
    accuracy = {"accuracy": data["accuracy"]} if data.get("accuracy") is not None else {}
    found = {"held-out loss": data["loss"], **accuracy, **data.get("metrics", {})}
    return ", ".join(f"{name} {'not finite' if x is None else f'{figure(x)}'}" for name, x in found.items())


_SILENT = frozenset(
    (
        "propose", "gather", "quorum", "reduce", "payload", "reduce.after", "prepare", "decide", "commit", "apply",
        "stall", "losses", "counts",
    )
)  # fmt: skip
"""Events of every outer step, most of a job's; nothing is said of them."""


def _text(record: Line) -> str | None:
    if record["event"] in _SILENT:
        return None
    name, data, who = record["event"], data_of(record), subject(record)
    version, step = record.get("version"), record.get("inner_step")
    if name == "fault":
        lasting = f" for {data['for_s']:g} s" if data.get("for_s") else ""
        what = f" {data['what']} of" if data.get("what") else ""
        return f"fault: {data['do']}{what} {who} at {data['point']}, inner step {step}{lasting}"
    if name == "evaluate":
        return None if data["final"] else f"inner step {step}: {score(data)}"
    if name == "spawn":
        again = data.get("life", 1) > 1
        return f"{'the coordinator' if who == 'coordinator' else who} is started again" if again else None
    if name in ("start", "recover"):
        if data.get("undone"):
            return str(data["undone"])
        return None if name == "start" else f"the job goes on; its newest version is {version}, inner step {step}"
    if name == "discarded":
        return f"{who}: {count(data['steps'], 'inner step')} dropped ({_WHY.get(data['reason'], data['reason'])})"
    if name == "overflow":
        return f"{who}: version {version} is not finite; {count(data['steps'], 'step is', 'steps are')} lost in it"
    if name == "replay":
        return f"{who} repeats {count(data['steps'], 'inner step')} of incarnation {data['of'][1]}"
    if name == "started":
        return f"{who} trains from inner step {data['start_step']} on"
    words = {
        "join": f"{who} joined; the job is at inner step {step}",
        "return": f"{who} is back; the job is at version {version}, inner step {step}",
        "leave": f"{who} left{_why_left(data)}",
        "spare": f"{who} stands by",
        "promoted": f"{who} is promoted, and trains in the place of {data.get('in_place_of')}",
        "over": over(who, data),
        "final": final(data),
        "stop": f"{data.get('by')} has stopped the job: {data.get('reason')}",
        "lost": f"the connection to {who} has ended",
        "disconnected": f"the connection of {who} to the coordinator has ended; it connects again",
        "gone": f"{who} is given up ({data.get('reason')}); if it comes back, its pending steps are dropped",
        "fetched": f"{who} has fetched version {version}",
        "abort": f"version {version}: an attempt failed ({data.get('reason', 'no reason')}); it is repeated",
        "death": f"{who} died ({data.get('status')})",
        "refuse": f"{who} was refused: {data.get('reason')}",
        "hold": str(data.get("text")),
        "job_failed": f"the job has failed: {who} was lost, and sync.on_loss is fail ({data.get('reason')})",
        "halt": f"the job has halted: {data.get('reason')}",
        "awaited": f"no connected replica holds the newest version, and {names(data.get('for', ()))} may: outer steps "
        f"wait for that, {data.get('at_most_s', 0):g} s at most; training goes on",
        "held_open": f"version {version} waits for {names(data.get('for', ()))} to fetch the state",
        "stalled": f"{who} takes no step; version {version} is made without it",
        "slow": f"{who} is slow: a step takes {data.get('step_s', 0):.3g} s, {times(data.get('factor', 0))} as long "
        f"as usual; outer steps {'call it in early' if data.get('called_in') else 'wait for it'}",
        "up_to_speed": f"{who} is up to speed again: a step takes {data.get('step_s', 0):.3g} s, "
        f"{data.get('usual_s', 0):.3g} s are usual now",
        "reset": f"{who} starts again from the job's state: {data.get('reason')}",
        "fork": f"{who} holds a state of another history",
        "mismatch": f"version {version}: results differ",
        "evicted": f"version {version}: {who} disagrees again; it fetches what the others hold",
        "kept_out": f"{names(data.get('replicas', ()))} take part in no outer step for {data.get('seconds', 0):.3g} s, "
        f"and keep their steps: reductions fail ({who}: {data.get('reason')})",
        "diverged": f"{who}: {data.get('reason')}",
        "unlike": f"{who}: {data.get('reason')}",
        "damaged": f"{who}: memory of version {version} has changed; it fetches it again",
        "outlier": f"{who} contributes nothing to version {version}: {data.get('reason')}",
        "left_out": f"{who}: a micro-batch is left out: {data.get('reason')}",
        "checkpoint_failed": f"{who}: no checkpoint: {data.get('reason')}",
        "keep_failed": f"{who}: {data.get('keeper')} could not fetch its newest copy: {data.get('reason')}",
        "not_kept": str(data.get("reason")),
        "replay_failed": f"{who} cannot repeat its predecessor's steps: {data.get('reason')}",
        "rollback": f"no replica is connected any more; the last version is {version}"
        if data.get("connected") == 0
        else f"no replica holds version {version} any more: the job goes back to what the replicas hold",
        "restore": f"{who} restores the checkpoint of version {version}",
    }
    return words.get(name)


def _why_left(data: Mapping[str, Any]) -> str:
    if data.get("reason"):
        return f" by an error: {data['reason']}"
    return " before its part of the job was done" if data.get("early") else ""


def over(who: object, data: Mapping[str, Any]) -> str:
    """Why a replica is sent home."""
    reason = str(data.get("reason"))
    return f"{who} comes too late: {reason}" if "has ended" in reason else f"{who}, a spare, is not needed any more"


def final(data: Mapping[str, Any]) -> str | None:
    """Whether the replicas that have come to their end have one version; None: there is but one."""
    ended = len(data.get("replicas", ()))
    same = "identical" if data.get("identical") else "NOT IDENTICAL"
    return f"final weights of {ended} replicas: {same}" if ended > 1 else None


_WHY = {
    "nonfinite": "NaN or Inf in its parameters or gradients",
    "reset": "it starts again from the job's state",
    "outlier": "they were out of line twice in a row",
    "loaded": "user code has loaded other weights",
    "taken_over": "the others have computed its share",
    "replaced": "a peer's parameters have replaced them",
    "mixed": "the method mixes them with the others'",
}
