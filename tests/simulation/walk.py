"""Random walks: one seed makes one history of faults, then a quiet time in which the job must go on (I4)."""

from __future__ import annotations

import math
import random
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.doom import all_die
from tests.simulation.drawn import drawn
from tests.simulation.replica import ReplicaProcess
from tests.simulation.simulation import Simulation
from tests.simulation.world import Violation

UNITS = 4
"""A unit of a global batch takes a fraction of the time that an inner step takes."""


@dataclass
class History:
    """What one walk came to. ``failure``: None, or what does not hold."""

    seed: int
    events: int = 0
    versions: int = 0
    coverage: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    trace: list[str] = field(default_factory=list)


@dataclass
class Coverage:
    """``covered``: in how many histories each thing has happened. ``failed``: the first history that broke a rule."""

    histories: int = 0
    events: int = 0
    covered: Counter[str] = field(default_factory=Counter)
    failed: History | None = None

    def walk(self, seed: int, count: int) -> Iterator[int]:
        """Runs the histories of ``seed``, ``seed + 1``, ...; ends at the first failure. Yields how many are done."""
        for number in range(seed, seed + count):
            history = run(number)
            self.histories += 1
            self.events += history.events
            self.covered.update(name for name, times in history.coverage.items() if times)
            if history.failure is not None:
                self.failed = history
                return
            yield self.histories

    def table(self) -> list[str]:
        """Share of the histories in which each thing has happened, a line each."""
        shares = sorted(self.covered.items(), key=lambda x: (-x[1], x[0]))
        width = max(map(len, self.covered), default=0)
        return [f"  {name:<{width}} {count / max(1, self.histories):7.1%}" for name, count in shares]


def run(seed: int, *, trace: bool = False) -> History:
    """Walks through the history of ``seed``."""
    history = History(seed)
    chooser = random.Random(seed * 7919 + 1)
    lines = history.trace if trace else None
    world = Simulation(seed, drawn(seed, chooser), trace=lines)
    world.coverage[f"{world.knobs.fragments} fragments"] += 1
    if world.knobs.grace:
        world.coverage["adaptive grace"] += 1
    if world.knobs.samples is not None:
        what = "a global batch" if world.knobs.global_batch else "a sample ledger"
        world.coverage["a sample ledger beside several fragments"] += world.knobs.fragments > 1
        world.coverage[what if world.knobs.samples.units is None else f"{what}, and an end of the data"] += 1
    try:
        _walk(world, chooser)
    except Exception as error:
        history.failure = f"{type(error).__name__}: {error}"
        history.trace += [traceback.format_exc()] if trace and not isinstance(error, AssertionError) else []
    history.events, history.coverage = world.events, world.coverage
    history.versions = max((v.version for v in world.checks.versions.values()), default=0)
    return history


def _walk(world: Simulation, chooser: random.Random) -> None:
    same = chooser.random() < 0.6
    count = chooser.choice((2, 3, 3, 4, 4, 5, 5, 6, 8, 12))
    for index in range(count):
        name = f"r{index}"
        initial = "init" if same else f"init-{name}"
        step_s = chooser.uniform(0.2, 0.6) * chooser.choice((1, 1, 1, 3))
        step_s /= UNITS if world.knobs.global_batch else 1
        world.add_process(name, initial=initial, step_s=step_s)
    world.server.start()
    start_s = world.now
    late = chooser.randint(0, max(0, count - 2))
    for index, process in enumerate(world.processes.values()):
        delay_s = chooser.uniform(0, 0.5) if index >= late else chooser.uniform(4, 12)
        world.at(delay_s, process.spawn)
    spares = random.Random(world.seed * 7919 + 36)
    for index in range(world.knobs.spares):
        initial = "init" if same else f"init-s{index}"
        spare = world.add_process(f"s{index}", initial=initial, step_s=spares.uniform(0.2, 0.6))
        spare.spare = True
        world.at(spares.choice((0.1, spares.uniform(2, 8))), spare.spawn)
    length_s = chooser.uniform(8, 22)
    world.faults_left = chooser.randint(1, 5)
    for _ in range(chooser.randint(1, 5)):
        world.at(chooser.uniform(1, length_s), _fault, world, chooser)
    seconds = random.Random(world.seed * 7919 + 9)
    for _ in range(seconds.randint(1, 2) if seconds.random() < 1 / 6 else 0):
        world.at(seconds.uniform(1, length_s), _second, world, seconds)
    for _ in range(3 if world.knobs.replay else 0):
        world.at(chooser.uniform(5, length_s), _replace, world, chooser)
    _slow_ones(world, random.Random(world.seed * 7919 + 10), length_s)
    _break_one(world, random.Random(world.seed * 7919 + 37), length_s)
    lonely = random.Random(world.seed * 7919 + 42)
    if lonely.random() < 1 / 16:
        world.at(lonely.uniform(3, length_s), _leave_one, world, lonely)
    if world.knobs.save_every:
        length_s += chooser.uniform(2, 10)
        world.at(chooser.uniform(0.6, 0.9) * length_s, all_die, world, chooser)
    world.run(start_s + length_s)
    _quiet(world)


