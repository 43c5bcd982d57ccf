"""Clean runs with unusual sizes: of initial parameters, rates, losses and rounds. The guard must drop no step.

A cell is a run of up to three replicas, threads of one process with the real coordinator, in which nothing is wrong.
What makes numbers that are not finite is no fault of the guard; such steps are counted apart.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ftopt
from benchmarks.harm import played
from ftopt import fragments
from ftopt.cli.shared.output import say
from ftopt.events import Event
from ftopt.methods import Method

RUN_S = 60.0
"""A run that lasts longer hangs."""
LATE = 0.5
"""After this share of a run the scene changes."""

FACTORS: Mapping[str, Sequence[Any]] = {
    "method": ("DiLoCo", "LocalSGD", "SlowMo", "Streaming", "Decoupled", "SyncSGD", "PAFT"),
    "initial": ("zeros", "normal-0.0001", "normal-0.01", "normal-0.1", "normal-1", "default", "lora"),
    "inner": ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "lion"),
    "rate": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.1, 1.0),
    "every": (1, 10, 20, 100, 500),
    "scale": (1e-6, 1e-3, 1, 1000, 1_000_000),
    "size": (1, 2, 3),
    "scene": (
        "plain", "warm-up", "rate-rises", "pauses", "decays", "unfreezes", "other-data", "larger-loss", "straggler",
        "joins",
    ),
}  # fmt: skip
"""Factor -> its levels, in the order of a cell's name. ``initial``: of all parameters; ``lora`` trains two factors of
which one is 0. ``every``: inner steps of a round. ``scale``: of the loss."""

METHODS: Mapping[str, Callable[[int], Method]] = {
    "DiLoCo": lambda every: ftopt.DiLoCo(sync_every=every),
    "LocalSGD": lambda every: ftopt.LocalSGD(sync_every=every),
    "SlowMo": lambda every: ftopt.SlowMo(sync_every=every),
    "Streaming": lambda every: ftopt.StreamingDiLoCo(
        sync_every=every, delay=min(1, every - 1), fragments=fragments.Balanced(n=2)
    ),
    "Decoupled": lambda every: ftopt.DecoupledDiLoCo(
        sync_every=every, delay=min(1, every - 1), fragments=fragments.Balanced(n=2)
    ),
    "SyncSGD": lambda every: ftopt.SyncSGD(),
    "PAFT": lambda every: ftopt.PAFT(sync_every=every),
}


class Lion(torch.optim.Optimizer):
    """Steps of one size, by the sign of the momentum."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.add_(torch.sign(momentum.lerp(p.grad, 0.1)), alpha=-group["lr"])
                    momentum.lerp_(p.grad, 0.01)


INNERS: Mapping[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "rmsprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
    "adagrad": lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    "lion": Lion,
}


class Pairs(nn.Module):
    """Products of two embedded symbols: with small parameters the loss begins on a plateau."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(200, 8), nn.Embedding(150, 8)

    def loss(self, chance: torch.Generator, *, other: bool) -> Tensor:
        i, j = torch.randint(200, (64,), generator=chance), torch.randint(150, (64,), generator=chance)
        labels = ((i * 7 + j * 3) % 5).float() - 2
        found = (self.first(i) * self.second(j)).sum(1) - (30 * labels if other else labels)
        return found.square().mean()


class Lora(nn.Module):
    """A fixed matrix, and two factors of what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(1)
        self.fixed = nn.Parameter(torch.randn(12, 12, generator=chance), requires_grad=False)
        self.wanted = torch.randn(12, 12, generator=chance)
        self.a, self.b = nn.Parameter(0.3 * torch.randn(2, 12)), nn.Parameter(torch.zeros(12, 2))

    def loss(self, chance: torch.Generator, *, other: bool) -> Tensor:
        x = torch.randn(32, 12, generator=chance)
        return (x @ (self.b @ self.a).T - x @ ((3.0 if other else 0.3) * self.wanted).T).square().mean()


@dataclass(frozen=True)
class Cell:
    """One run; a field for each factor."""

    method: str
    initial: str
    inner: str
    rate: float
    every: int
    scale: float
    size: int
    scene: str

    @property
    def name(self) -> str:
        """E.g. ``DiLoCo/normal-0.01/adamw/0.05/20/1/2/plain``."""
        return "/".join(map(str, asdict(self).values()))

    @property
    def steps(self) -> int:
        """Inner steps of a run."""
        return 30 if self.method == "SyncSGD" else max(30, min(4 * self.every, 2 * self.every + 200))


@dataclass
class Found:
    """What came of a run: steps that were dropped as out of line, contributions that were excluded, results that were
    doubted; steps that were dropped since they were not finite; and why it has not come to its end."""

    dropped: int = 0
    excluded: int = 0
    doubted: int = 0
    nonfinite: int = 0
    failed: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __call__(self, event: Event) -> None:
        with self.lock:
            self.excluded += event.event == "outlier"
            self.doubted += event.event == "implausible"
            if event.event == "discarded":
                self.dropped += event.data["steps"] * (event.data["reason"] == "outlier")
                self.nonfinite += event.data["steps"] * (event.data["reason"] == "nonfinite")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    @property
    def wrong(self) -> str:
        """What must not be; empty: nothing. Once numbers are not finite, nothing else is wrong."""
        if self.failed or (self.nonfinite and not self.dropped):
            return self.failed
        return f"{self.dropped} steps dropped, {self.excluded} contributions excluded" if self.excluded else ""


