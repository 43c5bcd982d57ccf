"""What each replica was doing at each moment, folded from the events alone.

Several things may be under way at once (a reduction while training goes on, a stop while it waits): each moment belongs
to exactly one state, so that a replica's states add up to the time that it is on record.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftopt.report.run import COORDINATOR, Run
from ftopt.report.steps import Steps
from ftopt.report.unsupervised import BROKE_OFF
from ftopt.telemetry.jsonl import Line, data_of

STATES = {
    "starting": ("starting", "its process has started, and has not joined yet"),
    "standing": ("standing by", "a spare: it holds the job's state, and waits for a replica's place"),
    "training": ("training", "inner steps, evaluation, checkpoints"),
    "overlapped": ("training, reducing", "training while a reduction is under way"),
    "waiting": ("waiting", "in an outer step, for the other replicas or the result"),
    "syncing": ("syncing", "in an outer step, while the reduction is under way"),
    "fetching": ("fetching", "fetching the job's state from a peer"),
    "struck": ("stopped", "stopped, hung or cut off by an injected fault"),
    "dead": ("dead", "its process is gone, and nothing of it has come back"),
}
"""State -> what a reader sees, and what it means; in the order of the legend."""

_LASTING = ("stop", "hang", "partition")


@dataclass(frozen=True, slots=True)
class Span:
    """From ``start`` to ``stop``, in the run's seconds."""

    start: float
    stop: float
    state: str


def timeline(run: Run) -> dict[str, list[Span]]:
    """Replica -> its states, one after the other."""
    of: dict[str, list[Line]] = defaultdict(list)
    for event in run.events:
        if event["replica"] != COORDINATOR or event["event"] in ("abort", "decide"):
            of[event["replica"]].append(event)
    end_s = run.end_s
    silent = set(run.unrecorded) - {event["replica"] for event in run.named("end")}
    found = {}
    for replica in run.replicas():
        steps = run.steps.get(replica, Steps())
        ends = ("end", "leave") if replica in silent else ("end",)
        events = sorted([*of[replica], *of[COORDINATOR]], key=lambda event: float(event["t_s"]))
        found[replica] = _split(_underway(events, steps, end_s, ends))
    return found


def seconds(spans: Iterable[Span]) -> dict[str, float]:
    """State -> how long, in all."""
    total: dict[str, float] = defaultdict(float)
    for span in spans:
        total[span.state] += span.stop - span.start
    return total


def lives(run: Run) -> dict[str, list[tuple[float, float | None]]]:
    """Replica -> when each of its incarnations died, or its record broke off, and when the next one was there (None:
    there was none)."""
    began: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in run.named("join", "return", "started"):  # in the order of time
        began[event["replica"]].append((event["t_s"], event["incarnation"]))
    found: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for event in run.named("death", BROKE_OFF):
        died_s, died = event["t_s"], event["incarnation"]
        later = (t_s for t_s, incarnation in began[event["replica"]] if t_s > died_s and incarnation > died)
        found[event["replica"]].append((died_s, next(later, None)))
    return found


