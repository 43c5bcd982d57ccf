"""One run: replicas as threads, the real coordinator, and at most one flipped bit."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import ftopt
from benchmarks.harm import task
from benchmarks.harm.cells import Cell
from ftopt.events import Event
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.fault_spec import Fault
from ftopt.run.harm import harm

DETECTIONS = (
    "outlier", "implausible", "overflow", "spoiled", "mismatch", "damaged", "repaired", "evicted", "diverged",
    "discarded", "fork", "rollback", "reset", "refuse", "fetch_failed",
)  # fmt: skip
"""Events that say that something was found; the first one names the detection. In a clean run there is none."""
ORDINARY = ("mixed", "taken_over", "replaced")
"""Reasons of ``discarded`` that say nothing of the kind: others have done that work."""
POLICY = ftopt.FaultPolicy(grace_s=1.0, dead_after_s=30.0, heartbeat_s=1.0)
"""Nobody is called in while all train: what comes out depends on the steps alone."""
RUN_S = 60.0
"""A run that lasts longer hangs; it takes a quarter of a second on an idle machine."""
_EQUAL_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Args:
        loss: held-out, of the survivors' committed parameters; of several that differ, the worst.
        equal: the survivors' committed states are.
        detected: events of `DETECTIONS` in the order of their first coming, with the reason of ``discarded``.
        lost: survivors' inner steps that are neither committed, pending nor discarded; they must not be.
        dropped: survivors' inner steps that were discarded.
        struck: the bit was flipped.
        peak: the largest absolute value of those parameters; a saturated unit hides it from the loss.
        failed: why a survivor has not come to its end; empty: all have.
    """

    loss: float
    equal: bool
    detected: tuple[str, ...] = ()
    lost: int = 0
    dropped: int = 0
    struck: bool = False
    failed: str = ""
    peak: float = math.inf


def is_detection(event: Event) -> bool:
    """Whether it says that something was found."""
    return event.event in DETECTIONS and event.data.get("reason") not in ORDINARY


@dataclass
class Watch:
    """What a run's events say. Any thread."""

    detected: dict[str, None] = field(default_factory=dict)
    decided: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Fragment 0's: version -> the steps of its members."""
    dropped: Counter[str] = field(default_factory=Counter)
    struck: bool = False
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: Event) -> None:
        with self.lock:
            if self.over:  # the last one to leave takes the job's state with it
                return
            if is_detection(event):
                reason = f" ({event.data['reason']})" if event.event == "discarded" else ""
                self.detected[event.event + reason] = None
            if event.event == "decide" and not event.fragment:
                members = event.data["members"]
                self.decided[event.version or 0] = [(x[0], x[2]) for x in members if x[4] > 0]
            elif event.event in ("start", "recover"):  # anew after a rollback
                last = event.data["versions"][0]
                self.decided = {version: members for version, members in self.decided.items() if version <= last}
            elif event.event == "discarded" and not event.fragment:
                self.dropped[event.replica] += event.data["steps"]
            elif event.event == "fault":
                self.struck = True

    def counted(self, name: str) -> int:
        """Inner steps of a replica that are committed."""
        return sum(steps for members in self.decided.values() for replica, steps in members if replica == name)


class _Bad:
    """The replica that is struck: its fault, and what becomes of it afterwards."""

    def __init__(self, cell: Cell, fault: Fault, on_event: Callable[[Event], None]) -> None:
        self.injector = FaultInjector([fault], on_event)
        self.injector.learn({})
        self.fate, self.later = cell.fate.split("-")[0], cell.fate.endswith("later")
        self.group: ftopt.ReplicaGroup | None = None
        self.struck_at: int | None = None
        self.steps = 0

    def __call__(self, event: Event) -> None:
        if event.event == "inner":
            self.steps += 1
        self.injector(event)

    def strike(self) -> None:
        self.struck_at = self.steps
        if self.fate == "dies" and not self.later:
            self.die()

    def goes(self) -> bool:
        """Behind a step: whether this replica's time has come."""
        if self.struck_at is None or self.fate == "stays":
            return False
        return not self.later or self.steps >= self.struck_at + task.H

    def die(self) -> None:
        """Nothing leaves it any more, nothing reaches it."""
        assert self.group is not None
        self.group.cut(3600.0)  # type: ignore[attr-defined]


