"""A coordinator's limits. A connection that exceeds one is closed; the others do not notice.

The limits of a single message are in `ftopt.sync.protocol.limits`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.coordinator.machine import Coordinator


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one coordinator.

    Args:
        waiting: connections that have not shown the token yet; beyond it the oldest is closed. 512: a thousand replicas
            that return within a second are admitted, in milliseconds each, and file descriptors are left for them.
        patience_s: seconds until the token must be shown, and from then until the hello. 10: a hello needs
            milliseconds, a frozen laptop more.
        connections: replicas connected at a time, over all jobs. 4096.
        jobs: jobs at a time; when a further one comes, those without a connection make room. 64.
        replicas: known replicas per job. 4096.
        messages_per_s: messages that a connection may send, on average. 1000: a replica with 50 fragments under way
            sends a few hundred per round.
        message_burst: messages above that average. 20,000: the rendezvous of a group of 4096 asks for that many keys.
        bytes_per_s: bytes that a connection may send, on average. 4 MiB.
        byte_burst: bytes above that average. 64 MiB: a hello of the largest size, and the rendezvous after it.
        unsent_bytes: bytes queued for a connection that does not read. 64 MiB.
        groups: newest process groups whose rendezvous keys are kept. 64: each fragment has one.
        store_keys: rendezvous keys per job. 65,536: 16 groups of 4096.
        store_bytes: bytes of rendezvous values per job. 256 MiB: Gloo's values grow with the square of the group.
        waiting_keys: keys that a connection may wait for at a time; the oldest requests are forgotten. 8192: two
            groups of 4096.
    """

    waiting: int = 512
    patience_s: float = 10.0
    connections: int = 4096
    jobs: int = 64
    replicas: int = 4096
    messages_per_s: float = 1000.0
    message_burst: float = 20_000.0
    bytes_per_s: float = float(4 << 20)
    byte_burst: float = float(64 << 20)
    unsent_bytes: int = 64 << 20
    groups: int = 64
    store_keys: int = 1 << 16
    store_bytes: int = 256 << 20
    waiting_keys: int = 1 << 13

    def refuses(self, hello: m.Hello, machine: Coordinator) -> str:
        """Why the replicas that ``hello`` names are too many for the job, "" when they are not."""
        known = machine.roster.members.keys()
        heard = len(machine.startup.hellos) if machine.startup is not None else 0
        new = {x for x in (hello.replica, *(replica for replica, _ in hello.roster)) if x not in known}
        count = len(known) + heard
        if not new or count + len(new) <= self.replicas:
            return ""
        return (
            f"job {hello.job!r} has {count} replicas already, at most {self.replicas} are taken; end some, or start "
            "another job"
        )


class Exceeded(Exception):
    """A connection went beyond a limit; the text says which."""


class Meter:
    """A token bucket that fills at ``rate`` per second up to ``burst``. ``what``: its unit, for the message.

    ``now`` is the clock, in seconds.
    """

    def __init__(self, what: str, rate: float, burst: float, now: float) -> None:
        self._what, self._rate, self._burst = what, rate, burst
        self._left, self._seen_s = burst, now

    def draw(self, amount: float, now: float) -> None:
        """Takes ``amount``; raises `Exceeded` when there is not enough."""
        self._left = min(self._burst, self._left + (now - self._seen_s) * self._rate)
        self._seen_s = now
        if amount > self._left:
            raise Exceeded(f"more than {self._rate:g} {self._what} a second")
        self._left -= amount
