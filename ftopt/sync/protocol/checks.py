"""Whether a well-formed message from a replica makes sense: numbers in range, names that are names, short lists.

`from_replica` turns the text of a stranger into a message that the coordinator machine can take.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized

from ftopt.sync.protocol import limits
from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.intervals import Ranges
from ftopt.sync.protocol.limits import MAX_INT, MAX_STEPS

_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


def from_replica(text: str) -> m.FromReplica:
    """The message in ``text``.

    Raises:
        MessageError: it is none, or none that a replica may send; says what is wrong.
    """
    message = m.decode(text)
    if not isinstance(message, m.FromReplica):
        raise m.MessageError(f"a replica sends no {type(message).__name__}")
    check_message(message)
    return message


def check_message(message: m.FromReplica) -> None:
    """Raises `MessageError` for a message that makes no sense, whatever the state of the job."""
    match message:
        case m.Hello():
            _hello(message)
        case m.Propose(contribution=contribution, wants=wants):
            _contribution(contribution)
            _within("wants", wants, limits.MAX_WANTS)
        case m.Prepared():
            _fragment(message.fragment)
            _within("attempt", message.attempt, MAX_INT)
            _word("digest", message.digest)
        case m.Failed():
            _fragment(message.fragment)
            _within("attempt", message.attempt, MAX_INT)
            _text("reason", message.reason, limits.MAX_TEXT)
            if message.peer:
                _name("peer", message.peer)
        case m.Heartbeat():
            _text("state", message.state, limits.MAX_WORD)
            _within("inner_step", message.inner_step, MAX_STEPS)
            _within("step_s", message.step_s, limits.MAX_STEP_S)
            _once_a_fragment("readings", message.readings, limits.MAX_FRAGMENTS)
            for reading in message.readings:
                _within("readings.version", reading.version, MAX_STEPS)
                _few("readings.values", reading.values, limits.MAX_VALUES)
                for value in reading.values:
                    _within("readings.values", value, limits.MAX_READING, least=-limits.MAX_READING)
        case m.Holds(position=position):
            _position(position)
        case m.Lacks(fragment=fragment):
            _fragment(fragment)
        case m.Ask(units=units):
            _within("units", units, limits.MAX_WANTS)
        case m.Copied():
            _within("serial", message.serial, MAX_INT)
            _few("versions", message.versions, limits.MAX_FRAGMENTS)
            for version in message.versions:
                _within("versions", version, MAX_STEPS)
        case m.Keeps():
            _incarnation_ids("incarnation_id", [message.incarnation_id], 1)
            _within("serial", message.serial, MAX_INT)
        case m.StoreSet():
            _text("key", message.key, limits.MAX_KEY)
            _text("value", message.value, limits.MAX_VALUE)
            if not _BASE64.fullmatch(message.value):
                raise m.MessageError("value: base64 is needed")
        case m.StoreGet(key=key):
            _text("key", key, limits.MAX_KEY)


def _hello(hello: m.Hello) -> None:
    _name("job", hello.job)
    _name("replica", hello.replica)
    _within("incarnation", hello.incarnation, MAX_STEPS)
    _within("epoch", hello.epoch, limits.MAX_EPOCH)
    _within("inner_step", hello.inner_step, MAX_STEPS)
    _within("size", hello.size, limits.MAX_RANKS, least=1)
    _within("rank", hello.rank, hello.size - 1)
    _within("fragments", hello.fragments, limits.MAX_FRAGMENTS, least=1)
    _text("address", hello.address, limits.MAX_WORD)
    _word("initial", hello.initial)
    _few("lines", hello.lines, limits.MAX_LINES)
    for key, line in hello.lines.items():
        _text("lines", key, limits.MAX_WORD)
        _text("lines", line, limits.MAX_TEXT)
    _few("settings", hello.settings, limits.MAX_LINES)
    for key, setting in hello.settings.items():
        _text("settings", key, limits.MAX_WORD)
        if isinstance(setting, str):
            _text("settings", setting, limits.MAX_TEXT)
    for what, parts in (
        ("positions", hello.positions),
        ("contributions", hello.contributions),
        ("prepared", hello.prepared),
    ):
        _once_a_fragment(what, parts, hello.fragments)
    for position in (*hello.positions, *((hello.checkpoint,) if hello.checkpoint else ())):
        _position(position)
    for contribution in hello.contributions:
        _contribution(contribution)
    for incarnation_id in hello.prepared:
        _within("prepared.attempt", incarnation_id.attempt, MAX_INT)
        _within("prepared.version", incarnation_id.version, MAX_STEPS)
        _word("prepared.digest", incarnation_id.digest)
    _incarnation_ids("roster", hello.roster, limits.MAX_REPLICAS)
    _incarnation_ids("gone", hello.gone, limits.MAX_GONE)
    _few("adopted_by", hello.adopted_by, limits.MAX_REPLICAS)
    for replica, adopter in hello.adopted_by:
        _name("adopted_by", replica)
        _name("adopted_by", adopter)
    _ranges("claim", hello.claim, limits.MAX_RANGES)
    _ranges("done", hello.done, limits.MAX_DONE)
    _within("cursor", hello.cursor, limits.MAX_UNIT)
    _within("wants", hello.wants, limits.MAX_WANTS)
    _within("plan", hello.plan, MAX_INT)
    _ranges("units", hello.units, limits.MAX_RANGES)


def _contribution(c: m.Contribution) -> None:
    _fragment(c.fragment)
    _within("version", c.version, MAX_STEPS)
    _within("last_step", c.last_step, MAX_STEPS)
    _within("steps", c.steps, c.last_step)
    _within("weight", c.weight, limits.MAX_WEIGHT)
    _within("tokens", c.tokens, MAX_INT)
    _within("norm", c.norm, float("inf"))
    if c.weight and not (c.finite and c.steps):
        raise m.MessageError(f"weight: {c.weight:g} for what has no steps or is not finite; 0 is needed")
    _within("overlap_s", c.overlap_s, limits.MAX_OVERLAP_S)
    _within("grace", c.grace, limits.MAX_GRACE)
    _ranges("ranges", c.ranges, limits.MAX_RANGES)
    _within("plan", c.plan, MAX_INT)


def _ranges(what: str, ranges: Ranges, most: int) -> None:
    _few(what, ranges, most)
    last = -1
    for start, stop in ranges:
        _within(what, stop, limits.MAX_UNIT)
        _within(what, start, stop)
        if not last < start < stop:
            raise m.MessageError(f"{what}: ({start}, {stop}) after {last}; ranges must be sorted, and not touch")
        last = stop


def _position(position: m.Position) -> None:
    _fragment(position.fragment)
    _within("version", position.version, MAX_STEPS)
    _word("chain", position.chain)


def _once_a_fragment(
    what: str, parts: Sequence[m.Position | m.Contribution | m.PreparedAttempt | m.Reading], fragments: int
) -> None:
    seen: set[int] = set()
    for part in parts:
        _within(f"{what}.fragment", part.fragment, fragments - 1)
        if part.fragment in seen:
            raise m.MessageError(f"{what}: two of fragment {part.fragment}")
        seen.add(part.fragment)


def _incarnation_ids(what: str, incarnation_ids: Sequence[m.IncarnationId], most: int) -> None:
    _few(what, incarnation_ids, most)
    for replica, incarnation in incarnation_ids:
        _name(what, replica)
        _within(what, incarnation, MAX_STEPS, least=1)


def _fragment(fragment: int) -> None:
    _within("fragment", fragment, limits.MAX_FRAGMENTS - 1)


def _name(what: str, name: str) -> None:
    if wrong := limits.wrong_name(name):
        raise m.MessageError(f"{what}: {wrong}")


def _word(what: str, word: str) -> None:
    _text(what, word, limits.MAX_WORD)


def _text(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise m.MessageError(f"{what}: {len(text)} characters; at most {most} are allowed")


def _few(what: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise m.MessageError(f"{what}: {len(items)} entries; at most {most} are allowed")


def _within(what: str, value: float, most: float, *, least: float = 0) -> None:
    if not least <= value <= most:
        raise m.MessageError(f"{what}: {value!r:.40}; must be from {least:g} to {most:g}")
