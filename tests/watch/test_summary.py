"""The figures of a run, from synthetic lines whose figures are known."""

from typing import Any

import pytest

from ftopt.watch.summary import summarize

Record = dict[str, Any]


def event(name: str, replica: str = "coordinator", incarnation: int = 0, **more: Any) -> Record:
    return {"t_s": more.pop("t_s", 1.0), "event": name, "replica": replica, "incarnation": incarnation, **more}


def decide(version: int, *members: list[Any], chain: str = "c", inner_step: int = 0) -> Record:
    data = {"members": list(members), "digest": "d", "chain": f"{chain}{version}", "inner_step": inner_step}
    return event("decide", fragment=0, version=version, attempt=version, inner_step=inner_step, data=data)


def lines(incarnation: int, count: int) -> list[Record]:
    return [{"t_s": 0.0, "incarnation": incarnation, "local_step": n + 1, "inner_step": n + 1} for n in range(count)]


def end(replica: str, incarnation: int, *, pending: int, digest: str = "a") -> Record:
    data = {"reason": "done", "local_steps": 0, "pending_steps": pending, "counted_step": 0, "anchor_digest": digest}
    return event("end", replica, incarnation, t_s=9.0, data=data)


@pytest.fixture
def run() -> tuple[list[Record], dict[str, list[Record]]]:
    """r0 takes 25 steps; r1 takes 17, dies at 7 beyond its counted 10, comes back and takes 8, of which 3 pend."""
    events = [
        event("join", "r0", 1),
        event("join", "r1", 1),
        event("evaluate", "r0", 1, t_s=1.5, data={"loss": 5.5, "accuracy": 0.125, "final": False}),
        event("quorum", fragment=0, version=1, attempt=1),
        decide(1, ["r0", 1, 10, 10, 10.0, True], ["r1", 1, 10, 10, 10.0, True], inner_step=10),
        event("quorum", fragment=0, version=2, attempt=2),
        event("fault", "r1", 1),
        event("abort", fragment=0, version=2, attempt=2),
        event("death", "r1", 1, t_s=3.0, data={"status": "SIGKILL"}),
        event("quorum", fragment=0, version=2, attempt=3),
        decide(2, ["r0", 1, 10, 20, 10.0, True], inner_step=20),
        event("join", "r1", 2, t_s=5.0),
        event("stall", "r0", 1, data={"stall_s": 0.2}),
        event("stall", "r0", 1, data={"stall_s": 0.4}),
        event("stall", "r1", 1, data={"stall_s": 60.0}),
        event("quorum", fragment=0, version=3, attempt=4),
        decide(3, ["r0", 1, 5, 25, 5.0, True], ["r1", 2, 5, 5, 5.0, True], inner_step=25),
        event("evaluate", "r1", 2, t_s=8.0, data={"loss": 2.25, "accuracy": 0.5, "final": True}),
        event("evaluate", "r0", 1, t_s=8.1, data={"loss": 2.25, "accuracy": 0.75, "final": True}),
        end("r0", 1, pending=0),
        end("r1", 2, pending=3),
    ]
    return events, {"r0": lines(1, 25), "r1": lines(1, 17) + lines(2, 8)}


def test_every_inner_step_is_in_exactly_one_place(run: tuple[list[Record], dict[str, list[Record]]]) -> None:
    got = summarize(*run)
    assert got["inner_steps_executed"] == 50
    assert got["inner_steps_committed"] == 40
    assert got["inner_steps_pending"] == 3
    assert got["dead_inner_steps_lost"] == 7
    assert got["survivor_inner_steps_lost"] == 0
    assert got["inner_steps_counted_twice"] == 0


def test_steps_pending_at_the_jobs_end_came_too_late_and_those_of_one_that_left_before_did_not(
    run: tuple[list[Record], dict[str, list[Record]]],
) -> None:
    assert summarize(*run)["inner_steps_too_late"] == 3
    run[0][-1]["data"]["reason"] = "left"
    got = summarize(*run)
    assert (got["inner_steps_too_late"], got["inner_steps_pending"]) == (0, 3)


