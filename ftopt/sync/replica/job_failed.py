"""What the training thread raises when its job has failed (LOSS)."""

from __future__ import annotations

import time

from ftopt.common.plural import count
from ftopt.errors import JobFailed
from ftopt.sync.protocol import messages as m


def job_failed(job: str, told: m.JobFailed, pending: int) -> JobFailed:
    """The error for the coordinator's message; ``pending``: inner steps of this replica that are in no version."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(told.at_s))
    versions = f"version{'s' if len(told.versions) > 1 else ''} {', '.join(map(str, told.versions))}"
    left = f"{count(pending, 'inner step')} of this replica {'is' if pending == 1 else 'are'} in no version; "
    last = f"; its last known inner step was {told.lost_step}" if told.lost_step else ""  # 0: never heard
    error = JobFailed(
        f"job {job!r} has failed, since replica {told.replica} was lost (policy.on_loss=fail): {told.why}{last}. That "
        f"was at {when}; the job stays at {versions}, inner step {told.inner_step}; {left if pending else ''}"
        "resume it from its newest checkpoint (`ftopt resume RUN`), or "
        "use policy.on_loss=go_on, with which the others train on"
    )
    error.replica, error.incarnation, error.why = told.replica, told.incarnation, told.why
    error.versions, error.inner_step, error.pending_steps = told.versions, told.inner_step, pending
    return error
