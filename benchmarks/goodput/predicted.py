"""What the simulation says of the same schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.goodput.account import Account, simulated
from benchmarks.goodput.schedule import Setting
from benchmarks.simulate.assumptions import Model
from benchmarks.simulate.comparison import Ours
from benchmarks.simulate.policies import Discard, Synchronous, young_daly
from benchmarks.simulate.traces import Trace

PARAMETERS = 288
"""Of the tiny model."""
LINK_BYTES_S = 1e9
"""Loopback; with so small a model it does not matter."""


@dataclass(frozen=True)
class Measured:
    """What the simulation is told of the machine, from a window without failures and the processes' starts.

    Args:
        step_s, spread: of an inner step, between two rounds.
        start_s: from the start of a process to its connection.
        stall_s: how long a blocking round keeps a training thread.
    """

    step_s: float
    spread: float
    start_s: float
    stall_s: float


def model(setting: Setting, measured: Measured, *, delay: int, latency_s: float) -> Model:
    """The simulation's, for this setting."""
    return Model(
        step_s=measured.step_s,
        spread=measured.spread,
        sync_every=setting.sync_every,
        delay=delay,
        parameters=PARAMETERS,
        link_bytes_s=LINK_BYTES_S,
        latency_s=latency_s,
        start_s=setting.start_s + measured.start_s,
        silent=False,
        notice_s=setting.notice_s if setting.told else 0.0,
        hand_in_s=setting.notice_s,
        grace_s=setting.grace_s,
        dead_after_s=setting.dead_after_s,
    )


def latency(setting: Setting, measured: Measured, quiet: Trace) -> float:
    """The latency with which a blocking round takes as long as without failures: all work of a round is in it."""
    low_s, high_s = 1e-5, 0.1
    for _ in range(12):
        middle_s = (low_s + high_s) / 2
        found = _ours(quiet, model(setting, measured, delay=0, latency_s=middle_s))
        assert found.stall is not None and found.attempts is not None
        stall_s = found.stall * quiet.machine_seconds() / max(1, found.attempts) / setting.machines
        low_s, high_s = (middle_s, high_s) if stall_s < measured.stall_s else (low_s, middle_s)
    return (low_s + high_s) / 2


def predict(
    setting: Setting,
    measured: Measured,
    trace: Trace,
    *,
    latency_s: float,
    seed: int,
    ddp_step_s: float,
    pause_s: float,
) -> dict[str, Account]:
    """By way.

    Args:
        setting, measured, trace, latency_s: as said.
        seed: of the machines' step times.
        ddp_step_s: of a synchronous step, its exchange included.
        pause_s: from a kill to the next synchronous step.
    """
    late = model(setting, measured, delay=setting.delay, latency_s=latency_s)
    blocking = replace(late, delay=0)
    restart = Synchronous(
        name="checkpoint and restart",
        assumes="",
        pause_s=pause_s,
        join_s=0.0,
        checkpoint_s=setting.checkpoint_s,
        interval_s=setting.step_s * checkpoint_every(setting),
        cost=ddp_step_s / measured.step_s,
    )
    again = simulated(restart.run(trace, blocking))
    return {
        "ftopt, blocking": _ours(trace, blocking, seed),
        f"ftopt, delay {setting.delay}": _ours(trace, late, seed),
        "checkpoint and restart": replace(again, lost=0, others=again.lost + again.others),
        "torchft": simulated(Discard(any_failure=False, timeout_s=setting.dead_after_s).run(trace, blocking)),
    }


def checkpoint_every(setting: Setting) -> int:
    """Inner steps between two checkpoints: the interval of Young and Daly."""
    return max(1, round(young_daly(setting.checkpoint_s, setting.gap_s) / setting.step_s))


def _ours(trace: Trace, assumed: Model, seed: int = 0) -> Account:
    return simulated(Ours("", "", assumed).run(trace, seed, lambda name, share: None))
