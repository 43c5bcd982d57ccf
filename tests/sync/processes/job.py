"""A whole job of real processes for tests: a coordinator, replicas with a tiny model, the run's events in a folder.

Processes come from a fork server that has torch and ftopt loaded. Whatever a test starts is gone when it ends.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.events import Event, Subscribers
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.fault_spec import Fault
from ftopt.run.harm import harm
from ftopt.run.subscribers import CurrentStep, step_log
from ftopt.sync.server.address import parse_address
from ftopt.sync.server.coordinator import CoordinatorServer
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines, Tail, read_lines
from ftopt.watch.summary import summarize
from tests.forkserver import CONTEXT, Flag, die_with_parent
from tests.ledger import with_ledger
from tests.ports import hold_port

LIMIT_S = 100.0
NOW = "inner"
"""The point of an ordered fault that does not wait for its event."""
_ORDERED = 1
"""The incarnation of ordered faults: they aim at the process that reads the order, whatever its incarnation is."""
FAST = ftopt.FaultPolicy(
    grace_s=1.0, heartbeat_s=0.1, dead_after_s=1.0, start_s=30.0, recovery_s=5.0, evict_after_s=60.0, start_replicas=3
)
"""For tests of what a busy machine may do as well: a replica is called in, or silent, and comes back."""
CALM = replace(FAST, grace_s=30.0, dead_after_s=20.0, recovery_s=30.0, stragglers="wait")
"""Nobody is called in, silent or given up, however busy the machine is. A process that dies is missed at once."""


def assert_nothing_lost(summary: Mapping[str, Any]) -> None:
    """No survivor's step is lost or counted twice, there is one history, and all who are done hold the same state."""
    assert summary["survivor_inner_steps_lost"] == 0, summary
    assert summary["inner_steps_counted_twice"] == 0, summary
    assert summary["chain_conflicts"] == [], summary
    assert len(set(summary["anchor_digests"].values())) == 1, summary


def tiny_model(width: int = 16) -> nn.Module:
    """The same in every replica."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


def _in_namespace(namespace: str | None, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Runs ``target`` in a network namespace of ``ip netns``; threads started from now on are in it too."""
    die_with_parent()
    if namespace is not None:
        with open(f"/run/netns/{namespace}", "rb") as handle:  # noqa: PTH123 (its descriptor is what is needed)
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    target(*args)


def _obey(orders: Any, injector: FaultInjector, trains: threading.Event) -> None:
    """Strikes what the test orders. Before the replica trains it can be killed and stopped only; the rest waits."""
    try:
        while True:
            fault, event = orders.get()
            if fault.do not in ("kill", "stop") or fault.point != NOW:
                trains.wait()
            if fault.point == NOW:
                injector.strike(fault, event)
            else:
                injector.add(fault)
    except BaseException:  # an order that is lost in silence would be waited for in vain
        traceback.print_exc()
        os._exit(3)


def _coordinator(folder: Path, bind: str, started: float, faults: Sequence[Fault], journal: str, life: int) -> None:
    files = RunFolder(folder)
    events = EventLog(JsonLines(files.events, started))
    injector = FaultInjector(faults, events, incarnation=life)

    def ready(url: str) -> None:
        (folder / f"url-{life}").write_text(url)

    host, port = parse_address(bind)
    path = folder / journal if journal else None
    server = CoordinatorServer(host, port, journal=path, new=life == 1, on_event=Subscribers([events, injector]))
    injector.learn({"partition": lambda fault, event: server.cut(fault.for_s or 0.0)})
    server.run(ready=ready)


def _replica(
    folder: Path,
    url: str,
    replica: str,
    started: float,
    faults: Sequence[Fault],
    options: Mapping[str, Any],
    target: Any,
    finish: Any,
    orders: Any,
) -> None:
    os.environ |= options.get("environ", {}).get(replica, {})
    torch.set_num_threads(options.get("threads", {}).get(replica, 1))
    files = RunFolder(folder)
    if options.get("logs"):
        logging.basicConfig(filename=folder / f"log-{replica}")
    events, record = EventLog(JsonLines(files.events, started)), CurrentStep()
    steps = step_log(record, [JsonLines(files.steps(replica), started).write])
    injector, ordered = FaultInjector(faults, events), FaultInjector((), events, incarnation=_ORDERED)
    trains = threading.Event()
    threading.Thread(target=_obey, args=(orders, ordered, trains), daemon=True).start()
    on_event = Subscribers([events, steps, injector, ordered])
    try:
        _train(url, replica, options, on_event, record, target, finish, (injector, ordered), trains)
    except UserError as error:
        on_event(Event("refused", replica, data={"text": str(error)}))
        os._exit(2)


