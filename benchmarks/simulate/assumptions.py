"""The assumptions of a simulation about compute, network and recovery, as numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from ftopt.errors import UserError, check_choice, check_number, check_whole
from ftopt.sync.protocol.limits import MAX_FRAGMENTS

HAND_IN = ("none", "leave", "sync")


@dataclass(frozen=True)
class Option:
    """The command-line option of `python -m benchmarks simulate` for a field of `Model`.

    Args:
        name: ``--name``.
        text: description, for the command's help.
        default: the command's default in the option's unit, if it is not the model's.
        unit: the field's value for an option of 1: a half if the option is a round trip and the field one way.
    """

    name: str
    text: str
    default: float | None = None
    unit: float = 1.0


def _option(value: Any, name: str, text: str, *, default: float | None = None, unit: float = 1.0) -> Any:
    return field(default=value, metadata={"option": Option(name, text, default, unit)})


@dataclass(frozen=True, kw_only=True)
class Model:
    """The assumptions; all seconds are virtual. A field with an `Option` is an option of the command, described there.

    Args:
        payload_bytes: bytes that one replica contributes to a round of the whole model. Default: 4 bytes a parameter.
        hand_in: how a replica reacts to the notice of its removal. ``none``: not at all. ``leave``:
            ``optimizer.close()``, which offers pending steps to the round that others open. ``sync``: it opens a round
            and leaves, as on SIGTERM and as with ``close(early=True)``.
        hand_in_s: seconds before the removal at which it does so, if the notice is that long.
        fragments: number of fragments of the model, each with its own rounds. Default 1.
        silent: a removed machine tells nobody, and is missed after ``dead_after_s`` (default). False: its connections
            break at once, like those of a process that is killed on a machine that lives.
        min_replicas, evict_after_s: as in ``policy``.
        adaptive_grace: gamma of the adaptive grace; 0 (default): ``grace_s``.
    """

    step_s: float = _option(1.0, "step-s", "computation of an inner step")
    spread: float = _option(0.02, "spread", "relative standard deviation of the machines' step times")
    slow_every_s: float = _option(math.inf, "slow-every", "seconds between two slowdowns of one machine")
    slow_factor: float = _option(2.0, "slow-factor", "how many times longer its steps take then")
    slow_for_s: float = _option(600.0, "slow-for", "seconds of a slowdown, on average")
    sync_every: int = _option(360, "sync-every", "inner steps of a round (H)")
    delay: int = _option(0, "delay", "inner steps of the policies with delay", default=10)
    fragments: int = 1
    parameters: float = _option(350e6, "parameters", "of the model")
    payload_bytes: float | None = None
    link_bytes_s: float = _option(1.25e9, "gbit-s", "link of a machine, in Gbit/s", unit=1.25e8)
    latency_s: float = _option(0.001, "latency-s", "a round trip between machines", unit=0.5)
    start_s: float = _option(15.0, "start", "seconds until a new machine's process connects")
    silent: bool = True
    batch: int = _option(1, "batch", "samples of an inner step")
    notice_s: float = _option(
        0.0, "notice", "seconds of notice before a removal, for the policies that use it; 0: none", default=120.0
    )
    hand_in: str = "sync"
    hand_in_s: float = _option(25.0, "hand-in", "seconds before the removal at which they use it")
    min_replicas: int = 1
    grace_s: float = _option(2.0, "grace", "policy.grace_s")
    dead_after_s: float = _option(3.0, "dead-after", "policy.dead_after_s; large fleets run faster with more")
    evict_after_s: float = 600.0
    adaptive_grace: float = 0.0

    def __post_init__(self) -> None:
        for name in ("parameters", "link_bytes_s", "grace_s", "evict_after_s"):
            check_number(*self._told(name), "(0, inf)")
        check_number(*self._told("step_s"), "[1e-6, 1e9]", of="seconds")
        for name in ("dead_after_s", "slow_for_s"):
            check_number(*self._told(name), "[0.001, 1e9]", of="seconds")
        for name in ("latency_s", "start_s", "notice_s", "hand_in_s", "adaptive_grace"):
            check_number(*self._told(name), "[0, inf)")
        check_number(*self._told("spread"), "[0, 1)")
        check_number(*self._told("slow_factor"), "[1, inf)")
        if not self.slow_every_s >= 0.001:
            raise UserError(f"--slow-every={self.slow_every_s:g}; must be at least 0.001 seconds, or inf for none")
        for name in ("sync_every", "fragments", "batch", "min_replicas"):
            check_whole(*self._told(name), 1)
        for name in ("sync_every", "batch"):
            check_number(*self._told(name), "[1, 1e9]")
        check_number(*self._told("fragments"), f"[1, {MAX_FRAGMENTS}]")  # a job refuses more, too
        check_whole(*self._told("delay"), 0)
        if self.delay >= self.sync_every:
            raise UserError(
                f"--delay={self.delay} with --sync-every={self.sync_every}; must be less, or a round never ends"
            )
        check_choice("hand_in", self.hand_in, HAND_IN)

    def _told(self, name: str) -> tuple[str, Any]:
        """A field as the user has given it: the name and value of its option if it has one, else its own."""
        value, option = getattr(self, name), OPTIONS.get(name)
        if option is None:
            return name, value
        return f"--{option.name}", value if option.unit == 1 else value / option.unit

    @property
    def round_bytes(self) -> float:
        """Bytes of one replica's contribution to one fragment."""
        return (4 * self.parameters if self.payload_bytes is None else self.payload_bytes) / self.fragments

    @property
    def state_bytes(self) -> float:
        """Bytes of the committed state of one fragment: anchor and momentum in fp32."""
        return 8 * self.parameters / self.fragments

    def reduce_s(self, members: int) -> float:
        """Seconds of a reduction: reduce-scatter and all-gather at the link's rate, messages along a tree."""
        if members < 2:
            return 0.0
        moved = 2 * (members - 1) / members * self.round_bytes
        return moved / self.link_bytes_s + 2 * math.ceil(math.log2(members)) * self.latency_s

    def fetch_s(self, at_once: int = 1) -> float:
        """Seconds to fetch one fragment's state, while the source serves ``at_once`` replicas."""
        return self.state_bytes * at_once / self.link_bytes_s + 2 * self.latency_s

    def settings(self, start_replicas: int) -> dict[str, float | int | str | None]:
        """The settings of ``policy``."""
        return {
            "min_replicas": self.min_replicas,
            "start_replicas": start_replicas,
            "grace_s": self.grace_s,
            "dead_after_s": self.dead_after_s,
            "evict_after_s": max(self.evict_after_s, self.dead_after_s),
            "heartbeat_s": self.heartbeat_s,
        }

    @property
    def heartbeat_s(self) -> float:
        """``policy.heartbeat_s``: its default up to ``dead_after_s`` of 3 s, and a sixth of that beyond."""
        return self.dead_after_s / 6


OPTIONS: dict[str, Option] = {x.name: x.metadata["option"] for x in fields(Model) if "option" in x.metadata}
"""Field of `Model` -> its option."""
