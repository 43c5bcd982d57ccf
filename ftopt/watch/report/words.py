"""What happened in a run and what it cost, in a few sentences; and the events, line by line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ftopt.common.plural import count
from ftopt.watch.account import scores, where_steps_are
from ftopt.watch.jsonl import data_of
from ftopt.watch.report.facts import COORDINATOR
from ftopt.watch.report.interruption import interrupted, killed_by
from ftopt.watch.report.lives import BROKE_OFF
from ftopt.watch.report.run import Run
from ftopt.watch.report.text import listed, share, size, span
from ftopt.watch.report.timeline import deaths
from ftopt.watch.sentences import clock, figure


def story(run: Run) -> list[str]:
    """A few sentences: how long, who died and came back, where the steps are, the longest wait, bytes, losses."""
    if not run.facts.decided and _of_a_joined_launch(run):
        return [
            "This is the folder of a launch that joined a job: it has only when its processes started and died. The "
            "job's account, with theirs, is in the folder of the launch that started the job."
        ]
    parts = [
        _beginning(run),
        interrupted(run),
        _deaths(run),
        *(_first([f"At {clock(t_s)}, {said}" for t_s, said in each], "such events") for each in run.fold.memorable()),
        _undone(run),
        _steps(run),
        _no_model(run),
        _attempts(run),
        _waits(run),
        _sent(run),
        _losses(run),
    ]
    return [part for part in parts if part]


def not_committed(run: Run) -> int | None:
    """For a run without its last lines: the steps that are in no commit and not given up, as far as is known."""
    s = run.summary
    if not run.facts.decided or run.partly:
        return None
    return max(0, int(s["inner_steps_pending"]) + int(s["survivor_inner_steps_lost"]))


def _of_a_joined_launch(run: Run) -> bool:
    """Whether the processes of this run had no coordinator of their own."""
    spawned = {event["replica"] for event in run.facts.named("spawn")}
    return bool(spawned) and COORDINATOR not in spawned and not run.steps


def _beginning(run: Run) -> str:
    members = run.members()
    first = min((event["t_s"] for event in run.facts.named("join")), default=0.0)
    of = "The job ran for" if run.facts.decided else "The record covers"
    who = f", with {count(len(members), 'replica')}"
    others = [replica for replica in run.replicas() if replica not in members]
    absent = f" {listed(others)} took no part." if others else ""
    late = first >= 0.05 * run.ran_s > 0
    before = f" (the first {span(first)} passed before the first replica joined)" if late else ""
    if run.facts.decided:
        outer = count(int(run.summary["outer_steps"]), "outer step")
        began = next((event["inner_step"] for event in run.facts.named("start", "recover")), 0)
        resumed = f" went on from inner step {began:,} and" if began else ""
        made = f", and committed {outer}; it{resumed} came to inner step {int(run.summary['inner_step']):,}."
    else:
        made = "."
    if run.ended:
        state = ""
    elif run.going_on:
        state = f" The run is still going on: its last line was written {span(run.age_s)} before this report."
    elif run.facts.named("spawn") or not (run.steps or run.facts.unrecorded):
        state = " The run has no summary.json: it was killed before its end. This is what it had recorded."
    else:
        who = listed(run.without_end()) or "The job"
        state = f" {who} did not come to an end on record: still running, cut off or killed."
    return f"{of} {span(run.ran_s)}{before}{who}{made}{absent}{state}"


def _deaths(run: Run) -> str:
    if not run.facts.decided and run.facts.named(BROKE_OFF):
        return _breaks(run)
    found = [each for each in deaths(run.facts, run.steps) if not data_of(each[0]).get("by")]
    again = sum(
        event["replica"] == COORDINATOR and data_of(event).get("life", 1) > 1 for event in run.facts.named("spawn")
    )
    coordinator = f" The coordinator was started again {count(again, 'time')}." if again else ""
    away = _away(run)
    if not found:
        known = run.ended and (run.facts.named("spawn") or not away)
        none = f"No {'other ' if killed_by(run) else ''}replica died." if known else "No replica's death is on record."
        return f"{none}{away}{coordinator}" if run.facts.decided else coordinator.strip()
    told = []
    for event, back in found[:6]:
        replica, died, data = event["replica"], event["t_s"], data_of(event)
        why = f"{data.get('status')}{', an injected fault' if data.get('by_fault') else ''}"
        after = (
            f", and {span(back - died)} later its successor took its first inner step"
            if back is not None and run.steps.get(replica)
            else f", and was back {span(back - died)} later"
            if back is not None
            else " and did not come back"
        )
        told.append(f"{replica} died at {clock(died)} ({why}){after}")
    more = f"; {len(found) - 6:,} more are in the report" if len(found) > 6 else ""
    down_s = sum(lane.seconds.get("dead", 0.0) for lane in run.fold.states.values())
    together = f" Replicas were down for {span(down_s)} in all." if len(found) > 1 else ""
    return f"{count(len(found), 'death')}: {'; '.join(told)}{more}.{together}{away}{coordinator}"


def _away(run: Run) -> str:
    """The replicas that came back although they had not left, and for how long their connections were lost."""
    left, since, away = set[str](), dict[str, float](), defaultdict[str, float](float)
    for event in run.facts.named("join", "return", "leave", "lost"):
        who, name, t_s = event["replica"], event["event"], float(event["t_s"])
        if name == "lost":
            since[who] = t_s
            continue
        lost_s = since.pop(who, t_s)
        if name == "return" and who not in left and not data_of(event).get("resumed"):
            away[who] += t_s - lost_s
        (left.add if name == "leave" else left.discard)(who)
    spawned = bool(run.facts.named("spawn"))  # then a coordinator that was started again has a sentence of its own
    told = [
        f"{who} ({span(away_s)})" if away_s else who for who, away_s in sorted(away.items()) if away_s or not spawned
    ]
    return f" The connection to {listed(told)} was lost, and came back." if told else ""


def _breaks(run: Run) -> str:
    """Without the coordinator's events: the replicas whose record breaks off, for whatever reason."""
    told = [
        f"The record of {x['replica']} breaks off at {clock(x['t_s'])}"
        + (f" and goes on at {clock(back)}" if back else "")
        for x, back in deaths(run.facts, run.steps)
    ]
    return f"{_first(told, 'breaks')} The folder has no events of the coordinator, so it does not tell who died."


