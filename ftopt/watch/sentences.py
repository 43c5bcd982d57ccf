"""Notable events in words: the one table for the terminal, logs, the live page, the report, and wandb's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ftopt.common.plural import count, natural, times
from ftopt.common.printable import printable
from ftopt.events import Event
from ftopt.watch.jsonl import Line, data_of

REASONS = {
    "nonfinite": "the contribution was not finite",
    "outlier": "out of line for the second time in a row",
    "reset": "the replica started again from the job's state",
    "mixed": "overwritten by an outer step that mixes",
    "taken_over": "the others have computed this share",
    "loaded": "user code has loaded other weights",
    "replaced": "replaced by a peer's parameters after a cut",
    "undone": "the job went back to a version without them",
}
"""Why steps are dropped (event `discarded`), in words."""
OLD_NEWS = ", gone before"
"""End of the reason of ``gone`` when a returning replica reports an incarnation that had ended before: the coordinator
of that time has reported and counted it."""
JOB_ENDED = "the job has ended"
_NAMED = 8


class Note(NamedTuple):
    """A sentence about an event, printable, without a full stop. ``tone``: ``good`` (something works again), ``warn``,
    ``bad``, or ""."""

    text: str
    tone: str = ""


def note_of(record: Line) -> Note | None:
    """A notable event in words; None for other events."""
    tone, words = SENTENCES.get(record["event"], ("", ""))
    if not words:
        return None
    fields = _Fields(record)
    text = words.format_map(fields) if isinstance(words, str) else words(fields)
    return Note(printable(text), tone) if text else None


def names(replicas: Iterable[str], most: int = _NAMED) -> str:
    """``r0, r1 and r2``; if there are very many, only the first ones."""
    known = sorted(replicas, key=natural)
    if len(known) > most:
        return f"{', '.join(known[:most])} and {len(known) - most} more"
    return " and ".join(filter(None, (", ".join(known[:-1]), *known[-1:])))


def subject(record: Line) -> str:
    """The replica of an event, with its incarnation if it is not the first."""
    life = record["incarnation"]
    return f"{record['replica']} (incarnation {life})" if life > 1 else str(record["replica"])


def figure(number: float, digits: int = 4) -> str:
    """A loss or similar number with ``digits`` significant digits: ``2.000``, ``0.0001234``."""
    return f"{number:#.{digits}g}".rstrip(".")


def clock(seconds: float) -> str:
    """A time since the run's start: ``0:50``, ``1:02:03``."""
    sign, rest = ("\N{MINUS SIGN}", -seconds) if seconds < -0.5 else ("", max(0.0, seconds))
    minutes, whole_s = divmod(math.floor(rest), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{sign}{hours}:{minutes:02}:{whole_s:02}" if hours else f"{sign}{minutes}:{whole_s:02}"


def score(data: Mapping[str, Any]) -> str:
    """The result of an evaluation."""
    accuracy = {"accuracy": data["accuracy"]} if data.get("accuracy") is not None else {}
    found = {"held-out loss": data["loss"], **accuracy, **data.get("metrics", {})}
    return ", ".join(f"{name} {'not finite' if x is None else f'{figure(x)}'}" for name, x in found.items())


def is_death(event: Event) -> bool:
    """Whether ``gone`` is of a replica that has not left in good order, and is news."""
    reason = str(event.data.get("reason"))
    return reason != "left" and not reason.endswith(OLD_NEWS)


def comes_too_late(event: Event) -> bool:
    """Whether a replica was turned away because its job has ended (END)."""
    return event.event in ("refuse", "over") and str(event.data["reason"]).startswith(JOB_ENDED)


def epochs_done(first: int, last: int) -> str:
    """The line of `epoch_done` about these epochs."""
    return f"epoch {last} of the data is done" if first == last else f"epochs {first} to {last} of the data are done"


def data_ended(epochs: int | None) -> str:
    """The line of `data_ended`."""
    return f"the data have ended after {count(epochs, 'epoch')}" if epochs else "the data have ended"


class _Fields(dict[str, Any]):
    """The fields that a sentence can use: an event's data, replica and incarnation, ``who``, ``version``, ``step``."""

    def __init__(self, record: Line) -> None:
        at = {"who": subject(record), "version": record.get("version"), "step": record.get("inner_step")}
        own = {"replica": record["replica"], "incarnation": record["incarnation"]}
        super().__init__({**data_of(record), **at, **own})

    def __missing__(self, name: str) -> str:
        return f"no {name} given"


def _interrupted(x: _Fields) -> str:
    second = "a second " if x.get("again") == x["by"] else ""
    again = f", and {second}{x['again']} ended it at once" if x.get("again") else ""
    return f"the run was interrupted by {x['by']}{again}"


def _fault(x: _Fields) -> str:
    lasting = f" for {x['for_s']:g} s" if x.get("for_s") else ""
    what = f" {x['what']} of" if x.get("what") else ""
    return f"fault: {x['do']}{what} {x['who']} at {x['point']}, inner step {x['step']}{lasting}"


def _spawn(x: _Fields) -> str:
    who = "the coordinator" if x["who"] == "coordinator" else x["who"]
    return f"{who} is started again" if x.get("life", 1) > 1 else ""


def _join(x: _Fields) -> str:
    return f"{x['who']} {'is back' if x['incarnation'] > 1 else 'joined'}; the job is at inner step {x['step']}"


def _begins(said: str) -> Callable[[_Fields], str]:
    return lambda x: str(x.get("undone") or said.format_map(x))


def _leave(x: _Fields) -> str:
    early = " before its part of the job was done"
    why = f"{early}, by an error: {x['reason']}" if x.get("reason") else early if x.get("early") else ""
    return f"{x['who']} left{why}"


def _over(x: _Fields) -> str:
    late = str(x["reason"]).startswith(JOB_ENDED)
    return f"{x['who']} comes too late: {x['reason']}" if late else f"{x['who']}, a spare, is not needed any more"


def _promoted(x: _Fields) -> str:
    lost = "its own former incarnation" if x["in_place_of"] == x["replica"] else x["in_place_of"]
    return f"{x['who']} is promoted, and trains in the place of {lost}"


def _final(x: _Fields) -> str:
    ended, same = len(x.get("replicas", ())), "identical" if x.get("identical") else "NOT IDENTICAL"
    return f"final weights of {ended} replicas: {same}" if ended > 1 else ""


def _gone(x: _Fields) -> str:
    reason = str(x["reason"])
    if reason.endswith(OLD_NEWS):
        return f"{x['who']} had ended before this coordinator began"
    if reason.startswith(("superseded", "reported by its next incarnation")):
        return f"{x['replica']} was started again: its incarnation {x['incarnation']} is over"
    return f"{x['who']} is removed ({reason}); if it comes back, its pending steps are dropped"


def _awaited(x: _Fields) -> str:
    return (
        f"no connected replica holds the newest version, and {names(x.get('for', ()))} may: outer steps and joins wait "
        f"for that, {x.get('at_most_s', 0):g} s at most; training goes on"
    )


def _slow(x: _Fields) -> str:
    follows = "call it in early" if x.get("called_in") else "wait for it"
    return (
        f"{x['who']} is slow: a step takes {x.get('step_s', 0):.3g} s, {times(x.get('factor', 0))} as long as usual; "
        f"outer steps {follows}"
    )


def _kept_out(x: _Fields) -> str:
    return (
        f"{names(x.get('replicas', ()))} take part in no outer step for {x.get('seconds', 0):.3g} s, and keep their "
        f"steps: reductions fail ({x['who']}: {x['reason']})"
    )


def _rollback(x: _Fields) -> str:
    if x.get("connected") == 0:
        return f"no replica is connected any more; the last version is {x['version']}"
    return f"no replica holds version {x['version']} any more: the job goes back to what the replicas hold"


def _dropped(x: _Fields) -> str:
    return f"{x['who']}: {count(x['steps'], 'inner step')} dropped ({REASONS.get(x['reason'], x['reason'])})"


SENTENCES: dict[str, tuple[str, str | Callable[[_Fields], str]]] = {
    # The run and the job.
    "spawn": ("", _spawn),
    "interrupted": ("warn", _interrupted),
    "fault": ("warn", _fault),
    "hold": ("", "{text}"),
    "start": ("", _begins("the job has started")),
    "recover": ("good", _begins("the job goes on; its newest version is {version}, inner step {step}")),
    "restore": ("good", "no connected replica holds the state: {who} restores the checkpoint of version {version}"),
    "rollback": ("bad", _rollback),
    "halt": ("bad", "the job has halted: {reason}"),
    "stop": ("", "{by} has stopped the job: {reason}"),
    "job_failed": ("", "the job has failed, since {who} was lost (policy.on_loss=fail): {reason}"),
    "final": ("", _final),
    "epoch_done": ("", lambda x: epochs_done(x.get("epoch", 0), x.get("epoch", 0))),
    "data_ended": (
        "",
        lambda x: f"{data_ended(x.get('epochs'))}: {count(x.get('units', 0), 'unit is', 'units are')} done",
    ),
    # Replicas come, stand by, are slow, and go.
    "join": ("good", _join),
    "return": ("good", "{who} goes on; the job is at version {version}, inner step {step}"),
    "started": ("good", "{who} trains from inner step {start_step} on"),
    "spare": ("", "{who} stands by"),
    "promoted": ("good", _promoted),
    "over": ("", _over),
    "refuse": ("bad", "{who} was refused: {reason}"),
    "leave": ("", _leave),
    "lost": ("warn", "the connection to {who} has ended"),
    "disconnected": ("warn", "the connection of {who} to the coordinator has ended; it connects again"),
    "gone": ("warn", _gone),
    "death": (
        "bad",
        lambda x: f"{x['who']} was killed by {x['by']}" if x.get("by") else f"{x['who']} died ({x['status']})",
    ),
    "reset": ("warn", "{who} starts again from the job's state: {reason}"),
    "slow": ("warn", _slow),
    "up_to_speed": (
        "good",
        lambda x: (
            f"{x['who']} is up to speed again: a step takes {x.get('step_s', 0):.3g} s, "
            f"{x.get('usual_s', 0):.3g} s are usual now"
        ),
    ),
    # Outer steps.
    "abort": ("warn", "version {version}: an attempt failed ({reason}); it is repeated"),
    "awaited": ("warn", _awaited),
    "held_open": ("warn", lambda x: f"version {x['version']} waits for {names(x.get('for', ()))} to fetch the state"),
    "stalled": ("warn", "{who} takes no step; version {version} is made without it"),
    "mismatch": ("bad", "version {version}: the replicas' results differ; the attempt is repeated"),
    "evicted": ("bad", "version {version}: {who} disagrees again; it fetches what the others hold"),
    "fork": ("bad", "{who} holds a state of another history: its work cannot be merged"),
    "kept_out": ("warn", _kept_out),
    "outlier": ("bad", "{who} contributes nothing to version {version}: {reason}"),
    "overflow": (
        "bad",
        lambda x: (
            f"{x['who']}: version {x['version']} is not finite; {count(x['steps'], 'step is', 'steps are')} lost in it"
        ),
    ),
    "discarded": ("bad", _dropped),
    "undone": ("", "{who}: the last inner step was undone"),
    "left_out": ("bad", "{who}: a micro-batch is left out: {reason}"),
    "held_twice": ("", "{who} holds samples that another replica holds too"),
    # States, copies, checkpoints, scores.
    "fetched": ("good", "{who} has fetched version {version}"),
    "fetch_failed": ("", "{who}: a fetch has failed: {reason}"),
    "diverged": ("bad", "{who}: {reason}"),
    "unlike": ("bad", "{who}: {reason}"),
    "damaged": ("warn", "{who}: memory of version {version} has changed; it fetches it again"),
    "checkpoint_failed": ("bad", "{who}: no checkpoint: {reason}"),
    "keep_failed": ("", "{who}: {keeper} could not fetch its newest copy: {reason}"),
    "not_kept": ("", "{reason}"),
    "replay": ("", lambda x: f"{x['who']} repeats {count(x['steps'], 'inner step')} of incarnation {x['of'][1]}"),
    "replay_failed": ("bad", "{who} cannot repeat its predecessor's steps: {reason}"),
    "evaluate": ("", lambda x: "" if x["final"] else f"inner step {x['step']}: {score(x)}"),
}
"""Event -> its tone, and its sentence: a template, or a function of an event's fields ("" if it is no news)."""

TOGETHER = {
    "join": "joined",
    "return": "go on",
    "lost": "have lost their connections",
    "leave": "left",
    "spare": "stand by",
    "stalled": "take no step; the outer step is made without them",
}
"""Events that many replicas have at once, which become one line, and the words for several replicas."""


def of_several(event: str, first: Sequence[str], number: int) -> str:
    """The line of `TOGETHER` about ``number`` replicas, of which ``first`` names some."""
    more = f" and {number - len(first)} more" if number > len(first) else ""
    return f"{', '.join(printable(name, 32) for name in first)}{more} {TOGETHER[event]}"
