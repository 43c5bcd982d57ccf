"""The replicas of other launches that are in a launch's job."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.status import Job


class Others:
    """Which they are, as the coordinator has last said.

    Attributes:
        here: all of them.
        untrained: those that have not taken an inner step yet.
        holders: those that hold the model, since they train or have fetched it.
    """

    def __init__(self, own: Collection[str]) -> None:
        self.here, self.untrained, self.holders = list[str](), list[str](), list[str]()
        self._own, self._trained = own, set[tuple[str, int]]()

    def hear(self, record: Line) -> None:
        """Takes up an event of the coordinator."""
        data = data_of(record)
        if record["event"] == "decide":
            self._trained.update((replica, life) for replica, life, steps, *_ in data.get("members", ()) if steps)
        elif record["event"] == "counts":
            each = data.get("counts", {}).items()
            self._trained.update((replica, life) for replica, (life, told) in each if told["steps"])

    def look(self, jobs: Iterable[Job], *, away: bool) -> None:
        """Takes up the job as the coordinator describes it. ``away``: include replicas that are not connected."""
        there = [x for job in jobs for x in job["replicas"] if away or x["state"] != "away"]
        found = {x["replica"]: x for x in there if x["replica"] not in self._own}
        self.here = sorted(found)
        self.untrained = [replica for replica in self.here if not self._has_trained(found[replica])]
        self.holders = [x for x in self.here if x not in self.untrained or _holds(found[x])]

    def told(self) -> dict[str, object]:
        """The fields of the event that a signal has ended the launch."""
        return {"others": self.holders, "untrained": self.untrained}

    def _has_trained(self, x: Mapping[str, Any]) -> bool:
        return bool((x.get("counts") or {}).get("steps")) or (x["replica"], x["incarnation"]) in self._trained


def _holds(x: Mapping[str, Any]) -> bool:
    return bool(x["versions"]) and None not in x["versions"]