def _first(told: Sequence[str], rest: str) -> str:
    """The first six as sentences; ``rest`` names the others."""
    more = f". {len(told) - 6:,} more {rest}" if len(told) > 6 else ""
    return f"{'. '.join(told[:6])}{more}." if told else ""


def _steps(run: Run) -> str:
    s = run.summary
    if run.partly:
        committed = count(int(s["inner_steps_committed"]), "inner step")
        return f"{committed} are in the model, as the coordinator has decided."
    executed = int(s["inner_steps_executed"]) + int(s["inner_steps_inherited"])
    if not run.facts.decided:
        return _by_replicas(run, executed)
    rest = f"are not in it {'yet' if run.going_on else 'and were pending when the record ends'}"
    part = f" ({share(int(s['inner_steps_committed']), executed)})"
    return _sentence(where_steps_are(s, part, survived=not run.lost, ended=run.ended, rest=rest))


def _undone(run: Run) -> str:
    """The steps that were in the model before the job started anew."""
    undone = run.fold.figures.decisions
    if not run.facts.lives.anew or not undone.undone:
        return ""
    return (
        f"Starting anew undid {count(undone.undone, 'outer step')} with {count(undone.undone_steps, 'inner step')}: "
        "neither these nor those that were pending then are in any state."
    )


def _no_model(run: Run) -> str:
    """Where outer steps have made a model that no replica has handed over."""
    if not run.lost or run.facts.saved or not run.summary["outer_steps"]:
        return ""
    end = data_of(run.interruption) if run.interruption is not None else {}
    if end.get("others") or end.get("checkpoint"):
        return f"The newest checkpoint is {end['checkpoint']}." if end.get("checkpoint") else ""
    if run.facts.unrecorded:  # scripts do not record their checkpoints
        return "No replica came to its end: that model is lost, unless the script has saved it (ftopt.Checkpoints)."
    return "No replica came to its end, and no checkpoint is on record: there is no model to use."


def _sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}."


