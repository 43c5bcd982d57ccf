"""The shipped recipes as they are, with faults: what a user of the first command relies on. Minutes each."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

POINTS = ("inner", "propose", "gather", "reduce", "prepare", "commit", "apply", "fetch")
GRACE_S, DEAD_AFTER_S = 2.0, 3.0
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``ftopt run RECIPE ...``; its summary, with the run's folder. The same command is run once."""
    done: dict[tuple[str, ...], dict[str, Any]] = {}

    def run_one(recipe: str, *overrides: str, take: int = 0) -> dict[str, Any]:
        key = (recipe, *overrides, str(take))
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            command = [sys.executable, "-m", "ftopt", "run", recipe, *overrides, f"log.dir={folder}"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            (path,) = folder.iterdir()
            done[key] = {**json.loads((path / "summary.json").read_text()), "folder": path}
        return done[key]

    return run_one


def events(summary: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    lines = (summary["folder"] / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] in names]


def assert_nothing_lost(summary: dict[str, Any], replicas: int = 4) -> None:
    assert summary["survivor_inner_steps_lost"] == 0
    assert summary["inner_steps_counted_twice"] == 0
    assert summary["chain_conflicts"] == []
    assert len(summary["anchor_digests"]) == replicas
    assert len(set(summary["anchor_digests"].values())) == 1


def max_stall_s(run: Run, *overrides: str) -> float:
    """Median of three runs."""
    return statistics.median(run("diloco_bytes", *overrides, take=take)["stall_s"]["max"] for take in range(3))


@pytest.mark.parametrize("recipe", ["diloco_bytes", "localsgd_bytes"])
def test_four_replicas_learn_more_than_one_and_agree(run: Run, recipe: str) -> None:
    four, one = run(recipe), run(recipe, "replicas=1")
    assert_nothing_lost(four)
    assert four["attempts_aborted"] == 0
    assert four["val_loss_final"] <= 2.25
    assert four["val_loss_final"] < one["val_loss_final"] - 0.02


@pytest.mark.parametrize(
    "recipe", ["own_images", "own_text", "own_lora", "two_datacentres", "spot_machines", "laptop_faults"]
)
def test_recipes_for_situations_learn_and_lose_nothing(run: Run, recipe: str) -> None:
    summary = run(recipe)
    assert summary["survivor_inner_steps_lost"] == 0
    assert len(set(summary["anchor_digests"].values())) == 1
    assert summary["val_loss_final"] < 0.6 * summary["val_loss_initial"]


def test_one_seed_gives_one_digest(run: Run) -> None:
    calm = ("policy.grace_s=60", "policy.stragglers=wait")  # nobody is called in
    first, second = (run("diloco_bytes", *calm, take=take) for take in range(2))
    assert first["anchor_digests"] == second["anchor_digests"]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_replica_comes_back(run: Run, point: str) -> None:
    if point == "fetch":
        faults = (
            "faults=[{replica: 1, at_step: 120, point: inner, do: kill, rejoin_s: 2},"
            "{replica: 1, incarnation: 2, at_step: 0, point: fetch, do: kill, rejoin_s: 2}]"
        )
    else:
        faults = f"faults=[{{replica: 1, at_step: 120, point: {point}, do: kill, rejoin_s: 2}}]"
    stall_s = max_stall_s(run, faults)
    for take in range(3):
        summary = run("diloco_bytes", faults, take=take)
        assert_nothing_lost(summary)
        deaths = 2 if point == "fetch" else 1
        assert len(summary["deaths"]) == deaths
        assert len(summary["joins"]) == 4 + deaths
        members = [m for event in events(summary, "decide") for m in event["data"]["members"]]
        assert any(m[:2] == ["r1", 1 + deaths] and m[2] > 0 for m in members), "the one that came back contributed"
        if point == "reduce":
            aborted = events(summary, "abort")[0]
            attempts = {e["attempt"]: e for e in events(summary, "quorum")}
            first = attempts[aborted["attempt"]]
            retry = min((e for e in attempts.values() if e["attempt"] > first["attempt"]), key=lambda e: e["attempt"])
            offered = dict(zip(map(tuple, first["data"]["members"]), first["data"]["steps"], strict=True))
            again = dict(zip(map(tuple, retry["data"]["members"]), retry["data"]["steps"], strict=True))
            assert retry["version"] == first["version"]
            assert again == {mark: steps for mark, steps in offered.items() if mark[0] != "r1"}
    assert stall_s <= max_stall_s(run) + 1.0


@pytest.mark.parametrize(("do", "limit_s"), [("stop", DEAD_AFTER_S + 1.0), ("hang", GRACE_S + 1.5)])
@pytest.mark.parametrize("point", ["inner", "reduce"])
def test_a_replica_that_is_silent_for_8_s(run: Run, point: str, do: str, limit_s: float) -> None:
    faults = f"faults=[{{replica: 1, at_step: 120, point: {point}, do: {do}, for_s: 8}}]"
    summary = run("diloco_bytes", faults, "train.inner_steps=900")
    assert_nothing_lost(summary)
    assert summary["deaths"] == []
    assert summary["inner_steps_committed"] + summary["inner_steps_pending"] == summary["inner_steps_executed"]
    stalls = [e for e in events(summary, "stall") if e["replica"] != "r1"]
    (struck,) = (event["t_s"] for event in events(summary, "fault"))
    during = [e for e in stalls if struck < e["t_s"] < struck + 8.0 + DEAD_AFTER_S]
    assert max(e["data"]["stall_s"] for e in during) <= limit_s
    rounds = {e["inner_step"] // 50 for e in during if e["data"]["stall_s"] > 1.0}
    assert len(rounds) <= 1, "once"


def test_the_coordinator_is_killed_and_goes_on_from_its_journal(run: Run) -> None:
    faults = "faults=[{replica: coordinator, at_step: 300, point: decide, do: kill, rejoin_s: 1, journal: keep}]"
    summary = run("diloco_bytes", faults)
    assert_nothing_lost(summary)
    assert summary["deaths"] == []
    assert len(summary["joins"]) == 4
    decided = [event["version"] for event in events(summary, "decide")]
    assert decided == sorted(set(decided)), "no version is reversed"
