"""What the journal knows of a job to which no replica has come since the coordinator started."""

from __future__ import annotations

from typing import Any

from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.sync.server.journal import Journal


def remembered(journal: Journal, most: int) -> dict[str, dict[str, Any]]:
    """Job -> its status, as in `Job.status`, for the ``most`` newest jobs in the journal. A job goes on, or is resumed,
    when its replicas come."""
    found = {}
    for job in journal.jobs()[-most:]:
        if (saved := journal.load(job)) is not None:
            found[job] = idle(job, saved.epoch, _phase(saved))
    return found


def idle(job: str, epoch: int | None, phase: str) -> dict[str, Any]:
    """The status of a job that has no replicas to show."""
    return {"job": job, "epoch": epoch, "phase": phase, "fragments": [], "replicas": []}


def ended_at(saved: e.JournalState | None) -> e.Decided | None:
    """The last decision of a job whose replicas have all left; None if they have not."""
    last = _last(saved) if saved is not None and saved.gone and not saved.roster else None
    return last if last is not None and last.version else None


def ended(version: int, inner_step: int | None) -> str:
    """Says in words that a job has ended there."""
    return f"ended at version {version}, inner step {inner_step}: no replica is left"


def _last(saved: e.JournalState) -> e.Decided | None:
    return next((d for d in reversed(saved.decided) if not d.fragment), None)


def _phase(saved: e.JournalState) -> str:
    if (failed := saved.failed) is not None:
        return f"failed, since replica {failed.replica} was lost: {failed.why}"
    if (last := ended_at(saved)) is not None:
        return ended(last.version, last.inner_step)
    last = _last(saved)
    came = f"version {last.version}, inner step {last.inner_step}" if last is not None else "version 0"
    return f"not running: it had come to {came}; no replica has connected since the coordinator started"