def fault_of(cell: Cell, seed: int) -> Fault:
    """Where and when it strikes; the element is drawn."""
    chance = random.Random(f"{seed} {cell.name}")
    tensors = [p.numel() for p in task.Net().parameters()]
    tensor = chance.randrange(len(tensors))
    element = sum(tensors[:tensor]) + chance.randrange(tensors[tensor])
    rounds = task.steps_of(cell.method) // task.H
    number = {"first": 1, "second": 2, "middle": rounds // 2, "late": rounds - 3}[cell.round]
    step, point = number * task.H, {"inner": "inner", "boundary": "propose", "reduction": "reduce"}[cell.moment]
    if cell.moment == "inner":
        step -= task.H // 2
    if cell.target == "grads":
        point = "inner"
    point = {"payload": "payload", "sum": "reduce.after", "result": "prepare"}.get(cell.target, point)
    return Fault(
        replica=_who(cell), do="corrupt", what=cell.target, point=point, at_step=step, bit=cell.bit, element=element
    )


def _who(cell: Cell) -> str:
    """Not always the first, not always the last."""
    return f"r{cell.bit % cell.size}"


def run_cell(cell: Cell, seed: int, *, flips: bool = True, data_seed: int = 0) -> Outcome:
    """Runs a cell to its end; without the flip if not ``flips``."""
    torch.set_num_threads(1)
    steps, names, watch = task.steps_of(cell.method), [f"r{m}" for m in range(cell.size)], Watch()
    bad = _Bad(cell, fault_of(cell, seed), watch) if flips else None

    def on_event(event: Event) -> None:
        watch(event)
        if bad is not None and event.replica == _who(cell):
            bad(event)

    groups = dict(zip(names, ftopt.local_groups(cell.size, policy=POLICY, on_event=on_event), strict=True))
    survivors = [n for n in names if bad is None or bad.fate == "stays" or n != _who(cell)]
    nets = {name: task.made(data_seed) for name in names}
    meet, ended = threading.Barrier(len(survivors), timeout=RUN_S), dict[str, tuple[float, float, str, int]]()
    failed, states = dict[str, str](), dict[str, tuple[str, int]]()

    def replica(name: str) -> None:
        net, group = nets[name], groups[name]
        own = bad if bad is not None and name == _who(cell) else None
        data = task.Data(name, cell.size, steps, data_seed)
        inner = task.inner_of(cell.inner, net)
        peak = inner.param_groups[0]["lr"]
        optimizer = ftopt.wrap(inner, net, replace(task.METHODS[cell.method](), codec=cell.codec), group=group)
        if own is not None:
            own.group = group
            actions = harm(optimizer, group)

            def strike(fault: Fault, event: Event) -> None:
                actions["corrupt"](fault, event)
                own.strike()

            own.injector.learn({"corrupt": strike})
        optimizer.__enter__()
        for step in range(steps):
            inner.param_groups[0]["lr"] = peak * task.rate(step, steps)
            optimizer.zero_grad()
            data.loss(net, step).backward()
            optimizer.step()
            if own is not None and own.goes():
                if own.fate == "dies":
                    own.die()
                    group.close()
                else:
                    optimizer.close()
                return
        settle(name, optimizer)
        digest = optimizer.digest()
        with optimizer.global_parameters():
            loss, peak = task.held_out(net), max(float(p.detach().abs().max()) for p in net.parameters())
        lost = optimizer.local_steps - watch.counted(name) - watch.dropped[name] - optimizer.pending_steps
        ended[name] = loss, peak, digest, lost
        meet.wait()
        watch.over = True
        optimizer.close(flush=False)

    def settle(name: str, optimizer: ftopt.ReplicaOptimizer) -> None:
        """Takes part in rounds until all survivors are at their end with nothing pending, and equal; or a while."""
        late_s = math.inf
        while True:
            optimizer.sync()
            states[name] = optimizer.digest(), optimizer.pending_steps
            if len(states) == len(survivors):
                late_s = min(late_s, time.monotonic() + _EQUAL_S)
                if set(states.values()) == {(states[name][0], 0)} or time.monotonic() > late_s:
                    break
            time.sleep(0.005)
        meet.wait()

    def guarded(name: str) -> None:
        try:
            replica(name)
        except Exception as error:
            if name in survivors:
                failed[name] = f"{type(error).__name__}: {error}"
                meet.abort()
            with contextlib.suppress(Exception):
                groups[name].close()

    threads = [threading.Thread(target=guarded, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + RUN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        return Outcome(math.inf, False, tuple(watch.detected), struck=watch.struck, failed="hangs")
    first = next((text for text in failed.values() if "Barrier" not in text), next(iter(failed.values()), ""))
    if first:
        return Outcome(math.inf, False, tuple(watch.detected), struck=watch.struck, failed=first)
    losses, peaks, digests, lost = zip(*ended.values(), strict=True)
    return Outcome(
        max(x if math.isfinite(x) else math.inf for x in losses),
        len(set(digests)) == 1,
        tuple(watch.detected),
        sum(lost),
        sum(watch.dropped[name] for name in survivors),
        watch.struck,
        peak=max(x if math.isfinite(x) else math.inf for x in peaks),
    )
