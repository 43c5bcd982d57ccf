"""Runs in which nothing is wrong, but not everything is smooth: nothing must be found.

Each has a recipe's method, inner optimizer, schedule and clipping, with shorter rounds and a small net in place of its
model. The codec, the number of replicas and what is not smooth take turns.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

import ftopt
from benchmarks.harm import task
from benchmarks.harm.cells import CODECS, SIZES
from benchmarks.harm.play import RUN_S, is_detection
from ftopt.config.inner_settings import CosineConfig, factor
from ftopt.config.loader import load
from ftopt.config.optimizers import inner_optimizers
from ftopt.config.schema import Recipe
from ftopt.events import Event
from ftopt.methods import Method

RECIPES = tuple(sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")))
SCENES = (
    "plain", "joins", "leaves", "comes-back", "slow", "uneven", "zero-rate", "restarts", "spike", "rare-rows",
    "synchronous-start",
)  # fmt: skip
"""A replica joins, leaves, is replaced by its next life, is slow, has longer rounds; the rate starts at 0, or starts
anew; one batch is bad; a symbol is rare; the first rounds are of one step."""
STEPS, STEPS_OF_GRADIENTS = 60, 40
_SYNC = ftopt.FaultPolicy(grace_s=0.5, dead_after_s=10.0, heartbeat_s=0.5)
_SPIKE = 30.0


@dataclass(frozen=True)
class CleanRun:
    """One run; ``size``: replicas that start together."""

    recipe: str
    scene: str
    codec: str
    size: int
    seed: int

    @property
    def name(self) -> str:
        """E.g. ``diloco_bytes/spike/fp32/3/17``."""
        return f"{self.recipe}/{self.scene}/{self.codec}/{self.size}/{self.seed}"


def clean_runs(count: int, seed: int, *, each: bool) -> list[CleanRun]:
    """So many in all, or of each recipe. A recipe goes through all scenes before one comes again."""
    chance, runs = random.Random(f"clean {seed}"), []
    recipes = (
        [name for name in RECIPES for _ in range(count)] if each else [RECIPES[i % len(RECIPES)] for i in range(count)]
    )
    turns = dict.fromkeys(RECIPES, 0)
    for number, recipe in enumerate(recipes):
        scene = SCENES[turns[recipe] % len(SCENES)]
        turns[recipe] += 1
        sizes = SIZES[1:] if scene in ("leaves", "comes-back") else SIZES
        runs.append(CleanRun(recipe, scene, chance.choice(CODECS), chance.choice(sizes), seed * 1_000_003 + number))
    return runs


def is_name(word: str) -> bool:
    """Whether this is a clean run's name."""
    return word.split("/")[0] in RECIPES


def named(name: str) -> CleanRun:
    """The run of this name."""
    recipe, scene, codec, size, seed = name.split("/")
    return CleanRun(recipe, scene, codec, int(size), int(seed))


@dataclass
class _Run:
    """What the threads of a run share."""

    run: CleanRun
    recipe: Recipe
    steps: int
    found: list[str] = field(default_factory=list)
    inner_step: int = 0
    over: bool = False
    gone: threading.Event = field(default_factory=threading.Event)
    joined: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if is_detection(event) and not self.over:
            self.found.append(f"{event.event} of {event.replica}: {event.data.get('reason', '')}")
        elif event.event == "decide" and event.inner_step is not None:
            self.inner_step = max(self.inner_step, event.inner_step)


@cache
def _recipe(name: str) -> Recipe:
    return load(name)


def shortened(recipe: Recipe, scene: str, *, longer: bool) -> Method:
    """The recipe's method with rounds of about six steps. ``longer``: of this replica alone, in some scenes."""
    method = recipe.method
    assert isinstance(method, Method)
    changes = dict[str, object]()
    if method.gradients is None or method.name == "paft":
        changes["sync_every"] = 9 if longer else 6
        if method.overlap.delay > 5:
            changes["delay"] = 5
    if scene == "synchronous-start" and method.name != "sync_sgd":
        changes["average_until_step"] = 8
    if method.name == "sync_sgd":
        changes["verify_every"] = 5
    return replace(method, **changes)  # type: ignore[arg-type]