def _second(world: Simulation, chooser: random.Random) -> None:
    """A second process of one id is started; half of the time the coordinator restarts while it waits."""
    first, stays_s = chooser.choice(list(world.processes.values())), chooser.uniform(1, 8)
    world.second(first, stays_s=stays_s, resumes=chooser.random() < 0.5)
    if world.server.up and chooser.random() < 0.5:
        world.server.crash()
        world.at(chooser.uniform(0.1, 1.0), lambda: world.server.start(keep=chooser.choice((None, 0))))


def _leave_one(world: Simulation, chooser: random.Random) -> None:
    """All replicas but one are killed; that one stands still for a while, and its supervisor starts another process."""
    alive = [x for x in world.processes.values() if x.alive and x.machine.complete and not x.spare]
    if not alive:
        return
    left = chooser.choice(alive)
    world.note("walk", f"all but {left.name} are killed, and it stands still")
    world.coverage["a lone holder stands still"] += 1
    for process in world.processes.values():
        if process is not left:
            process.crash()
            world.at(chooser.uniform(0.1, 3.0), process.spawn)
    left.frozen_until_s = max(left.frozen_until_s, world.now + chooser.uniform(4, 12))
    world.second(left, stays_s=chooser.uniform(4, 12), resumes=False)


def _slow_ones(world: Simulation, chooser: random.Random, length_s: float) -> None:
    """Steps of one or two replicas take longer for a while, in every third history."""
    for _ in range(chooser.randint(1, 2) if chooser.random() < 1 / 3 else 0):
        process, factor = chooser.choice(list(world.processes.values())), chooser.choice((2.0, 5.0, 20.0))
        start_s = chooser.uniform(1, length_s)
        world.at(start_s, _slow_down, world, process, factor)
        world.at(start_s + chooser.uniform(2, length_s), _slow_down, world, process, 1.0)


def _break_one(world: Simulation, chooser: random.Random, length_s: float) -> None:
    """In every eighth history all reductions of one replica fail for a while, or for ever."""
    if chooser.random() < 1 / 8:
        process, how = chooser.choice(list(world.processes.values())), chooser.choice(("itself", "blames", "mute"))
        world.at(chooser.uniform(1, length_s), _break, world, process, how)
        if chooser.random() < 0.5:
            world.at(length_s, _break, world, process, "")


def _break(world: Simulation, process: ReplicaProcess, how: str) -> None:
    world.note(process.name, f"its reductions fail: {how}" if how else "its reductions work again")
    world.incidents += bool(how)
    process.broken = how


def _slow_down(world: Simulation, process: ReplicaProcess, factor: float) -> None:
    """Its steps take ``factor`` times as long as usual from now on, or until the faults stop."""
    world.note(process.name, f"steps take {factor:g} times as long as usual")
    process.step_s = process.usual_step_s * factor
    process.longest_step_s = max(process.longest_step_s, process.step_s)


def _replace(world: Simulation, chooser: random.Random) -> None:
    """A replica is killed, and another process comes in its place."""
    process = chooser.choice(list(world.processes.values()))
    world.incidents += 1
    process.crash()
    world.at(chooser.uniform(0.2, 2.0), process.spawn)