def _train(
    url: str,
    replica: str,
    options: Mapping[str, Any],
    on_event: Callable[[Event], None],
    record: CurrentStep,
    target: Any,
    finish: Any,
    injectors: Sequence[FaultInjector],
    trains: threading.Event,
) -> None:
    if (samples := options.get("samples")) is not None and samples.global_batch is not None:
        _train_together(url, replica, options, on_event, target, finish, injectors, trains)
        return
    leaving = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    model = tiny_model(options.get("width", 16))
    group = ftopt.connect(
        url,
        replica,
        job=options.get("job"),
        policy=options["policy"],
        on_event=on_event,
        connect_s=20.0,
        standby=options.get("standby", False),
    )
    with_ledger([group], options.get("samples"))
    optimizer = ftopt.wrap(
        torch.optim.AdamW(model.parameters(), lr=options.get("lr", 1e-3)), model, options["method"], group=group
    )
    for injector in injectors:
        injector.learn(harm(optimizer, group))
    kernels = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    on_event(Event("kernels", replica, data=kernels))
    step_s = options["step_s"]
    step_s = step_s[replica] if isinstance(step_s, dict) else step_s
    with optimizer:
        trains.set()
        seed = sum(map(ord, replica)) * 100 + group.incarnation
        data = torch.Generator().manual_seed(seed)
        while optimizer.status.committed_step < target.value and not leaving.is_set():
            if group.units is not None:
                unit = group.units.take(timeout_s=LIMIT_S)
                if unit is None:
                    if group.units.ended:
                        break
                    continue
                if not group.units.draw(unit):
                    continue
                data.manual_seed(unit)
            x = torch.randn(4, 8, generator=data)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            record.loss, record.local_step = float(loss.detach()), optimizer.local_steps + 1
            time.sleep(step_s)  # an inner step of known length
            optimizer.step()
            optimizer.zero_grad()
        done = not leaving.is_set()
        if done:
            optimizer.sync(propose=False)
            with optimizer.busy("done"):
                _tell_end(optimizer, group, on_event, "done")
                finish.wait(LIMIT_S)
                optimizer.sync(propose=False)
                _tell_end(optimizer, group, on_event, "done")
        optimizer.close(flush=not done, timeout_s=30.0)
        if not done:
            _tell_end(optimizer, group, on_event, "left")


class Points:
    """A data set for `tiny_model`: what it gets, turned round, is what it shall give."""

    random = False

    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.inputs[index]


