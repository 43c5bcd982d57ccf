"""Training for the comparisons: replicas as threads, only the method differs, every run is kept on disk.

A run is a `Case`. Its result is kept under a hash of the case, so that an interrupted comparison continues where it
stopped, and an extended one computes only what is new.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import ftopt
from ftopt.cli.shared.output import say
from ftopt.config.inner_settings import factor
from ftopt.config.loader import load
from ftopt.config.optimizers import inner_optimizers
from ftopt.config.tasks import Task, task_of
from ftopt.data.seeds import seed_of
from ftopt.events import Event
from ftopt.methods import Method
from ftopt.run.harm import corrupt

_QUICK_STEPS = 3
RESULTS = Path(__file__).parent / "results"
PATIENT = ftopt.FaultPolicy(grace_s=600.0, dead_after_s=600.0, heartbeat_s=5.0)
"""Nobody is called in: what comes out depends on the steps alone, not on how busy the machine is."""


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """What happens to each replica's gradient behind the aggregation (of a method that averages none: before its step).

    Args:
        how: ``noise``, ``bit``, ``stuck`` or ``bias``, see `ftopt.run.fault_spec.Fault`.
        size: as there.
        every: at every so many steps.
        replicas: only at so many of the first replicas; None: at all.
        params: it hits the parameters instead.
    """

    how: str
    size: float = 0.0
    every: int = 1
    replicas: int | None = None
    params: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run.

    Args:
        recipe: the shipped recipe that model, data and schedule are taken from.
        method: the method.
        lr: peak inner rate; None with the recipe's inner optimizers, which have rates of their own.
        inner: ``adamw``, ``sgd`` (momentum 0.9), or ``recipe``: the recipe's.
        replicas: how many.
        steps: inner steps of each.
        seed: of model and data.
        codec: wire precision.
        corrupted: what goes wrong behind the aggregation.
        eval_every: inner steps between two evaluations.
        momentum: of ``sgd``.
    """

    recipe: str
    method: Method
    lr: float | None
    inner: str = "adamw"
    replicas: int = 4
    steps: int = 600
    seed: int = 0
    codec: str = "fp32"
    corrupted: tuple[Corruption, ...] = ()
    eval_every: int = 50
    momentum: float = 0.9

    def key(self) -> str:
        """Tells this case from all others."""
        plain = {**asdict(self), "method": repr(self.method)}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Args:
        curve: (inner step, held-out loss of the committed parameters).
        loss: of the committed parameters at the end, on all held-out data; of a few steps, on a part of it.
        accuracy: likewise, for tasks that have one.
        sent_bytes: by one replica, the mean over all.
        seconds: it took.
        discarded: inner steps that were mixed away.
        own: each replica's own accuracy at the end, for tasks that have one.
        mean: that of the mean of their parameters.
        training: the replicas' mean loss on their own batches, at their own parameters, over the whole run.
        averages: how often the anchor was set.
    """

    curve: list[tuple[int, float]]
    loss: float
    accuracy: float | None
    sent_bytes: float
    seconds: float
    discarded: int
    own: list[float]
    mean: float | None
    training: float
    averages: int


def train(case: Case) -> Outcome:
    """Trains a case in this process."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    tasks = [task_for(case) for _ in range(case.replicas)]
    sent, discarded = [0] * case.replicas, [0]
    places = {f"r{m}": m for m in range(case.replicas)}
    chances = [torch.Generator().manual_seed(seed_of(f"corrupted {case.seed}", m)) for m in range(case.replicas)]
    passes = [0] * case.replicas
    thorough = case.steps > _QUICK_STEPS
    spoiling = "inner" if case.method.gradients is None else "aggregated"

    def on_event(event: Event) -> None:
        m = places.get(event.replica)
        if m is None:
            return
        if event.event == "prepare":
            sent[m] = int(event.data["wire_bytes"])
        elif event.event == "discarded" and event.fragment == 0:
            discarded[0] += int(event.data["steps"])
        elif event.event == spoiling:
            passes[m] += 1
            for one in case.corrupted:
                if passes[m] % one.every == 0 and (one.replicas is None or m < one.replicas):
                    parameters = list(tasks[m].model.parameters())
                    tensors = [p.data if one.params else p.grad for p in parameters]
                    corrupt([t for t in tensors if t is not None], one.how, one.size, chances[m])

    groups = ftopt.local_groups(case.replicas, policy=PATIENT, on_event=on_event)
    curve: list[tuple[int, float]] = []
    scores: list[tuple[float, float | None]] = []
    own, finals = dict[int, float](), dict[int, Tensor]()
    losses, averages = list[float](), list[int]()

    def replica(m: int) -> None:
        task, group = tasks[m], groups[m]
        with wrapped(case, task, group) as optimizer:
            for step, loss in inner_steps(case, task, optimizer, group.replica):
                losses.append(float(loss))
                if m == 0 and step % case.eval_every == 0:
                    with optimizer.global_parameters():
                        curve.append((step, task.score(thorough=False).loss))
            if "accuracy" in task.score(thorough=False).metrics:
                own[m] = task.score(thorough=thorough).metrics["accuracy"]
                finals[m] = nn.utils.parameters_to_vector(task.model.parameters()).detach().clone()
            averages.append(optimizer.status.versions[-1])
            optimizer.sync()
            if m == 0:
                with optimizer.global_parameters():
                    score = task.score(thorough=thorough)
                scores.append((score.loss, score.metrics.get("accuracy")))

    with ThreadPoolExecutor(case.replicas) as pool:
        for future in [pool.submit(replica, m) for m in range(case.replicas)]:
            future.result()
    ((loss, accuracy),) = scores
    mean = None
    if finals:
        nn.utils.vector_to_parameters(torch.stack(list(finals.values())).mean(0), tasks[0].model.parameters())
        mean = tasks[0].score(thorough=thorough).metrics.get("accuracy")
    seconds = round(time.perf_counter() - started, 1)
    return Outcome(
        curve,
        loss,
        accuracy,
        sum(sent) / case.replicas,
        seconds,
        discarded[0],
        list(own.values()),
        mean,
        statistics.fmean(losses),
        averages[0],
    )


