"""All replicas die at once, and the job goes on from a checkpoint: resumed by a list of replicas, or of its own
accord."""

from __future__ import annotations

import random

from ftopt.sync.protocol.coordinator.roster import effects as e
from tests.simulation.checkpoints import SimCheckpoint
from tests.simulation.replica import ReplicaProcess
from tests.simulation.simulation import Simulation


def all_die(world: Simulation, chooser: random.Random) -> None:
    """Every replica is killed; the coordinator lives on, or is started again with its journal, a part of it, or none.

    Its job goes on from its newest checkpoint, now and then from an older one, with as many replicas, fewer or more; or
    all are started as newcomers, and restore the newest by themselves (RESTORE).
    """
    world.note("walk", "all replicas die")
    world.coverage["all replicas die"] += 1
    world.faults_left += chooser.choice((0, 0, 1, 2))
    for process in world.processes.values():
        process.crash()
        process.barred, process.offline_until_s = True, 0.0
    server, what = world.server, _memory(chooser)
    remembers: list[e.Journalled] | None = None
    if server.up and what != "lives":
        server.crash()
        keep = {"part": chooser.randint(0, len(server.journal)), "none": 0}.get(what)
        remembers = server.journal[:keep]
        world.at(chooser.uniform(0.1, 3.0), lambda: server.start(keep=keep))
    whole = world.checkpoints.whole
    if not whole or chooser.random() < 0.3:
        _forget_the_void(world, whole)
        for process in world.processes.values():
            process.barred = False
            world.at(chooser.uniform(0.1, 3.0), process.spawn)
        return
    checkpoint = whole[-1] if chooser.random() < 0.8 else chooser.choice(whole)
    world.coverage["resumed from an older checkpoint"] += checkpoint is not whole[-1]
    world.checkpoints.fall_back_on(checkpoint)
    _resume(world, chooser, checkpoint, remembers)


def _memory(chooser: random.Random) -> str:
    """What becomes of the coordinator: it lives, or is started with its journal, a part of it, or none."""
    return chooser.choice(("lives", "journal", "journal", "part", "none"))


def _comes_s(chooser: random.Random) -> float:
    """After how many seconds a replica resumes; one in ten comes much later."""
    return chooser.uniform(0.1, 3.0) * (1 if chooser.random() < 0.9 else 5)


def _resume(
    world: Simulation, chooser: random.Random, checkpoint: SimCheckpoint, remembers: list[e.Journalled] | None
) -> None:
    """Resumes with a list of replicas that all of them know. ``remembers``: the journal of a new coordinator; None: the
    old one lives."""
    there = sorted(checkpoint.parts)
    what = chooser.choice(("as many", "as many", "fewer", "more"))
    least = int(world.knobs.settings["min_replicas"] or 1)
    if what == "fewer" and len(there) > least:
        present = chooser.sample(there, chooser.randint(least, len(there) - 1))
    elif what == "more":
        others = [name for name in world.processes if name not in there]
        present = [*there, *chooser.sample([*others, "r90", "r91"], chooser.randint(1, 2))]
    else:
        what, present = "as many", there
    world.coverage[f"resumed with {what} replicas"] += 1
    newest = checkpoint.newest
    void = any(key[0] == 0 and x.version > newest[0].record.version for key, x in world.checks.versions.items())
    world.coverage["resumed where later versions are void"] += void
    under_way = any(part.held.contributions for part in checkpoint.parts.values())
    world.coverage["resumed with a contribution under way"] += under_way
    coming = checkpoint.resumed(present)
    _forget_the_void(world, [checkpoint])
    if remembers is not None:  # a life that was given up since may come back to a coordinator that knows nothing of it
        gone = {x.replica: x.incarnation for x in remembers if isinstance(x, e.Gone)}
        back = {name: x.held.incarnation for name, x in coming.items()}
        world.checks.gone -= {(name, life) for name, life in back.items() if life > gone.get(name, 0)}
    some = next(iter(world.processes.values()))
    for name, each in coming.items():
        process = world.processes.get(name) or world.add_process(name, initial=some.initial, step_s=some.step_s)
        process.barred, process.coming = False, each
        world.at(_comes_s(chooser), process.spawn)
    for process in world.processes.values():
        if process.barred and chooser.random() < 0.3:
            world.at(chooser.uniform(3.0, 12.0), _let_in, process)


def _let_in(process: ReplicaProcess) -> None:
    process.barred = False
    process.spawn()


def _forget_the_void(world: Simulation, kept: list[SimCheckpoint]) -> None:
    parts = [part for checkpoint in kept for part in checkpoint.parts.values()]
    world.checks.all_died(x.record for part in parts for x in part.fragments)
