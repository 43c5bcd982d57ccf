"""The text of a stranger as a message that the coordinator machine can take.

`limits` has what a field may hold. Here is what fields must be to each other.
"""

from __future__ import annotations

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.limits import within


def from_replica(text: str) -> m.FromReplica:
    """The message in ``text``.

    Raises:
        MessageError: it is none, or none that a replica may send; says what is wrong.
    """
    message = m.decode(text)
    if not isinstance(message, m.FromReplica):
        raise m.MessageError(f"a replica sends no {type(message).__name__}")
    match message:
        case m.Hello():
            _hello(message)
        case m.Propose(contribution=contribution):
            _contribution(contribution)
    return message


def _hello(hello: m.Hello) -> None:
    _within("rank", hello.rank, hello.size - 1)
    for what in ("positions", "contributions", "prepared"):
        for part in getattr(hello, what):
            _within(f"{what}.fragment", part.fragment, hello.fragments - 1)
    for contribution in hello.contributions:
        _contribution(contribution)


def _contribution(c: m.Contribution) -> None:
    _within("steps", c.steps, c.last_step)
    if c.weight and not (c.finite and c.steps):
        raise m.MessageError(f"weight: {c.weight:g} for what has no steps or is not finite; 0 is needed")


def _within(what: str, value: int, most: int) -> None:
    if wrong := within(most)(value):
        raise m.MessageError(f"{what}: {wrong}")
