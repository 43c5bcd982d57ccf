"""Drives ftopt through a scenario, with its public surface alone: replicas are threads that go in lockstep."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

import ftopt
from ftopt import fragments, outer
from ftopt.events import Event
from ftopt.methods import Method
from tests.oracle.oracle import Trace, due
from tests.oracle.problems import INNER, PROBLEMS, noise, set_rate, tokens
from tests.oracle.scenario import Change, Outer, Scenario, Spec

LONG_S = 60.0
"""Nobody is called in, cut off or left behind by a clock."""

PARTITIONS: dict[str, Any] = {
    "named": fragments.Named(patterns=["table", "layers", "head"]),
    "strided": fragments.Strided(n=2),
    "balanced": fragments.Balanced(n=2),
}


def outer_rule(settings: Outer) -> Any:
    """The outer optimizer of these settings."""
    schedule: Any = outer.ConstantRate(warmup=settings.warmup)
    if settings.cosine is not None:
        schedule = outer.CosineRate(steps=settings.cosine, warmup=settings.warmup, floor=settings.floor)
    if settings.kind == "adam":
        return outer.Adam(lr=settings.lr, betas=list(settings.betas), eps=settings.eps, schedule=schedule)
    return outer.SGD(lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, schedule=schedule)


def method(spec: Spec) -> Method:
    """The method of these settings."""
    common: dict[str, Any] = {"sync_every": spec.every, "weights": spec.weights}
    if spec.kind == "sync_sgd":
        return ftopt.SyncSGD(**common, clip_norm=spec.clip)
    common["average_until_step"] = spec.average_until
    streaming: dict[str, Any] = {"delay": spec.delay, "mix": spec.mix, "wait_for_result_s": LONG_S}
    match spec.kind:
        case "local_sgd":
            return ftopt.LocalSGD(**common)
        case "diloco":
            return ftopt.DiLoCo(**common, outer=outer_rule(spec.outer))
        case "slowmo":
            return ftopt.SlowMo(
                **common, slow_lr=spec.slow_lr, slow_momentum=spec.slow_momentum, inner_state=spec.inner_state
            )
        case "paft":
            return ftopt.PAFT(**common, delay=spec.delay, clip_norm=spec.clip, inner_state=spec.inner_state)
    streaming |= {"outer": outer_rule(spec.outer), "fragments": PARTITIONS.get(spec.cut, fragments.Strided(n=1))}
    if spec.kind == "streaming":
        return ftopt.StreamingDiLoCo(**common, **streaming)
    return ftopt.DecoupledDiLoCo(**common, **streaming, adaptive_grace=0.0)


class Seen:
    """The events of a run, to wait for."""

    every_step = False

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.new: frozenset[str] = frozenset()
        """Whose average of PAFT's parameters is proposed before all others'."""
        self._count: Counter[tuple[str, str]] = Counter()
        self._averages: set[str] = set()
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._count[event.event, event.replica] += 1
            self._changed.notify_all()
            if event.fragment == 1 and event.event == "gather":
                self._averages.add(event.replica)
            if event.fragment == 1 and event.event == "propose" and event.replica not in self.new:
                self._changed.wait_for(lambda: self.new <= self._averages, LONG_S)

    def count(self, what: str, who: str) -> int:
        """How many so far."""
        with self._changed:
            return self._count[what, who]

    def wait(self, what: str, who: str, least: int, ended: Future[None] | None = None) -> None:
        """Until there have been so many, or a call has ended."""
        if ended is not None:
            ended.add_done_callback(lambda _: self._wake())
        with self._changed:
            done = lambda: self._count[what, who] >= least or (ended is not None and ended.done())  # noqa: E731
            if not self._changed.wait_for(done, LONG_S):
                raise TimeoutError(f"{what} of {who}: {self._count[what, who]}, not {least}")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class Worker:
    """One replica: its model, its wrapped optimizer, and the thread that all its calls are made on."""

    def __init__(self, number: int, scenario: Scenario, group: ftopt.ReplicaGroup) -> None:
        self.number, self.scenario, self.group = number, scenario, group
        self.problem = PROBLEMS[scenario.problem]
        self.module = self.problem.module().to(torch.bfloat16 if scenario.bf16 else torch.float32)
        self.parameters = list(self.module.parameters())
        self.inner = INNER[scenario.inner](self.parameters)
        self.tick = 0
        if scenario.noisy:
            self.inner.register_step_pre_hook(lambda *_: self._corrupt())
        self.optimizer = ftopt.wrap(self.inner, self.module, method(scenario.spec), group=group)
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.leave: Future[None] | None = None

    def _corrupt(self) -> None:
        for k, p in enumerate(self.parameters):
            if p.grad is not None:
                p.grad.add_(noise(self.number, self.tick, p, k))

    def step(self, tick: int, policy: bool) -> None:
        """An inner step; then, if the replica has not met the others in it, a round with what it has."""
        self.tick = tick
        if (tick, self.number) not in self.scenario.skips:
            if self.scenario.rate is not None:
                set_rate(self.optimizer, self.scenario.rate(tick))
            self.optimizer.zero_grad()
            self.problem.loss(self.parameters, self.number, tick).backward()  # type: ignore[no-untyped-call]
            if self.scenario.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.scenario.clip)
            self.optimizer.log(tokens=tokens(self.number, tick))
            self.optimizer.step()
        if policy and self.optimizer.pending_steps:
            assert self.optimizer.sync()

    def host(self, joined: threading.Event) -> None:
        """Lets a newcomer read the parameters, while it joins."""
        with self.optimizer.global_parameters():
            assert joined.wait(LONG_S)

    def freeze(self, change: Change) -> None:
        """Or thaw."""
        for name, p in self.module.named_parameters():
            if name.startswith(change.what):
                p.requires_grad_(change.kind == "thaw")
                p.grad = None

    def record(self, trace: Trace, tick: int, anchor: bool) -> None:
        """Parameters, and the agreed ones."""
        trace.parameters[tick, self.number] = [p.detach().clone() for p in self.parameters]
        if anchor:
            with self.optimizer.global_parameters():
                trace.anchors[tick, self.number] = [p.detach().clone() for p in self.parameters]


class Drive:
    """A run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.spec = scenario, scenario.spec
        self.seen = Seen()
        settings = ftopt.FaultPolicy(
            start_replicas=scenario.replicas, grace_s=LONG_S, dead_after_s=LONG_S, evict_after_s=10 * LONG_S
        )
        groups = ftopt.local_groups(scenario.everybody(), policy=settings, on_event=self.seen)
        self.all = [Worker(k, scenario, group) for k, group in enumerate(groups)]
        self.live: list[Worker] = []
        self.new: list[Worker] = []
        """Those of `live` that have not met the others yet."""
        self.trace = Trace()
        self.rounds = 0

    def run(self) -> Trace:
        """All ticks."""
        try:
            self.live = self.all[: self.scenario.replicas]
            _together([(w, w.optimizer.__enter__, ()) for w in self.live])
            for tick in range(1, self.scenario.ticks + 1):
                for change in self.scenario.changes:
                    if change.tick == tick:
                        self._change(change)
                self._tick(tick)
            for worker in self.all:
                if worker.leave is not None:
                    worker.leave.result()
            self.seen.wait("decide", "coordinator", self.rounds)
            return self.trace
        finally:
            for worker in self.all:
                worker.group.close()
                worker.thread.shutdown()

    def _tick(self, tick: int) -> None:
        meet = [f for f in range(max(1, len(self.spec.fragments))) if due(self.spec, f, tick)]
        policy = bool(meet) and self.spec.delay == 0 and not self.spec.cut
        paft = self.spec.kind == "paft"
        self.seen.new = frozenset(_name(w) for w in self.new if paft)
        first = [w for w in self.live if w in self.new and (policy or paft)]  # PAFT exchanges gradients at every tick
        started = []
        for worker in first:  # newcomers have half a second from the first proposal on: it shall be theirs
            before = self.seen.count("gather", _name(worker))  # sent, not only begun
            started.append(worker.thread.submit(worker.step, tick, policy))
            self.seen.wait("gather", _name(worker), before + 1)
        started += [w.thread.submit(w.step, tick, policy) for w in self.live if w not in first]
        for future in started:
            future.result()
        self.rounds += len(meet)
        self.new = [] if meet else self.new
        for worker in self.live:
            worker.thread.submit(worker.record, self.trace, tick, self.spec.delay == 0).result()

    def _change(self, change: Change) -> None:
        some = [w for w in self.live if change.replica in (None, w.number)]
        if change.kind in ("join", "die", "leave"):
            self.seen.wait("decide", "coordinator", self.rounds)
        match change.kind:
            case "join":
                worker = next(w for w in self.all[self.scenario.replicas :] if w.tick == 0)
                worker.tick = change.tick
                joined = threading.Event()
                # PAFT's parameters are read only while their owner is in a call of its optimizer.
                hosts = [w.thread.submit(w.host, joined) for w in self.live] if self.spec.kind == "paft" else []
                try:
                    worker.thread.submit(worker.optimizer.__enter__).result(LONG_S)
                finally:
                    joined.set()
                for host in hosts:
                    host.result()
                self.live.append(worker)
                self.new.append(worker)
            case "die":
                for worker in some:
                    worker.thread.submit(worker.group.close).result()
                    self.live.remove(worker)
            case "leave":
                for worker in some:
                    self._leave(worker, change.tick)
            case "freeze" | "thaw":
                _together([(w, w.freeze, (change,)) for w in some])

    def _leave(self, worker: Worker, tick: int) -> None:
        self.live.remove(worker)
        offers = sum(not due(self.spec, f, tick - 1) for f in range(max(1, len(self.spec.fragments))))
        before = self.seen.count("gather", _name(worker))
        worker.leave = worker.thread.submit(worker.optimizer.close, timeout_s=LONG_S)
        # What has been sent is counted in the next round; what is only proposed by then, in the one behind it.
        self.seen.wait("gather", _name(worker), before + max(1, offers), worker.leave)


def _name(worker: Worker) -> str:
    return f"r{worker.number}"


def _together(calls: list[tuple[Worker, Any, tuple[Any, ...]]]) -> None:
    for future in [worker.thread.submit(call, *args) for worker, call, args in calls]:
        future.result()


def drive(scenario: Scenario) -> Trace:
    """Runs the scenario."""
    return Drive(scenario).run()
