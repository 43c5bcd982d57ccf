"""Training without ftopt's protocol: replicas of one process that take their inner steps in turn, and meet.

The replicas' parameters are stacked, so that one call of an inner optimizer moves them all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.grid.gradients import gradients_of
from ftopt.config.inner_settings import factor
from ftopt.config.loader import load
from ftopt.config.tasks import Task, task_of
from ftopt.data.draws import Draws
from ftopt.data.seeds import seed_of

RECIPE = "diloco_bytes"
REPLICAS = 4
MARKS = 4
"""So many times in a run the committed parameters are evaluated."""
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run.

    Args:
        kind: ``diloco``; ``sync``, gradients averaged before every inner step; or ``alone``, one replica.
        muon: rate of Muon for the matrices of the blocks; AdamW has the rest. None: AdamW has all.
        rate: peak rate of AdamW.
        part: what both inner rates are multiplied with.
        batch: windows of an inner step of a replica.
        steps: inner steps of a replica.
        lead: so many inner steps are synchronous before DiLoCo begins.
        h: inner steps between two outer steps.
        eta: outer rate.
        mu: outer Nesterov momentum.
        falling: the momentum falls linearly, from ``mu`` in the first outer step to 0 in the last one.
        seed: of model and data.
    """

    kind: str = "diloco"
    muon: float | None = None
    rate: float
    part: float = 1.0
    batch: int = 16
    steps: int = 600
    lead: int = 0
    h: int = 0
    eta: float = 1.0
    mu: float = 0.0
    falling: bool = False
    seed: int = 0

    @property
    def gain(self) -> float:
        """What a steady outer gradient is multiplied by in the end."""
        return self.eta / (1 - self.mu)

    @property
    def memory(self) -> float:
        """Inner steps that the outer momentum remembers."""
        return self.h / (1 - self.mu)

    @property
    def windows(self) -> int:
        """That the run takes: its cost."""
        return self.steps * self.batch * (1 if self.kind == "alone" else REPLICAS)

    def meets(self) -> list[int]:
        """After which inner steps there is an outer step: every ``h``, and at the end."""
        if self.kind != "diloco":
            return []
        return [*range(self.lead + self.h, self.steps, self.h), self.steps]

    def momentum(self, number: int) -> float:
        """Of an outer step, counted from 0."""
        last = len(self.meets()) - 1
        return self.mu * (1 - number / last) if self.falling and last else self.mu


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run.

    Args:
        loss: held-out loss of the committed parameters at the end, on 512 windows; infinite if training broke down.
        curve: (inner step, the same on 128 windows), `MARKS` times.
        training: mean loss of all batches of the last tenth, each at its replica's own parameters.
        wall_s, cpu_s: it took.
    """

    loss: float
    curve: Sequence[tuple[int, float]]
    training: float
    wall_s: float
    cpu_s: float


def train(point: Point) -> Outcome:
    """Trains in this process."""
    torch.set_num_threads(1)
    wall, cpu = time.perf_counter(), time.process_time()
    curve: list[tuple[int, float]] = []
    losses: list[float] = []
    task = task_for(point)
    marks = {point.steps * mark // MARKS for mark in range(1, MARKS)}
    values: list[Tensor] = []
    for step, loss, values in steps(point, task):
        losses.append(loss)
        if not math.isfinite(loss):
            break
        if step in marks:
            curve.append((step, score(task, values, thorough=False)))
    end = score(task, values, thorough=point.steps >= MARKS * MARKS) if math.isfinite(losses[-1]) else math.inf
    last = losses[-max(1, point.steps // 10) :]
    return Outcome(
        loss=end if math.isfinite(end) else math.inf,
        curve=curve,
        training=mean if math.isfinite(mean := sum(last) / len(last)) else math.inf,
        wall_s=round(time.perf_counter() - wall, 2),
        cpu_s=round(time.process_time() - cpu, 2),
    )


def steps(point: Point, task: Task) -> Iterator[tuple[int, float, list[Tensor]]]:
    """Takes the inner steps; after each: their number, the replicas' mean loss, the committed parameters."""
    streams = [task.batches(seed_of(point.seed, f"r{m}", 1)) for m in range(1 if point.kind == "alone" else REPLICAS)]
    replicas = Replicas(task, point)
    until = {"sync": point.steps, "diloco": point.lead, "alone": 0}[point.kind]
    for step in range(until):
        yield step + 1, replicas.step(step, [_joined(streams)]), replicas.first()
    replicas = replicas.copies(len(streams))
    anchor = replicas.first()
    velocity: list[Tensor] | None = None
    meets = point.meets()
    for step in range(until, point.steps):
        loss = replicas.step(step, [stream.batch() for stream in streams])
        if point.kind == "alone":
            anchor = replicas.first()
        elif step + 1 in meets:
            mu = point.momentum(meets.index(step + 1))
            delta = [a - mean for a, mean in zip(anchor, replicas.mean(), strict=True)]
            velocity = delta if velocity is None else [mu * v + d for v, d in zip(velocity, delta, strict=True)]
            anchor = [a - point.eta * (d + mu * v) for a, d, v in zip(anchor, delta, velocity, strict=True)]
            replicas.set(anchor)
        yield step + 1, loss, anchor


def task_for(point: Point) -> Task:
    """Model and data: those of the recipe, at the point's batch and length."""
    recipe = load(RECIPE)
    torch.manual_seed(point.seed)
    train = replace(recipe.train, seed=point.seed, inner_steps=point.steps)
    return task_of(replace(recipe, train=train, data=replace(recipe.data, batch_size=point.batch)))


