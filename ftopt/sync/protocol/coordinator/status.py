"""The status of a coordinator's job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ftopt.sync.protocol.coordinator.machine import Coordinator


def status(coordinator: Coordinator, now: float) -> dict[str, Any]:
    startup, phase = coordinator.startup, "running"
    if (failed := coordinator.failed) is not None:
        phase = f"failed, since replica {failed.replica} was lost: {failed.why}"
    elif startup is not None:
        phase = startup.text(now)
    here = set() if startup is None else {x.replica for x in startup.hellos.values()}
    return {
        "job": coordinator.job,
        "epoch": coordinator.epoch,
        "phase": phase,
        **({"evict_after_s": coordinator.policy.evict_after_s} if coordinator.defined else {}),
        "fragments": [
            {
                "version": r.at.version,
                "chain": r.at.chain,
                "inner_step": r.versions.last.inner_step,
                "proposed": sorted(r.gather.proposals),
                "attempt": r.attempt.attempt if r.attempt else None,
                "attempts": r.decide.attempts,
                "attempts_aborted": r.decide.aborted,
            }
            for r in coordinator.rounds
        ],
        "replicas": [
            {
                "replica": x.replica,
                "incarnation": x.incarnation,
                "state": x.state if x.conn is not None else "connected" if x.replica in here else "away",
                "stalled": x.stalled and x.replica not in here,
                "slow": x.speed.slow,
                "not_kept": coordinator.members.backups.not_kept(x),
                "factor": round(x.speed.factor, 2),
                "inner_step": x.inner_step,
                "step_s": x.step_s,
                "loss": x.loss,
                "counts": asdict(x.counts) if x.counts is not None else None,
                "versions": [x.held[f].version if f in x.held else None for f in range(len(coordinator.rounds))],
            }
            for _, x in sorted(coordinator.roster.members.items())
        ],
    }
