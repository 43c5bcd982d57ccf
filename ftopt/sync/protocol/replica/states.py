"""The states of a replica in one fragment. ``docs/protocol.md`` has their transitions, under "States"."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ftopt.sync.protocol import messages as m


class State(Enum):
    """The state of a replica in one fragment."""

    NOTHING = auto()
    """It has no committed state, and knows no source of one."""
    HOLDS = auto()
    """It has a committed state; no contribution is outstanding."""
    OFFERED = auto()
    """A contribution for the next version is outstanding (FREEZE)."""
    REDUCING = auto()
    """The reduction of an attempt runs, with the outstanding contribution in it."""
    PREPARED = auto()
    """The attempt's result is ready, and waits for its decision, also across connections."""
    FETCHING = auto()
    """Another state is wanted. A record and an outstanding contribution stay until it is installed."""


class Soundness(Enum):
    """How sound the held state is. Independent of `State`: a state in doubt may be held, offered or fetched."""

    FIRM = auto()
    TENTATIVE = auto()
    """Sound, but a cold start may still replace it, since other fragments are not held: nothing is offered on it."""
    IN_DOUBT = auto()
    """It may be damaged: until a fetch is complete it is not served and nothing is proposed."""
    RESET = auto()
    """It belongs to a dead incarnation: pending work on it is void."""


class Transfer(Enum):
    """The shell's state of a fetch. Independent of `State`: a fetch outlives the connection that requested it."""

    NONE = auto()
    RUNNING = auto()
    """The shell answers with `fetched` or `fetch_failed`."""
    INSTALLING = auto()
    """A fetched state is being installed: the held state is unknown until that has ended."""


class Call(Enum):
    """What the trainer is to do about the round. Independent of `State`: it changes nothing that the replica holds."""

    NONE = auto()
    CALL_IN = auto()
    """Nothing is outstanding, and the others wait for a contribution: propose."""
    TRAIN_ON = auto()
    """Do not wait for the outstanding contribution: cut off, or too few replicas."""


@dataclass(slots=True)
class Offer:
    """The outstanding contribution. ``now``: it wants the round at once. ``known``: it was sent on this connection."""

    contribution: m.Contribution
    now: bool = False
    known: bool = False
