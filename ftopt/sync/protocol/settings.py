"""The settings of the outer-sync layer: one frozen dataclass, the same fields in Python and in a recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sync:
    """Who is waited for, and for how long. The first replica of a job defines them; one that differs is refused.

    Args:
        min_replicas: members that a quorum must have when it forms. Default 1: a lone survivor goes on.
        start_replicas: replicas that must be connected before a cold start. None: as many as come within ``start_s``
            (``ftopt run`` sets it to the recipe's ``replicas``).
        start_s: seconds after which a cold start happens with whoever is there. Default 60.
        grace_s: seconds from the first proposal after which those still at work are called in. Default 2.
        heartbeat_s: seconds between two progress messages of a replica. Default 0.5.
        dead_after_s: seconds of silence after which a replica counts as cut off, and seconds without a reduced piece
            after which an attempt fails. Default 3; at least 3 heartbeats.
        recovery_s: seconds that a coordinator without its journal waits for the replicas it hears of. Default 30.
        gone_after_s: seconds after which a replica that is away is gone for good. Default 600.
        tail_s: at the end of the data: seconds after which a replica is gone for good that holds samples and does
            nothing with them, while another one has nothing left to train on. Default None: ``gone_after_s``.
        outlier_ratio: a contribution whose norm is above so many times the median of its peers' weighs nothing, and its
            steps stay pending. Counts with two peers at least. Default 100: a corrupted replica, no noisy one; None:
            off.
        recover: what becomes of the inner steps that a dead replica had not handed in. ``drop`` (default): its samples
            are others' to train on. ``replay``: a neighbour keeps a copy of what it was at the start of its round, and
            the process that comes in its place does its steps again; see ``docs/replay.md``.
        codec: wire precision of the payloads: ``fp32`` (default), ``bf16``, ``int8``, ``fp4`` or
            ``top_k:FRACTION:BITS``, see ``docs/codecs.md``.
        error_feedback: how much of what a lossy codec left out of one contribution goes with the next (beta of
            ``e <- beta * e + Delta``), 0 to 1. Default 1; 0: nothing is kept.
        backend: who moves the payloads. ``gloo`` (default).

    Raises:
        ValueError: a value out of range; the message says which one, what is allowed and what to do.
    """

    min_replicas: int = 1
    start_replicas: int | None = None
    start_s: float = 60.0
    grace_s: float = 2.0
    heartbeat_s: float = 0.5
    dead_after_s: float = 3.0
    recovery_s: float = 30.0
    gone_after_s: float = 600.0
    tail_s: float | None = None
    outlier_ratio: float | None = 100.0
    recover: str = "drop"
    codec: str = "fp32"
    error_feedback: float = 1.0
    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(
                f"sync.min_replicas={self.min_replicas}; must be at least 1; use 1 to let a lone survivor go on"
            )
        if self.start_replicas is not None and self.start_replicas < 1:
            raise ValueError(f"sync.start_replicas={self.start_replicas}; must be null or at least 1")
        for name in ("start_s", "grace_s", "heartbeat_s", "dead_after_s", "recovery_s", "gone_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"sync.{name}={getattr(self, name)}; must be a number of seconds above 0")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"sync.dead_after_s={self.dead_after_s:g} with heartbeat_s={self.heartbeat_s:g}; must be at least 3 "
                f"heartbeats, or one late heartbeat declares a replica dead; use dead_after_s={3 * self.heartbeat_s:g} "
                "or a shorter heartbeat_s"
            )
        if self.gone_after_s < self.dead_after_s:
            raise ValueError(
                f"sync.gone_after_s={self.gone_after_s:g}; must be at least dead_after_s={self.dead_after_s:g}"
            )
        if self.tail_s is not None and self.tail_s < self.dead_after_s:
            raise ValueError(
                f"sync.tail_s={self.tail_s:g}; must be null or at least dead_after_s={self.dead_after_s:g}"
            )
        if self.outlier_ratio is not None and not self.outlier_ratio > 1:
            raise ValueError(f"sync.outlier_ratio={self.outlier_ratio:g}; must be null or above 1; 100 is generous")
        if self.recover not in ("drop", "replay"):
            raise ValueError(f"sync.recover={self.recover!r}; allowed: drop, replay")
        if not 0 <= self.error_feedback <= 1:
            raise ValueError(
                f"sync.error_feedback={self.error_feedback:g}; must be from 0 (off) to 1 (nothing is forgotten)"
            )
        if self.backend != "gloo":
            raise ValueError(f"sync.backend={self.backend!r}; allowed: gloo")