def run_clean(run: CleanRun) -> list[str]:
    """What was found, which must be nothing."""
    torch.set_num_threads(1)
    recipe = _recipe(run.recipe)
    method = replace(shortened(recipe, run.scene, longer=False), codec=run.codec)
    shared = _Run(run, recipe, STEPS_OF_GRADIENTS if method.gradients is not None else STEPS)
    names = [f"r{m}" for m in range(run.size)]
    late = {"joins": [f"r{run.size}"], "comes-back": [names[-1]]}.get(run.scene, [])
    grace_s = 0.05 if run.scene == "slow" else _SYNC.grace_s
    policy = replace(_SYNC, start_replicas=run.size, grace_s=grace_s)
    if not late:
        shared.joined.set()
    groups = ftopt.local_groups(len(names) + len(late), policy=policy, on_event=shared, names=[*names, *late])
    nets = [task.made(run.seed) for _ in groups]
    failed = list[str]()

    def replica(number: int) -> None:
        group = groups[number]
        try:
            if number >= run.size:
                _wait_to_join(shared)
            _train(shared, nets[number], group, number)
        except Exception as error:
            failed.append(f"{group.replica}: {type(error).__name__}: {error}")
            with contextlib.suppress(Exception):
                group.close()

    threads = [threading.Thread(target=replica, args=(number,), daemon=True) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RUN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        failed.append("hangs")
    return shared.found + failed


def _wait_to_join(shared: _Run) -> None:
    """Until a third of the run is over, or its predecessor is gone."""
    if shared.run.scene == "comes-back":
        shared.gone.wait(RUN_S)
    while shared.inner_step < shared.steps // 3:
        time.sleep(0.005)


def _train(shared: _Run, net: nn.Module, group: ftopt.ReplicaGroup, number: int) -> None:
    run, recipe, last = shared.run, shared.recipe, number == shared.run.size - 1
    method = shortened(recipe, run.scene, longer=run.scene == "uneven" and last)
    inner = recipe.inner_sections()
    optimizers = inner_optimizers(inner, net)
    optimizer = ftopt.wrap(optimizers, net, method, group=group)
    peaks = [parameters["lr"] for parameters in optimizer.param_groups]
    limit = 4 * shared.steps
    data = task.Data(f"{group.replica} {number}", run.size, limit, run.seed)
    if run.scene == "rare-rows":
        _make_rare(data, number)
    clip = recipe.train.clip_norm
    with optimizer:
        if number >= run.size:
            shared.joined.set()
        while _goes_on(shared, optimizer) and optimizer.local_steps < limit - 1:
            step = optimizer.local_steps
            for parameters, peak in zip(optimizer.param_groups, peaks, strict=True):
                parameters["lr"] = peak * _rate(shared, inner[0].schedule, optimizer.inner_step)
            optimizer.zero_grad()
            loss = data.loss(net, step)
            if run.scene == "spike" and last and step == shared.steps // 2:
                loss = loss * _SPIKE
            loss.backward()
            optimizer.log(tokens=len(data.inputs[step]), loss=loss.detach())
            if clip is not None and method.gradients is None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            if run.scene == "slow" and last:
                time.sleep(0.02)
            if run.scene in ("leaves", "comes-back") and last and run.size > 1 and step >= shared.steps // 2:
                optimizer.close(early=True)  # at the end of a `with` it would wait for the others' end
                shared.gone.set()
                return
        if not _goes_on(shared, optimizer):
            shared.over = True  # whoever leaves last takes the job's state along
    shared.gone.set()


def _goes_on(shared: _Run, optimizer: ftopt.ReplicaOptimizer) -> bool:
    """To the last step, but not before the one that is expected has joined."""
    return optimizer.inner_step < shared.steps or not shared.joined.is_set()


def _rate(shared: _Run, schedule: object, step: int) -> float:
    if shared.run.scene == "zero-rate":
        return max(0.0, min(1.0, (step - 12) / 12))  # the first rounds move nothing
    if shared.run.scene == "restarts":
        return 1.0 - (step % 20) / 20
    if isinstance(schedule, CosineConfig):
        schedule = replace(schedule, warmup=6)
    return factor(schedule, step, shared.steps)  # type: ignore[arg-type]


def _make_rare(data: task.Data, number: int) -> None:
    """The last symbol is in one batch of the first replica alone, late; its row has no gradient until then."""
    rare = task.SYMBOLS - 1
    data.inputs[data.inputs == rare] = 0
    if number == 0:
        data.inputs[25, 0, 0] = rare


def complaint(run: CleanRun, found: list[str]) -> str:
    """One line; empty if nothing was found."""
    return f"{run.name}  {'; '.join(found)}" if found else ""