def test_who_was_ended_while_it_started_is_no_death() -> None:
    ended = event("end", "r0", data={"reason": "not_joined", "local_steps": 0, "pending_steps": 0})
    got = summarize([event("spawn", "r0"), ended], {})
    assert (got["ended_before_joining"], got["deaths"], got["joins"]) == (1, [], [])


def test_a_replica_that_resumes_as_the_same_incarnation_ends_like_others_and_has_lost_steps_before() -> None:
    """r0 takes 10 steps that count and 7 that do not, dies, resumes at its 10th, and takes 8, of which 3 pend."""
    events = [
        event("join", "r0", 1),
        decide(1, ["r0", 1, 10, 10, 10.0, True], inner_step=10),
        event("death", "r0", 1, t_s=2.0, data={"status": "SIGKILL"}),
        event("return", "r0", 1, t_s=3.0, data={"resumed": True}),
        event("resumed", "r0", 1, t_s=3.0, data={"pending_by_fragment": [0]}),
        decide(2, ["r0", 1, 5, 15, 5.0, True], inner_step=15),
        end("r0", 1, pending=3),
    ]
    for told in (events, [x for x in events if x["event"] not in ("decide", "return", "join")]):
        alone = told is not events
        if alone:  # `ftopt replica` records what the replica itself knows
            spawn = event("spawn", "r0", 1, data={"job": "j"})
            apply = event("apply", "r0", 1, t_s=4.0, version=2, data={"counted_step": 15, "committed_step": 15})
            told = [spawn, *told[:-1], apply, told[-1]]
        got = summarize(told, {"r0": lines(1, 25)})
        assert (got["inner_steps_committed"], got["inner_steps_pending"], got["dead_inner_steps_lost"]) == (15, 3, 7)
        assert got["survivor_inner_steps_lost"] == (None if alone else 0)
        assert got["anchor_digests"] == {"r0": "a"}
        again = event("death", "r0", 1, t_s=9.5, data={"status": "SIGKILL"})
        got = summarize([*told, again], {"r0": lines(1, 25)})
        assert (got["inner_steps_pending"], got["dead_inner_steps_lost"], got["anchor_digests"]) == (0, 10, {})


def test_rounds_joins_deaths_and_stalls_are_counted(run: tuple[list[Record], dict[str, list[Record]]]) -> None:
    got = summarize(*run)
    assert (got["outer_steps"], got["attempts"], got["attempts_aborted"], got["inner_step"]) == (3, 4, 1, 25)
    assert [(join["replica"], join["incarnation"]) for join in got["joins"]] == [("r0", 1), ("r1", 1), ("r1", 2)]
    assert got["deaths"] == [{"t_s": 3.0, "replica": "r1", "incarnation": 1, "status": "SIGKILL"}]
    assert got["stall_s"] == {"median": pytest.approx(0.3), "p99": 0.4, "max": 0.4}
    assert got["anchor_digests"] == {"r0": "a", "r1": "a"}
    assert (got["val_loss_initial"], got["val_loss_final"], got["wall_s"]) == (5.5, 2.25, 9.0)
    assert (got["val_accuracy_initial"], got["val_accuracy_final"]) == (0.125, 0.75)
    assert got["samples_committed"] is None


def test_a_step_that_a_survivor_lost_is_missing(run: tuple[list[Record], dict[str, list[Record]]]) -> None:
    events, steps = run
    steps["r0"] += lines(1, 4)
    assert summarize(events, steps)["survivor_inner_steps_lost"] == 4


def test_steps_counted_twice_show_as_such(run: tuple[list[Record], dict[str, list[Record]]]) -> None:
    events, steps = run
    got = summarize([*events, decide(4, ["r0", 1, 5, 25, 5.0, True])], steps)
    assert got["inner_steps_counted_twice"] == 5
    assert got["survivor_inner_steps_lost"] == -5


def test_a_decision_told_again_counts_once_and_another_chain_is_reported(
    run: tuple[list[Record], dict[str, list[Record]]],
) -> None:
    events, steps = run
    again = decide(2, ["r0", 1, 10, 20, 10.0, True])
    assert summarize([*events, again], steps)["inner_steps_committed"] == 40
    fork = decide(2, ["r0", 1, 10, 20, 10.0, True], chain="x")
    got = summarize([*events, fork], steps)
    assert got["outer_steps"] == 3
    assert got["chain_conflicts"] == [2]