def score(task: Task, values: Sequence[Tensor], *, thorough: bool) -> float:
    """The held-out loss of parameters."""
    with torch.no_grad():
        for parameter, value in zip(task.model.parameters(), values, strict=True):
            parameter.copy_(value)
    return task.score(thorough=thorough).loss


def _joined(streams: Sequence[Draws]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*(stream.batch() for stream in streams), strict=True)
    return torch.cat(inputs), torch.cat(targets)


class Replicas:
    """Parameters of replicas, stacked, and their inner optimizers. One, as it is created.

    Args:
        task: whose model's parameters they begin with.
        point: the inner optimizer's settings.
    """

    def __init__(self, task: Task, point: Point) -> None:
        recipe = load(RECIPE)
        assert not isinstance(recipe.inner, list)
        self._schedule, self._clip = recipe.inner.schedule, recipe.train.clip_norm
        self._point, self._gradients = point, gradients_of(task.model)
        self._shapes = {name: parameter.shape for name, parameter in task.model.named_parameters()}
        self._matrices = [
            name for name, shape in self._shapes.items() if len(shape) == 2 and name.startswith("blocks.")
        ]
        initial = {name: parameter.detach()[None] for name, parameter in task.model.named_parameters()}
        rest = [value.flatten(1) for name, value in initial.items() if name not in self._matrices]
        matrices = [initial[name].flatten(1) for name in self._matrices]
        self._hold(torch.cat(rest, 1), torch.cat(matrices, 1))

    def _hold(self, rest: Tensor, matrices: Tensor) -> None:
        self._flat = [rest, matrices]
        self._grads = [torch.zeros_like(rest), torch.zeros_like(matrices)]
        self._values, self._into = self._views(self._flat), self._views(self._grads)
        self._momenta = torch.zeros_like(matrices)
        own = [nn.Parameter(flat) for flat in (self._flat if self._point.muon is None else self._flat[:1])]
        for parameter, gradient in zip(own, self._grads, strict=False):
            parameter.grad = gradient
        self._adam = torch.optim.AdamW(own, lr=self._point.rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def copies(self, count: int) -> Replicas:
        """So many replicas that are like the first one, with its inner state."""
        new: Replicas = object.__new__(Replicas)
        new.__dict__.update(self.__dict__)
        new._hold(*(flat[:1].repeat(count, 1) for flat in self._flat))
        new._momenta.copy_(self._momenta[:1].expand(count, -1))
        parameters = (adam.param_groups[0]["params"] for adam in (self._adam, new._adam))
        for old, parameter in zip(*parameters, strict=True):
            new._adam.state[parameter] = {
                name: state.clone() if state.ndim == 0 else state[:1].repeat(count, 1)
                for name, state in self._adam.state[old].items()
            }
        return new

    def _views(self, flat: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Of each replica: name -> its part, in the model's order."""
        found = []
        for rest, matrices in zip(*flat, strict=True):
            at, views = [0, 0], {}
            for name, shape in self._shapes.items():
                which = int(name in self._matrices)
                views[name] = (rest, matrices)[which][at[which] : at[which] + shape.numel()].view(shape)
                at[which] += shape.numel()
            found.append(views)
        return found

    def step(self, step: int, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """An inner step of each, on a batch of its own; the mean loss."""
        losses = [
            self._gradients(*batch, values, into)
            for batch, values, into in zip(batches, self._values, self._into, strict=True)
        ]
        if self._clip is not None:
            norms = torch.stack([gradient.norm(dim=1) for gradient in self._grads]).norm(dim=0)
            scales = (self._clip / (norms + 1e-6)).clamp(max=1.0)[:, None]
            for gradient in self._grads:
                gradient.mul_(scales)
        part = self._point.part * factor(self._schedule, step, self._point.steps)
        self._adam.param_groups[0]["lr"] = self._point.rate * part
        self._adam.step()
        if self._point.muon is not None:
            self._muon(self._point.muon * part)
        return sum(losses) / len(losses)

    def _muon(self, rate: float, momentum: float = 0.95) -> None:
        """torch.optim.Muon with its defaults and no weight decay, for matrices of one shape at a time."""
        self._momenta.lerp_(self._grads[1], 1 - momentum)
        updates = self._grads[1].lerp(self._momenta, momentum)
        by_shape: dict[torch.Size, list[slice]] = {}
        at = 0
        for name in self._matrices:
            by_shape.setdefault(shape := self._shapes[name], []).append(slice(at, at := at + shape.numel()))
        for shape, places in by_shape.items():
            stacked = torch.cat([updates[:, place] for place in places]).view(-1, *shape)
            turned = orthogonal(stacked).flatten(1).to(updates.dtype).chunk(len(places))
            for place, update in zip(places, turned, strict=True):
                self._flat[1][:, place].add_(update, alpha=-rate * math.sqrt(max(1.0, shape[0] / shape[1])))

    def first(self) -> list[Tensor]:
        """The first replica's parameters."""
        return [value.clone() for value in self._values[0].values()]

    def mean(self) -> list[Tensor]:
        """Of the parameters."""
        (views,) = self._views([flat.mean(0, keepdim=True) for flat in self._flat])
        return list(views.values())

    def set(self, values: Sequence[Tensor]) -> None:
        """Sets all replicas' parameters."""
        for views in self._values:
            for view, value in zip(views.values(), values, strict=True):
                view.copy_(value)


def orthogonal(matrices: Tensor) -> Tensor:
    """Muon's iteration, for a stack: the bits of ``torch.optim._muon._zeropower_via_newtonschulz`` for each of them."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16().mT if tall else matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
