"""The limits of messages, and the types of fields that have them. Messages that exceed a limit are refused.

`wire` checks a field of type ``Annotated[T, check]`` with ``check(value)``, which returns the error, "" if none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sized
from typing import Annotated, Any

from ftopt.sync.protocol.intervals import Ranges

MAX_MESSAGE_BYTES = 4 << 20  # a hello of 1024 fragments with a full roster and all gone incarnations has 3 MiB
MAX_NAME = 128  # characters of a job's name and of a replica's id: a host name (64 at most) and a process id
MAX_WORD = 256  # characters of a digest, a chain, an address, a state
MAX_TEXT = 4096  # characters of a reason, or of a line that must agree among the replicas
MAX_LINES = 256  # lines that must agree; a method has about ten settings
MAX_FRAGMENTS = 1024  # each costs the coordinator a few KiB, and a look at each message; papers use up to 50
MAX_REPLICAS = 4096  # known at a time; a job of ten thousand nodes has islands of several
MAX_GONE = 1 << 12  # gone incarnations in a hello: twice as many as a job remembers at most
MAX_RANKS = 4096  # ranks of a replica
MAX_RANGES = 1 << 10  # sample ranges of a contribution, and of all that a replica holds: it has a few
MAX_DONE = 1 << 14  # ranges of the units that are done: holes are what a job of 4096 replicas holds
MAX_UNIT = 1 << 52  # units of a job: what is granted stays below MAX_INT
MAX_BATCH = 1 << 14  # units of a global batch: sharing them out among replicas of different speeds takes 10 ms
MAX_WANTS = 1 << 30  # units that a replica asks for
MAX_VALUES = 8  # numbers in a reading
MAX_READING = 1e150  # such a number: a sum of squares of fp32 parameters; sums of 4096 of them are finite
MAX_SECONDS = 1e9  # seconds that a replica has waited: 30 years
MAX_REASONS = 16  # why steps were dropped
MAX_WAITS = 1024  # waits for outer steps of different lengths
MAX_LOSS = 1e30  # a loss beyond it is shown as infinite: squares of sums stay finite
MAX_KEY = 512  # characters of a rendezvous key: job, fragment, attempt and rank
MAX_VALUE = 1 << 20  # characters of a rendezvous value: 200 bytes for each of 4096 members, in base64
MAX_INT = (1 << 53) - 1  # any integer: what JSON carries exactly everywhere
MAX_STEPS = 1 << 40  # inner steps, versions, incarnations: 35 years of a thousand a second
FAR_LIVES = (
    1 << 20
)  # a life this far beyond all lives that a coordinator knows is false, if it is also beyond half of all lives
MAX_ADVANCE = 1 << 30  # inner steps of a contribution: of a replica that has trained alone for a year
MAX_EPOCH = 1 << 33  # seconds since 1970, until 2242; with a million attempts each, numbers stay below MAX_INT
FAR_EPOCHS = 10 * 365 * 24 * 3600  # an epoch this far beyond the coordinator's clock is false: ten years
MAX_WEIGHT = 1e24  # a trillion tokens times a trillion tokens per step
MAX_STEP_S = 3600.0  # seconds of an inner step: a call-in waits two of them
MAX_OVERLAP_S = 1e9  # seconds that a replica trains on without a result; the grace is bounded apart from that
MAX_GRACE = 1e6  # gamma of the adaptive grace
HISTORY = 1000  # decisions of a fragment that are kept: enough to tell a fork from lateness


def wrong_name(name: str) -> str:
    """Why ``name`` cannot name a job or a replica, "" when it can."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME:
        return f"it has {len(name)} characters; at most {MAX_NAME} are allowed"
    if not name.isprintable():
        return "it holds characters that cannot be printed"
    if name != name.strip():
        return "it begins or ends with a blank"
    if name in (".", "..") or name.startswith("-"):  # a folder, an option
        return "it is a dot, two dots, or begins with a dash; begin it with a letter or a digit"
    if unicodedata.combining(name[0]):
        return "it begins with a combining character, which a terminal puts onto the one before"
    return ""


Check = Callable[[Any], str]

_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")


def within(most: float, least: float = 0) -> Check:
    def check(value: float) -> str:
        return "" if least <= value <= most else f"{value!r:.40}; must be from {least:g} to {most:g}"

    return check


def at_most(most: int) -> Check:
    """A check that limits the number of characters or entries; numbers pass."""

    def check(value: Any) -> str:
        if not isinstance(value, Sized) or len(value) <= most:
            return ""
        return f"{len(value)} {'characters' if isinstance(value, str) else 'entries'}; at most {most} are allowed"

    return check


def at_most_ranges(most: int) -> Check:
    def check(ranges: Ranges) -> str:
        last = -1
        for start, stop in ranges if len(ranges) <= most else ():
            if wrong := within(MAX_UNIT)(stop) or within(stop)(start):
                return wrong
            if not last < start < stop:
                return f"({start}, {stop}) after {last}; ranges must be sorted, and not touch"
            last = stop
        return at_most(most)(ranges)

    return check


def once_a_fragment(parts: tuple[Any, ...]) -> str:
    seen: set[int] = set()
    for part in parts:
        if part.fragment in seen:
            return f"two of fragment {part.fragment}"
        seen.add(part.fragment)
    return ""


def base64(text: str) -> str:
    return "" if _BASE64.fullmatch(text) else "base64 is needed"


def loss(value: float | str | None) -> str:
    if isinstance(value, str):
        return "" if value in ("nan", "inf", "-inf") else f"{value!r:.40}; must be a number, 'nan', 'inf' or '-inf'"
    return "" if value is None else within(MAX_LOSS, -MAX_LOSS)(value)


def wrong_word(text: str) -> str:
    """Why ``text`` cannot be a digest, address or state, "" when it can; these are logged unchanged."""
    return at_most(MAX_WORD)(text) or ("" if text.isprintable() else "it holds characters that cannot be printed")


Word = Annotated[str, wrong_word]
ShortText = Annotated[str, at_most(MAX_TEXT)]
Name = Annotated[str, wrong_name]
Number = Annotated[int, within(MAX_INT)]
Step = Annotated[int, within(MAX_STEPS)]  # an inner step, a version or an incarnation
FragmentIndex = Annotated[int, within(MAX_FRAGMENTS - 1)]
Wants = Annotated[int, within(MAX_WANTS)]
Loss = Annotated[float | str | None, loss]  # JSON has no number for a loss that is not finite
UnitRanges = Annotated[Ranges, at_most_ranges(MAX_RANGES)]
Done = Annotated[Ranges, at_most_ranges(MAX_DONE)]
