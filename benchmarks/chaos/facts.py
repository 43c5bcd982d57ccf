"""What a campaign knows by itself, and what it has come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.jobs import Run
from benchmarks.meter import Sizes


@dataclass
class Outcome:
    """Of one campaign. All numbers that must be 0 are in `bad` when they are not.

    Args:
        faults_s: how long faults struck.
        steps_lost, steps_twice: of survivors' steps, of all fragments; ``told``: dropped, and their logs say so.
        died: steps that died with their process, in fragment 0.
        samples_lost, samples_twice: of the ledger's; None without.
        stall_s: the longest stall of a training thread in ``step()``; ``allowed_s``: what the table allows there;
            ``too_long``: stalls that are longer than that.
        idle_s: the longest time without an outer step.
        data_wait_s: the longest wait for a batch.
        end_s: from the data's end, or the order to stop, to the last process' end; None: it did not end.
        unlike: looks at an anchor that differ from another process' at the same versions.
    """

    faults_s: float = 0.0
    steps: int = 0
    steps_lost: int = 0
    steps_twice: int = 0
    told: int = 0
    died: int = 0
    samples_lost: int | None = None
    samples_twice: int | None = None
    stall_s: float = 0.0
    allowed_s: float = 0.0
    too_long: int = 0
    idle_s: float = 0.0
    data_wait_s: float = 0.0
    end_s: float | None = None
    unlike: int = 0
    loud: int = 0
    grown: int = 0
    events: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Facts:
    """What the campaign knows by itself.

    Args:
        runs: all processes.
        way: the method's name.
        policy: the job's settings.
        faults: in order.
        ordered: when the replicas were told to stop; 0: the data end by themselves.
        complaints: of the one who struck.
        coordinator: sizes of its last life.
        jumps: when the clock of the day was set, and by how much.
    """

    folder: Path
    runs: Sequence[Run]
    way: str
    samples: int
    policy: Mapping[str, Any]
    started: float
    faults: Sequence[Mapping[str, Any]]
    ordered: float
    complaints: Sequence[str]
    coordinator: Sequence[Sizes]
    jumps: Sequence[tuple[float, float]] = ()
