"""The present state of a run, and what to say about it: one fold of its events and inner steps."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftopt.watch.jsonl import Line, data_of
from ftopt.watch.sentences import OLD_NEWS, SENTENCES, Note, data_ended, names, note_of, score, subject

_STATES = {"spawn": "starting", "spare": "standby", "propose": "waiting", "fetch": "fetching", "death": "dead"}
_STATES |= dict.fromkeys(("join", "return", "apply", "fetched", "promoted"), "training")
_AFTER_FAULT = {"kill": "dead", "stop": "stopped", "hang": "hanging", "partition": "cut off"}
_ENDED = ("left", "done", "failed", "dead", "not joined")
_NOT_HERE = (*_ENDED, "starting", "cut off")
_IDLE = (*_NOT_HERE, "away", "standby", "fetching", "stopped", "hanging")  # any other state is one of training
_ACTIVE = ("training", "waiting", "slow")
_MAKES_A_ROW = ("spawn", "join", "return", "spare")
"""Other events may name replicas that a checkpoint knows but this run does not have."""
_USUAL = ("left", "superseded", "superseded by a newcomer", None)
"""Reasons why replicas are gone that other events already explain."""
_SILENT = ("epoch_done", "held_twice", "fetch_failed", "undone", "started")
"""Events that a terminal need not tell: `join`, or the replica's own log, already says that it has `started`."""
_QUIET = ("mixed", "taken_over")  # intended by the method
_NOT_SLOW = ("join", "return", "lost", "leave", "gone", "death", "end", "spawn")
"""Events after which a replica no longer counts as slow."""
INTERRUPTED = ("exit status 130", "exit status 143", "SIGINT", "SIGTERM")
"""How replicas end that have not joined when a signal ends the run."""
_GOES_ON = "the job goes on from what its replicas hold"
"""A replica reports this when it hears of it, which is after the coordinator's `recover` and `return`."""
_TOLD = SENTENCES.keys() | {"checkpoint", "end"}
_SECONDS = re.compile(r"[\d.]+ s\b")
_WINDOW_S, _RATE_S = 10.0, 60.0
_WAITS_S = 3.0
_SILENT_S = 10.0


@dataclass(slots=True)
class Row:
    """One replica: what it is doing, and how far it is. ``steps_per_s``, ``tokens_per_s``: over the last ten seconds.
    ``waited_s``: in outer steps. ``first_s``, ``last_s``: of its inner steps. ``proposed``, ``called``: the last
    version of fragment 0 that it has proposed for, and been called in for. ``slow``, ``promoted``: a note has said so.
    ``farewell``: the note that it has left, shown once it is known whether it failed. ``lost_s``: of its connection."""

    replica: str
    state: str = "starting"
    incarnation: int = 0
    inner_step: int = 0
    version: int = 0
    loss: float | None = None
    steps_per_s: float = 0.0
    tokens_per_s: float = 0.0
    unit: str = "tokens"
    waited_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    proposed: int = 0
    proposed_s: float = 0.0
    called: int = 0
    called_s: float = 0.0
    spawned: bool = False
    slow: bool = False
    spare: bool = False
    promoted: bool = False
    farewell: Note | None = None
    lost_s: float | None = None
    _times: deque[tuple[float, int]] = field(default_factory=deque)

    def stepped(self, line: Line) -> None:
        """Takes up a line of the replica's own file."""
        if self.state not in _ENDED or line["incarnation"] > self.incarnation:
            self.state = "training"
        self.inner_step, self.incarnation = line["inner_step"], line["incarnation"]
        self.loss, self.last_s = line["loss"], line["t_s"]
        self.first_s = self.last_s if self.first_s is None else self.first_s
        tokens = line.get("tokens", 0)
        self.unit = "samples" if tokens <= line.get("samples", 0) else "tokens"
        self._times.append((line["t_s"], tokens))
        while self.last_s - self._times[0][0] > _WINDOW_S:
            self._times.popleft()
        span = self.last_s - self._times[0][0]
        self.steps_per_s = (len(self._times) - 1) / span if span else 0.0
        self.tokens_per_s = sum(tokens for _, tokens in list(self._times)[1:]) / span if span else 0.0

    def shown_state(self, now_s: float) -> str:
        """Its state, or how long it has taken no step although it should."""
        if self.state == "training" and self.first_s is not None:
            silent_s = now_s - self.last_s
            if silent_s > max(_SILENT_S, 10 / self.steps_per_s if self.steps_per_s else 0.0):
                return f"no step for {silent_s:.0f} s"
        return "slow" if self.slow and self.state == "training" else self.state


