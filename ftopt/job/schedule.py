"""Learning-rate schedules as functions of the job's inner step, so that a newcomer starts where the job is."""

from __future__ import annotations

import math

from ftopt.config.inner import CosineConfig, ScheduleConfig


def factor(schedule: ScheduleConfig, inner_step: int, inner_steps: int) -> float:
    """What the learning rate is multiplied with for the step after ``inner_step`` of ``inner_steps``."""
    warm = min(1.0, (inner_step + 1) / schedule.warmup) if schedule.warmup else 1.0
    if not isinstance(schedule, CosineConfig):
        return warm
    progress = (inner_step - schedule.warmup) / max(1, inner_steps - schedule.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    return warm * (schedule.floor + (1 - schedule.floor) * cosine)
