"""The account of a chaos campaign: what is lost or counted twice is read from the model."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

import ftopt
from benchmarks import chaos
from benchmarks.chaos import account, broken
from benchmarks.chaos.broken import BROKEN
from benchmarks.chaos.facts import Facts, Outcome
from benchmarks.chaos.faults import DECK, HELD, Striker
from benchmarks.chaos.jobs import Run, processes
from benchmarks.chaos.methods import GLOBAL_BATCH, WAYS
from benchmarks.chaos.relay import Link, Relays
from benchmarks.chaos.script import Account, Life, Samples, steps_of
from ftopt.sync.protocol import messages as m
from ftopt.transport.sockets import unreachable
from tests.sync.server.access import identity, scripted

COUNTED = [way for way in WAYS if way != GLOBAL_BATCH]
SAMPLES = 60


@pytest.mark.parametrize("way", COUNTED)
def test_every_step_and_every_sample_is_in_the_model_once(way: str) -> None:
    groups = ftopt.local_groups(3)
    models = [Account(WAYS[way].fragments, SAMPLES) for _ in groups]
    begun = [0, 0, 0]

    def train(i: int) -> None:
        loader = ftopt.DataLoader(Samples(SAMPLES), 1, group=groups[i])
        inner = torch.optim.SGD(models[i].parameters(), lr=1.0)
        optimizer = ftopt.wrap(inner, models[i], WAYS[way].make(), group=groups[i])
        with optimizer:
            for samples in loader:
                models[i](i, samples).backward()
                optimizer.step()
                optimizer.zero_grad()
                begun[i] += 1

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = models[0].read()
    assert found["samples"] == [1.0] * SAMPLES
    assert found["steps"][0][:4] == [*map(float, begun), 0.0]
    assert sum(begun) == SAMPLES


def test_a_record_without_room_says_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r0.1.steps"
    path.touch()  # all that a full disk takes, or a process that was killed then
    assert steps_of(path) == (0, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 96, 4))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"the disk is full \(4 bytes free\).*make room.*r0\.1\.steps"):
        steps_of(path)


class Ended:
    """A process that has ended."""

    pid = 0

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


def facts(folder: Path, *, steps: list[float], samples: list[float] | None = None, **more: Any) -> Facts:
    """Of a campaign of two lives with 10 steps each, of which the first came to its end."""
    (folder / "run").mkdir()
    (folder / "run" / "events.jsonl").write_text(
        json.dumps({"t_s": 0.0, "event": "start", "data": {"versions": [0]}}) + "\n"
    )
    runs = []
    for number, code in enumerate((0, -9)):
        life = Life("", f"r{number}", number, "DiLoCo", len(samples or ()), 0.0, str(folder), chaos.POLICY)
        run = Run(life, Ended(code), began=1.0, ended=20.0, fate="kill" if code else "")  # type: ignore[arg-type]
        (folder / f"{life.name}.steps").write_bytes(struct.pack("<qq", 10, 10))
        (folder / f"{life.name}.log").write_text("" if code else more.get("log", ""))
        runs.append(run)
    model = {"steps": [steps], "samples": samples}
    end = {"how": "done", "at": 19.5, "versions": [3], "pending": [0], "model": model}
    (folder / "r0.0.end").write_text(json.dumps(end))
    lines = [{"what": "data ended", "at": 19.0}, *more.get("lines", ())]
    (folder / "r0.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "r1.1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more.get("others", ())))
    faults = [{"at": 5.0, "kind": "kill", "who": "r1.1"}]
    return Facts(folder, runs, "DiLoCo", len(samples or ()), chaos.POLICY, 0.0, faults, 0.0, (), ())


def anchor(digest: str) -> dict[str, Any]:
    return {"what": "anchor", "at": 2.0, "versions": [2], "digest": digest}


def wait(seconds: float, at: float = 15.0) -> dict[str, Any]:
    return {"what": "wait", "of": "step", "at": at, "seconds": seconds}


@pytest.mark.parametrize(
    ("more", "bad"),
    [
        ({"steps": [10.0, 7.0]}, None),
        ({"steps": [9.0, 7.0]}, "1 steps of r0.0 lost in fragment 0, 0 told of"),
        ({"steps": [9.0, 7.0], "log": "replica r0: 1 step dropped: why"}, None),
        ({"steps": [9.0, 7.0], "log": "replica r0: 1,000 steps dropped: why"}, None),
        ({"steps": [9.0, 7.0], "log": "replica r0: 1 pending step dropped: why"}, None),
        ({"steps": [9.0, 7.0], "log": "replica r0: 2 pending steps of fragment 0 dropped: why"}, None),
        (
            {"steps": [9.0, 7.0], "log": "replica r0: 2 pending steps of fragment 1 dropped: why"},
            "1 steps of r0.0 lost",
        ),
        ({"steps": [11.0, 7.0]}, "1 steps of r0.0 twice in fragment 0"),
        ({"steps": [10.0, 11.0]}, "1 steps of r1.1 twice in fragment 0"),
        ({"steps": [9.5, 7.0]}, "r0.0 has 9.5 steps in fragment 0"),
        ({"steps": [10.0, 7.0], "samples": [1.0, 1.0, 1.0]}, None),
        ({"steps": [10.0, 7.0], "samples": [1.0, 0.0, 2.0]}, "1 samples lost, 1 twice"),
        ({"steps": [10.0, 7.0], "samples": [1.0, 1.0, 0.8]}, "1 samples in part"),
        ({"steps": [10.0, 7.0], "log": "Task exception was never retrieved"}, "never retrieved"),
        ({"steps": [10.0, 7.0], "lines": [anchor("a")], "others": [anchor("b")]}, "r1.1 and r0.0 differ at versions"),
        ({"steps": [10.0, 7.0], "lines": [wait(4.0)]}, None),
        ({"steps": [10.0, 7.0], "lines": [wait(14.0, at=40.0)]}, "r0.0 stood still for 14.0 s"),
    ],
)
def test_a_campaign_is_bad_if_anything_is_lost_or_twice_or_loud(
    tmp_path: Path, more: dict[str, Any], bad: str | None
) -> None:
    outcome = account.judge(facts(tmp_path, **more))
    assert [bad in line for line in outcome.bad] == [True] if bad else outcome.bad == []


def test_who_ended_before_the_state_died_has_no_claim_to_it(tmp_path: Path) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0])
    with (tmp_path / "run" / "events.jsonl").open("a") as lines:
        lines.write(json.dumps({"t_s": 30.0, "event": "restore"}) + "\n")
        lines.write(json.dumps({"t_s": 31.0, "event": "decide", "version": 1}) + "\n")
    assert account.judge(found).bad == ["nobody has come to the end"]


def test_the_deck_is_dealt_alike_for_a_seed_and_every_card_can_be_played() -> None:
    def dealt(seed: int) -> list[str]:
        played: list[str] = []
        striker = Striker(None, seed=seed, replicas=5, pause=lambda _: None, tell=lambda _: None)  # type: ignore[arg-type]
        for kind in DECK:
            name = "_" + kind.replace(", ", "_").replace(" ", "_")
            assert callable(getattr(striker, name)), kind
            setattr(striker, name, played.append)
        for _ in range(sum(DECK.values())):
            striker.strike()
        return played

    assert dealt(3) == dealt(3) != dealt(4)
    assert sorted(dealt(3)) == sorted(kind for kind, count in DECK.items() for _ in range(count))


def test_only_the_kinds_that_are_asked_for_are_dealt() -> None:
    plan = chaos.Plan("DiLoCo", False, 0, only=("broken", "upgrade"))
    assert plan.kinds == [*BROKEN, "coordinator upgrade"]
    assert chaos.Plan("DiLoCo", False, 0).kinds == list(DECK)


@pytest.mark.parametrize("words", [["broken", "earthquake"], ["Kill"]])
def test_a_word_that_no_fault_has_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    chaos.add(parser)
    assert chaos.run(parser.parse_args(["DiLoCo", "--only", *words])) == 2
    assert f"--only {words[-1]}; must be part of a name of kill, stop" in capsys.readouterr().err


def address(port: int) -> bytes:
    """What Gloo leaves in the store, in part."""
    return b"\x02\x00" + port.to_bytes(2, "big") + b"\x7f\x00\x00\x01" + bytes(8) + b"\x13-"


def test_a_broken_address_leads_nowhere() -> None:
    well = address(40_000)
    assert broken._elsewhere("", well) == broken._elsewhere("mute", well) == well
    refused, silent = broken._elsewhere("refused", well), broken._elsewhere("silent", well)
    assert refused == address(1)
    assert unreachable({"0/0/0": well, "0/0/1": silent, "0/0/2": refused}, 0, 0.3) == [1]
    for opened in broken._silent():
        opened.close()
    broken._silent.cache_clear()


def test_broken_values_are_wrong_in_each_way() -> None:
    def after(how: str) -> list[float]:
        flat = torch.ones(2)
        assert broken._spoiled(how, flat, "found") == "found"
        return flat.tolist()

    assert after("") == after("mute") == [1.0, 1.0]
    assert min(after("huge")) > 1e5 * chaos.POLICY["outlier_ratio"] ** 2 and all(map(math.isnan, after("not finite")))
    with pytest.raises(FloatingPointError):
        after("codec")
    assert broken._spoiled("codec", torch.ones(2, dtype=torch.int64), "found") == "found", "rows are no values"


def test_a_broken_member_may_hold_up_the_others_while_it_is_looked_for(tmp_path: Path) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0], lines=[wait(20.0, at=40.0)])
    fault = {"at": 20.0, "kind": "broken reduction", "who": "r1.1", "for_s": 15.0, "how": "fails"}
    assert "r0.0 stood still for 20.0 s" in account.judge(replace(found, faults=[fault])).bad[0]
    assert account.judge(replace(found, faults=[fault | {"how": "mute"}])).bad == []
    assert account.judge(replace(found, faults=[fault | {"at": 10.0, "how": "mute", "for_s": 5.0}])).bad


@pytest.mark.parametrize(
    ("event", "bad"),
    [
        ({"event": "evicted", "replica": "r1"}, []),
        ({"event": "evicted", "replica": "r0"}, ["1 events evicted"]),
        ({"event": "mismatch", "data": {"digests": {"r0": "a", "r1": "b", "r2": "a"}}}, []),
        ({"event": "mismatch", "data": {"digests": {"r0": "a", "r1": "b", "r2": "c"}}}, ["1 events mismatch"]),
    ],
)
def test_who_computes_wrong_is_found_out_and_nobody_else(tmp_path: Path, event: dict[str, Any], bad: list[str]) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0])
    events(tmp_path, event | {"t_s": 25.0})
    fault = {"at": 20.0, "kind": "broken values", "who": "r1.1", "for_s": 15.0, "how": "huge"}
    assert account.judge(replace(found, faults=[fault])).bad == bad
    assert account.judge(replace(found, faults=[fault | {"at": 1.0}])).bad, "it was well again"


@pytest.mark.parametrize("version", [0, 2, 3])
def test_the_state_may_not_be_given_up_while_its_only_holder_stands_still(tmp_path: Path, version: int) -> None:
    """``version``: what the job goes on from: 3 is the newest one, which a checkpoint has, too; 0: from none so far."""
    found = facts(tmp_path, steps=[10.0, 7.0])
    found = replace(found, faults=[{"at": 10.0, "kind": HELD, "who": "r0.0", "for_s": 5.0, "alone": True}])
    assert account.judge(found).bad == []
    events(tmp_path, {"event": "decide", "t_s": 9.0, "version": 3}, {"event": "rollback", "t_s": 13.0, "version": 3})
    events(tmp_path, *([recovered(version, 16.0)] if version else []))
    given_up = ["the state was given up after 13.0 s, while r0.0 stood still"]
    assert account.judge(found).bad[:1] == ([] if version == 3 else given_up)
    damaged = {"at": 14.0, "kind": account.DAMAGED, "who": "r0.0"}
    assert account.judge(replace(found, faults=[*found.faults, damaged])).bad[:1] == ([] if version else given_up)


@pytest.mark.parametrize(
    ("how", "why"), [("protocol", "run different versions of ftopt"), ("job", "does not fit job 'default'")]
)
def test_another_coordinator_turns_the_replicas_of_the_job_away(tmp_path: Path, how: str, why: str) -> None:
    async def answer(url: str) -> Any:
        async with scripted(url, identity("default"), token=None) as replica:
            await replica.send(replica.machine.connect()[0].message)  # type: ignore[union-attr]
            return await replica.receive()

    with processes(tmp_path, {}) as job:
        taken, until = job.start_other(how, journal=tmp_path / "other"), time.monotonic() + 60.0
        while True:
            assert time.monotonic() < until
            try:
                if taken.exists():
                    refusal = asyncio.run(answer(f"http://{job.address}"))
                    break
            except aiohttp.ClientConnectorError:  # it makes the file before it listens
                time.sleep(0.05)
    assert isinstance(refusal, m.Refuse) and refusal.kind == "misfit" and why in refusal.reason


def test_a_table_has_a_row_a_method_and_says_that_a_job_never_ended() -> None:
    good = Outcome(faults_s=90.0, steps=5, end_s=0.5).plain()
    rows = [
        {"way": "DiLoCo", "faults": [1, 2], "outcome": good},
        {"way": "DiLoCo", "faults": [], "outcome": {**good, "end_s": None, "too_long": 2, "bad": ["x"]}},
        {"way": "PAFT", "faults": [], "outcome": good},
    ]
    lines = chaos.table(rows)
    assert lines[2] == "| DiLoCo | 2 | 3.0 | 2 | 10 | 0 | 0 | 0 | 0 | 0.0 | 2 | 0.5 | 1 | 1 |"
    assert len(lines) == 4


def test_campaigns_of_a_method_take_turns_with_ledger_recovery_and_resume() -> None:
    parser = argparse.ArgumentParser()
    chaos.add(parser)
    plans = chaos.plans(parser.parse_args(["DiLoCo", "PAFT", "--seed", "7", "--runs", "8"]))
    assert [(plan.way, plan.seed) for plan in plans[:3]] == [("DiLoCo", 7), ("PAFT", 7), ("DiLoCo", 8)]
    assert {plan.recover for plan in plans if plan.way == "PAFT"} == {"drop"}, "replicas that step alike replay nothing"
    mine = {(plan.ledger, plan.recover, plan.resume) for plan in plans if plan.way == "DiLoCo"}
    assert mine == {(True, r, x) for r in ("drop", "replay") for x in (False, True)} | {
        (False, "drop", False),
        (False, "drop", True),
    }


@pytest.fixture
def relays() -> Iterator[tuple[Relays, socket.socket]]:
    """Relays to a port that listens."""
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(60)
        made = Relays(target.getsockname()[1])
        yield made, target
        made.close()


def connected(relays: Relays, target: socket.socket) -> tuple[Link, socket.socket, socket.socket]:
    link = relays.open()
    near = socket.create_connection(("127.0.0.1", link.port), timeout=60)
    return link, near, target.accept()[0]


@pytest.mark.parametrize(
    ("how", "near_heard", "far_heard"), [("both", b"", b""), ("from it", b"b", b""), ("to it", b"", b"a")]
)
def test_what_is_sent_through_a_cut_link_arrives_when_it_is_mended(
    relays: tuple[Relays, socket.socket], how: str, near_heard: bytes, far_heard: bytes
) -> None:
    link, near, far = connected(*relays)
    with near, far:
        far.settimeout(60)
        relays[0].cut(link, how)
        near.sendall(b"a")
        far.sendall(b"b")
        assert (near.recv(1) if near_heard else b"", far.recv(1) if far_heard else b"") == (near_heard, far_heard)
        relays[0].mend(link)
        assert (near_heard or near.recv(1), far_heard or far.recv(1)) == (b"b", b"a")


def test_a_loud_cut_resets_connections_until_it_is_mended(relays: tuple[Relays, socket.socket]) -> None:
    link, near, far = connected(*relays)
    relays[0].cut(link, "loud")
    for end in (near, far):
        with end, pytest.raises(ConnectionResetError):
            end.recv(1)
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", link.port), timeout=60) as refused,
    ):
        refused.recv(1)
    relays[0].mend(link)
    with socket.create_connection(("127.0.0.1", link.port), timeout=60) as near, relays[1].accept()[0] as far:
        near.sendall(b"a")
        assert far.recv(1) == b"a"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_campaign_loses_nothing_and_leaves_no_process(tmp_path: Path) -> None:
    seed = random.randrange(1000)
    plan = chaos.Plan("DiLoCo", True, seed, seconds=20.0)
    outcome, faults = chaos.campaign(plan, tmp_path)
    assert outcome.bad == [], (seed, faults)


def test_a_state_that_somebody_has_ended_with_counts_though_nobody_has_trained_on_it() -> None:
    decided, wipes = [{"event": "decide", "t_s": 5.0}], [0.0, 10.0]
    assert account._wiped(decided, wipes, 100.0, [104.0]) == 0.0
    assert account._wiped(decided, wipes, 100.0, [104.0, 120.0]) == 110.0


def events(folder: Path, *found: dict[str, Any]) -> None:
    """More of the coordinator's."""
    with (folder / "run" / "events.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"replica": "coordinator", "fragment": 0, **event}) + "\n" for event in found)


def recovered(version: int, t_s: float) -> dict[str, Any]:
    return {"event": "recover", "t_s": t_s, "version": version, "data": {"versions": [version]}}


@pytest.mark.parametrize(("version", "bad"), [(2, "nobody has come to the end"), (3, None)])
def test_replicas_that_resume_with_an_older_state_make_it_another_one(
    tmp_path: Path, version: int, bad: str | None
) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0])
    decided = {"event": "decide", "t_s": 5.0, "version": 3}
    events(tmp_path, decided, recovered(version, 30.0), decided | {"t_s": 31.0, "version": version + 1})
    assert account.judge(found).bad == ([bad] if bad else [])