def _fault(world: Simulation, chooser: random.Random) -> None:
    """A fault at a moment that has nothing to do with the protocol's."""
    kind = chooser.choice(("replica", "replica", "coordinator", "pair", "leave", "network", "schism", "rival"))
    process = chooser.choice(list(world.processes.values()))
    world.incidents += 1
    if kind == "replica" and process.alive:
        process.misfortune()
    elif kind == "coordinator" and world.server.up:
        world.server.crash()
        keep = chooser.choice((None, None, 0, 0, -1))
        if keep == -1:
            keep = chooser.randint(0, len(world.server.journal))
        world.at(chooser.uniform(0.1, 3.0), lambda: world.server.start(keep=keep))
    elif kind == "pair":
        pair = frozenset(chooser.sample(sorted(world.processes), 2))
        deaf = chooser.choice(("", "", *sorted(pair)))
        world.note("net", f"cut between {sorted(pair)} {deaf and f'towards {deaf}'}")
        world.cuts[pair] = deaf
        world.at(chooser.uniform(2, 12), world.cuts.pop, pair, None)
    elif kind == "leave" and process.alive and process.machine.ready:
        if world.chance(0.5 if world.knobs.strict else 0.2):
            process.finish()
        process.leave()
        if chooser.random() < 0.5:
            world.at(chooser.uniform(7, 12), process.spawn)
    elif kind == "schism" and chooser.random() < 0.3:
        world.server.schism = True
    elif kind == "rival" and chooser.random() < 0.5:
        world.note("net", "a second coordinator starts")
        world.rival()
    elif kind == "network":
        for process in world.processes.values():
            if process.alive and process.conn and chooser.random() < 0.6:
                process.offline_until_s = world.now + chooser.uniform(0.1, 6)
                process.conn.cut(told=chooser.random() < 0.7)


def _all_left(world: Simulation) -> bool:
    """Whether all replicas have left in good order, so that nobody makes a version."""
    return all(p.life and p.leaving and p.gone and not p.alive for p in world.processes.values())


def _quiet(world: Simulation) -> None:
    """I4: faults stop; the living replicas go on, and agree on one history."""
    world.note("walk", "faults stop")
    world.faults_left = 0
    world.cuts.clear()
    for server in world.servers:
        server.schism = False
    if len(world.servers) > 1:
        world.random.choice(world.servers).retire()
    object.__setattr__(world.knobs, "corrupt", 0.0)
    for process in world.processes.values():
        process.hung_until_s = process.offline_until_s = 0.0
    longest_s = [p.longest_step_s for p in world.processes.values() if p.longest_step_s > p.usual_step_s]
    for process in world.processes.values():
        process.step_s = process.usual_step_s
    _unjam(world)
    _repair(world)
    thawed_s = max(process.frozen_until_s for process in world.processes.values())
    world.run(max(world.now + 3.1, thawed_s))  # a coordinator that is down is started, a killed replica comes back
    if not world.server.up:
        world.server.start()
    settings = world.knobs.settings
    least = int(settings["min_replicas"] or 1)
    for process in world.processes.values():
        if process.alive and process.leaving and least > 1:
            world.at(7.0, process.spawn)
    _start_missing(world, least)
    bound_s = _bound_s(world)
    if least > 1:  # some leave at their end, or one that stood still comes back after all others were sent home
        for after_s in range(2, int(bound_s / 2), 10):
            world.at(float(after_s), _start_missing, world, least)
    bound_s += 4 * max(longest_s, default=0.0)  # a step that has begun ends; until then, two are waited for
    old, left = set(world.checks.versions), set(range(world.knobs.fragments))
    if not world.run(world.now + bound_s, lambda: _together(world, old, left) or _all_left(world)):
        alive = [p for p in world.processes.values() if p.alive]
        if _ends(world) and (late := [p.name for p in alive if not p.leaving and not p.ended]):
            raise Violation("I4", f"{', '.join(late)}: the data have not ended {bound_s:.0f} s after the last fault")
        held = {p.name: [(x.record.version, x.record.chain[:6]) if x.record else None for x in p.shards] for p in alive}
        raise Violation("I4", f"no next version that everybody holds within {bound_s:.0f} s: {held}")
    if world.server.machine is not None and world.server.machine.failed is None:
        world.checks.leases(world.server)


def _start_missing(world: Simulation, least: int) -> None:
    """Starts replicas again until ``least`` train, as who looks after a job does."""
    for process in world.processes.values():
        if not process.spare and sum(map(_trains, world.processes.values())) < least:
            process.barred = False
            process.spawn()


def _trains(process: ReplicaProcess) -> bool:
    """Whether it lives, wants to stay, and is no spare."""
    return process.alive and not process.leaving and not process.machine.standby


def _ends(world: Simulation) -> bool:
    """Whether the job has data that end."""
    return world.knobs.samples is not None and world.knobs.samples.units is not None


