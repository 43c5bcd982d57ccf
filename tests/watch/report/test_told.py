"""The report of scripts: they write no record of their own, and tell the coordinator what they have done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftopt.watch.report.write import write
from tests.watch.report.recorded import Page, Recorder, page_of, record
from tests.watch.report.test_folders import reported, text_of


def counts(steps: int, pending: int, waited_s: float = 0.0, sent: int = 0, **dropped: int) -> dict[str, Any]:
    return {"steps": steps, "pending": pending, "dropped": dropped, "waited_s": waited_s, "sent": sent}


def whole(path: Path) -> Page:
    assert reported(path) == 0
    return page_of(path / "report.html")


def job(path: Path, *, unreported: int | None = 0) -> Recorder:
    """r0 is there from begin to end; r1 is killed with 5 steps that no version has, and comes back."""
    run = Recorder(path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.now = 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.event("counts", data={"counts": {"r0": [1, counts(12, 2)], "r1": [1, counts(12, 2)]}})
    run.now = 3.0
    more = {} if unreported is None else {"unreported": unreported}
    run.event("lost", "r1", 1, data={"counts": counts(15, 5, 0.2, 1000), **more})
    run.now = 5.0
    run.event("gone", "r1", 1, data={"reason": "superseded by a newcomer"})
    run.event("join", "r1", 2)
    run.round(2, {"r0": (1, 17, 27), "r1": (2, 6, 6)}, here=[])
    return run


def end(run: Recorder, *, identical: bool = True) -> None:
    run.now = 9.0
    run.event("final", version=2, data={"replicas": ["r0", "r1"], "identical": identical, "awaited": []})
    run.event("leave", "r0", 1, data={"counts": counts(34, 4, 0.5, 3_000_000, nonfinite=3)})
    run.event("leave", "r1", 2, data={"counts": counts(6, 0, 0.1, 2_000_000)})


def test_the_report_of_scripts_says_where_every_inner_step_is(tmp_path: Path) -> None:
    run = job(tmp_path)
    end(run)
    text = text_of(tmp_path)
    assert (
        "Of 55 inner steps, 43 (78.2 %) are in the model, 4 were in no outer step, 5 were lost with replicas that "
        "died, 3 were dropped (the contribution was not finite); survivors lost no others."
    ) in text
    assert "Outer steps kept the replicas from their next inner steps for 0.8 s in all" in text
    assert "r0 waited longest, 0.5 s. Until all had proposed, they waited mostly for r1: 0.4 s." in text
    assert "The replicas sent 5 MB in reductions, 2.5 MB per outer step." in text
    figures = page_of(tmp_path / "report.html").figures()
    assert figures["inner steps executed"] == "55"
    assert figures["lost by survivors"] == "0"
    assert figures["final weights of 2 replicas"] == "identical"


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("claims", ["", "return", "join"])
def test_a_replica_that_resumes_as_the_same_incarnation_has_died_and_lost_its_pending_steps(
    tmp_path: Path, launched: bool, claims: str
) -> None:
    """r1 is killed 5 steps after version 1, and goes on from a checkpoint. ``launched``: its death is on record.
    ``claims``: it is given the next incarnation after all; one that joins goes on with its own count."""
    run = Recorder(tmp_path)
    if launched:
        run.event("spawn", "r1", data={"pid": 1, "life": 1})
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.now = 1.0
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.event("counts", data={"counts": {"r0": [1, counts(12, 2)], "r1": [1, counts(12, 2)]}})
    run.now = 3.0
    run.event("lost", "r1", 1, data={"counts": counts(17, 5, 0.2, 1000, nonfinite=2)})
    if launched:
        run.event("death", "r1", 1, data={"status": "SIGKILL", "by_fault": False})
    run.now = 5.0
    run.event("return", "r1", 1, version=1, inner_step=10, data={"resumed": True})
    life, before = 2 if claims else 1, 0 if claims == "return" else 10
    if claims:
        run.event("lost", "r1", 1)
        run.event("gone", "r1", 1, data={"reason": "superseded"})
        run.event(claims, "r1", 2, version=1, inner_step=10, data={"resumed": True} if claims == "return" else {})
    run.now = 6.0
    run.round(2, {"r0": (1, 17, 27), "r1": (life, 6, before + 6)}, here=[])
    run.now = 9.0
    run.event("leave", "r0", 1, data={"counts": counts(27, 0, 0.5, 3000)})
    run.event("leave", "r1", life, data={"counts": counts(before + 8, 2, 0.1, 2000)})
    found = write([tmp_path], over=True, say=lambda text: None)
    text = " ".join(found.story)
    assert "1 death: r1 died at 0:03" in text and ", and was back 2" in text and "did not come back" not in text
    assert (
        "Of 52 inner steps on record, 43 (82.7 %) are in the model, 2 were in no outer step, 5 were lost with replicas "
        "that died, 2 were dropped (the contribution was not finite); survivors lost no others; before"
    ) in text.replace("\N{NO-BREAK SPACE}", " ")
    assert (found.summary["dead_inner_steps_lost"], found.summary["wire_bytes"]) == (5, 6000)


def test_a_launch_finds_the_deaths_of_replicas_that_another_launch_has_started(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    for replica in ("coordinator", "r0"):
        run.event("spawn", replica, 0, data={"pid": 1, "life": 1})
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "b0"):
        run.event("join", replica, 1)
    run.round(1, {"r0": (1, 10, 10), "b0": (1, 10, 10)}, here=[])
    run.now = 3.0
    run.event("lost", "b0", 1, data={"counts": counts(12, 2), "unreported": 1})
    run.now = 9.0
    run.event("leave", "r0", 1, data={"counts": counts(10, 0)})
    run.event("lost", "r0", 1)  # its own launcher knows how it has ended
    found = write([tmp_path], over=True, say=lambda text: None)
    assert [(x["replica"], x["status"]) for x in found.summary["deaths"]] == [("b0", "killed, crashed or cut off")]
    assert found.summary["dead_inner_steps_lost"] == 2
    assert "1 death: b0 died at 0:03 (killed, crashed or cut off) and did not come back." in " ".join(found.story)


@pytest.mark.parametrize(("most", "more"), [(4, "up to 4 more steps"), (1, "up to 1 more step"), (None, "more steps")])
def test_what_a_dead_replica_may_have_done_since_its_last_report_has_a_bound(
    tmp_path: Path, most: int | None, more: str
) -> None:
    run = job(tmp_path, unreported=most)
    end(run)
    said = f"before contact was lost, replicas that died may have taken {more} than they reported, which are lost."
    text = text_of(tmp_path)
    assert "Of 55 inner steps on record, " in text and said in text
    assert write([tmp_path], over=True, say=lambda text: None).summary["dead_inner_steps_unreported"] == most


def test_a_connection_that_was_interrupted_costs_nothing(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.event("lost", "r0", 1, data={"counts": counts(29, 2)})
    run.event("return", "r0", 1)
    end(run)
    assert "5 were lost with replicas that died" in text_of(tmp_path)


def test_what_a_script_does_not_account_for_is_told(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.now = 9.0
    run.event("leave", "r0", 1, data={"counts": counts(34, 0)})
    run.event("leave", "r1", 2, data={"counts": counts(6, 0)})
    assert "7 of survivors CANNOT BE FOUND" in text_of(tmp_path)


def test_a_decision_after_a_replica_has_told_its_counts_counts_once(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.event("lost", "r0", 1, data={"counts": counts(24, 14), "unreported": 7})  # as of its last heartbeat
    run.event("gone", "r0", 1, data={"reason": "away for longer than evict_after_s"})
    run.event("leave", "r1", 2, data={"counts": counts(6, 0)})
    text = text_of(tmp_path)
    assert (
        "Of 48 inner steps on record, 43 (89.6 %) are in the model, 5 were lost with replicas that died; survivors "
        "lost none; before contact was lost, replicas that died may have taken up to 4 more steps than" in text
    )


def test_a_report_of_scripts_that_still_train_has_what_they_last_told(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.event("counts", data={"counts": {"r0": [1, counts(31, 4)], "r1": [2, counts(8, 2)]}})
    text = text_of(tmp_path)
    assert "Of 54 inner steps, 43 (79.6 %) are in the model, 6 are not in it yet, 5 were lost with" in text


def test_final_weights_that_differ_are_told(tmp_path: Path) -> None:
    run = job(tmp_path)
    end(run, identical=False)
    assert reported(tmp_path) == 0
    assert page_of(tmp_path / "report.html").figures()["final weights of 2 replicas"] == "NOT IDENTICAL"


def test_a_life_that_took_no_step_has_told_its_own_end(tmp_path: Path) -> None:
    """It came back when the job was done, and has the final weights like the others."""
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.steps("r0", 1, 10)
    run.round(1, {"r0": (1, 10, 10)})
    run.event("join", "r1", 2)
    run.event("counts", data={"counts": {"r1": [2, counts(0, 0)]}})
    run.end("r0")
    run.end("r1", 2)
    assert reported(tmp_path) == 0
    assert page_of(tmp_path / "report.html").figures()["final weights of 2 replicas"] == "identical"


def test_the_wait_of_a_method_that_trains_meanwhile_is_for_nobody(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.event("leave", "r0", 1, data={"counts": counts(34, 4, 0.1)})
    text = text_of(tmp_path)
    assert "Outer steps kept the replicas" in text and "waited mostly for" not in text


def test_the_report_says_when_its_second_0_was_and_when_each_event_was(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.files.about.write_text('{"began": "2026-11-30T23:59:58Z"}', encoding="utf-8")
    page = whole(tmp_path)
    assert "Times count from 2026-11-30 23:59:58 UTC." in page.text
    assert ["0:03", "00:00:01", "the connection to r1 has ended"] in page.table("time", "UTC", "what")
    run.event("spawn", data={"pid": 1, "life": 1})
    assert "23:59:58 UTC, as in the output of `ftopt launch`." in whole(tmp_path).text
    run.files.about.write_text("{}", encoding="utf-8")
    assert "Times count from" not in whole(tmp_path).text


def test_not_all_steps_are_claimed_to_be_in_the_model_when_a_replica_has_died_and_the_run_has_ended_all_the_same(
    tmp_path: Path,
) -> None:
    """r1's last report was of before the decision; it never comes back, and r0 goes to the end."""
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.event("lost", "r1", 1, data={"counts": counts(10, 10)})
    run.now = 5.0
    run.event("leave", "r0", 1, data={"counts": counts(10, 0)})
    page = whole(tmp_path)
    assert "still going on" not in page.text
    assert "All 20 inner steps on record are in the model; before contact was lost, replicas that died" in page.text
    assert "100 % of those on record" in page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert page.figures()["share in the model"] == "100 % of those on record"


