"""The lives of replicas that no command of this folder has started: how they ended, and what they have reported of
themselves.

Nobody recorded such a death when it happened. An incarnation has died if its replica has a later one, or if the
coordinator has lost it for good and it has recorded nothing later; and if it has reported neither its end nor that it
starts again from the job's state. It died when the coordinator lost its connection, or at its last record if that is
later. The next incarnation's record of that death bears that incarnation's time, and is left out. Without the
coordinator's events nobody knows whether it has died: the report only says that its record breaks off.

A replica that a script has started writes nothing. The coordinator's events have what it reported about itself
(`ftopt.sync.protocol.values.Counts`): ``lost`` and ``leave`` have the counts of the replica whose connection ends,
``counts`` now and then those of all connected replicas. For a replica that is killed they are about half a second old.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ftopt.watch.decisions import Incarnation
from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.lanes import is_kept_waiting
from ftopt.watch.report.steps import Steps

BROKE_OFF = "broke_off"
"""The event in place of `death` where the coordinator's events are missing; no process emits it."""
_STATUS = "killed, crashed or cut off"
_ROUNDED = 1.05
"""The lengths of waits that a replica reports are rounded to some per cent."""
_LATE_S = 1.0
"""Aligned clocks of two machines may still differ by this."""
_OWN_WORDS = frozenset(
    ("spawn", "started", "propose", "reduce", "commit", "apply", "stall", "fetch", "fetched", "evaluate")
)
"""Events that only replicas emit."""


@dataclass(slots=True)
class Life:
    """One incarnation. Times are None for what never happened."""

    joined_s: float | None = None
    own_s: float | None = None  # of its last event of its own
    lost_s: float | None = None
    unreported: int | None = None  # at most this many steps between its last report and this loss
    back: tuple[float, float] = (0.0, -_LATE_S)  # when it was lost, and when it came back
    joins: bool = False  # it has joined, and not only come back
    over: bool = False  # it has reported its end or that it starts again, or its death is on record
    ended: bool = False  # it has reported its end
    left: bool = False
    error: tuple[float, str] | None = None  # when, and which one has ended it
    counts: Line | None = None  # its last report about itself, with what its former processes did
    former: Line | None = None  # the last report of a former process: this one has resumed its checkpoint
    died: dict[float, int | None] = field(
        default_factory=dict
    )  # when such processes were lost, and their `silent_steps`
    decided: bool = False  # some decision has steps of it
    in_model: bool = False  # a decision of fragment 0 has
    before: int | None = None  # by its own count, steps of a checkpoint or of its former incarnation
    committed: int = 0  # its steps in decisions of fragment 0
    last: int = 0  # the last of these by its own count
    stalled_s: float = 0.0  # its waits for outer steps, by its own record
    gathering_s: float = 0.0  # from its proposals to the quorums
    told_of_s: float = 0.0  # the part of this before its last report

    def report(self, counts: Line) -> None:
        """Takes up a report about itself, which begins anew with each process."""
        self.counts, self.told_of_s = counts, self.gathering_s
        if (former := self.former) is not None:
            sums = {name: former[name] + counts[name] for name in ("waited_s", "sent")}
            self.counts = {**counts, **sums, "dropped": Counter(former["dropped"]) + Counter(counts["dropped"])}

    def resume(self, lost_s: float) -> None:
        """Another process goes on from a checkpoint: the steps that were pending at ``lost_s`` are lost. Those of them
        that the checkpoint has count as taken again."""
        self.died[lost_s] = self.silent_steps()
        if (counts := self.counts) is not None:
            dropped = Counter(counts["dropped"]) + Counter(reset=self.pending(counts))
            self.counts = self.former = {**counts, "pending": 0, "dropped": dropped}

    def silent_steps(self) -> int | None:
        """How many steps on no record its process may have taken: a decision may have some after its last report."""
        since = max(0, self.last - self.counts["steps"]) if self.counts is not None else 0
        return None if self.unreported is None else max(0, self.unreported - since)

    def pending(self, counts: Line) -> int:
        """The pending steps of a report; a decision may have counted some after it."""
        return int(min(counts["pending"], max(0, counts["steps"] - self.last)))


