"""The models of compute, network and recovery that a simulation assumes, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftopt.errors import UserError, check_choice, check_number, check_whole

HAND_IN = ("none", "leave", "sync")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is assumed; all seconds are virtual.

    Args:
        step_s: of one inner step on a usual machine. Default 1.
        spread: standard deviation of the machines' step times, relative. Default 0.02.
        slow_every_s: mean time between two slowdowns of one machine; inf (default): none.
        slow_factor: how many times longer a step takes then. Default 2.
        slow_for_s: mean duration of a slowdown. Default 600.
        sync_every: inner steps of a round (H). Default 360.
        delay: inner steps from a snapshot to its result; 0 (default): training waits.
        fragments: of the model, each with its own rounds. Default 1.
        parameters: of the model. Default 350e6.
        payload_bytes: what one replica contributes to a round of the whole model. Default: 4 bytes a parameter.
        link_bytes_s: bytes a second of one machine's link. Default 1.25e9 (10 Gbit/s).
        latency_s: of a message. Default 0.001.
        start_s: from when a machine is there to when its process connects (start, imports, device). Default 15.
        batch: samples of one inner step. Default 1.
        notice_s: seconds before its removal at which a machine is told; 0 (default): not at all.
        hand_in: what a replica does then. ``none``: nothing. ``leave``: ``optimizer.close()``, which offers what is
            pending to the round that others open. ``sync``: it opens one and leaves, as on SIGTERM and as with
            ``close(early=True)``.
        hand_in_s: seconds before the removal at which it does so, if the notice is that long. Default 25.
        min_replicas, grace_s, dead_after_s, gone_after_s: as in ``sync``.
        adaptive_grace: gamma of the adaptive grace; 0 (default): ``grace_s``.
    """

    step_s: float = 1.0
    spread: float = 0.02
    slow_every_s: float = math.inf
    slow_factor: float = 2.0
    slow_for_s: float = 600.0
    sync_every: int = 360
    delay: int = 0
    fragments: int = 1
    parameters: float = 350e6
    payload_bytes: float | None = None
    link_bytes_s: float = 1.25e9
    latency_s: float = 0.001
    start_s: float = 15.0
    batch: int = 1
    notice_s: float = 0.0
    hand_in: str = "sync"
    hand_in_s: float = 25.0
    min_replicas: int = 1
    grace_s: float = 2.0
    dead_after_s: float = 3.0
    gone_after_s: float = 600.0
    adaptive_grace: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_s", "parameters", "link_bytes_s", "grace_s", "dead_after_s", "gone_after_s", "slow_for_s"):
            check_number(name, getattr(self, name), "(0, inf)")
        for name in ("latency_s", "start_s", "notice_s", "hand_in_s", "adaptive_grace"):
            check_number(name, getattr(self, name), "[0, inf)")
        check_number("spread", self.spread, "[0, 1)")
        check_number("slow_factor", self.slow_factor, "[1, inf)")
        if not self.slow_every_s > 0:
            raise UserError(f"slow_every_s={self.slow_every_s:g}; must be seconds above 0, or inf for none")
        for name in ("sync_every", "fragments", "batch", "min_replicas"):
            check_whole(name, getattr(self, name), 1)
        check_whole("delay", self.delay, 0)
        if self.delay >= self.sync_every:
            raise UserError(
                f"delay={self.delay} with sync_every={self.sync_every}; must be less, or a round never ends"
            )
        check_choice("hand_in", self.hand_in, HAND_IN)

    @property
    def round_bytes(self) -> float:
        """One replica's contribution of one fragment."""
        return (4 * self.parameters if self.payload_bytes is None else self.payload_bytes) / self.fragments

    @property
    def state_bytes(self) -> float:
        """The committed state of one fragment: anchor and momentum in fp32."""
        return 8 * self.parameters / self.fragments

    def reduce_s(self, members: int) -> float:
        """A reduction among so many: reduce-scatter and all-gather at the link's rate, messages along a tree."""
        if members < 2:
            return 0.0
        moved = 2 * (members - 1) / members * self.round_bytes
        return moved / self.link_bytes_s + 2 * math.ceil(math.log2(members)) * self.latency_s

    def fetch_s(self, at_once: int = 1) -> float:
        """A fetch of one fragment's state, while the source serves so many."""
        return self.state_bytes * at_once / self.link_bytes_s + 2 * self.latency_s

    def settings(self, start_replicas: int) -> dict[str, float | int | str | None]:
        """Those of ``sync``."""
        return {
            "min_replicas": self.min_replicas,
            "start_replicas": start_replicas,
            "grace_s": self.grace_s,
            "dead_after_s": self.dead_after_s,
            "gone_after_s": max(self.gone_after_s, self.dead_after_s),
            "heartbeat_s": self.heartbeat_s,
        }

    @property
    def heartbeat_s(self) -> float:
        """``sync.heartbeat_s``: its default up to ``dead_after_s`` of 3 s, and a sixth of that beyond."""
        return self.dead_after_s / 6
