"""What a loop does every so many inner steps of the job, where the inner step jumps."""

from __future__ import annotations

from collections.abc import Hashable


class Passed:
    """For each question that a loop asks, the multiple that the job's inner step had passed at the last one."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}

    def ask(self, question: Hashable, every: int, *, start_step: int, inner_step: int) -> bool:
        """Whether the inner step has passed a multiple of ``every`` since the same question, or the start."""
        last, now = self._last.get(question, start_step // every), inner_step // every
        self._last[question] = max(last, now)  # a step that is undone does not pass it again
        return now > last