class Lives:
    """Takes up a run's events in order; call `close` after the last one. ``found``: a `death`, or `BROKE_OFF`, for each
    one that nobody recorded, in the order of time. ``recorded``: the incarnations that have a record of their own.
    ``anew``: the job has started anew. ``earlier``: those that were there with steps in the model then."""

    def __init__(self) -> None:
        self.of: dict[Incarnation, Life] = defaultdict(Life)
        self.found: list[Line] = []
        self.recorded: set[Incarnation] = set()
        self.decided = self.anew = self._restored = self._undone = False
        self.earlier: set[Incarnation] = set()
        self._supervised: set[str] = set()  # replicas whose deaths the process that has started them records

    def add(self, event: Line) -> None:
        name, data = event["event"], data_of(event)
        if name == "decide":
            self._decide(data["members"], first=not event.get("fragment"))
        elif name in ("start", "recover", "quorum"):
            if name != "quorum" and data.get("undone"):
                self._undo(data.get("versions", ()))
            for who, waited_s in zip(data.get("members", ()), data.get("waited", ()), strict=False):
                self.of[who[0], who[1]].gathering_s += 0.0 if data["retry"] else waited_s or 0.0
        elif name == "restore":
            self._restored = True
        elif name in _OWN_WORDS:
            life = self.of[event["replica"], event["incarnation"]]
            life.own_s = max(event["t_s"], life.own_s or 0.0)
            if name == "stall":
                life.stalled_s += data["stall_s"]
            elif name == "spawn" and "job" not in data:
                self._supervised.add(event["replica"])
        elif not _is_guess(event):
            self._of_a_life(event, name, data)
        self.decided = self.decided or name in ("start", "recover", "quorum", "decide")
        if name in ("lost", "leave", "counts"):
            for who, counts in _counts(event):
                self.of[who].report(counts)

    def _undo(self, versions: Sequence[int]) -> None:
        """The job goes back to these versions, or starts anew: at version 0 of each fragment."""
        self._undone = self._undone or not versions or any(versions)
        if not any(versions):
            self.anew = True
            self.earlier |= {who for who, life in self.of.items() if life.decided and not life.left}

    def _decide(self, members: Sequence[Any], *, first: bool) -> None:
        for replica, incarnation, steps, last_step, _weight, finite in members:
            life = self.of[replica, incarnation]
            life.decided = life.decided or bool(steps)
            if first:
                life.in_model = True
                life.before = last_step - steps if life.before is None else life.before
                life.committed += steps if finite else 0
                life.last = max(life.last, last_step)

    def _of_a_life(self, event: Line, name: str, data: Line) -> None:
        if name not in ("end", "reset", "over", "death", "join", "return", "lost", "leave"):
            return
        life, t_s = self.of[event["replica"], event["incarnation"]], event["t_s"]
        life.over = life.over or name in ("end", "reset", "over", "death")
        life.ended = life.ended or name == "end"
        life.joins = life.joins or name == "join"
        if name in ("join", "return") and life.joined_s is None:
            life.joined_s = t_s
        if name == "lost":
            # Back for a moment: another process has claimed it from a checkpoint, and was given the next one.
            at_once = t_s < life.back[1] + _LATE_S
            life.lost_s, unreported = (life.back[0], life.unreported) if at_once else (t_s, data.get("unreported"))
            life.unreported = unreported
            life.died = {died_s: steps for died_s, steps in life.died.items() if died_s < life.lost_s}
        elif name in ("return", "leave") and life.lost_s is not None:
            if data.get("resumed"):
                life.resume(life.lost_s)
            life.back, life.lost_s = (life.lost_s, t_s), None
        if name == "leave":
            life.left = True
            if reason := data.get("reason"):
                life.error = t_s, f"ended by an error: {reason}"

    def close(self, steps: Mapping[str, Steps]) -> None:
        """Called after the last event."""
        last: dict[Incarnation, float] = {}
        for replica, own in steps.items():
            for t_s, incarnation in zip(own.t_s, own.incarnation, strict=True):
                last[replica, incarnation] = max(t_s, last.get((replica, incarnation), 0.0))
        trained = set(last)
        self.recorded = trained | {who for who, life in self.of.items() if life.ended}
        unwatched = {who: life for who, life in self.of.items() if who[0] not in self._supervised}
        for who, life in unwatched.items():
            known = [t_s for t_s in (life.own_s, last.get(who)) if t_s is not None]
            if known or life.joined_s is not None:
                last[who] = max(known, default=life.joined_s or 0.0)
        newest: dict[str, int] = {}
        for replica, incarnation in last:
            newest[replica] = max(incarnation, newest.get(replica, 0))
        for who, t_s in [x for x in last.items() if x[0][0] not in self._supervised]:
            life = self.of[who]
            over = life.over or (life.left and who not in trained)  # who stood by reports no end of its own
            lost_s = life.lost_s if life.lost_s is not None and t_s < life.lost_s + _LATE_S else None
            if who[1] > 0 and not over and not life.error and (who[1] < newest[who[0]] or lost_s is not None):
                self._find(who, t_s if lost_s is None else lost_s, "death" if self.decided else BROKE_OFF, _STATUS)
        for who, life in unwatched.items():
            if life.error and not life.over:
                self._find(who, life.error[0], "death", life.error[1])
            for died_s in life.died:
                self._find(who, died_s, "death", _STATUS)
        self.found.sort(key=lambda event: float(event["t_s"]))

    def _find(self, who: Incarnation, t_s: float, event: str, status: str) -> None:
        at = {"t_s": t_s, "event": event, "replica": who[0], "incarnation": who[1]}
        self.found.append({**at, "data": {"status": status}})

    def keeps(self, event: Line) -> bool:
        """Whether `found` does not replace this event."""
        return event["replica"] in self._supervised or not _is_guess(event)

    def within(self, events: Iterable[Line]) -> Iterator[Line]:
        """The same events, with those of `found`."""
        return heapq.merge(filter(self.keeps, events), self.found, key=lambda event: float(event["t_s"]))

    # The replicas' reports.

    def unrecorded(self) -> list[str]:
        """The replicas whose inner steps are not, or not all, on record, although the coordinator names them: scripts
        started them, so that they write no folder, or their folder was not given."""
        heard = {who for who, life in self.of.items() if life.own_s is not None} | self.recorded
        named = {who for who, life in self.of.items() if life.decided or (life.joins and not heard)}
        return sorted({replica for replica, _ in named - heard})

    def told(self) -> dict[Incarnation, Line]:
        """The last counts of each incarnation without a record of its own."""
        found = ((who, life.counts) for who, life in self.of.items() if who not in self.recorded)
        return {who: counts for who, counts in found if counts is not None}

    def unreported(self, dead: Set[Incarnation]) -> int | None:
        """How many inner steps the ``dead`` without a record of their own may have taken after their last reports, at
        most; None: not known."""
        found: list[int | None] = []
        for life in (self.of[who] for who in dead - self.recorded if who[1] and who in self.of):
            back = life.lost_s is None and bool(life.died)
            found += [*life.died.values(), *([] if life.left or back else [life.silent_steps()])]
        return None if None in found else sum(x or 0 for x in found)

    def waits(self, who: Incarnation) -> bool:
        """Whether an incarnation's training waits for outer steps."""
        life = self.of[who]
        if who in self.recorded or life.counts is None:
            return life.stalled_s > 0 and is_kept_waiting(life.stalled_s, life.gathering_s)
        return is_kept_waiting(life.counts["waited_s"], life.told_of_s)

    def waited(self, who: Incarnation) -> tuple[float, float]:
        """For how long outer steps have kept an incarnation from its next inner steps in all, and for how long at most
        at a time (infinity: not known)."""
        life = self.of[who]
        if who in self.recorded or life.counts is None:
            return life.stalled_s, math.inf
        longest_s = max((seconds for seconds, _ in life.counts.get("waits", ())), default=math.inf)
        return life.counts["waited_s"], _ROUNDED * longest_s

    def is_complete(self, silent: Sequence[str], dead: Set[Incarnation]) -> bool:
        """Whether each incarnation of the ``silent`` replicas with steps in the model has reported its counts, or has a
        record of its own. False for a job that went back to an earlier version, where the counts do not add up; they do
        for one that started anew, if those whose steps it had are ``dead`` for good or had left."""
        known = self.recorded | self.told().keys()
        in_model = [who for who, life in self.of.items() if life.in_model and who[0] in silent]
        gone = all(who in dead and not self.of[who].died for who in self.earlier)
        return gone and not self._undone and all(who in known for who in in_model)

    def as_recorded(self) -> tuple[list[Line], Counter[Incarnation]]:
        """The lines that these incarnations would have written at their ends, and how many inner steps each has
        taken."""
        lines: list[Line] = []
        taken: Counter[Incarnation] = Counter()
        for who, counts in self.told().items():
            life, at = self.of[who], {"replica": who[0], "incarnation": who[1], "t_s": 0.0}
            pending = life.pending(counts)
            accounted = life.committed + pending + sum(counts["dropped"].values())
            # An incarnation from a checkpoint goes on with earlier steps, too: it has taken all that are accounted for.
            resumed = self._restored or life.former is not None or not life.joins
            taken[who] = accounted if resumed or life.before is None else max(counts["steps"] - life.before, accounted)
            for reason, dropped in counts["dropped"].items():
                lines.append({**at, "event": "discarded", "data": {"steps": dropped, "reason": reason}})
            told = {"wire_bytes": counts["sent"], "waits": counts.get("waits", ())}
            lines.append({**at, "event": "end", "data": {"reason": "left", "pending_steps": pending, **told}})
        return lines, taken


def _counts(event: Line) -> Iterator[tuple[Incarnation, Line]]:
    data = data_of(event)
    if event["event"] in ("lost", "leave") and "counts" in data:
        yield (event["replica"], event["incarnation"]), data["counts"]
    elif event["event"] == "counts":
        for replica, (incarnation, counts) in data["counts"].items():
            yield (replica, incarnation), counts


def _is_guess(event: Line) -> bool:
    """Whether it comes from an earlier reading, or from the next incarnation."""
    status = data_of(event).get("status") if event["event"] == "death" else None
    return event["event"] == BROKE_OFF or status in (_STATUS, "unknown")