def test_what_a_rollback_has_taken_back_is_of_the_dead_and_no_fork() -> None:
    events = [
        event("join", "r0", 1),
        decide(1, ["r0", 1, 10, 10, 10.0, True]),
        decide(2, ["r0", 1, 10, 20, 10.0, True]),
        decide(3, ["r0", 1, 10, 30, 10.0, True]),
        event("death", "r0", 1, data={"status": "SIGKILL"}),
        event("rollback", "coordinator", 0, fragment=0, version=3),
        event("recover", "coordinator", 0, version=1, data={"versions": [1]}),
        decide(2, ["r0", 2, 10, 10, 10.0, True], chain="x"),
        end("r0", 2, pending=0),
    ]
    got = summarize(events, {"r0": lines(1, 32) + lines(2, 10)})
    assert (got["outer_steps"], got["inner_steps_committed"], got["dead_inner_steps_lost"]) == (2, 20, 22)
    assert got["survivor_inner_steps_lost"] == got["inner_steps_counted_twice"] == 0
    assert got["chain_conflicts"] == []


def test_a_decision_whose_coordinator_was_killed_before_it_told_it_is_counted() -> None:
    last = {"fragment": 0, "version": 2, "chain": "c2", "inner_step": 20, "members": [["r0", 1, 10, 20, 10.0, True]]}
    events = [
        event("join", "r0", 1),
        decide(1, ["r0", 1, 10, 10, 10.0, True], inner_step=10),
        event("recover", version=2, data={"versions": [2], "decided": [last]}),
        event("recover", version=2, data={"versions": [2], "decided": [last]}),
        end("r0", 1, pending=2),
    ]
    got = summarize(events, {"r0": lines(1, 22)})
    assert (got["outer_steps"], got["inner_step"], got["inner_steps_committed"]) == (2, 20, 20)
    assert got["survivor_inner_steps_lost"] == got["inner_steps_counted_twice"] == 0
    assert got["chain_conflicts"] == []


def test_steps_of_a_nonfinite_contribution_are_discarded_and_not_lost() -> None:
    events = [
        event("join", "r0", 1),
        event("discarded", "r0", 1, fragment=0, data={"steps": 10, "reason": "nonfinite"}),
        decide(1, ["r0", 1, 10, 10, 0.0, False]),
        decide(2, ["r0", 1, 10, 20, 10.0, True]),
        end("r0", 1, pending=2),
    ]
    got = summarize(events, {"r0": lines(1, 22)})
    assert got["inner_steps_discarded"] == {"nonfinite": 10, "mixed": 0}
    assert (got["inner_steps_committed"], got["survivor_inner_steps_lost"]) == (10, 0)


def test_a_step_that_was_undone_was_not_executed() -> None:
    events = [
        event("join", "r0", 1),
        event("undone", "r0", 1, data={"steps": 1}),
        event("undone", "r0", 1, data={"steps": 1}),
        decide(1, ["r0", 1, 10, 10, 10.0, True]),
        end("r0", 1, pending=0),
    ]
    got = summarize(events, {"r0": lines(1, 12)})
    assert (got["inner_steps_executed"], got["survivor_inner_steps_lost"]) == (10, 0)


def test_no_lines_give_a_summary_of_nothing() -> None:
    got = summarize([], {})
    assert got["outer_steps"] == 0
    assert got["val_loss_final"] is None
    assert got["stall_s"] is None
    assert got["anchor_digests"] == {}


def test_a_resumed_job_that_is_at_its_end_already_stands_where_its_checkpoint_is() -> None:
    got = summarize([event("started", "r0", 2, inner_step=670), end("r0", 2, pending=0)], {"r0": []})
    assert (got["outer_steps"], got["inner_step"]) == (0, 670)