def _underway(events: Iterable[Line], steps: Steps, end_s: float, ends: Sequence[str]) -> list[Span]:
    """Everything that is under way at some time, as spans that may overlap; a replica ends with one of ``ends``."""
    since: dict[str, float] = {}  # what is under way now
    spans: list[Span] = []
    reducing: dict[int, tuple[int, float]] = {}  # fragment -> attempt, and since when
    proposed_s: float | None = None  # there has been no `stall` since then, which would tell how long it was kept

    def begin(name: str, t_s: float) -> None:
        since.setdefault(name, t_s)

    def end(name: str, t_s: float) -> None:
        if name in since:
            spans.append(Span(since.pop(name), t_s, name))

    for event in events:
        name, t_s, data = event["event"], float(event["t_s"]), data_of(event)
        if name == "propose":
            proposed_s = t_s
        for fragment in [fragment for fragment, (attempt, _) in reducing.items() if _is_over(event, fragment, attempt)]:
            spans.append(Span(reducing.pop(fragment)[1], t_s, "reducing"))
        if event["replica"] == COORDINATOR:
            continue
        if name == "spawn":
            end("dead", t_s)
            if "standing" not in since:  # the coordinator has seen it before
                begin("standing" if data.get("standby") else "starting", t_s)
        elif name == "hold" and not since.keys() & {"training", "standing"}:
            begin("starting", t_s)
        elif name == "spare":
            begin("standing", t_s)
        elif name == "promoted" or (name == "leave" and "standing" in since):
            end("standing", t_s)
            if name == "leave":  # a spare tells no end of its own
                end("training", t_s)
            elif "training" not in since:
                begin("starting", t_s)
        elif (
            name in ("join", "started")
            or (name == "return" and "dead" in since)  # out of a checkpoint, as a later incarnation
            or (name in ("propose", "evaluate") and "training" not in since)
        ):
            end("dead", t_s)
            end("starting", t_s)  # also behind `join`, where another machine's clock has put it
            begin("training", t_s)
        elif name in ("death", BROKE_OFF, *ends):
            if name not in ends and proposed_s is not None and not steps.between(proposed_s, t_s):
                spans.append(Span(proposed_s, t_s, "stalled"))
            proposed_s = None
            for what in list(since):
                end(what, t_s)
            if name == "death":
                begin("dead", t_s)
        elif name == "fetch":
            begin("fetching", t_s)
        elif name in ("fetched", "fetch_failed"):
            end("fetching", t_s)
        elif name == "reduce":
            reducing[event.get("fragment", 0)] = event.get("attempt", 0), t_s
        elif name == "stall":
            proposed_s = None
            spans.append(Span(t_s - float(data["stall_s"]), t_s, "stalled"))
        elif name == "fault" and data.get("do") in _LASTING and isinstance(data.get("for_s"), int | float):
            spans.append(Span(t_s, min(end_s, t_s + data["for_s"]), "struck"))
    spans += [Span(start, end_s, name) for name, start in since.items()]
    spans += [Span(start, end_s, "reducing") for _, start in reducing.values()]
    if proposed_s is not None and not steps.between(proposed_s, end_s):
        spans.append(Span(proposed_s, end_s, "stalled"))
    if steps and not any(span.state == "training" for span in spans):
        spans.append(Span(steps.t_s[0], end_s, "training"))  # without the coordinator's events, and before a round
    return [span for span in spans if span.stop > span.start]


def _is_over(event: Line, fragment: int, attempt: int) -> bool:
    """Whether a reduction ends with this event of its replica or of the coordinator."""
    name = event["event"]
    if name in ("abort", "decide") and event["replica"] == COORDINATOR:
        return bool(event.get("attempt") == attempt)
    same = event.get("fragment", 0) == fragment
    return name in ("death", BROKE_OFF, "end") or (same and name in ("reduce", "commit", "fetched"))


def _split(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans, cut so that each moment has one state."""
    edges = [edge for span in spans for edge in ((span.start, 1, span.state), (span.stop, -1, span.state))]
    now: Counter[str] = Counter()
    found: list[Span] = []
    before = 0.0
    for t_s, change, what in sorted(edges):
        state = _state(now)
        if state is not None and t_s > before:
            if found and found[-1].state == state and found[-1].stop == before:
                found[-1] = Span(found[-1].start, t_s, state)
            else:
                found.append(Span(before, t_s, state))
        now[what] += change
        before = t_s
    return found


def _state(now: Mapping[str, int]) -> str | None:
    for name in ("dead", "struck", "starting", "standing", "fetching"):
        if now.get(name):
            return name
    if not now.get("training"):
        return None
    if now.get("stalled"):
        return "syncing" if now.get("reducing") else "waiting"
    return "overlapped" if now.get("reducing") else "training"