@pytest.mark.parametrize(("began", "bad"), [(1.0, []), (9.0, ["1 events fork"])])
def test_who_has_lived_through_a_new_start_may_say_so_late(tmp_path: Path, began: float, bad: list[str]) -> None:
    """It was stopped meanwhile."""
    found = facts(tmp_path, steps=[10.0, 7.0])
    found.runs[1].began = began
    start = {"event": "start", "t_s": 8.0, "version": 0, "data": {"versions": [0]}}
    events(tmp_path, start, {"event": "fork", "replica": "r1", "t_s": 15.0, "version": 9})
    assert account.judge(found).bad == bad


@pytest.mark.parametrize(("let_in_s", "bad"), [(9.0, []), (14.0, ["1 events fork"])])
def test_who_resumes_from_a_checkpoint_of_before_a_new_start_is_not_let_in(
    tmp_path: Path, let_in_s: float, bad: list[str]
) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0])
    found.runs[1].began, found.runs[1].life = 12.0, replace(found.runs[1].life, resume=True)
    start = {"event": "start", "t_s": 8.0, "version": 0, "data": {"versions": [0]}}
    let_in = {"event": "join", "replica": "r1", "t_s": let_in_s, "version": 0}
    events(tmp_path, start, let_in, {"event": "fork", "replica": "r1", "t_s": 15.0, "version": 9})
    assert account.judge(found).bad == bad


@pytest.mark.parametrize(
    ("kind", "times", "bad"),
    [
        ("kill", (), None),
        ("kill", (20.0, 40.0, 60.0), "no outer step for 70.0 s after 5.0 s"),
        ("all, damaged checkpoint", (20.0, 40.0, 60.0), None),
        ("coordinator stop", (20.0,), "no outer step for 55.0 s after 20.0 s"),
        ("everything", (200.0,), None),
    ],
)
def test_an_outer_step_comes_in_time_after_whatever_strikes_the_whole_job(
    tmp_path: Path, kind: str, times: tuple[float, ...], bad: str | None
) -> None:
    found = facts(tmp_path, steps=[10.0, 7.0])
    found = replace(found, faults=[{"at": t, "kind": kind, "who": "x"} for t in times])
    last = 75.0 if times and times[0] < 100.0 else 40.0
    decided = {"event": "decide", "version": 3}
    events(tmp_path, decided | {"t_s": 5.0}, decided | {"t_s": last})
    outcome = account.judge(found)
    assert outcome.idle_s == last - 5.0
    assert [line.startswith(bad) for line in outcome.bad] == [True] if bad else outcome.bad == []