def test_who_never_joined_is_not_among_those_that_ran(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.event("spawn", "r2", data={"pid": 1, "life": 1})
    run.event("death", "r2", data={"status": "SIGKILL"})
    run.event("refuse", "r3", data={"kind": "misfit", "reason": "another model"})
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    for replica in ("r0", "r1"):
        run.event("leave", replica, 1, data={"counts": counts(10, 0)})
    story = write([tmp_path], over=True, say=lambda text: None).story
    assert ", with 2 replicas, and" in story[0] and story[0].endswith(". r2 took no part.")
    assert "All 20 inner steps are in the model." in story, "it has taken no steps that are not on record"
    assert whole(tmp_path).figures()["replicas"] == "2"


def test_a_replica_that_misses_outer_steps_counts_where_it_took_part(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.round(2, {"r0": (1, 10, 20)}, here=[])
    run.event("leave", "r0", 1, data={"counts": counts(20, 0, 0.5)})
    run.event("leave", "r1", 1, data={"counts": counts(10, 0, 0.4)})
    assert "for 0.9 s in all, 0.3 s per contribution (3 in all):" in text_of(tmp_path)


@pytest.mark.parametrize("ends", ["left", "was killed"])
def test_a_last_outer_step_without_an_inner_step_to_follow_kept_nobody_from_one(tmp_path: Path, ends: str) -> None:
    """r0 waits 0.2 s for r1 in its loop. Then it waits 0.6 s as it leaves (or it is killed), after its last report."""
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1", "r2"):
        run.event("join", replica, 1)
    run.round(1, dict.fromkeys(("r0", "r2", "r1"), (1, 10, 10)), here=[])
    run.event("counts", data={"counts": {"r0": [1, counts(15, 5, 0.5)]}})
    last = {"members": [["r0", 1], ["r1", 1], ["r2", 1]], "retry": False, "waited": [0.6, 0.1, 0.0], "for": "r2"}
    run.event("quorum", fragment=0, version=2, attempt=7, data=last)
    run.event("leave" if ends == "left" else "lost", "r0", 1, data={"counts": counts(15, 0, 0.5)})
    for replica in ("r1", "r2"):
        run.event("leave", replica, 1, data={"counts": counts(10, 0, 0.3)})
    assert "Until all had proposed, they waited mostly for r1: 0.4 s of 0.5 s." in text_of(tmp_path)
    rows = page_of(tmp_path / "report.html").table("replica", "in all", "mostly for")
    assert rows[0] == ["r0", "0.5 s", "r1 0.2 s"]


def test_the_parts_of_all_waits_add_up_to_their_sum(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    replicas = [f"r{number}" for number in range(5)]
    for replica in replicas:
        run.event("join", replica, 1)
    for version in range(1, 6):  # each is the last one once
        replicas = [*replicas[1:], replicas[0]]
        run.round(version, dict.fromkeys(replicas, (1, 10, 10 * version)), here=[])
    for replica in replicas:
        run.event("leave", replica, 1, data={"counts": counts(60, 0, 0.8)})
    assert reported(tmp_path) == 0
    rows = page_of(tmp_path / "report.html").table("replica", "in all", "mostly for")
    assert rows[-1][1] == "4 s" and rows[-1][2].endswith(" 0.8 s, others 1.6 s")


def test_a_wait_at_the_end_that_is_longer_than_any_reported_one_is_not_among_them(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in ("r0", "r1"):
        run.event("join", replica, 1)
    for version in (1, 2, 3):
        run.round(version, dict.fromkeys(("r0", "r1"), (1, 10, 10 * version)), here=[])
    last = {"members": [["r0", 1], ["r1", 1]], "retry": False, "waited": [0.6, 0.0], "for": "r1"}
    run.event("quorum", fragment=0, version=4, attempt=7, data=last)
    run.event("leave", "r0", 1, data={"counts": counts(35, 0, 1.5) | {"waits": [[0.5, 3]]}})
    run.event("leave", "r1", 1, data={"counts": counts(35, 0, 0.9) | {"waits": [[0.3, 3]]}})
    assert "Until all had proposed, they waited mostly for r1: 0.6 s." in text_of(tmp_path)


@pytest.mark.parametrize("how", ["killed", "failed", "one left", "saved"])
def test_a_model_that_nobody_has_handed_over_is_not_called_kept(tmp_path: Path, how: str) -> None:
    run = job(tmp_path)
    for replica, life in (("r0", 1), ("r1", 2)):
        if how == "one left" and replica == "r0":
            run.event("leave", replica, life, data={"counts": counts(27, 0)})
            continue
        if how == "saved":
            run.event("return", replica, life, data={"resumed": True})
        failed = {"reason": "ZeroDivisionError: division by zero"} if how == "failed" else {}
        run.event("leave" if failed else "lost", replica, life, data={"counts": counts(27, 0), **failed})
        run.event("death", replica, life, data={"status": "exit status 1"})
    text = " ".join(write([tmp_path], over=True, say=lambda text: None).story)
    assert ("No replica came to its end: that model is lost, unless" in text) == (how in ("killed", "failed"))


def test_a_run_that_records_its_checkpoints_says_that_there_is_no_model(tmp_path: Path) -> None:
    run = record(tmp_path, ended=False)
    for replica in ("r0", "r2"):
        run.event("death", replica, 1, data={"status": "SIGKILL"})
    run.summarize()
    assert "no checkpoint is on record: there is no model to use." in text_of(tmp_path)
    run.event("checkpoint", "r0", 1, data={"path": "x", "bytes": 1})
    assert "there is no model" not in text_of(tmp_path)


def test_the_figures_of_scripts_have_the_waits_that_leavers_tell_and_the_bytes_of_all(tmp_path: Path) -> None:
    run = job(tmp_path)
    run.now = 9.0
    waits = {"r0": [[0.1, 3], [0.5, 1]], "r1": [[0.2, 2]]}
    run.event("leave", "r0", 1, data={"counts": counts(31, 4, 0.8, 3000) | {"waits": waits["r0"]}})
    run.event("leave", "r1", 2, data={"counts": counts(6, 0, 0.4, 2000) | {"waits": waits["r1"]}})
    found = write([tmp_path], say=lambda text: None).summary
    assert found["stall_s"] == {"median": 0.15, "p99": 0.5, "max": 0.5}
    assert found["wire_bytes"] == 6000, "r1 had sent 1000 before it died"


def test_a_record_of_its_own_counts_once_whatever_a_replica_tells(tmp_path: Path) -> None:
    run = Recorder(tmp_path)
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    run.event("join", "r0", 1)
    run.steps("r0", 1, 10)
    run.event("stall", "r0", 1, data={"stall_s": 0.3})
    run.round(1, {"r0": (1, 10, 10)})
    run.event("leave", "r0", 1, data={"counts": counts(10, 0, 0.3, 1000) | {"waits": [[0.3, 1], [0.9, 9]]}})
    run.end("r0")
    assert write([tmp_path], say=lambda text: None).summary["stall_s"]["max"] == 0.5, "its own record, not 0.9"


def started_anew(path: Path, *, restarted: bool = False, resumes: bool = False) -> Recorder:
    """Both replicas are killed 2 steps after version 1, and start anew. ``restarted``: so was the coordinator, which
    saw no rollback. ``resumes``: r1 comes back under its former incarnation."""
    run, lives = Recorder(path), ("r0", "r1")
    run.event("start", version=0, inner_step=0, data={"epoch": 1, "versions": [0]})
    for replica in lives:
        run.event("join", replica, 1)
    run.round(1, {"r0": (1, 10, 10), "r1": (1, 10, 10)}, here=[])
    run.now = 3.0
    for replica in lives:
        run.event("lost", replica, 1, data={"counts": counts(12, 2, 0.4, 1000), "unreported": 3})
        run.event("gone", replica, 1, data={"reason": "superseded by a newcomer"})
    if not restarted:
        run.event("rollback", version=1, inner_step=10, data={"connected": 1})
    run.now = 5.0
    why = "the job had come to version 1, inner step 10; nobody who is here holds that state: it starts anew"
    run.event("start", version=0, inner_step=0, data={"epoch": 2, "versions": [0], "undone": why})
    life = {"r0": 2, "r1": 1 if resumes else 2}
    for replica in lives:
        run.event("return" if life[replica] == 1 else "join", replica, life[replica])
    run.round(1, {replica: (life[replica], 20, 20) for replica in lives}, here=[])
    run.now = 9.0
    for replica in lives:
        run.event("leave", replica, life[replica], data={"counts": counts(20, 0, 0.4, 1000)})
    return run


@pytest.mark.parametrize("restarted", [False, True])
def test_a_job_that_starts_anew_accounts_for_the_steps_of_its_earlier_life(tmp_path: Path, *, restarted: bool) -> None:
    started_anew(tmp_path, restarted=restarted)
    found = write([tmp_path], over=True, say=lambda text: None)
    text = " ".join(found.story).replace("\N{NO-BREAK SPACE}", " ")
    assert "Starting anew undid 1 outer step with 20 inner steps: neither these nor those that were pending" in text
    assert (
        "Of 64 inner steps on record, 40 (62.5 %) are in the model, 24 were lost with replicas that died; survivors "
        "lost none; before contact was lost, replicas that died may have taken up to 6 more steps"
    ) in text
    assert "for 1.6 s in all, 0.4 s per contribution (4 in all, 2 of them undone)" in text
    assert "The replicas sent 4 kB in reductions, 2 kB per outer step (2 were made, 1 of them undone)." in text
    rows = page_of(found.path).table("replica", "inner steps in the model")
    assert [row[:2] for row in rows] == [["r0", "20"], ["r1", "20"]], "without those undone"
    names = ("outer_steps", "inner_steps_executed", "dead_inner_steps_lost", "survivor_inner_steps_lost")
    assert [found.summary[name] for name in names] == [1, 64, 24, 0]


def test_a_job_that_nobody_has_survived_tells_what_its_new_start_undid(tmp_path: Path) -> None:
    """Both replicas raise an exception after version 1, start anew, and raise it again."""
    run = Recorder(tmp_path)
    for life in (1, 2):
        undone = {"undone": "the job had come to version 1, inner step 10: it starts anew"} if life == 2 else {}
        run.event("start", version=0, inner_step=0, data={"epoch": life, "versions": [0], **undone})
        for replica in ("r0", "r1"):
            run.event("join", replica, life)
        run.round(1, {"r0": (life, 10, 10), "r1": (life, 10, 10)}, here=[])
        for replica in ("r0", "r1"):
            failed = {"counts": counts(15, 5, 0.4, 1000), "reason": "ValueError: my bug"}
            run.event("leave", replica, life, data=failed)
            run.event("death", replica, life, data={"status": "exit status 1"})
        run.event("rollback", version=1, inner_step=10, data={"connected": 0})
    run.summarize()
    text = text_of(tmp_path)
    assert "Starting anew undid 1 outer step with 20 inner steps" in text
    assert "Of 60 inner steps, 20 (33.3 %) are in the model, 40 were lost with replicas that died. No replica" in text
    rows = page_of(tmp_path / "report.html").table("replica", "inner steps in the model")
    assert [row[:2] for row in rows] == [["r0", "10"], ["r1", "10"]]


def test_an_incarnation_that_trains_on_after_the_job_started_anew_leaves_the_account_open(tmp_path: Path) -> None:
    started_anew(tmp_path, resumes=True)
    assert write([tmp_path], over=True, say=lambda text: None).summary["inner_steps_executed"] is None


def test_a_report_says_without_javascript_what_happened(tmp_path: Path) -> None:
    job(tmp_path)
    assert reported(tmp_path) == 0
    plain = (tmp_path / "report.html").read_text().split("<noscript>")[1].split("</noscript>")[0]
    assert "<p>The job ran for" in plain and "are in the model" in plain
