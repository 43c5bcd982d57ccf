"""Random walks of the real machines: 300 histories hold I1 to I6, and 1,100 with ``-m slow``; planted bugs don't.

``python -m tests.simulation --replay n`` runs one history again and prints its trace; ``FTOPT_WALK_HISTORIES=n`` runs
more.
"""

from __future__ import annotations

import os
import sys

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.effects import Send
from ftopt.sync.protocol.replica.resumed import Held
from tests.simulation.check import Checks, SimVersion
from tests.simulation.host import Content
from tests.simulation.knobs import Knobs
from tests.simulation.simulation import Simulation
from tests.simulation.walk import Coverage, run
from tests.simulation.world import Violation, World
from tests.sync.planted.found import FOUND
from tests.sync.planted.rules import BUGS, LIMIT, Bug, find

FEW, MANY = 300, int(os.environ.get("FTOPT_WALK_HISTORIES", "1100"))
COVERED = (
    "abort", "return", "join", "leave", "gone", "fork", "a replica is reset", "rollback", "mismatch", "evicted", "void",
    "stalled", "held_open", "hurry", "a reducer that hangs for ever", "decided while a member was away",
    "decided with a dead member's work", "restart with journal", "restart without journal",
    "two coordinators at once", "a link that carries one way only", "a result that one member misses",
    *(f"{count} fragments" for count in (1, 2, 3, 4)), "adaptive grace", "a sample ledger",
    "a sample ledger, and an end of the data", "a sample ledger beside several fragments",
    "a leaver gives units back", "a global batch", "a share that grows", "a sum given up",
    "a share too late for its batch", "a global batch, and an end of the data", "all replicas die",
    "resumed with as many replicas", "resumed with more replicas", "resumed with a contribution under way",
    "resumed where later versions are void", "pending work of a missing replica", "a checkpoint is restored",
    "a copy is kept", "a dead one's steps are done again", "pending work of a dead one is taken over",
    "epoch_done", "no units for now", "data_ended", "halt",
    "a second process of an id", "a second process is let in", "spare", "a spare begins to train",
    "a member that always fails", "a member that fails for ever", "a round without an outlier",
    "an outlier gives its steps up",
)  # fmt: skip
"""What has to happen in more than one history of a hundred, and in one of the few; else the walks prove little."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("histories", "share"), [(FEW, 0.0), pytest.param(MANY, 0.01, marks=pytest.mark.slow)])
def test_histories_hold_every_invariant_and_cover_the_protocol(
    histories: int, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Coverage()
    for _ in tally.walk(0, histories):
        pass
    if tally.failed is not None:
        seed = tally.failed.seed
        trace = "\n".join(run(seed, trace=True).trace[-200:])
        text = (
            f"{trace}\n\nseed {seed}: {tally.failed.failure}\nrun it again: python -m tests.simulation --replay {seed}"
        )
        pytest.fail(text, pytrace=False)
    with capsys.disabled():
        head = f"\n{histories} histories, {tally.events} events; share of histories with:"
        sys.stdout.write("\n".join([head, *tally.table(), ""]))
    assert [name for name in COVERED if tally.covered[name] <= share * tally.histories] == []


@pytest.mark.parametrize(
    "seed",
    [
        4794, 60002421, 77011295, 77018343, 90008492, 91000034, 91003967, 95001594, 410002187, 410007048, 410009072,
        410011698, 410014386, 410020929, 410025442, 410031518, 520006921, 520006921, 700004292, 700012622, 700065108,
        700070613, 700073612, 1800002044, 1900006919, 1900016493, 2100003869, 3000055147, 3100011725, 3100073233,
        3200039958, 3400000768, 410014554, 410017637, 90021041, 2751, 7197, 8339,
    ],
)  # fmt: skip
def test_a_history_that_once_broke_a_rule_or_a_bound_holds(seed: int) -> None:
    """What the last long runs found; tests of the protocol play those scenarios by hand, unless the check was wrong."""
    assert run(seed).failure is None


def test_a_seed_is_one_history() -> None:
    first, second = run(7, trace=True), run(7, trace=True)
    assert first.trace == second.trace
    assert len(first.trace) > 50


def test_a_fork_is_excused_where_an_excused_coordinator_has_made_it_and_nowhere_else() -> None:
    checks = Checks(World(0, Knobs(settings={})))
    for chain, parent, version, epoch in (
        ("start", "", 0, 1), ("a", "start", 1, 1), ("a twice", "start", 1, 1), ("b", "start", 1, 2),
        ("bc", "b", 2, 3), ("bd", "b", 2, 4),
    ):  # fmt: skip
        checks.versions[(0, chain)] = SimVersion(parent, version, Content(chain))
        checks.deciders[(0, chain)] = [(1, epoch)]
    assert not checks.one_history(0, "a", "b")
    checks.excuse((1, 2), "it did not hear of a")
    assert checks.one_history(0, "a", "b")
    assert checks.one_history(0, "bc", "a")
    assert checks.one_history(0, "bc", "start")
    assert not checks.one_history(0, "bc", "bd")
    checks.excuse((1, 1), "another reason")
    assert not checks.one_history(0, "a", "a twice")


def test_a_coordinator_must_wait_for_a_living_holder_that_it_hears_of_unless_it_has_given_that_one_up() -> None:
    """It may have, while another coordinator lets the same incarnation in: a job is resumed with both of them."""
    world = Simulation(0, Knobs(settings={"dead_after_s": 3.0, "recovery_s": 8.0}))
    for name in ("a", "b"):
        process = world.add_process(name, initial="init", step_s=0.1)
        process.spawn()
        record = process.shards[0].record = m.Record(0, 3, "chain", 3)
        process.machine.resume(Held(name, 1, 1, roster={"a": 1, "b": 1}, records=(record,)))
    heard = [x.message for x in process.machine.connect() if isinstance(x, Send) and isinstance(x.message, m.Hello)]
    server = world.server
    server.start()
    assert server.machine is not None
    world.contested, server.first_hello_s = True, world.now
    with pytest.raises(Violation, match="has not waited for a"):
        world.checks.opened(server, heard, anew=False)
    server.machine.roster.forget(("a", 1), 0)
    server.opened = False
    world.checks.opened(server, heard, anew=False)


@pytest.mark.parametrize("bug", [pytest.param(x, id=x.name) for x in BUGS if x.name in FOUND])
def test_a_history_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    look_for(bug, monkeypatch, seed=FOUND[bug.name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", [pytest.param(x, id=x.name) for x in BUGS])
def test_a_walk_finds_a_planted_bug(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    look_for(bug, monkeypatch)


def look_for(bug: Bug, patch: pytest.MonkeyPatch, seed: int | None = None) -> None:
    """It is found, and the history that finds it holds without it."""
    count, history = find(bug, patch, seed=seed)
    if history is None:
        pytest.fail(f"{LIMIT:,} histories did not find: {bug.text}")
    if seed is not None and count > FEW:
        pytest.fail(f"found.py is old: {bug.name} is found after {count:,} histories: write {history.seed} there")
    patch.undo()
    bug.drawn(patch)
    assert run(history.seed).failure is None, f"seed {history.seed} fails without the bug, too"
    sys.stdout.write(f"{bug.name}: found after {count:,} histories, by seed {history.seed}: {history.failure}\n")