@dataclass(slots=True)
class Story:
    """A run: its rows, and the job's own figures. `take` takes up events, `stepped` inner steps; call `due` now and
    then.

    Args:
        inner_steps: the committed inner step at which the job ends.
        name: the job's name, for the title.
        whole: whether the events are those of the whole job, including the coordinator's; else of one replica.
        standby: the one replica is a spare that has not been promoted yet.
        slow_s: how long a replica must be slow before a note says so, as in its own log: busy machines have hiccups.
    """

    inner_steps: int
    name: str = ""
    whole: bool = True
    standby: bool = False
    slow_s: float = 15.0
    rows: dict[str, Row] = field(default_factory=dict)
    now_s: float = 0.0
    inner_step: int = 0
    version: int = 0
    aborted: int = 0
    members: int = 0
    score: str = ""
    held: set[str] = field(default_factory=set)
    """Reasons why the job has not begun or does not go on, as given since the last outer step, without seconds."""
    checkpoints_fail: bool = False
    ending: bool = False  # replicas are leaving because the run ends
    data_end: float = math.inf  # the inner step at which the data end, estimated from the epochs that are done
    started: bool = False  # with one replica: it has joined, and trains
    _told_waiting: int = 0
    _slow: dict[str, tuple[float, Note]] = field(default_factory=dict)
    _progress: deque[tuple[float, int]] = field(default_factory=deque)

    def row(self, replica: str) -> Row:
        """The row of a replica, created if it is new."""
        return self.rows.setdefault(replica, Row(replica, spare=self.standby))

    def stepped(self, replica: str, line: Line) -> None:
        """Takes up a line of a replica's own file."""
        row = self.row(replica)
        row.stepped(line)
        self.now_s = max(self.now_s, row.last_s)
        self._at_step(row.last_s, row.inner_step)

    def _at_step(self, t_s: float, inner_step: int) -> None:
        """Notes for the time left that some replica was at this inner step."""
        if not self._progress or inner_step > self._progress[-1][1]:
            self._progress.append((t_s, inner_step))
            while t_s - self._progress[0][0] > _RATE_S:
                self._progress.popleft()

    def heard(self, job: Mapping[str, Any]) -> None:
        """Takes up a running job as ``GET /status`` shows it, without those that left: it has what no file has."""
        there = {x["replica"]: x["state"] for x in job["replicas"]}
        for row in self.rows.values():  # of those that are away, some have left while no coordinator was there
            if (now := there.get(row.replica, "left")) in ("left", "away") and row.state not in _NOT_HERE:
                row.state = now
        for fragment in job["fragments"][:1]:
            self._at(fragment["version"], fragment["inner_step"])
        for x in (x for x in job["replicas"] if x["state"] != "away"):
            row = self.row(x["replica"])
            row.state, row.inner_step, row.incarnation = x["state"], x["inner_step"], x["incarnation"]
            row.loss = x["loss"] if isinstance(x["loss"], float) else None
            row.steps_per_s = 1 / x["step_s"] if x["step_s"] else 0.0
            self.inner_steps = max(self.inner_steps, (x.get("counts") or {}).get("planned", 0))
            self._at_step(self.now_s, row.inner_step)

    def take(self, record: Line) -> Note | None:
        """Takes up an event line; returns a note when there is something to say about it now."""
        name, replica, data = record["event"], record["replica"], data_of(record)
        self.now_s = max(self.now_s, record["t_s"])
        fetched_before = self.standby and bool(self.version)
        self._take_job(name, record, data)
        if name == "data_ended":
            return self._data_ended(data.get("epochs"))
        row = self.rows.get(replica)
        before = (row.state, row.slow, row.promoted) if row else None
        if replica != "coordinator" and (before or name in _MAKES_A_ROW or not self.whole):
            self._update(self.row(replica), record, data)
        if name not in _TOLD or not self._is_news(record, data, before, fetched_before=fetched_before):
            return None
        note = note_of(record)
        if name == "rollback" and not any(row.state not in (*_ENDED, "cut off") for row in self.rows.values()):
            return Note(f"no replica is left; the last one was at version {self.version}, inner step {self.inner_step}")
        if name == "death" and before and before[0] == "left":  # an error of the user's own, after it has said goodbye
            return Note(f"{subject(record)} left since it failed ({data.get('status')})", "bad")
        if note and row and name == "return" and row.lost_s is not None:
            away_s, row.lost_s = record["t_s"] - row.lost_s, None
            return Note(f"{note.text}; it was away for {away_s:.1f} s", note.tone)
        if name == "leave" and row and row.spawned and before and before[0] not in _ENDED:
            row.farewell = note  # its `end` comes late, or its process has failed
            return None
        if name == "end" and row:
            note, row.farewell = row.farewell, None
        return self._after_a_while(name, record, note)

    def due(self) -> list[Note]:
        """The notes that are due by now, although nothing happens."""
        found = [replica for replica, (since_s, _) in self._slow.items() if self.now_s - since_s >= self.slow_s]
        return [note for note in (self._waits(), *(self._slow.pop(x)[1] for x in found)) if note is not None]

    def _after_a_while(self, name: str, record: Line, note: Note | None) -> Note | None:
        """Holds back the note that a replica is slow until it has been slow for a while."""
        if name == "slow" and note is not None and self.slow_s:
            self._slow[record["replica"]] = float(record["t_s"]) - float(data_of(record).get("for_s", 0.0)), note
            return None
        if name == "up_to_speed" and self._slow.pop(record["replica"], None) is not None:
            return None  # no note has said that it was slow
        return note

    def _take_job(self, name: str, record: Line, data: Line) -> None:
        first = not record.get("fragment")
        if name in ("rollback", "decide" if self.whole else "apply"):
            self.held.clear()
        if name in ("start", "recover", "rollback"):
            for row in self.rows.values():
                row.proposed = row.called = self._told_waiting = 0
        if name in _NOT_SLOW:
            self._slow.pop(record["replica"], None)
        if name == "decide" and first:
            self._at(record["version"], record["inner_step"])
            self.members = len(data.get("members", ()))
        elif name == "apply" and not self.whole and first and "committed_step" in data:
            self._at(record["version"], data["committed_step"])
        elif name == "started" and not self.whole:
            self._at(record["version"], data["start_step"])
            self.started = True
        elif name == "fetched" and self.standby and first:
            self._at(record["version"], data["committed_step"])
        elif name == "promoted":
            self.standby = False
        elif name == "recover":
            self._at(record["version"], record["inner_step"])
            self.held.add(_GOES_ON)  # the sentence of `recover` says it better
        elif name == "abort":
            self.aborted += 1
        elif name == "evaluate":
            self.score = score(data)
        elif name == "epoch_done" and data.get("epochs"):
            self.data_end = self.inner_step * data["epochs"] / (data["epoch"] + 1)
        elif name == "data_ended":
            self.data_end = self.inner_step

    def _at(self, version: int, inner_step: int) -> None:
        self.version, self.inner_step = version, inner_step

    def _data_ended(self, epochs: int | None) -> Note:
        if self.inner_step >= self.inner_steps:
            return Note(data_ended(epochs))
        return Note(f"{data_ended(epochs)}, at inner step {self.inner_step} of {self.inner_steps}", "warn")

    def _waits(self) -> Note | None:
        """A note that the round of fragment 0 has waited for some seconds, and for which replicas; once per version."""
        version, rows = self.version + 1, self.rows.values()
        if not self.whole or self._told_waiting == version or self.ending:
            return None
        called = [row for row in rows if row.called == version and row.proposed < version and row.state not in _ENDED]
        waiting = [row for row in rows if row.state == "waiting" and row.proposed == version]
        late = called or [x for x in rows if x.proposed < version and x.state not in (*_ENDED, "starting", "standby")]
        begun = [*(row.called_s for row in called), *(row.proposed_s for row in waiting)]
        if not late or not begun or (waited_s := self.now_s - min(begun)) < _WAITS_S:
            return None
        self._told_waiting = version
        doing = names(f"{row.replica} ({row.shown_state(self.now_s)})" for row in late)
        return Note(f"version {version} has waited {waited_s:.0f} s for {doing}", "warn")

    def _is_news(
        self, record: Line, data: Line, before: tuple[str, bool, bool] | None, *, fetched_before: bool
    ) -> bool:
        """Whether an event is news. ``before``: state, slow and promoted of the replica's row, if it had one;
        ``fetched_before``: the spare has fetched a version."""
        name, reason = record["event"], data.get("reason")
        if name in ("hold", "diverged", "unlike"):  # each replica hears the same, and again as time passes
            text = _SECONDS.sub("", data["text"] if name == "hold" else str(reason))
            news = text not in self.held
            self.held.add(text)
            return news
        if name in ("checkpoint", "checkpoint_failed"):  # the first of several failures, until one succeeds
            told, self.checkpoints_fail = self.checkpoints_fail, name == "checkpoint_failed"
            return not told
        done = 0 < self.inner_steps <= self.inner_step
        row, (_, was_slow, was_promoted) = self.rows.get(record["replica"]), before or ("", False, False)
        first = record["incarnation"] == 1 and not record.get("inner_step")
        no_news = {
            # The coordinator and the replica both report it.
            "slow": was_slow,
            "up_to_speed": not was_slow,
            "promoted": was_promoted,
            "fetched": fetched_before and not record.get("fragment"),  # a spare fetches each; the first is news
            "start": not data.get("undone"),
            # Of a spare, `spare` says that it "stands by"; of the first ones, "all 4 replicas are connected" does.
            "join": row is not None and (row.spare or (self.whole and len(self.rows) > 1 and first and row.spawned)),
            "discarded": reason in _QUIET,
            "gone": reason in _USUAL or str(reason).endswith(OLD_NEWS) or self.ending,
            "death": self.ending and data.get("status") in INTERRUPTED,
            "lost": self.ending or done or self._ended(),
            "rollback": self.ending or done or self._ended(),
        }
        return name not in _SILENT and not no_news.get(name, False)

    def _ended(self) -> bool:
        """All replicas have left: as intended, the states that they held go with them."""
        return bool(self.rows) and all(row.state in _ENDED for row in self.rows.values())

    def _update(self, row: Row, record: Line, data: Line) -> None:
        name, first = record["event"], not record.get("fragment")
        if record["incarnation"] > row.incarnation:
            row.incarnation, row.slow, row.lost_s = record["incarnation"], False, None
            row.spare = row.spare and self.standby
        if name in ("apply", "join", "return"):
            row.version = record.get("version") or row.version
            row.inner_step = max(row.inner_step, record.get("inner_step") or 0)
        elif name == "propose" and first:
            row.proposed, row.proposed_s = record.get("version", 0), record["t_s"]
        elif name == "call_in" and first:
            row.called, row.called_s = record.get("version", 0), record["t_s"]
        elif name == "stall":
            row.waited_s += data["stall_s"]
        elif name == "spawn":
            row.spawned, row.slow, row.farewell = True, False, None
        elif name in ("spare", "promoted"):
            row.spare, row.promoted = name == "spare", name == "promoted"
        elif name == "fetched" and row.spare and first:
            row.version, row.inner_step = record["version"], data["committed_step"]
        elif name in ("slow", "up_to_speed"):
            row.slow = name == "slow"
        if name == "end":
            row.state = data["reason"].replace("_", " ")
        elif name in ("leave", "lost"):
            row.lost_s = record["t_s"] if name == "lost" else None
            stays = ("done",) if name == "leave" else _ENDED
            row.state = row.state if row.state in stays else "left" if name == "leave" else "cut off"
        elif name == "fault":
            row.state = _AFTER_FAULT.get(data["do"], row.state)
        else:
            row.state = _STATES.get(name, row.state)
        if row.spare and (row.state in ("starting", "training") or (row.state == "fetching" and row.version)):
            row.state = "standby"  # a spare's first fetch, which may take long, is the only one worth showing

    # Figures.

    def at(self) -> int:
        """The job's inner step, including pending ones: that of the furthest replica."""
        return max([self.inner_step, *(row.inner_step for row in self.rows.values() if row.state != "dead")])

    def share(self) -> float:
        """The fraction of the job that is done, 0 to 1."""
        return min(1.0, self.at() / self.inner_steps) if self.inner_steps else 0.0

    def left_s(self) -> float | None:
        """Seconds to the end of the job or its data at the last minute's rate; None if unknown or already there."""
        left = min(self.inner_steps, self.data_end) - self.at()
        if left <= 0 or self.ending or len(self._progress) < 2 or self._progress[-1][0] - self._progress[0][0] < 1.0:
            return None
        (first_s, first), (_, last) = self._progress[0], self._progress[-1]
        rate = (last - first) / max(self.now_s - first_s, 1e-9)
        return left / rate if rate > 0 else None

    def replicas(self) -> list[dict[str, Any]]:
        """The replicas as `ftopt.watch.status` shows them."""
        return [
            {
                "replica": row.replica,
                "incarnation": row.incarnation,
                "state": (state := row.shown_state(self.now_s)),
                "stalled": False,
                "inner_step": row.inner_step,
                "step_s": 1 / row.steps_per_s if (active := state in _ACTIVE) and row.steps_per_s else 0.0,
                "rate": row.tokens_per_s if active else 0.0,
                "unit": self.unit,
                "loss": row.loss,
                "waited_s": row.waited_s,
                "versions": [row.version],
            }
            for row in self.rows.values()
        ]

    @property
    def unit(self) -> str:
        """What `tokens_per_s` counts: ``tokens``, or ``samples`` if they have no tokens."""
        return "samples" if any(row.unit == "samples" for row in self.rows.values()) else "tokens"

    def tokens_per_s(self) -> float:
        """The sum over all replicas that train."""
        return sum(row.tokens_per_s for row in self.rows.values() if row.state in ("training", "waiting"))

    def waiting_share(self) -> float | None:
        """The share of their time that outer steps have kept the replicas waiting."""
        trained = [row for row in self.rows.values() if row.first_s is not None and row.last_s > row.first_s]
        total_s = sum(row.last_s - (row.first_s or 0.0) for row in trained)
        return min(1.0, sum(row.waited_s for row in trained) / total_s) if total_s > 0 else None

    def loss(self) -> float | None:
        """The mean of the known training losses of replicas that train; after the end, of those that came to it."""
        known = [(row.state, row.loss) for row in self.rows.values() if row.loss is not None]
        losses = [x for state, x in known if state not in _IDLE] or [x for state, x in known if state == "done"]
        return sum(losses) / len(losses) if losses else None

    def states(self, rows: Iterable[Row] | None = None) -> Counter[str]:
        """How many replicas are in which state."""
        return Counter(row.shown_state(self.now_s).split(" for ")[0] for row in rows or self.rows.values())
