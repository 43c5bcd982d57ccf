"""What a replica is at with one fragment. The state diagram is in ``docs/protocol.md``, under "States"."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ftopt.sync.protocol import messages as m


class State(Enum):
    """What a replica is at with one fragment."""

    NOTHING = auto()
    """It has no committed state, and knows no source of one."""
    HOLDS = auto()
    """It has a committed state; no contribution is outstanding."""
    OFFERED = auto()
    """A contribution for the next version is outstanding (FREEZE)."""
    REDUCING = auto()
    """The reduction of an attempt runs, with the outstanding contribution in it."""
    PREPARED = auto()
    """The attempt's result is there, and waits for its decision, also across connections."""
    FETCHING = auto()
    """Another state is wanted. A record and an outstanding contribution stay until it is installed."""


class Soundness(Enum):
    """How far the held state can be relied on. Apart from `State`: a state in doubt may be held, offered or fetched."""

    FIRM = auto()
    TENTATIVE = auto()
    """Sound, but a cold start may still replace it, since other fragments are not held: nothing is offered on it."""
    IN_DOUBT = auto()
    """It may be damaged: until a fetch is complete it is not served and nothing is proposed."""
    RESET = auto()
    """It is a dead incarnation's: pending work on it is void."""


class Transfer(Enum):
    """What the shell does about fetches. Apart from `State`: a fetch outlives the connection on which it was wanted."""

    NONE = auto()
    RUNNING = auto()
    """The shell answers with `fetched` or `fetch_failed`."""
    INSTALLING = auto()
    """A fetched state is being installed: what is held is not known before that has ended."""


class Call(Enum):
    """What the trainer is to do about the round. Apart from `State`: it changes nothing that the replica holds."""

    NONE = auto()
    CALL_IN = auto()
    """Nothing is outstanding, and the others wait for a contribution: propose."""
    TRAIN_ON = auto()
    """Do not wait for the outstanding contribution: cut off, or too few replicas."""


@dataclass(slots=True)
class Offer:
    """The outstanding contribution. ``now``: its trigger means now. ``known``: it was sent on this connection."""

    contribution: m.Contribution
    now: bool = False
    known: bool = False
