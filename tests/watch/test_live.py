"""What the live page is given: rings of bounded size, events in words, rounds and whom they wait for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from ftopt.events import Event
from ftopt.net.token import authorization
from ftopt.sync.protocol import messages as m
from ftopt.watch.jsonl import record_of
from ftopt.watch.lanes import _SPANS, Lanes
from ftopt.watch.live import MAX_FRAGMENTS, MAX_REPLICAS, live
from ftopt.watch.prometheus import FROM_ZERO
from ftopt.watch.rings import COLUMNS, EVENTS, LINES, MAX_CHARS, RANGES, TESTS, History, Speed, Tokens
from ftopt.watch.sentences import SENTENCES, note_of
from tests.sync.server.access import TOKEN, Scripted, coordinator, identity, scripted, status
from tests.test_events_page import emitted

REPLICA: dict[str, Any] = {
    "replica": "r0", "incarnation": 1, "state": "training", "stalled": False, "inner_step": 5, "step_s": 0.1,
    "versions": [1], "loss": None, "counts": None,
}  # fmt: skip


def decided(steps: int, *, fragment: int = 0) -> Event:
    return Event("decide", "coordinator", fragment=fragment, data={"members": [["r0", 1, steps, 9, 1.0, True]]})


def counted(step: int, *, life: int = 1, tokens: int = 0, tested: float | None = None) -> dict[str, Any]:
    counts = {"pending": 4, "tokens": tokens, "tested": tested, "tested_step": step}
    return REPLICA | {"incarnation": life, "inner_step": step, "counts": counts}


def columns(history: History, ring: int = 0) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in history.rings[ring].after(0)]


@pytest.mark.long
def test_the_coordinators_events_have_the_losses_that_are_finite() -> None:
    told: list[Event] = []

    async def run() -> None:
        async with (
            coordinator(token=None, on_event=told.append) as url,
            scripted(url, identity(settings={"start_replicas": 2}), token=None) as first,
            scripted(url, identity(replica="r1", settings={"start_replicas": 2}), token=None) as other,
        ):
            await asyncio.gather(first.join(), other.join())
            await other.send(m.Heartbeat("training", 7, 0.1, loss="nan"))
            for step in (40, 41):
                await first.send(m.Heartbeat("training", step, 0.1, loss=2.0 / step))
                while not [x for x in told if x.event == "losses" and x.data["losses"]["r0"][1] == step]:
                    await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 30))
    losses = [x.data["losses"] for x in told if x.event == "losses"]
    assert losses == [{"r0": [1, 40, 0.05]}, {"r0": [1, 41, 2.0 / 41]}], "each once"


def test_the_coordinators_events_have_what_replicas_tell_of_their_lives() -> None:
    told: list[Event] = []

    async def run() -> None:
        async with (
            coordinator(token=None, on_event=told.append) as url,
            scripted(url, identity(settings={"start_replicas": 2}), token=None) as first,
            scripted(url, identity(replica="r1", settings={"start_replicas": 2}), token=None) as other,
        ):
            await asyncio.gather(first.join(), other.join())
            await first.send(m.Heartbeat("training", 7, 0.1, counts=m.Counts(7, 3, {"nonfinite": 2}, 1.5, 4096)))
            while not [x for x in told if x.event == "counts"]:
                await asyncio.sleep(0.05)
            await first.send(m.Heartbeat("training", 9, 0.1))  # as of before
            await first.send(m.Bye())
            while not [x for x in told if x.event == "leave"]:
                await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(run(), 30))
    counts = {"steps": 7, "pending": 3, "dropped": {"nonfinite": 2}, "waited_s": 1.5, "sent": 4096}
    counts |= {"tokens": 0, "tested": None, "tested_step": 0, "planned": 0, "waits": ()}
    assert [x.data["counts"] for x in told if x.event == "counts"] == [{"r0": [1, counts]}]
    assert [x.data for x in told if x.event == "leave"] == [{"counts": counts}]


# ------------------------------------------------------------ history


def test_a_history_of_any_length_takes_no_more_than_its_rings() -> None:
    history = History()
    per_row = [1, RANGES[1][1], RANGES[1][1] * RANGES[2][1]]
    keep = [rows for *_, rows in RANGES]
    samples = per_row[2] * keep[2] + per_row[2]
    row = (1.0,) * (len(COLUMNS) - 1)
    for i in range(3 * _SPANS):
        states = [REPLICA | {"replica": f"r{n}", "state": ("training", "waiting")[i % 2]} for n in range(4)]
        history.lanes.sample(2.0 * i, states)
        history.evaluations.sample(2.0 * i, [counted(i, tested=1.0)])
    assert sum(map(len, history.lanes.after(0, ["r0", "r1", "r2", "r3"]).values())) <= 3 * (2 * _SPANS + 4)
    assert len(history.evaluations.found.points) < 2 * TESTS < history.evaluations.found.count == 3 * _SPANS
    for _ in range(samples):
        history.rings[0].add((*row, {"r0": 1.0}))
    for i in range(2 * EVENTS):
        history.note(Event("fork", f"r{i}", version=i), float(i))
    for ring, per, kept in zip(history.rings, per_row, keep, strict=True):
        assert ring.count == samples // per
        assert len(ring.after(0)) == kept
        assert len(ring.waiting) < per_row[2]
    assert [row["joins"] for row in columns(history, 2)] == [per_row[2]] * keep[2]
    assert len(history.events()) == EVENTS


def test_a_coarse_row_is_the_mean_of_levels_and_the_sum_of_counts() -> None:
    history, every = History(), RANGES[1][1]
    for i in range(every):
        if i % 3 == 0:
            history.note(Event("abort", "coordinator", version=i, data={"reason": "lost"}), float(i))
        other = REPLICA | {"replica": "r1", "state": "away" if i % 2 else "waiting"}
        history.sample([REPLICA, other], float(i))
    (row,) = columns(history, 1)
    assert (row["training"], row["waiting"], row["away"], row["aborts"]) == (1, 0.5, 0.5, every // 3)


def with_losses(*losses: float | str | None) -> list[dict[str, Any]]:
    return [REPLICA | {"replica": f"r{i}", "loss": loss} for i, loss in enumerate(losses)]


def test_losses_are_kept_one_by_one_while_there_are_few_and_else_as_mean_least_and_most() -> None:
    history = History()
    history.sample(with_losses(*map(float, range(LINES))), 0.0)
    history.sample(with_losses(*map(float, range(LINES + 1))), 2.0)
    history.sample([*with_losses(1.0), *(x | {"state": "away"} for x in with_losses(9.0, "inf"))], 4.0)
    few, many, last = columns(history)
    assert (few["loss"], few["losses"]) == ((LINES - 1) / 2, {f"r{i}": float(i) for i in range(LINES)})
    assert (many["loss"], many["loss_least"], many["loss_most"], many["losses"]) == (LINES / 2, 0.0, float(LINES), None)
    assert (last["loss_most"], last["losses"], last["not_finite"]) == (1.0, {"r0": 1.0}, 0), "not of those away"


def test_a_loss_that_is_not_finite_is_counted_and_leaves_the_others_and_json_alone() -> None:
    history = History()
    for _ in range(RANGES[1][1] + 1):
        history.sample(with_losses("nan", 2.0, "inf", None), 0.0)
    history.sample(with_losses("nan", None), 0.0)
    *_, one, none = columns(history)
    assert (one["loss"], one["losses"], one["not_finite"]) == (2.0, {"r1": 2.0}, 2)
    assert (none["loss"], none["loss_least"], none["losses"], none["not_finite"]) == (None, None, None, 1)
    (coarse,) = columns(history, 1)
    assert (coarse["loss_most"], coarse["losses"], coarse["not_finite"]) == (2.0, {"r1": 2.0}, 2)
    shown = live({"j": (job(2, 1) | {"replicas": with_losses("nan", 2.0)}, history)}, {})
    assert "NaN" not in json.dumps(shown, allow_nan=False)
    assert [x["loss"] for x in shown["job"]["members"]] == ["nan", 2.0]


def test_a_coarse_row_has_the_means_of_the_replicas_that_it_saw() -> None:
    history, every = History(), RANGES[1][1]
    for i in range(every):
        history.sample(with_losses(float(i), 4.0 if i % 2 else None), float(i))
    (row,) = columns(history, 1)
    assert row["losses"] == {"r0": (every - 1) / 2, "r1": 4.0}
    assert (row["loss_least"], row["loss_most"]) == (0.0, float(every - 1))


@pytest.mark.parametrize("ring", range(len(RANGES)))
def test_what_has_just_happened_is_told_before_a_row_of_it_is_complete(ring: int) -> None:
    history = History()
    for i in range(RANGES[1][1] + 3):
        history.sample([REPLICA], float(i))
    history.note(Event("lost", "r0", 1), 99.0)
    history.sample([REPLICA], 99.0)
    history.note(Event("gone", "r0", 1, data={"reason": "superseded by a newcomer"}), 100.0)
    answer = live({"j": (job(1, 1) | {"replicas": [REPLICA | {"state": "away"}]}, history)}, {"range": str(ring)})[
        "job"
    ]
    recent = dict(zip(COLUMNS, answer["recent"], strict=True))
    assert (recent["training"], recent["away"], recent["deaths"]) == (0, 1, 1)
    assert recent["lost"] + sum(row[COLUMNS.index("lost")] for row in answer["rows"]) == 1


def test_only_rows_that_the_page_lacks_are_sent() -> None:
    history = History()
    for i in range(5):
        history.sample([REPLICA] * i, float(i))
    ring = history.rings[0]
    assert ring.after(3) == ring.after(0)[3:]
    assert ring.after(5) == ring.after(10**15) == []


def test_a_replica_that_leaves_is_no_death_and_one_that_is_superseded_is() -> None:
    history = History()
    history.note(Event("gone", "r0", data={"reason": "left"}), 0.0)
    history.note(Event("gone", "r1", 1, data={"reason": "superseded by a newcomer"}), 0.0)
    history.sample([], 0.0)
    history.sample([], 2.0)
    assert [row["deaths"] for row in columns(history)] == [1, 0]


def test_the_speed_is_what_is_committed_and_falls_while_nothing_is() -> None:
    speed = Speed()
    speed.begin(100.0)
    assert speed.now(102.0) == 0
    speed.committed(110.0, 50)
    assert speed.now(110.0) == 5  # of the ten seconds since the start
    assert speed.now(115.0) == 5
    assert speed.now(130.0) == 2.5  # nothing more for 20 s
    speed.committed(131.0, 40)
    speed.committed(132.0, 4)
    assert speed.now(132.0) == 2  # 44 steps in 22 s


@pytest.mark.parametrize("event", ["rollback", "job_failed"])
def test_the_speed_is_zero_once_the_job_does_not_run(event: str) -> None:
    history = History()
    history.note(Event("start", "coordinator"), 0.0)
    history.note(decided(20), 10.0)
    history.sample([], 10.0)
    history.note(Event(event, "coordinator", fragment=0, version=1), 11.0)
    history.sample([], 12.0)
    assert [row["steps_per_s"] for row in columns(history)] == [2, 0]


def test_steps_count_once_however_many_fragments_there_are() -> None:
    history = History()
    history.note(Event("start", "coordinator"), 0.0)
    for fragment in range(4):
        history.note(decided(20, fragment=fragment), 10.0)
    history.sample([], 10.0)
    (row,) = columns(history)
    assert (row["steps_per_s"], row["outer_steps"]) == (2, 4)


def test_tokens_are_those_of_all_replicas_and_a_new_incarnation_takes_none_away() -> None:
    tokens = Tokens()
    for now, life, count in ((0, 1, 1000), (2, 1, 1200), (4, 2, 100)):
        tokens.sample(
            float(now), [counted(1, life=life, tokens=count), counted(1, tokens=10 * now) | {"replica": "r1"}]
        )
    assert tokens.per_s == (200 + 0 + 40) / 4
    for now in range(6, 20, 2):
        tokens.sample(float(now), [counted(1, life=2, tokens=50 * now)])
    assert tokens.per_s == 50


def test_an_evaluation_is_told_once() -> None:
    history = History()
    for step, loss in ((0, None), (10, 2.5), (10, 2.5), (20, "nan"), (30, 2.0)):
        history.sample([counted(step, tested=loss)], 0.0)  # type: ignore[arg-type]
    shown = live({"j": (job(1, 1), history)}, {})["job"]
    assert [x[1:] for x in shown["tests"]] == [(10, 2.5), (30, 2.0)]
    again = live({"j": (job(1, 1), history)}, {"history": shown["history"], "tests": "2"})["job"]
    assert (shown["tested"], again["tests"]) == (2, None)
    assert [row["inner_step"] for row in columns(history)] == [0, 10, 10, 20, 30]


def test_a_late_page_is_given_the_states_since_the_jobs_start_and_then_what_is_new() -> None:
    lanes = Lanes()
    for t, state in enumerate(("training", "waiting", "waiting", "fetching", "evaluating", "training")):
        lanes.sample(2.0 * t, [REPLICA | {"state": state}])
    assert lanes.after(-1, ["r0", "r9"]) == {
        "r0": [0.0, 4.0, "waiting", 4.0, 6.0, "fetching", 6.0, 8.0, "other", 8.0, 10.0, "training"]
    }
    assert lanes.after(7, ["r0"]) == {"r0": [6.0, 8.0, "other", 8.0, 10.0, "training"]}


def test_a_replica_is_down_until_it_has_taken_a_step_and_what_its_failure_cost_is_kept() -> None:
    lanes = Lanes()
    away = counted(5) | {"state": "away"}
    for t, x in enumerate((counted(5), away, away, counted(5, life=2), counted(6, life=2), away, counted(6, life=1))):
        lanes.sample(2.0 * t, [x])
    lost, back = lanes.failures
    assert lanes.after(0, ["r0"])["r0"] == [0.0, 6.0, "dead", 6.0, 8.0, "training", 8.0, 12.0, "dead"]
    assert (lost["from"], lost["to"], lost["lost"], lost["before"]) == (2.0, 8.0, 4, False)
    assert (back["from"], back["to"], back["lost"]) == (10.0, None, None), "the same incarnation has kept its steps"
    lanes.sample(14.0, [])
    assert (back["to"], back["gone"], back["lost"], lanes.after(0, ["r0"])) == (14.0, True, 4, {})
    quick = Lanes()
    for t, x in enumerate((told(0.0), told(0.0, "away"), told(0.0, steps=1, life=2))):
        quick.sample(2.0 * t, [x])
    assert quick.failures[0]["to"] == 4.0, "its first report says that it has taken a step"
    fresh = Lanes()
    fresh.sample(0.0, [away])
    assert fresh.failures[0]["before"]


def told(
    waited_s: float, state: str = "training", *, steps: int = 20, life: int = 1, pending: int = 4
) -> dict[str, Any]:
    counts = {"steps": steps, "pending": pending, "tokens": 0, "tested": None, "tested_step": 0, "waited_s": waited_s}
    return REPLICA | {"incarnation": life, "state": state, "inner_step": steps, "counts": counts}


def test_waits_last_as_long_as_the_replica_has_reported_and_not_as_long_as_the_samples_that_they_fall_into() -> None:
    history, found = History(), []
    samples = [(7.0, "training"), (7.0, "waiting"), (7.5, "waiting"), (8.0, "waiting"), (8.5, "training")]
    for t, (waited_s, state) in enumerate(samples):
        x = told(waited_s, state, steps=20 + t)
        history.lanes.sample(2.0 * t, [x])
        found.append(history.recent(0, [x])[COLUMNS.index("waiting")])
    assert found == [0, 0, 0.25, 0.25, 0.25]
    assert history.lanes.after(-1, ["r0"])["r0"][:9] == [
        0.0,
        3.5,
        "training",
        3.5,
        4.0,
        "waiting",
        4.0,
        5.5,
        "training",
    ]


def test_a_replica_that_takes_no_step_for_a_sample_and_waits_has_waited_all_the_time() -> None:
    """Its wait is reported when it is over, and counts once."""
    lanes = Lanes()
    samples = [
        (20, 0.0, "training"),
        (25, 0.0, "waiting"),
        (25, 0.0, "waiting"),
        (25, 0.0, "waiting"),
        (29, 5.0, "training"),
    ]
    for t, (steps, waited_s, state) in enumerate(samples):
        lanes.sample(2.0 * t, [told(waited_s, state, steps=steps)])
    assert lanes.after(-1, ["r0"])["r0"] == [
        0.0,
        2.0,
        "training",
        2.0,
        6.0,
        "waiting",
        6.0,
        7.0,
        "training",
        7.0,
        8.0,
        "waiting",
    ]


@pytest.mark.parametrize("decides", [False, True])
def test_the_steps_of_a_lost_replica_are_at_risk_until_it_is_known_where_they_are(*, decides: bool) -> None:
    history = History()
    history.lanes.sample(0.0, [told(0.0)])
    history.lanes.decided([["r0", 1, 10, 18, 10.0, True]])
    history.note(Event("lost", "r0", 1), 0.0)
    history.lanes.sample(2.0, [told(0.0, "away")])
    (failure,) = history.lanes.failures
    assert (failure["from"] < 2.0, failure["to"], failure["lost"]) == (True, None, None)
    assert failure["pending"] == 2, "two were in a version already, of which its last report did not know"
    if decides:
        history.lanes.decided([["r0", 1, 2, 20, 2.0, True]])  # it had prepared, and the others commit
    history.lanes.sample(4.0, [told(0.0, life=2)])
    assert failure["lost"] == (0 if decides else 2)


def test_who_comes_back_from_a_checkpoint_as_the_same_incarnation_has_lost_its_pending_steps() -> None:
    history = History()
    for t, x in enumerate((told(9.0), told(9.0, "away"))):
        history.lanes.sample(2.0 * t, [x])
    history.note(Event("return", "r0", 1, data={"resumed": True}), 3.0)
    history.lanes.sample(4.0, [REPLICA | {"counts": None}])
    history.lanes.sample(6.0, [told(0.5, steps=21)])
    (failure,) = history.lanes.failures
    assert (failure["to"], failure["lost"]) == (6.0, 4)
    history.lanes.sample(8.0, [told(1.5, steps=22)])
    assert history.lanes.after(6.5, ["r0"])["r0"][-3:] == [7.0, 8.0, "waiting"], "its waits count from its start"


def test_nothing_is_claimed_of_a_replica_that_was_away_before() -> None:
    lanes = Lanes()
    lanes.sample(0.0, [REPLICA | {"state": "away"}])
    lanes.decided([["r0", 1, 10, 18, 10.0, True]])
    assert lanes.failures[0]["pending"] is None


def test_the_page_is_told_for_whom_each_replica_has_waited() -> None:
    history, status = History(), job(3, 1)
    for x, waited_s in zip(status["replicas"], (5.0, 5.0, 0.1), strict=True):
        x["counts"] = {"steps": 50, "pending": 7, "dropped": {}, "waited_s": waited_s, "sent": 9}
    r0, r1, r2 = (x["replica"] for x in status["replicas"])
    members = [[r0, 1], [r1, 1], [r2, 1]]
    for retry, there, waited in ((False, members, [2.0, 0.0, 1.0]), (True, members[1:], [3.0, 2.0])):
        data = {"members": there, "retry": retry, "waited": waited, "for": r1}
        history.note(Event("quorum", "coordinator", fragment=0, version=1, data=data), 4.0 * retry)
    shown = {x["replica"]: x["waited"] for x in live({"j": (status, history)}, {})["job"]["members"]}
    assert shown == {r0: [5.0, r1, 2.0], r1: [5.0, r0, 3.0], r2: [0.1]}, (
        "r2 trains meanwhile; r0 is lost in the attempt"
    )
    history.sample([REPLICA], 0.0)
    assert history.awaited.of == {}, "those who are not there are not kept"


# ------------------------------------------------------------ words


def test_many_that_come_at_once_are_one_line() -> None:
    history = History()
    for i in range(64):
        history.note(Event("join", f"r{i}", 1), 0.0)
    history.note(Event("lost", "r7", 1), 0.0)
    assert [(e["text"], e["times"]) for e in history.events()] == [
        ("r0, r1, r2, r3, r4 and 59 more joined", 1),
        ("the connection to r7 has ended", 1),
    ]


def test_long_ids_leave_room_for_what_happened() -> None:
    history = History()
    for i in range(64):
        history.note(Event("stalled", f"{i}" * 128, 1), 0.0)
    (told,) = history.events()
    assert len(told["text"]) <= MAX_CHARS
    assert told["text"].endswith("and 59 more take no step; the outer step is made without them")


def test_a_storm_of_aborts_is_one_line_that_counts() -> None:
    history = History()
    for version in range(9):
        history.note(Event("abort", "coordinator", version=version, data={"reason": "r1 was lost"}), 0.0)
    text = "version 8: an attempt failed (r1 was lost); it is repeated"
    assert [(e["text"], e["times"]) for e in history.events()] == [(f"{text} (the last of 9 such events in a row)", 1)]
    assert history.told == 9
    again = History()
    for _ in range(9):
        again.note(Event("abort", "coordinator", version=8, data={"reason": "r1 was lost"}), 0.0)
    assert [(e["text"], e["times"]) for e in again.events()] == [(text, 9)]


def test_epochs_that_end_one_after_another_are_one_line_that_names_the_first_and_the_last() -> None:
    history = History()
    history.note(Event("epoch_done", "coordinator", data={"epoch": 2}), 0.0)
    assert history.events()[0]["text"] == "epoch 2 of the data is done"
    history.note(Event("join", "r0", 1), 0.0)
    for epoch in range(3, 12):
        history.note(Event("epoch_done", "coordinator", data={"epoch": epoch}), 0.0)
    assert [e["text"] for e in history.events()][2:] == ["epochs 3 to 11 of the data are done"]
    assert history.events()[2]["times"] == 1


def test_what_a_replica_says_is_cut_and_has_no_control_characters() -> None:
    history = History()
    history.note(Event("abort", "coordinator", version=1, data={"reason": "\x1b[2J\u202e" + "x" * 5000}), 0.0)
    text = history.events()[0]["text"]
    assert text.isprintable()
    assert len(text) == MAX_CHARS


def test_an_incarnation_that_had_ended_before_this_coordinator_began_is_no_death() -> None:
    reported = Event("gone", "r1", 1, data={"reason": "reported by r1, gone before"})
    history = History()
    history.note(reported, 0.0)
    assert history.events()[0]["text"] == "r1 had ended before this coordinator began"
    assert not history._counts["gone"]
    former = Event("gone", "r0", 1, data={"reason": "reported by its next incarnation"})
    assert getattr(note_of(record_of(former)), "text", "") == "r0 was started again: its incarnation 1 is over"
    history.note(Event("gone", "r1", 1, data={"reason": "away for 600 s"}), 0.0)
    assert history._counts["gone"] == 1


SILENT = {
    "call_in", "quorum", "decide", "frozen", "hurry", "equalized", "plan", "kept", "void", "losses", "counts",
}  # fmt: skip
"""Events of the coordinator without a sentence: they happen in good rounds, too."""


def test_every_event_of_the_coordinator_has_words_or_is_silent_on_purpose() -> None:
    data = {"reason": "why", "for": ["r1"], "epoch": 1, "units": 5, "replicas": ["r1", "r2"], "identical": True}
    names = {name for name, file in emitted().items() if file.startswith("sync/protocol/coordinator/")}
    assert len(names) > 15
    names |= {*FROM_ZERO, "return", "start", "recover"}
    assert names - SENTENCES.keys() <= SILENT
    for name in names & SENTENCES.keys():
        assert note_of(record_of(Event(name, "r0", 2, 0, 3, 4, 5, data))) is not None, f"{name} has no words"


# ------------------------------------------------------------ the answer


def job(replicas: int, fragments: int) -> dict[str, Any]:
    return {
        "job": "j",
        "epoch": 7,
        "phase": "running",
        "fragments": [
            {"version": 1, "chain": "c", "inner_step": 5, "proposed": [], "attempt": None, "attempts": 1,
             "attempts_aborted": 0, "waits_for": [], "doing": "no replica has proposed yet", "age_s": 1.0}
            for _ in range(fragments)
        ],
        "replicas": [REPLICA | {"replica": f"r{i:05}", "versions": [1] * fragments} for i in range(replicas)],
        "waiting": {},
        "last_version": None,
    }  # fmt: skip


def test_of_a_huge_job_what_matters_comes_first_and_the_answer_stays_small() -> None:
    huge = job(4096, 1024)
    huge["replicas"][4000]["state"] = "away"
    huge["replicas"][4001]["stalled"] = True
    huge["replicas"][4002]["state"] = "x" * 256
    huge["fragments"][1000] |= {"proposed": ["r00001"], "waits_for": ["r04002"]}
    answer = live({"j": (huge, History())}, {})
    shown, names = answer["job"], [x["replica"] for x in answer["job"]["members"]]
    assert (shown["replicas"], shown["fragments_in_all"]) == (4096, 1024)
    assert len(names) == MAX_REPLICAS
    assert names[:3] == ["r04002", "r04000", "r04001"]
    assert [x["fragment"] for x in shown["fragments"]] == [1000, *range(MAX_FRAGMENTS - 1)]
    assert len(json.dumps(answer)) < 60_000


@pytest.mark.parametrize("value", ["", "-1", "x", "9" * 400, "1e3", "\u0663", "0x1", " 1"])
def test_a_query_that_makes_no_sense_counts_as_none(value: str) -> None:
    history = History()
    history.sample([], 0.0)
    query = dict.fromkeys(("range", "after", "told", "tests", "lanes"), value) | {"history": value, "job": value}
    assert live({"j": (job(1, 1), history)}, query) == live({"j": (job(1, 1), history)}, {})


def test_a_job_that_runs_is_shown_first_and_else_one_with_replicas() -> None:
    ended = job(0, 0) | {"phase": "ended at version 3"}
    starting = ended | {"phase": "1 of 2 replicas connected", "waiting": {"r0": 0}}
    states = {"a": ended, "b": starting, "c": job(1, 1), "d": job(1, 1)}
    jobs = {name: (x | {"job": name}, History()) for name, x in states.items()}
    assert live(jobs, {})["job"]["job"] == "c"
    del jobs["c"], jobs["d"]
    assert live(jobs, {})["job"]["job"] == "b"
    assert live(jobs, {"job": "a"})["job"]["job"] == "a", "the one that is asked for"


async def _not_running() -> None:
    settings = {"start_replicas": 2, "start_s": 600.0, "dead_after_s": 30.0, "evict_after_s": 60.0}
    async with coordinator() as url:
        async with (
            scripted(url, identity(settings=settings)) as first,
            scripted(url, identity(replica="r1", settings=settings)) as second,
        ):
            for effect in first.machine.connect():
                await first.send(effect.message)  # type: ignore[union-attr]
            await first.until(m.Hold)
            shown = (await _asked(url))["job"]
            assert (shown["phase"][:28], shown["fragments"]) == ("1 of 2 replicas connected; t", [])
            (member,) = shown["members"]
            assert (member["replica"], member["state"], member["inner_step"]) == ("r0", "connected", None)
            await asyncio.gather(first.until(m.Start), second.join())
            for replica in (first, second):
                await _propose(replica)
            for replica in (first, second):
                quorum = await replica.until(m.Quorum)
                for effect in replica.machine.reduced(0, quorum.attempt, "d", [[5], [5]]):
                    await replica.send(effect.message)  # type: ignore[union-attr]
            for replica in (first, second):
                assert (await replica.until(m.Commit)).version == 1
                await replica.send(m.Bye())
            await asyncio.gather(first.ended(), second.ended())
        shown = (await _asked(url))["job"]
        assert (shown["phase"].split(",")[0], shown["last_version"]) == ("ended at version 1", 1)
        assert (shown["replicas"], shown["members"]) == (0, [])


def test_a_job_that_does_not_run_tells_who_waits_and_its_last_version() -> None:
    asyncio.run(_not_running())


def test_the_steps_of_all_replicas_are_summed() -> None:
    status = job(2, 1)
    for replica, dropped in zip(status["replicas"], ({"nonfinite": 2, "reset": 1}, {}), strict=True):
        replica["counts"] = {"steps": 50, "pending": 7, "dropped": dropped, "waited_s": 1.0, "sent": 9}
    shown = live({"j": (status, History())}, {})["job"]
    assert (shown["taken"], shown["dropped"], [x["waited"] for x in shown["members"]]) == (100, 3, [[1.0], [1.0]])


def test_no_jobs_are_an_answer() -> None:
    assert (live({}, {"job": "j"})["jobs"], live({}, {})["job"]) == ([], None)


async def _asked(url: str, **query: object) -> Any:
    async with (
        aiohttp.ClientSession(headers=authorization(TOKEN)) as session,
        session.get(f"{url}/live", params={key: str(value) for key, value in query.items()}) as answer,
    ):
        assert answer.status == 200
        return await answer.json()


async def _propose(replica: Scripted) -> None:
    record = replica.machine.fragments[0].record
    assert record is not None
    for effect in replica.machine.propose(m.Contribution(0, record.version, 5, record.inner_step + 5, 5.0)):
        await replica.send(effect.message)  # type: ignore[union-attr]


async def _doing(url: str, *words: str) -> Any:
    """Waits until the round of ``/status`` does what ``words`` say, one after another; returns the fragment."""
    async with asyncio.timeout(60):
        while True:
            (shown,) = json.loads((await status(url))[1])["jobs"]
            if shown["fragments"] and shown["fragments"][0]["doing"] in words:
                return shown["fragments"][0]
            await asyncio.sleep(0.02)


async def _a_round() -> None:
    settings = {"start_replicas": 2, "dead_after_s": 30.0, "evict_after_s": 60.0, "grace_s": 20.0}
    async with (
        coordinator() as url,
        scripted(url, identity(settings=settings)) as first,
        scripted(url, identity(replica="r1", settings=settings)) as second,
    ):
        await asyncio.gather(first.join(), second.join())
        assert (await _doing(url, "no replica has proposed yet"))["waits_for"] == []
        for replica in (first, second):
            await replica.send(m.Heartbeat("training", 3, 0.5))
        await _propose(first)
        fragment = await _doing(url, "1 of 2 have proposed; it waits for r1")
        assert fragment["waits_for"] == ["r1"]
        assert {x["replica"]: x["round"] for x in (await _asked(url))["job"]["members"]} == {
            "r0": "proposed", "r1": "awaited",
        }  # fmt: skip
        await _propose(second)
        quorum = await first.until(m.Quorum)
        assert (await _doing(url, "reducing: 0 of 2 have the result; it waits for r0 and r1"))["waits_for"] == [
            "r0",
            "r1",
        ]
        for effect in first.machine.reduced(0, quorum.attempt, "d", [[5], [5]]):
            await first.send(effect.message)  # type: ignore[union-attr]
        assert (await _doing(url, "reducing: 1 of 2 have the result; it waits for r1"))["waits_for"] == ["r1"]
        answer = await _asked(url)
        known = answer["job"]
        assert known["events"][-1]["text"] == "r0, r1 joined"
        again = await _asked(url, history=known["history"], after=known["count"], told=known["told"])
        assert again["job"]["events"] is None
        assert again["job"]["count"] - known["count"] == len(again["job"]["rows"])
        other = await _asked(url, history="another", after=known["count"], told=known["told"])
        assert other["job"]["events"] == known["events"]


def test_a_round_says_what_it_does_and_whom_it_waits_for() -> None:
    asyncio.run(_a_round())


async def _few() -> None:
    settings = {"start_replicas": 1, "min_replicas": 2, "dead_after_s": 30.0, "evict_after_s": 60.0}
    async with coordinator() as url, scripted(url, identity(settings=settings)) as replica:
        await replica.join()
        await _propose(replica)
        await _doing(url, "1 of 1 has proposed; it needs 1 more (min_replicas is 2)")


def test_a_round_of_too_few_says_how_many_it_needs() -> None:
    asyncio.run(_few())


async def _rows(url: str) -> list[list[Any]]:
    return list((await _asked(url))["job"]["rows"][-2:])


async def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftopt.sync.server.coordinator.SAMPLE_S", 0.02)
    async with coordinator() as url, scripted(url) as replica:
        await replica.join()
        await replica.send(m.Heartbeat("training", 3, 0.5, loss=2.5))
        async with asyncio.timeout(60):
            while [[*row[1:8], row[-1]] for row in await _rows(url)] != [[3, 0, 0, 1, 0, 0, 0, {"r0": 2.5}]] * 2:
                await asyncio.sleep(0.02)


def test_the_server_samples_its_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_sampled(monkeypatch))
