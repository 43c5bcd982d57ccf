"""What a run looks like now, folded from its event and step lines; what the displays draw."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ftopt.telemetry.jsonl import Line, data_of

_STATES = {"spawn": "starting", "propose": "waiting", "fetch": "fetching", "leave": "left", "death": "dead"}
_STATES |= dict.fromkeys(("join", "apply", "fetched"), "training")
_AFTER_FAULT = {"kill": "dead", "stop": "stopped", "hang": "hanging", "partition": "cut off"}
_WINDOW_S = 5.0


@dataclass(slots=True)
class Row:
    """One replica: what it is doing, where it stands."""

    replica: str
    state: str = "starting"
    incarnation: int = 0
    inner_step: int = 0
    version: int = 0
    loss: float | None = None
    steps_per_s: float = 0.0
    _times: deque[float] = field(default_factory=deque)

    def stepped(self, line: Line) -> None:
        """Takes up a line of the replica's own file."""
        self.state = "training"
        self.inner_step, self.incarnation = line["inner_step"], line["incarnation"]
        self.loss = line["loss"]
        self._times.append(line["t_s"])
        while self._times[-1] - self._times[0] > _WINDOW_S:
            self._times.popleft()
        span = self._times[-1] - self._times[0]
        self.steps_per_s = (len(self._times) - 1) / span if span else 0.0


@dataclass(slots=True)
class RunView:
    """The run: its rows and the job's own figures."""

    inner_steps: int
    rows: dict[str, Row] = field(default_factory=dict)
    inner_step: int = 0
    version: int = 0
    aborted: int = 0
    score: str = ""
    held: str = ""
    checkpoints_fail: bool = False

    def row(self, replica: str) -> Row:
        """The row of a replica, made when it is new."""
        return self.rows.setdefault(replica, Row(replica))

    def event(self, record: Line) -> str | None:
        """Takes up an event line; returns a sentence when the event is a notable one."""
        name, replica = record["event"], record["replica"]
        data = data_of(record)
        if name == "decide" and record.get("fragment") == 0:
            self.version, self.inner_step = record["version"], record["inner_step"]
        elif name == "abort":
            self.aborted += 1
        elif name == "evaluate":
            self.score = f"held-out loss {_number(data['loss'])}{_metrics(data)}"
        if replica != "coordinator":
            self._update(self.row(replica), record, data)
        if name == "hold":
            if data["text"] == self.held:
                return None  # Each replica is told the same.
            self.held = data["text"]
        if name in ("checkpoint", "checkpoint_failed"):
            told, self.checkpoints_fail = self.checkpoints_fail, name == "checkpoint_failed"
            if told:
                return None  # Once, until one succeeds again.
        if name == "rollback" and self.inner_step >= self.inner_steps:
            return None  # The last holders have left because the job is done.
        return sentence(record)

    def _update(self, row: Row, record: Line, data: Line) -> None:
        name = record["event"]
        if record["incarnation"] > row.incarnation:
            row.incarnation = record["incarnation"]
        if name == "apply":
            row.version = record["version"]
        if name == "end":
            row.state = data["reason"]
        elif name == "fault":
            row.state = _AFTER_FAULT.get(data["do"], row.state)
        else:
            row.state = _STATES.get(name, row.state)


def _metrics(data: Line) -> str:
    """What an evaluation reports besides the loss."""
    accuracy = {"accuracy": data.get("accuracy")} if data.get("accuracy") is not None else {}
    return "".join(f", {name} {_number(value)}" for name, value in {**accuracy, **data.get("metrics", {})}.items())


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def sentence(record: Line) -> str | None:
    """A notable event in words, None for the others."""
    name, data = record["event"], record.get("data", {})
    who = record["replica"]
    if record["incarnation"] > 1:
        who += f" (incarnation {record['incarnation']})"
    if name == "fault":
        lasting = f" for {data['for_s']:g} s" if data.get("for_s") else ""
        what = f" {data['what']} of" if data.get("what") else ""
        return f"fault: {data['do']}{what} {who} at {data['point']}, inner step {record.get('inner_step')}{lasting}"
    if name == "abort":
        return f"version {record['version']}: an attempt was aborted ({data.get('reason', 'no reason given')})"
    if name == "evaluate":
        said = f"inner step {record['inner_step']}: held-out loss {_number(data['loss'])}{_metrics(data)}"
        return None if data["final"] else said
    words = {
        "join": f"{who} joined",
        "leave": f"{who} left",
        "fetched": f"{who} fetched version {record.get('version')}",
        "death": f"{who} died ({data.get('status')})",
        "refuse": f"{who} was refused: {data.get('reason')}",
        "hold": str(data.get("text")),
        "reset": f"{who} was away for too long and starts anew",
        "fork": f"{who} is on another branch of the history",
        "mismatch": f"version {record.get('version')}: results differ",
        "evicted": f"version {record.get('version')}: {who} disagrees again; it fetches what the others hold",
        "damaged": f"{who}: memory of version {record.get('version')} has changed; it fetches it anew",
        "outlier": f"{who} weighs nothing: {data.get('reason')}",
        "checkpoint_failed": f"{who}: no checkpoint: {data.get('reason')}",
        "replay": f"{who} does {data.get('steps')} inner steps of incarnation {data.get('of', [0, 0])[1]} again",
        "replay_failed": f"{who} goes on without what its predecessor has done: {data.get('reason')}",
        "rollback": f"nobody holds version {record.get('version')} any more",
        "restore": f"{who} goes on from the checkpoint of version {record.get('version')}",
    }
    if name == "spawn" and data.get("life", 1) > 1:
        return f"{who} is started again"
    return words.get(name)