def task_for(case: Case) -> Task:
    """Model and data of a replica, alike in all."""
    recipe = load(case.recipe)
    torch.manual_seed(case.seed)
    return task_of(replace(recipe, train=replace(recipe.train, seed=case.seed, inner_steps=case.steps)))


def wrapped(case: Case, task: Task, group: ftopt.ReplicaGroup) -> ftopt.ReplicaOptimizer:
    """The case's method around its inner optimizer."""
    parameters = task.model.parameters()
    inner: torch.optim.Optimizer | list[torch.optim.Optimizer]
    if case.lr is None:
        inner = inner_optimizers(load(case.recipe).inner_sections(), task.model)
    elif case.inner == "sgd":
        inner = torch.optim.SGD(parameters, lr=case.lr, momentum=case.momentum)
    else:
        inner = torch.optim.AdamW(parameters, lr=case.lr, betas=(0.9, 0.99), weight_decay=0.0)
    return ftopt.wrap(inner, task.model, replace(case.method, codec=case.codec), group=group)


def inner_steps(
    case: Case, task: Task, optimizer: ftopt.ReplicaOptimizer, replica: str
) -> Iterator[tuple[int, Tensor]]:
    """Takes the case's inner steps; gives the number of those taken after each, and its loss."""
    recipe = load(case.recipe)
    inner = recipe.inner[0] if isinstance(recipe.inner, list) else recipe.inner
    batches = task.batches(seed_of(case.seed, replica, 1))
    clip = recipe.train.clip_norm if case.method.gradients is None else None
    rates = [parameters["lr"] for parameters in optimizer.param_groups]
    for step in range(case.steps):
        for parameters, rate in zip(optimizer.param_groups, rates, strict=True):
            parameters["lr"] = rate * factor(inner.schedule, step, case.steps)
        loss = task.loss(batches.batch())
        loss.backward()
        optimizer.log(loss=loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(task.model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1, loss.detach()


class Book:
    """Outcomes by case, kept in a folder.

    Args:
        name: the folder's, in ``benchmarks/results``.
        workers: processes that train at a time. Default: the number of cores.
        quick: each case takes a few steps only, and no earlier outcome counts: to see that everything works.

    Attributes:
        folder: where outcomes are kept.
    """

    def __init__(self, name: str, workers: int | None = None, *, quick: bool = False) -> None:
        self.quick = quick
        self.folder = RESULTS / "quick" / name if quick else RESULTS / name
        if quick:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._workers = workers or os.cpu_count() or 1

    def get(self, case: Case) -> Outcome | None:
        """What is kept of it."""
        path = self.folder / f"{case.key()}.json"
        if not path.exists():
            return None
        data = json.loads(path.read_text())["outcome"]
        return Outcome(**{**data, "curve": [tuple(point) for point in data["curve"]]})

    def all(self, cases: Iterable[Case]) -> list[Outcome]:
        """Trains what is not there yet; outcomes in the order of ``cases``."""
        cases = [replace(case, steps=_QUICK_STEPS, eval_every=_QUICK_STEPS) if self.quick else case for case in cases]
        todo = list({case.key(): case for case in cases if self.get(case) is None}.values())
        if self.quick:
            for case in todo:
                self._keep(case, train(case))
        elif todo:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(self._workers, mp_context=context) as pool:
                waiting: dict[Future[Outcome], Case] = {pool.submit(train, case): case for case in todo}
                for done, future in enumerate(as_completed(waiting), 1):
                    case = waiting[future]
                    self._keep(case, outcome := future.result())
                    say(f"{done:3d}/{len(todo)}  {outcome.loss:.4f}  {outcome.seconds:5.1f} s  {describe(case)}")
        found = [self.get(case) for case in cases]
        return [outcome for outcome in found if outcome is not None]

    def _keep(self, case: Case, outcome: Outcome) -> None:
        path = self.folder / f"{case.key()}.json"
        text = json.dumps({"case": {**asdict(case), "method": repr(case.method)}, "outcome": asdict(outcome)}, indent=1)
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)


def describe(case: Case) -> str:
    """One line."""
    what = [case.method.name, f"H={case.method.sync_every}", case.codec, f"lr={case.lr:g}", f"seed={case.seed}"]
    what += [f"M={case.replicas}", f"{case.steps} steps"]
    what += [f"{one.how} {one.size:g}" for one in case.corrupted]
    return " ".join(what)