def together_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The mean over the samples of ``x``."""
    return (model(x) - x.flip(1)).square().mean()


def _train_together(
    url: str,
    replica: str,
    options: Mapping[str, Any],
    on_event: Callable[[Event], None],
    target: Any,
    finish: Any,
    injectors: Sequence[FaultInjector],
    trains: threading.Event,
) -> None:
    """A global batch of ``samples`` is shared out; an event has each step's gradient.

    With the option ``hold``, a number and an event, it waits for the event after so many micro-batches.
    """
    computed, (hold_at, go_on) = 0, options.get("hold", (-1, None))
    samples, at_once = options["samples"], options.get("at_once", 1)
    method = options["method"] if options["method"].gradients is not None else ftopt.SyncSGD()
    model = tiny_model(options.get("width", 16))
    group = ftopt.connect(url, replica, policy=options["policy"], on_event=on_event, connect_s=20.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = ftopt.wrap(inner, model, method, group=group)
    for injector in injectors:
        injector.learn(harm(optimizer, group))
    loader = ftopt.DataLoader(
        Points(samples.samples), samples.batch_size * at_once, group=group, epochs=samples.epochs,
        global_batch=samples.global_batch, split=samples.batch_size,
    )  # fmt: skip
    with optimizer:
        trains.set()
        for micro_batches in loader.global_batches():
            for x in micro_batches:
                if computed == hold_at:
                    go_on.wait(LIMIT_S)
                computed += 1
                time.sleep(options["step_s"])  # a micro-batch of known length
                together_loss(model, x).backward()
            optimizer.step()
            gradient = [float(g) for p in model.parameters() if p.grad is not None for g in p.grad.flatten()]
            data = {"version": optimizer.version, "gradient": gradient}
            on_event(Event("gradient", replica, group.incarnation, data=data))
            if optimizer.status.committed_step >= target.value:
                break
        optimizer.sync(propose=False)
        with optimizer.busy("done"):
            _tell_end(optimizer, group, on_event, "done")
            finish.wait(LIMIT_S)
        optimizer.close(flush=False)


def _tell_end(
    optimizer: ftopt.ReplicaOptimizer, group: ftopt.ReplicaGroup, on_event: Callable[[Event], None], reason: str
) -> None:
    data = {
        "reason": reason,
        "local_steps": optimizer.local_steps,
        "pending_steps": optimizer.pending_steps,
        "pending_by_fragment": optimizer.status.pending_steps,
        "counted_step": optimizer.status.counted_step,
        "anchor_digest": optimizer.digest(),
    }
    on_event(Event("end", group.replica, group.incarnation, inner_step=optimizer.inner_step, data=data))


class TinyJob:
    """A running job; made by `tiny_job`."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 3,
        method: Any = None,
        policy: ftopt.FaultPolicy = FAST,
        steps: int | None = 120,
        step_s: float | dict[str, float] = 0.004,
        faults: Mapping[str, Sequence[Fault]] | None = None,
        journal: str = "journal.sqlite",
        bind: str = "127.0.0.1",
        beside: TinyJob | None = None,
        namespaces: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.folder = folder
        self.names = [f"{options.get('job', 'r')}{i}" for i in range(replicas)]
        self.started = time.time()
        self.options = {
            "method": method or ftopt.DiLoCo(sync_every=20),
            "policy": policy,
            "step_s": step_s,
            **options,
        }
        self.faults = dict(faults or {})
        self.journal = journal
        self.target = CONTEXT.RawValue("q", 1 << 40 if steps is None else steps)  # no lock that the killed would keep
        self.finish = Flag()
        self.processes: dict[str, BaseProcess] = {}
        self._all: list[BaseProcess] = []
        self._lives = 0
        RunFolder(folder).create()
        self._tail = Tail(RunFolder(folder).events)
        self._events: list[dict[str, Any]] = []
        self.namespaces = dict(namespaces or {})
        self.orders: dict[str, Any] = {}
        self._held = None if "coordinator" in self.namespaces else hold_port(bind)  # for its successor, too
        self.url = f"http://{bind}:{self._held.getsockname()[1] if self._held else 0}"
        if beside is not None:  # another job of the same coordinator
            self.url, self.started = beside.url, beside.started
        else:
            self.start_coordinator()

    def start_coordinator(self) -> None:
        """Starts the coordinator, or its successor at the same address."""
        self._lives += 1
        args = (
            self.folder,
            self.url.removeprefix("http://"),
            self.started,
            self.faults.get("coordinator", ()),
            self.journal,
            self._lives,
        )
        self._start("coordinator", _coordinator, args)
        path = self.folder / f"url-{self._lives}"
        self.wait_until(lambda: path.exists() and bool(path.read_text()), "the coordinator listens")
        self.url = path.read_text()

    def start(self, name: str, **options: Any) -> BaseProcess:
        """Starts a replica."""
        self.orders[name] = CONTEXT.SimpleQueue()
        args = (
            self.folder,
            self.url,
            name,
            self.started,
            self.faults.get(name, ()),
            {**self.options, **options},
            self.target,
            self.finish,
            self.orders[name],
        )
        return self._start(name, _replica, args)

    def order(self, name: str, fault: Fault) -> None:
        """A fault of a replica's process: at once with point `NOW`, otherwise at its point's next event."""
        life = max((e["incarnation"] for e in self.events("join", name)), default=1)
        self.orders[name].put((replace(fault, incarnation=_ORDERED), Event("order", name, life)))

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)

    def events(self, event: str | None = None, replica: str | None = None) -> list[dict[str, Any]]:
        """The events so far."""
        self._events += self._tail.more()
        return [e for e in self._events if event in (None, e["event"]) and replica in (None, e["replica"])]

    def trained(self, replica: str, *, since: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The inner steps of a replica since an event."""
        return [x for x in read_lines(RunFolder(self.folder).steps(replica)) if x["t_s"] > since["t_s"]]

    def until(
        self, event: str, replica: str | None = None, *, count: int = 1, at_step: int = 0, incarnation: int = 0
    ) -> dict[str, Any]:
        """Waits for the ``count``-th event of that name; returns it."""

        def found() -> list[dict[str, Any]]:
            return [
                e
                for e in self.events(event, replica)
                if e.get("inner_step", 0) >= at_step and incarnation in (0, e["incarnation"])
            ]

        self.wait_until(lambda: len(found()) >= count, f"{event} of {replica or 'anybody'}")
        return found()[count - 1]

    def until_away(self, name: str) -> dict[str, Any]:
        """Waits until the coordinator misses a replica; returns its `lost`. On a busy machine it may have missed it
        before, too, and heard it again."""

        def last() -> dict[str, Any]:
            told = [e for e in self.events(None, name) if e["event"] in ("join", "lost", "return")]
            return told[-1] if told else {"event": "none"}

        self.wait_until(lambda: last()["event"] == "lost", f"{name} is away")
        return last()

    def heal(self, name: str) -> None:
        """Ends a partition of a replica's."""
        self.order(name, Fault(point=NOW, do="partition", for_s=0.001))

    def wake(self, name: str) -> None:
        """A process that a fault has stopped goes on."""
        pid = self.processes[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)

    def kill(self, name: str) -> None:
        """SIGKILL, and the death on record."""
        process = self.processes[name]
        process.kill()
        self.died(name)

    def died(self, name: str) -> None:
        """Waits for the end of a process that was killed, and puts its death on record."""
        process = self.processes.pop(name)
        process.join(LIMIT_S)
        joins = [e["incarnation"] for e in self.events("join", name)]
        lines = JsonLines(RunFolder(self.folder).events, self.started)
        lines.write({"event": "death", "replica": name, "incarnation": max(joins, default=0)})
        lines.close()

    def after(self, event: dict[str, Any], name: str, replica: str | None = None, *, count: int = 1) -> dict[str, Any]:
        """Waits for the ``count``-th event of that name after ``event``; returns it."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.events(name, replica) if e["t_s"] > event["t_s"]]

        self.wait_until(lambda: len(found()) >= count, f"{name} of {replica or 'anybody'} after {event['event']}")
        return found()[count - 1]

    def enough(self, *, more: int = 40) -> None:
        """The job ends ``more`` committed inner steps from now (for one that was started with ``steps=None``)."""
        self.target.value = max(e["inner_step"] for e in self.events("decide")) + more

    def end(self) -> dict[str, Any]:
        """Waits until all replicas are done, lets them go, and returns the run's summary."""
        waiting = [n for n in self.processes if n != "coordinator"]
        self.wait_until(lambda: all(self._ended(n) for n in waiting), f"the end of {waiting}")
        self.finish.set()
        for name in waiting:
            self.processes[name].join(LIMIT_S)
            assert self.processes[name].exitcode == 0, (name, self.processes[name].exitcode)
        files = RunFolder(self.folder)
        steps = {name: read_lines(files.steps(name)) for name in self.names}
        return summarize([e for e in self.events() if self._is_own(e)], steps)

    def _is_own(self, event: dict[str, Any]) -> bool:
        """Not of another job in the same folder."""
        members = event.get("data", {}).get("members", [])
        return event["replica"] in (*self.names, "coordinator") and all(m[0] in self.names for m in members)

    def close(self) -> None:
        """Ends whatever still lives."""
        for process in self._all:
            if process.is_alive():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
        for process in self._all:
            process.join(10)
        if self._held is not None:
            self._held.close()

    def _ended(self, name: str) -> bool:
        process = self.processes[name]
        if process.exitcode not in (None, 0):
            raise AssertionError(f"{name} ended with {process.exitcode}: {json.dumps(self.events()[-5:], indent=1)}")
        lives = [e["incarnation"] for e in self.events("join", name)]
        return any(e["incarnation"] == max(lives, default=0) for e in self.events("end", name))

    def _start(self, name: str, target: Any, args: tuple[Any, ...]) -> BaseProcess:
        process = CONTEXT.Process(target=_in_namespace, args=(self.namespaces.get(name), target, args), name=name)
        process.start()
        self.processes[name] = process
        self._all.append(process)
        return process

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """Waits for a condition; an AssertionError with the last events when it does not come."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            if time.monotonic() > deadline:
                tail = "\n".join(json.dumps(e) for e in self.events()[-30:])
                raise AssertionError(f"{what} did not come within {LIMIT_S:g} s; the last events:\n{tail}")
            time.sleep(0.01)


@contextmanager
def tiny_job(folder: Path, **options: Any) -> Iterator[TinyJob]:
    """A job whose processes are gone when the block ends."""
    job = TinyJob(folder, **options)
    try:
        yield job
    finally:
        job.close()