def _by_replicas(run: Run, executed: int) -> str:
    """Without the coordinator's events: the facts that the replicas reported at their ends."""
    ends = [data_of(event) for event in run.facts.named("end")]
    pending = sum(int(data.get("pending_steps", 0)) for data in ends)
    told = f", {pending:,} of them pending when their replicas left" if ends else ""
    return (
        f"{count(executed, 'inner step')} are on record{told}. The folder has no events of the coordinator, so it does "
        "not tell which of them are in the model; `ftopt coordinator --folder DIR` records that."
    )


def _attempts(run: Run) -> str:
    aborted = run.summary["attempts_aborted"]  # None: only the coordinator knows
    if not aborted:
        return ""
    why = run.fold.reasons
    first = f"the most frequent reason: {why.most_common(1)[0][0]}" if len(why) > 1 else next(iter(why), "")
    attempts = count(int(run.summary["attempts"]), "attempt")
    repeated = f"{'was' if aborted == 1 else 'were'} repeated"
    return f"{aborted:,} of {attempts} to average failed and {repeated} ({first})."


def _waits(run: Run) -> str:
    lasting, waits = run.lasting_waits, run.fold.waits
    if not lasting:
        return _waits_told(run)
    median, _, _ = lasting.of()
    longest, t_s, replica = max((*each.longest, replica) for replica, each in waits.items())
    there = _there_s(run)
    total = sum(each.every.total for each in waits.values())
    return (
        f"An outer step kept a replica from its next inner step for {span(median)} at the median; the longest wait was "
        f"{span(longest)} ({replica}, at {clock(t_s)}). All waits together are {share(total, there)} of the replicas' "
        f"time in the job.{_whom(run)}"
    )


def _whom(run: Run) -> str:
    """For whom outer steps have waited most."""
    waited_for = sum(run.waited_for().values(), Counter[str]())
    if not waited_for:
        return ""
    whom, waited_s = waited_for.most_common(1)[0]
    others = f" of {span(waited_for.total())}" if len(waited_for) > 1 else ""
    return f" Until all had proposed, they waited mostly for {whom}: {span(waited_s)}{others}."


def _waits_told(run: Run) -> str:
    """The total waiting times, for replicas that have reported them."""
    waited = run.waits_told()
    if not (total := sum(waited.values())):
        return ""
    most = max(waited, key=lambda replica: waited[replica])
    made, undone = run.told_contributions()
    told = f"{made:,} in all{_of_them_undone(undone)}"
    each = f", {span(total / made)} per contribution ({told})" if made else ""
    return (
        f"Outer steps kept the replicas from their next inner steps for {span(total)} in all{each}: "
        f"{share(total, _there_s(run))} of their time in the job. {most} waited longest, {span(waited[most])}."
        f"{_whom(run)}"
    )


def _there_s(run: Run) -> float:
    """The total time that the replicas spent in the job."""
    lanes = run.fold.states.values()
    return sum(sum(v for k, v in lane.seconds.items() if k not in ("dead", "starting")) for lane in lanes)


def _sent(run: Run) -> str:
    total = sum(run.sent().values())
    if not total:
        return ""
    undone = run.fold.figures.decisions.undone
    made = int(run.summary["outer_steps"]) + undone
    told = f" ({made:,} were made{_of_them_undone(undone)})" if undone else ""
    each = f", {size(total / made)} per outer step{told}" if made else ""
    return f"The replicas sent {size(total)} in reductions{each}."


def _of_them_undone(undone: int) -> str:
    return f", {undone:,} of them undone" if undone else ""


def _losses(run: Run) -> str:
    s, tests = run.summary, run.facts.named("evaluate")
    if not tests:
        return ""
    if s["val_loss_final"] is not None:
        if all(data_of(event).get("final") for event in tests):
            s = s | {"val_step_initial": s["val_step_final"]}
        return _sentence("; ".join(scores(s, run.loss_unit)))
    first, last = figure(s["val_loss_initial"], 5), figure(float(data_of(tests[-1])["loss"]), 5)
    at = f" at inner step {s['val_step_initial']:,}" if s["val_step_initial"] else " at first"
    return f"Held-out loss: {first}{run.loss_unit}{at}, {last} at the last evaluation."
