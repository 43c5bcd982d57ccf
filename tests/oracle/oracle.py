"""The oracle: replicas one after the other, each inner step and each round as in the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.oracle.problems import INNER, PROBLEMS, set_rate, tokens
from tests.oracle.rules import RULES, Part, Rule, Tensors
from tests.oracle.scenario import Change, Scenario, Spec


@dataclass
class Trace:
    """What a run has gone through, of every replica and of what they have agreed on."""

    parameters: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    """(tick, replica) -> its parameters after the tick."""
    anchors: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    """(tick, replica) -> the agreed parameters that it holds after the tick."""


@dataclass
class Pending:
    """A replica's steps that no round of a fragment contains yet."""

    steps: int = 0
    tokens: int = 0
    rates: float = 0.0

    def weight(self, how: str) -> float:
        """In the mean."""
        if how == "tokens_per_step":
            return self.tokens * self.tokens / self.steps if self.steps else 0.0
        return float({"steps": self.steps, "uniform": int(self.steps > 0), "tokens": self.tokens}[how])


class Replica:
    """One worker: its parameters, its inner optimizer, and what each fragment's round has yet to hear of it."""

    def __init__(self, number: int, scenario: Scenario, start: Tensors, fragments: int) -> None:
        self.number = number
        self.parameters = [p.clone().requires_grad_() for p in start]
        self.optimizer = INNER[scenario.inner](self.parameters)
        self.start = [p.detach().clone() for p in self.parameters]
        self.pending = [Pending() for _ in range(fragments)]
        self.frozen: set[int] = set()
        self.sums: list[Tensor | None] = [None] * len(start)
        self.passes = 0

    def backward(self, scenario: Scenario, tick: int) -> None:
        """The gradients of this tick's batch, and the tick's learning rate."""
        if scenario.rate is not None:
            set_rate(self.optimizer, scenario.rate(tick))
        self.optimizer.zero_grad()
        PROBLEMS[scenario.problem].loss(self.parameters, self.number, tick).backward()  # type: ignore[no-untyped-call]
        for k in self.frozen:
            self.parameters[k].grad = None
        if scenario.clip is not None:
            clip([p.grad for p in self.parameters], scenario.clip)
        for pending in self.pending:
            pending.steps += 1
            pending.tokens += tokens(self.number, tick)
            pending.rates += self.optimizer.param_groups[0]["lr"]


def clip(gradients: list[Tensor | None], norm: float) -> None:
    """Scales them down to an L2 norm, all together."""
    there = [g for g in gradients if g is not None]
    length = math.sqrt(sum(float(g.double().square().sum()) for g in there))
    if length > norm:
        for g in there:
            g.mul_(norm / length)


