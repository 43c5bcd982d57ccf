"""The training losses of replicas that write no folder, as the coordinator has heard of them."""

from __future__ import annotations

from collections.abc import Mapping

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.report.steps import Steps

_MOST = 10_000


class Heard:
    """Folds the losses that the coordinator has told of replicas without any steps on record.

    Attributes:
        of: replica -> these; of very many the means of two that follow each other, of four and so on.
    """

    def __init__(self, steps: Mapping[str, Steps]) -> None:
        self._recorded = {replica for replica, own in steps.items() if own}
        self.of: dict[str, Steps] = {}

    def add(self, event: Line) -> None:
        """A `losses`."""
        for replica, (incarnation, inner_step, loss) in data_of(event)["losses"].items():
            if replica not in self._recorded:
                into = self.of.setdefault(replica, Steps())
                into.add(event["t_s"], incarnation, inner_step, loss)
                if len(into) >= _MOST:
                    self.of[replica] = _halved(into)


def _halved(steps: Steps) -> Steps:
    found, at = Steps(), 0
    while at < len(steps):
        pair = 2 if at + 1 < len(steps) and steps.incarnation[at] == steps.incarnation[at + 1] else 1
        middle = [sum(each[at : at + pair]) / pair for each in (steps.t_s, steps.inner_step, steps.loss)]
        found.add(middle[0], steps.incarnation[at], round(middle[1]), middle[2])
        at += pair
    return found
