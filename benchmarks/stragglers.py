"""Slow replicas: how soon they are known, false alarms, and what they cost a job in time to a loss.

``watch``: the production machines under virtual time. Replicas take steps of one second, each with noise; one of them
slows down, or pauses now and then. ``cost``: the same; what the slow one costs the others. ``job``: real processes,
sockets and Gloo. Four replicas train; one of them takes several times as long for each step from some moment on; with
`policy.stragglers` both ways, and without a slow one.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ftopt
from ftopt.cli.shared.output import say
from ftopt.run.fault_spec import Fault
from ftopt.step.outer.counters import Counters
from ftopt.sync.protocol.coordinator.roster import effects as e
from ftopt.watch.jsonl import read_lines
from tests.simulation.knobs import Knobs
from tests.simulation.replica import ReplicaProcess
from tests.simulation.server import CoordinatorProcess
from tests.simulation.simulation import Simulation
from tests.sync.processes.job import FAST, TinyJob, tiny_job

ROUND = 30
"""Inner steps of a virtual round."""
LENGTH_S = 600.0
SHORT_S, BUSY_S = 0.02, 120.0
NOISES = (0.0, 0.1, 0.2, 0.4)
FACTORS = (2.0, 5.0)
POLICY: dict[str, float | int | str | None] = {
    "start_replicas": None, "start_s": 1.0, "heartbeat_s": 0.5, "dead_after_s": 3.0, "grace_s": 2.0,
}  # fmt: skip


# ------------------------------------------------------------ virtual time


class Machine(ReplicaProcess):
    """A replica whose steps have noise, and which measures them as the real one does."""

    noise = 0.0
    pause_every, pause_s = 0, 0.0
    chance: random.Random
    counters: Counters

    def spawn(self) -> None:
        self.chance, self.counters = random.Random(f"{self.world.seed} {self.name}"), Counters()
        super().spawn()

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        if getattr(action, "__func__", None) is not getattr(self.training._step, "__func__", None):
            super().later(delay_s, action, *args)
            return
        took_s = self.step_s * max(0.1, self.chance.gauss(1.0, self.noise))
        if self.pause_every and self.local_steps % self.pause_every == self.pause_every - 1:
            took_s += self.pause_s
        super().later(took_s, self._end_step, took_s)

    def _end_step(self, took_s: float) -> None:
        self.counters.count_step(0, took_s)
        self.training._step()

    def _heartbeat(self) -> None:
        real_s, self.step_s = self.step_s, self.counters.step_s
        super()._heartbeat()
        self.step_s = real_s


class Fleet(Simulation):
    """Machines, and what their coordinator tells of their speed: (seconds, event, replica)."""

    def __init__(self, seed: int, **policy: Any) -> None:
        super().__init__(seed, Knobs(settings=POLICY | policy, sync_every=ROUND))
        self.decided: list[tuple[float, int]] = []
        """Seconds, and the inner steps of the outer step."""
        self.told: list[tuple[float, str, str]] = []
        fleet = self

        class Recording(CoordinatorProcess):
            def _told(self, tell: e.Emit) -> None:
                super()._told(tell)
                if tell.event == "decide":
                    fleet.decided.append((fleet.now, sum(steps for _, _, steps, *_ in tell.data["members"])))
                if tell.event in ("slow", "up_to_speed"):
                    fleet.told.append((fleet.now, tell.event, tell.replica))

        self.servers[:] = [Recording(self, self.checks)]

    def add(self, name: str, noise: float) -> Machine:
        machine = Machine(self, name, initial="init", step_s=1.0, checks=self.checks, groups=self._groups)
        machine.noise, machine.longest_step_s = noise, LENGTH_S  # slow ones may keep the others waiting
        self.processes[name] = machine
        return machine

    def play(self, length_s: float = LENGTH_S) -> None:
        self.server.start()
        for process in self.processes.values():
            process.spawn()
        self.run(self.now + length_s)


def watch(seeds: int, replicas: int) -> None:
    """Prints the table."""
    say(f"{replicas} replicas, steps of 1 s, rounds of {ROUND} steps, {seeds} seeds")
    say(f"{'noise':>6}{'slower':>8}{'known after (median, longest)':>34}{'missed':>8}{'false alarms':>14}")
    for noise in NOISES:
        for factor in (1.0, *FACTORS):
            found, missed, false = [], 0, 0
            for seed in range(seeds):
                fleet = Fleet(seed)
                machines = [fleet.add(f"r{i}", noise) for i in range(replicas)]
                at_s = random.Random(seed).uniform(0.3, 0.5) * LENGTH_S
                fleet.at(at_s, setattr, machines[-1], "step_s", factor)
                began_s = fleet.now
                fleet.play()
                slow = [(t - began_s, who) for t, event, who in fleet.told if event == "slow"]
                right = [t - at_s for t, who in slow if factor > 1 and who == machines[-1].name and t > at_s]
                false += len(slow) - len(right)
                found += right[:1]
                missed += factor > 1 and not right
            known = f"{statistics.median(found):.0f} s, {max(found):.0f} s" if found else "-"
            say(f"{noise:6.0%}{factor:8g}{known:>34}{missed:8}{false:14}")
    say("\none replica pauses for 60 s every 20 steps (an evaluation), noise 20 %:")
    false = 0
    for seed in range(seeds):
        fleet = Fleet(seed)
        machines = [fleet.add(f"r{i}", 0.2) for i in range(replicas)]
        machines[0].pause_every, machines[0].pause_s = 20, 60.0
        fleet.play()
        false += sum(event == "slow" for _, event, _ in fleet.told)
    say(f"{false} false alarms in {seeds} x {LENGTH_S:.0f} s")
    say(f"\nsteps of {SHORT_S:g} s, noise 30 %; each replica is 2 to 4 times slower for a moment, every 20 s:")
    for longest_s in (4.0, 8.0):
        found = [_busy(seed, replicas, longest_s) for seed in range(seeds)]
        say(f"moments of 1 to {longest_s:g} s: {sum(found)} times slow in {seeds} x {BUSY_S:g} s")


def _busy(seed: int, replicas: int, longest_s: float) -> int:
    """How often a replica of short steps is called slow on a busy machine."""
    fleet, chance = Fleet(seed), random.Random(seed)
    for machine in [fleet.add(f"r{i}", 0.3) for i in range(replicas)]:
        machine.step_s, at_s = SHORT_S, 10.0
        while at_s < BUSY_S:
            at_s += chance.expovariate(1 / 20)
            lasts_s = chance.uniform(1.0, longest_s)
            fleet.at(at_s, setattr, machine, "step_s", SHORT_S * chance.uniform(2.0, 4.0))
            fleet.at(at_s + lasts_s, setattr, machine, "step_s", SHORT_S)
            at_s += lasts_s
    fleet.play(BUSY_S)
    return sum(event == "slow" for _, event, _ in fleet.told)


def cost(seeds: int, replicas: int) -> None:
    """Prints what a slow replica costs, from when it became slow to the end."""
    say(f"\n{replicas} replicas, steps of 1 s, noise 20 %, rounds of {ROUND}; one slows down after {ROUND} s")
    say(f"{'slower':>6}{'grace_s':>9}  {'':<10}{'seconds per outer step':>24}{'steps committed per s':>24}")
    for factor, grace_s in itertools.product((2.0, 5.0, 20.0), (2.0, 10.0)):
        ways = {"none slow": ("wait", 1.0), "wait": ("wait", factor), "call_in": ("call_in", factor)}
        for name, (how, slower) in ways.items():
            got = [_cost(seed, replicas, slower, stragglers=how, grace_s=grace_s) for seed in range(seeds)]
            shown = [f"{statistics.median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in zip(*got, strict=True)]
            say(f"{factor:6g}{grace_s:9g}  {name:<10}{shown[0]:>24}{shown[1]:>24}")


def _cost(seed: int, replicas: int, slower: float, **policy: Any) -> tuple[float, float]:
    """Seconds per outer step, and inner steps that are committed per second."""
    fleet = Fleet(seed, **policy)
    machines = [fleet.add(f"r{i}", 0.2) for i in range(replicas)]
    began_s = fleet.now + ROUND
    fleet.at(ROUND, setattr, machines[-1], "step_s", slower)
    fleet.play()
    late = [x for x in fleet.decided if x[0] >= began_s]
    took_s = late[-1][0] - late[0][0]
    return took_s / (len(late) - 1), sum(steps for _, steps in late[1:]) / took_s


# ------------------------------------------------------------ real processes

STEP_S, EVERY, SLOW_AT = 0.04, 150, 150
LEAST = 5
"""Outer steps of a run: without the first two and the last one there is a time between two of them."""
METHOD = ftopt.DiLoCo(sync_every=EVERY)
JOB = replace(FAST, grace_s=2.0, heartbeat_s=0.5, dead_after_s=3.0, start_replicas=4)


def job(seeds: int, factor: float, target: float) -> None:
    """Prints the table."""
    say(f"\n4 processes, steps of {STEP_S:g} s, rounds of {EVERY}; one is {factor:g} times slower from {SLOW_AT} on")
    say(f"seconds from the first step to a training loss of {target:g}, and per outer step; {seeds} seeds")
    ways = {"none slow": ("call_in", 1.0), "wait": ("wait", factor), "call_in": ("call_in", factor)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for seed in range(seeds):
        for name, (how, slower) in ways.items():
            times[name].append(_time(seed, how, slower, target))
        say(f"seed {seed}: " + "; ".join(f"{name} {x[-1][0]:.1f}, {x[-1][1]:.2f}" for name, x in times.items()))
    for index, what in enumerate(("to the loss", "per outer step")):
        for name, taken in times.items():
            more = [a[index] / b[index] - 1 for a, b in zip(taken, times["none slow"], strict=True)]
            say(f"{what:<16}{name:<10}{statistics.median(more):+5.0%} (from {min(more):+.0%} to {max(more):+.0%})")


def _time(seed: int, how: str, factor: float, target: float) -> tuple[float, float]:
    """Seconds to the loss, and of an outer step while the slow one is: the median."""
    slow = [Fault(point="inner", do="slow", at_step=SLOW_AT, factor=factor)] if factor > 1 else []
    names = f"s{seed}-"  # the names seed the data
    with tempfile.TemporaryDirectory(prefix="ftopt-stragglers-") as folder:
        policy = replace(JOB, stragglers=how)
        faults = {f"{names}3": slow}
        options: dict[str, Any] = {"replicas": 4, "policy": policy, "method": METHOD, "steps": None, "faults": faults}
        with tiny_job(Path(folder), step_s=STEP_S, lr=3e-4, job=names, logs=True, **options) as running:
            running.start_all()
            running.wait_until(
                lambda: _reached(running, target) is not None and len(running.events("decide")) >= LEAST, "the loss"
            )
            reached = _reached(running, target)
            assert reached is not None
            running.enough(more=EVERY)
            summary = running.end()
            decided = [x["t_s"] for x in running.events("decide")]
    assert not summary["survivor_inner_steps_lost"] and not summary["inner_steps_counted_twice"], summary
    return reached, statistics.median(b - a for a, b in itertools.pairwise(decided[2:-1]))


def _reached(running: TinyJob, target: float, window: int = 25) -> float | None:
    """When the mean loss of the last steps of the first replica, which is never slow, has fallen to ``target``."""
    lines = list(read_lines(running.folder / "replicas" / f"{running.names[0]}.jsonl"))
    for end in range(window, len(lines) + 1):
        if statistics.fmean(x["loss"] for x in lines[end - window : end]) <= target:
            return float(lines[end - 1]["t_s"] - lines[0]["t_s"])
    return None


def add(parser: argparse.ArgumentParser) -> None:
    """[watch|cost|job] [--seeds N] [--replicas N] [--factor X] [--target LOSS]"""
    parser.add_argument("parts", nargs="*", metavar="PART", help="watch, cost, job (default: all)")
    parser.add_argument("--seeds", type=int, default=10, help="of each case (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=4, help="under virtual time (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=5.0, help="how much slower (default: %(default)g)")
    parser.add_argument("--target", type=float, default=0.2, help="the loss to reach (default: %(default)g)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the tables."""
    if "watch" in (parts := arguments.parts or ("watch", "cost", "job")):
        watch(arguments.seeds, arguments.replicas)
    if "cost" in parts:
        cost(arguments.seeds, arguments.replicas)
    if "job" in parts:
        job(arguments.seeds, arguments.factor, arguments.target)
    return 0