class Oracle:
    """A run. ``dtype`` is that of its arithmetic: float32 shows how far rounding alone can move the result."""

    def __init__(self, scenario: Scenario, dtype: torch.dtype = torch.float64) -> None:
        self.scenario, self.spec, self.dtype = scenario, scenario.spec, dtype
        self.own = torch.bfloat16 if scenario.bf16 else dtype
        problem = PROBLEMS[scenario.problem]
        self.names = problem.names()
        self.anchor = [p.detach().to(dtype) for p in problem.module().parameters()]
        groups = self.spec.fragments or (tuple(self.names),)
        self.fragments = [[self.names.index(name) for name in group] for group in groups]
        self.rules = [self._rule(indices) for indices in self.fragments]
        start = [a.to(self.own) for a in self.anchor]
        self.live = [Replica(k, scenario, start, len(groups)) for k in range(scenario.replicas)]
        self.leaving: list[Replica] = []
        self.later: list[tuple[int, Callable[[], None]]] = []
        """(tick, what is applied then)."""
        self.trace = Trace()

    def _rule(self, indices: list[int]) -> Rule:
        return RULES[self.spec.kind](self.spec, [self.names[k] for k in indices])

    def run(self) -> Trace:
        """All ticks."""
        for tick in range(1, self.scenario.ticks + 1):
            for change in self.scenario.changes:
                if change.tick == tick:
                    self._change(change)
            self._inner(tick)
            self._apply(tick)
            for f in range(len(self.fragments)):
                if due(self.spec, f, tick):
                    self._round(f, tick)
            for replica in self.live:
                self.trace.parameters[tick, replica.number] = [p.detach().clone() for p in replica.parameters]
                self.trace.anchors[tick, replica.number] = [a.to(self.own, copy=True) for a in self.anchor]
        return self.trace

    def _change(self, change: Change) -> None:
        some = [r for r in self.live if change.replica in (None, r.number)]
        match change.kind:
            case "join":
                number = 1 + max(r for _, r in [*self.trace.parameters, (0, self.scenario.replicas - 1)])
                start = [a.to(self.own) for a in self.anchor]
                self.live.append(Replica(number, self.scenario, start, len(self.fragments)))
            case "die" | "leave":
                self.live = [r for r in self.live if r not in some]
                self.leaving += some if change.kind == "leave" else []
            case "freeze" | "thaw":
                which = {k for k, name in enumerate(self.names) if name.startswith(change.what)}
                for replica in some:
                    replica.frozen = replica.frozen | which if change.kind == "freeze" else replica.frozen - which

    def _inner(self, tick: int) -> None:
        for replica in self.live:
            if (tick, replica.number) not in self.scenario.skips:
                replica.backward(self.scenario, tick)
                replica.optimizer.step()

    def _apply(self, tick: int) -> None:
        for at, apply in self.later:
            if at == tick:
                apply()
        self.later = [item for item in self.later if item[0] > tick]

    def _round(self, f: int, tick: int) -> None:
        indices, members = self.fragments[f], [r for r in self.live + self.leaving if r.pending[f].steps]
        members.sort(key=lambda r: r.number)
        parts = [self._part(r, f) for r in members]
        synchronous = tick <= self.spec.average_until
        step = self.rules[f].average if synchronous else self.rules[f].next
        new = step([self.anchor[k] for k in indices], parts)
        for k, a in zip(indices, new, strict=True):
            self.anchor[k] = a
        for replica in members:
            replica.pending[f] = Pending()
        self.leaving = [r for r in self.leaving if any(p.steps for p in r.pending)]
        delay = 0 if synchronous else self.spec.delay
        snapshots = {r.number: [r.parameters[k].detach().clone() for k in indices] for r in self.live}
        states = self._inner_state(members, parts)

        def apply() -> None:
            for replica in self.live + self.leaving:
                if replica.number in snapshots:
                    self._move(replica, indices, new, snapshots[replica.number], delay)
                    states(replica)

        if delay:
            self.later.append((tick + delay, apply))
        else:
            apply()

    def _part(self, replica: Replica, f: int) -> Part:
        pending = replica.pending[f]
        start, now = ([list_[k].detach() for k in self.fragments[f]] for list_ in (replica.start, replica.parameters))
        return Part(start, now, pending.weight(self.spec.weights), pending.rates / pending.steps)

    def _move(self, replica: Replica, indices: list[int], new: Tensors, snapshot: Tensors, delay: int) -> None:
        """2501.18512, algorithm 2: ``alpha * params + (1 - alpha) * new``; without alpha what followed is kept."""
        alpha = self.spec.mix
        with torch.no_grad():
            for k, a, before in zip(indices, new, snapshot, strict=True):
                p, there = replica.parameters[k], a.to(self.own)
                replica.start[k] = there
                if alpha is not None:
                    p.copy_(alpha * p.to(self.dtype) + (1 - alpha) * there.to(self.dtype))
                elif delay:
                    p.copy_(there.to(self.dtype) + (p.to(self.dtype) - before.to(self.dtype)))
                else:
                    p.copy_(there)

    def _inner_state(self, members: list[Replica], parts: list[Part]) -> Callable[[Replica], None]:
        """What becomes of the inner optimizers' moments."""
        how = self.spec.inner_state if self.spec.kind in ("slowmo", "paft") else "keep"
        if how == "reset":
            return lambda replica: replica.optimizer.state.clear()
        if how == "keep":
            return lambda replica: None
        weights = [part.weight / sum(p.weight for p in parts) for part in parts]
        means, befores = _moments(members, weights), {r.number: _moments([r], [1.0]) for r in members}

        def write(replica: Replica) -> None:
            for (k, key), value in means.items():
                now = replica.optimizer.state[replica.parameters[k]][key]
                now.copy_(value + (now - befores[replica.number][k, key]))

        return write


def _moments(replicas: list[Replica], weights: list[float]) -> dict[tuple[int, str], Tensor]:
    """(parameter, name) -> the weighted mean of all that an inner optimizer keeps, step counts left out."""
    result: dict[tuple[int, str], Tensor] = {}
    for replica, weight in zip(replicas, weights, strict=True):
        for k, p in enumerate(replica.parameters):
            for key, value in replica.optimizer.state[p].items():
                if isinstance(value, Tensor) and key != "step":
                    result[k, key] = result.get((k, key), torch.zeros_like(value)) + weight * value
    return result


def due(spec: Spec, f: int, tick: int) -> bool:
    """Whether fragment ``f`` meets after this tick: every H ticks, the fragments one after the other."""
    if tick <= spec.average_until:
        return True
    parts = max(1, len(spec.fragments))
    first = spec.every if f == 0 else math.ceil(f * spec.every / parts)
    since = tick - spec.average_until - first
    return since >= 0 and since % spec.every == 0


def oracle(scenario: Scenario, dtype: torch.dtype = torch.float64) -> Trace:
    """Runs the scenario."""
    from tests.oracle.gradients import GradientOracle

    return (GradientOracle if scenario.spec.kind in ("sync_sgd", "paft") else Oracle)(scenario, dtype).run()