def test_the_folder_of_one_replica_is_accounted_for_by_what_it_says_itself() -> None:
    """One life that was killed with 7 of its 27 steps pending, and one that left after 12, of which 2 were dropped."""

    def line(name: str, life: int, t_s: float, **data: object) -> dict[str, object]:
        return {"t_s": t_s, "event": name, "replica": "r0", "incarnation": life, "fragment": 0, "data": data}

    events = [
        line("spawn", 1, 0, job="http://head:29410 job"),
        line("apply", 1, 1, counted_step=10, committed_step=10) | {"version": 1},
        line("apply", 1, 2, counted_step=20, committed_step=20) | {"version": 2},
        line("death", 1, 9, status="unknown"),
        line("spawn", 2, 9, job="http://head:29410 job"),
        line("fetched", 2, 9) | {"version": 6},
        line("apply", 2, 9, counted_step=0, committed_step=60) | {"version": 6},
        line("discarded", 2, 10, steps=2, reason="nonfinite"),
        line("apply", 2, 11, counted_step=12, committed_step=70) | {"version": 7},
        line("end", 2, 12, reason="left", pending_steps=0, pending_by_fragment=[0]),
    ]
    steps = [{"incarnation": 1}] * 27 + [{"incarnation": 2}] * 12
    got = summarize(events, {"r0": steps})
    assert got["inner_steps_executed"] == 39
    assert (got["inner_steps_committed"], got["dead_inner_steps_lost"], got["inner_steps_pending"]) == (30, 7, 0)
    assert got["inner_steps_discarded"] == {"nonfinite": 2, "mixed": 0}
    assert (got["outer_steps"], got["inner_step"]) == (3, 70)
    assert got["attempts"] is got["survivor_inner_steps_lost"] is got["inner_steps_counted_twice"] is None
    running = summarize(events[:3], {"r0": steps[:27]})  # killed, and not started again
    assert (running["inner_steps_committed"], running["dead_inner_steps_lost"]) == (20, 7)


def test_steps_of_a_version_that_was_rolled_back_are_lost_with_the_life_that_took_them() -> None:
    """r0's second life began at inner step 989 and was killed after 215 steps, of which version 25 counted 200; the job
    went on from version 24, at 1139."""

    def line(name: str, life: int, version: int, **data: object) -> dict[str, object]:
        at = {"t_s": float(life), "event": name, "replica": "r0", "incarnation": life, "fragment": 0}
        return at | {"version": version, "data": data}

    events = [
        line("spawn", 1, 0, job="http://head:29410 job"),
        line("started", 1, 0, start_step=0),
        line("apply", 1, 20, counted_step=959, committed_step=939),
        line("spawn", 2, 0, job="http://head:29410 job"),
        line("started", 2, 21, start_step=989),
        line("apply", 2, 24, counted_step=150, committed_step=1139),
        line("apply", 2, 25, counted_step=200, committed_step=1189),
        line("started", 3, 24, start_step=1139),
        line("apply", 3, 25, counted_step=50, committed_step=1190),
        line("end", 3, 25, reason="left", pending_steps=0, pending_by_fragment=[0]),
    ]
    steps = [{"incarnation": 1}] * 959 + [{"incarnation": 2}] * 215 + [{"incarnation": 3}] * 250
    got = summarize(events, {"r0": steps})
    assert got["inner_steps_executed"] == 1424
    assert (got["inner_steps_committed"], got["dead_inner_steps_lost"]) == (1359, 65)
    assert (got["outer_steps"], got["inner_step"]) == (3, 1190)
    before = summarize(events[:7], {"r0": steps[:1174]})
    assert (before["dead_inner_steps_lost"], before["inner_step"]) == (15, 1189)


def test_what_a_rollback_has_taken_back_of_one_that_had_left_is_undone() -> None:
    events = [
        event("join", "r0", 1),
        decide(1, ["r0", 1, 10, 10, 10.0, True]),
        decide(2, ["r0", 1, 10, 20, 10.0, True]),
        event("leave", "r0", 1),
        end("r0", 1, pending=2),
        event("rollback", "coordinator", 0, fragment=0, version=2),
        event("recover", "coordinator", 0, version=1, data={"versions": [1]}),
        decide(2, ["r1", 1, 10, 10, 10.0, True], chain="x"),
        end("r1", 1, pending=0),
    ]
    got = summarize(events, {"r0": lines(1, 22), "r1": lines(1, 10)})
    assert (got["inner_steps_committed"], got["inner_steps_pending"]) == (20, 2)
    assert got["inner_steps_discarded"]["undone"] == 10
    assert got["survivor_inner_steps_lost"] == got["dead_inner_steps_lost"] == 0
