"""The state that the parts of one replica's outer step share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ftopt.step.outer.counters import Counters
from ftopt.step.outer.fragment import Fragment
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import ReplicaGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The state that the threads share, `Fragment`s and `Counters`, with its environment.

    Args:
        clock: seconds, monotonic.
        memory: memory for flat tensors; ``committed_memory``: for those of committed states.
    """

    group: ReplicaGroup
    clock: Callable[[], float]
    memory: Memory
    committed_memory: Memory
    counters: Counters = field(default_factory=Counters)
    fragments: list[Fragment] = field(default_factory=list)

    def inner_step(self) -> int:
        """The job's committed inner step plus this replica's pending steps."""
        return self.fragments[0].inner_step()

    def job_step(self) -> int:
        """The job's inner step that the parameters have reached, where replicas take the same steps: pending gradients
        that no round has counted are not steps yet."""
        return self.fragments[0].applied.meta.inner_step