def named(name: str) -> Cell:
    """The cell of this name. ValueError: there is none."""
    parts = name.split("/")
    levels = {
        factor: next((level for level in allowed if str(level) == part), None)
        for part, (factor, allowed) in zip(parts, FACTORS.items(), strict=False)
    }
    if len(parts) != len(FACTORS) or None in levels.values():
        raise ValueError(f"{name!r} is no cell; use {'/'.join(FACTORS)}, e.g. {next(iter(sample(1, 0))).name}")
    return Cell(**levels)


def sample(count: int, seed: int) -> list[Cell]:
    """So many cells, in which all levels of a factor come equally often."""
    chance = random.Random(f"honest {seed}")
    turns = [itertools.cycle(chance.sample(levels, len(levels))) for levels in FACTORS.values()]
    columns = [[next(turn) for _ in range(count)] for turn in turns]
    for column in columns:
        chance.shuffle(column)
    return [Cell(*levels) for levels in zip(*columns, strict=True)]


def model_of(initial: str) -> Pairs | Lora:
    """A model with these initial parameters."""
    torch.manual_seed(0)
    if initial == "lora":
        return Lora()
    model, (kind, _, size) = Pairs(), initial.partition("-")
    for parameter in model.parameters() if kind != "default" else ():
        nn.init.normal_(parameter, std=float(size)) if kind == "normal" else nn.init.zeros_(parameter)
    return model


def rate_at(cell: Cell, share: float) -> float:
    """The rate after this share of a run."""
    factors = {
        "warm-up": min(1.0, share / LATE),
        "rate-rises": 1.0 if share >= LATE else 1e-5,
        "pauses": 0.0 if LATE / 2 <= share < LATE else 1.0,
        "decays": 10 ** (-6 * share) if share < 0.8 else 1.0,
    }
    return cell.rate * factors.get(cell.scene, 1.0)


def run_cell(cell: Cell) -> Found:
    """Runs a cell to its end."""
    torch.set_num_threads(1)
    found, late = Found(), threading.Event()
    joins = cell.scene == "joins"
    policy = ftopt.FaultPolicy(grace_s=1.0, dead_after_s=30.0, heartbeat_s=1.0, start_replicas=cell.size)
    groups = ftopt.local_groups(cell.size + joins, policy=policy, on_event=found)

    def replica(number: int) -> None:
        model, chance = model_of(cell.initial), torch.Generator().manual_seed(number)
        if number == cell.size:
            late.wait(RUN_S)
        halves = [[p] for p in model.parameters() if p.requires_grad]
        inner = INNERS[cell.inner]([{"params": half} for half in halves], cell.rate)
        last = number == cell.size - 1
        with ftopt.wrap(inner, model, METHODS[cell.method](cell.every), group=groups[number]) as optimizer:
            for step in range(cell.steps):
                share = step / cell.steps
                for index, group in enumerate(inner.param_groups):
                    frozen = cell.scene == "unfreezes" and index == 0 and share < LATE
                    group["lr"] = 0.0 if frozen else rate_at(cell, share)
                if share >= LATE:
                    late.set()
                if cell.scene == "straggler" and last:
                    time.sleep(0.005)
                larger = 1000.0 if cell.scene == "larger-loss" and share >= LATE else 1.0
                loss = model.loss(chance, other=cell.scene == "other-data" and share >= LATE)
                (cell.scale * larger * loss).backward()
                optimizer.step()
                optimizer.zero_grad()

    def guarded(number: int) -> None:
        try:
            replica(number)
        except Exception as error:
            found.failed = f"{groups[number].replica}: {type(error).__name__}: {error}"
            late.set()
            groups[number].close()

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RUN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        found.failed = found.failed or "hangs"
    return found


def table(cells: Sequence[Cell], found: Sequence[Found]) -> list[str]:
    """Markdown: a row for each level of each factor."""
    lines = ["| factor | level | runs | steps dropped | contributions excluded | runs that diverge |", "|---" * 6 + "|"]
    for factor, levels in FACTORS.items():
        for level in levels:
            of = [f for cell, f in zip(cells, found, strict=True) if getattr(cell, factor) == level]
            sums = Counter(dropped=sum(f.dropped for f in of), excluded=sum(f.excluded for f in of))
            diverge = sum(bool(f.nonfinite) for f in of)
            lines.append(f"| {factor} | {level} | {len(of)} | {sums['dropped']} | {sums['excluded']} | {diverge} |")
    return lines


def add(parser: argparse.ArgumentParser) -> None:
    """[--count N] [--cells NAME ...] [--seed N] [--jobs N]"""
    parser.add_argument("--count", type=int, default=1000, help="so many cells (default: %(default)s)")
    parser.add_argument("--cells", nargs="+", default=[], metavar="NAME", help="these, in place of a sample")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 1 when a run has dropped steps, or has not come to its end."""
    try:
        cells = [named(word) for word in arguments.cells] or sample(arguments.count, arguments.seed)
    except ValueError as error:
        say(str(error))
        return 2

    def complaint(cell: Cell, found: Found) -> str:
        return f"{cell.name}  {found.wrong}" if found.wrong else ""

    found = played(
        "clean runs", run_cell, cells, arguments.jobs, failed=lambda reason: Found(failed=reason), wrong=complaint
    )
    bad, dropped = sum(bool(f.wrong) for f in found), sum(f.dropped for f in found)
    say("\n".join(table(cells, found)))
    say(f"\n{len(cells)} clean runs, {dropped} steps dropped, {bad} runs with a complaint")
    return 1 if bad else 0