def _bound_s(world: Simulation) -> float:
    """Seconds after the last fault by which a job has gone on as one, and its data have ended if they end."""
    settings, knobs = world.knobs.settings, world.knobs
    gone_s = float(settings["evict_after_s"] or 0)
    # A cut-off process sees the end of its connection within dead_after_s; gathering ends in start_s + recovery_s.
    # Fragments may catch up one after another: a trainer that waits for one of them is late for the rounds of others.
    bound_s = 25.0 + float(settings["start_s"] or 0) + float(settings["recovery_s"] or 0)
    bound_s += 3 * (1 + knobs.fragments) * knobs.fetch_s
    machine = world.server.machine
    assert machine is not None
    living = {p.incarnation_id for p in world.processes.values() if p.alive and not p.leaving}
    dead = knobs.save_every and any(not p.alive for p in world.processes.values())  # a checkpoint tells of them
    if dead or any(x.incarnation_id not in living for x in machine.roster.members.values()):
        bound_s += gone_s + bound_s
    if any(
        p.broken for p in world.processes.values()
    ):  # it is searched for: each failure may take as long as a silence
        bound_s += (2 + 2 * math.ceil(math.log2(len(world.processes)))) * (knobs.dead_after_s + 2.5)
    if any(p.jammed_until_s == math.inf for p in world.processes.values()):
        bound_s += 15.0 * knobs.fragments + gone_s
    if knobs.samples is not None and _ends(world):
        bound_s += (knobs.samples.units or 0) * _unit_s(world)
        if not knobs.global_batch:
            # Who hangs is given up after at most twice evict_after_s, with some of the rest of the data. If all were
            # given up before, that may be twice, the second time after twice as long, and once more after four times.
            bound_s += 12 * gone_s
    return bound_s


def _unit_s(world: Simulation) -> float:
    """Seconds that a unit takes at most, its step's waiting included: each fragment's rounds are waited for in turn."""
    knobs = world.knobs
    step_s = max(p.step_s for p in world.processes.values())
    load_s = step_s * max(1, knobs.global_batch)
    round_s = float(knobs.settings["grace_s"] or 0) + max(0.5, 2 * load_s) + 2 * knobs.reduce_s + 10 * knobs.delay_s
    rounds = 1 / knobs.global_batch if knobs.global_batch else knobs.fragments * (1 / knobs.sync_every + knobs.hasty)
    return step_s + rounds * round_s


def _unjam(world: Simulation) -> None:
    """Reducers that hang: half of them for ever, if another replica can go on without them. Where data end, more of
    them: the last units may be with any."""
    jammed = [p for p in world.processes.values() if p.alive and world.now < p.jammed_until_s]
    able = [p for p in world.processes.values() if _trains(p) and p not in jammed]
    if _ends(world) and not world.knobs.global_batch:
        jammed += [able.pop() for _ in able[1:] if world.chance(0.2)]
    for process in jammed:
        last = not able or world.knobs.settings["min_replicas"] != 1
        for_ever = not last and world.chance(0.5)
        process.jam(math.inf if for_ever else world.now)
        world.coverage["a reducer that hangs for ever"] += for_ever


def _repair(world: Simulation) -> None:
    """A replica whose reductions fail does so for ever, if others can go on without it, and wait for none of its
    units."""
    for process in [p for p in world.processes.values() if p.broken]:
        others = any(_trains(p) for p in world.processes.values() if p is not process and not p.jammed_until_s)
        if _ends(world) or not others or world.knobs.settings["min_replicas"] != 1:
            process.broken = ""
        world.coverage["a member that fails for ever"] += bool(process.broken)


def _together(world: Simulation, old: set[tuple[int, str]], left: set[int]) -> bool:
    """Whether each fragment has moved on, and all the living have held its newest version: who joins catches up. With a
    global batch, whose rounds are not held open, and of a spare, for which none is, any new version will do.

    ``left``: fragments of which that is not yet so.
    """
    machine = world.server.machine
    living = [p for p in world.processes.values() if p.alive and not p.leaving]
    if not living and any(p.late or p.failed for p in world.processes.values()):
        return True
    if machine is None or not machine.running or not living:
        return False
    ends = _ends(world)
    if ends and not all(p.ended for p in living):
        return False
    for fragment in sorted(left):
        at = machine.rounds[fragment].at
        good = []
        for p in living:
            x, loose = p.machine.fragments[fragment].record, world.knobs.global_batch or p.machine.standby
            any_new = x is not None and loose and not ends and (fragment, x.chain) not in old
            good.append(x is not None and (x.position == at or any_new))
        if all(good) and (ends or (fragment, at.chain) not in old):
            left.discard(fragment)
    return not left
