"""What each rank of an island answers to each call, before the start, in the job, and after the end, beside what a
replica of one process answers; by torchrun: ``python -m tests.island.asking OUT``.

Rank 0 writes the answers of all ranks: by kind of replica, method and phase, those to the calls in turn.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ftopt
from ftopt.methods import Method
from tests.island.lasting import shared_folder, three, train, values

METHODS: dict[str, Callable[[], Method]] = {
    "diloco": lambda: ftopt.DiLoCo(sync_every=2),
    "streaming": lambda: ftopt.StreamingDiLoCo(
        sync_every=4, fragments=ftopt.fragments.Balanced(n=2), delay=1, wait_for_result_s=60.0
    ),
    "syncsgd": lambda: ftopt.SyncSGD(),
}
KINDS = {
    "single": ("diloco", "streaming", "syncsgd"),
    "island": ("diloco", "streaming", "syncsgd"),
    "fsdp": ("streaming", "syncsgd"),
}
"""Kinds of replicas, and the methods that are asked for there; "fsdp": an island with a sharded model."""


class Replica:
    """What is asked: a wrapped optimizer alone in its job, with checkpoints."""

    def __init__(self, kind: str, method: str, phase: str, folder: Path) -> None:
        self.rank = dist.get_rank()
        mesh, own = (False, f"-{self.rank}") if kind == "single" else (None, "")
        job = f"{kind}-{method}-{phase}{own}"
        policy = ftopt.FaultPolicy(start_replicas=1, grace_s=60.0, dead_after_s=60.0, stragglers="wait")
        self.model = three()
        if kind == "fsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.group = ftopt.connect(job=job, replica="r", policy=policy, mesh=mesh)
        self.optimizer = ftopt.wrap(
            self.inner,
            self.model,
            METHODS[method](),
            group=self.group,
        )
        self.checkpoints = ftopt.Checkpoints(folder / job, self.optimizer, every=100)

    def train(self, steps: int = 5) -> None:
        """Inner steps."""
        train(self.model, self.optimizer, steps)

    def parameters(self) -> list[float]:
        """As the model has them, rounded: slices are added up in another order."""
        return [round(float(value.double().sum()), 4) for value in values(self.model)]


def _outer(replica: Replica) -> object:
    with replica.optimizer.global_parameters():
        inside = replica.parameters()
    return inside, replica.parameters()


def _busy(replica: Replica) -> object:
    with replica.optimizer.busy("evaluating"):
        return None


def _suspended(replica: Replica) -> object:
    with replica.optimizer.suspended():
        replica.optimizer.step()
    return replica.parameters()


def _enter(replica: Replica) -> object:
    return replica.optimizer.__enter__() is replica.optimizer


def _modes(replica: Replica) -> object:
    replica.optimizer.eval()
    inside = replica.parameters()
    replica.optimizer.train()
    return inside, replica.parameters()


def _committed(replica: Replica) -> object:
    committed = replica.optimizer._core.standing().committed
    return committed.version, committed.inner_step, committed.counted_step


def _state(replica: Replica) -> object:
    state = replica.optimizer.state_dict()
    return state["ftopt"], sorted(map(str, state))


def _load(replica: Replica) -> object:
    replica.optimizer.load_state_dict(copy.deepcopy(replica.optimizer.state_dict()))
    return replica.parameters()


def _cleared(replica: Replica) -> object:
    replica.optimizer.zero_grad()
    return [p.grad is None for p in replica.model.parameters()]


def _copied(replica: Replica) -> object:
    found = copy.deepcopy(replica.optimizer)
    found.step()
    return repr(found)


def _stepped(replica: Replica) -> object:
    for p in replica.model.parameters():
        p.grad = torch.ones_like(p)
    replica.optimizer.step()
    return replica.optimizer.local_steps


LOOKS: dict[str, Callable[[Replica], object]] = {
    "start_step": lambda r: r.optimizer.start_step,
    "replaying": lambda r: r.optimizer.status.replaying,
    "inner_step": lambda r: r.optimizer.inner_step,
    "local_steps": lambda r: r.optimizer.local_steps,
    "pending_steps": lambda r: r.optimizer.pending_steps,
    "pending_by_fragment": lambda r: r.optimizer.status.pending_steps,
    "versions": lambda r: r.optimizer.status.versions,
    "committed": _committed,
    "anchor_digest": lambda r: r.optimizer.digest(),
    "repr": lambda r: repr(r.optimizer),
    "state_dict": _state,
    "param_groups": lambda r: r.optimizer.param_groups[0]["lr"],
    "zero_grad": _cleared,
    "count": lambda r: r.optimizer.log(tokens=2, samples=1, loss=0.5),
    "count wrongly": lambda r: r.optimizer.log(tokens=-2),
    "count an impossible loss": lambda r: r.optimizer.log(loss=torch.ones(2)),
    "count too much": lambda r: r.optimizer.log(tokens=2**53 - 1),
    "busy": _busy,
    "suspended": _suspended,
    "undo": lambda r: ftopt.undo.undo_step(r.optimizer),
    "copied": _copied,
    "load_state_dict": _load,
    "checkpoints.step": lambda r: r.checkpoints.step(),
}
"""Calls that do not join the job."""
WORK: dict[str, Callable[[Replica], object]] = {
    "eval and train": _modes,
    "settle": lambda r: r.optimizer.sync(propose=False),
    "global_parameters": _outer,
    "sync": lambda r: r.optimizer.sync(),
    "step": _stepped,
    "with": _enter,
    "resume": lambda r: r.checkpoints.resume(),
    "checkpoints.last": lambda r: r.checkpoints.last(),
    "include": lambda r: r.checkpoints.include(),
    "add_param_group": lambda r: r.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "checkpoints.close": lambda r: r.checkpoints.close(),
}


def _in_job(replica: Replica) -> None:
    replica.optimizer.__enter__()
    replica.train()


def _evaluates(replica: Replica) -> None:
    _in_job(replica)
    replica.optimizer.eval()


def _within(replica: Replica) -> None:
    _in_job(replica)
    within = replica.optimizer.global_parameters()
    within.__enter__()
    replica.model.within = within  # type: ignore[assignment]


def _ended(replica: Replica) -> None:
    _in_job(replica)
    replica.optimizer.close()


def _ended_evaluating(replica: Replica) -> None:
    _evaluates(replica)
    replica.optimizer.close()


def _failed(replica: Replica) -> None:
    _in_job(replica)
    try:
        raise FloatingPointError
    except FloatingPointError as error:
        replica.optimizer.__exit__(type(error), error, None)


def _never(replica: Replica) -> None:
    replica.optimizer.close()


PHASES: dict[str, Callable[[Replica], None]] = {
    "before": lambda replica: None,
    "in the job": _in_job,
    "while it evaluates": _evaluates,
    "within global_parameters": _within,
    "after the end": _ended,
    "after an end while it evaluates": _ended_evaluating,
    "after an error": _failed,
    "closed before the start": _never,
}


def answer(call: Callable[[Replica], object], replica: Replica) -> object:
    """What a call answers: a value, or the kind of an error."""
    try:
        return call(replica)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def answers(kind: str, method: str, folder: Path) -> dict[str, Any]:
    """By phase and call."""
    found: dict[str, Any] = {}
    for phase, bring in PHASES.items():
        if method != "diloco" and phase not in ("in the job", "after the end"):
            continue
        bring(replica := Replica(kind, method, phase, folder))
        found[phase] = {name: answer(call, replica) for name, call in LOOKS.items()}
        if phase == "after an error":  # the ranks have left the job each by itself, and do nothing together any more
            continue
        if phase == "before":  # each of them may join
            replica.optimizer.close()
            for name, call in WORK.items():
                replica = Replica(kind, method, f"{phase}-{name}", folder)
                found[phase][name] = answer(call, replica)
                found[phase][f"{name}, and then inner_step"] = replica.optimizer.inner_step
                replica.optimizer.close()
        else:
            found[phase] |= {name: answer(call, replica) for name, call in WORK.items()}
            found[phase] |= {f"{name} after all": answer(call, replica) for name, call in LOOKS.items()}
            if phase == "within global_parameters":
                replica.model.within.__exit__(None, None, None)  # type: ignore[operator, union-attr]
            found[phase]["close"] = answer(lambda r: r.optimizer.close(), replica)
            found[phase]["close again"] = answer(lambda r: r.optimizer.close(), replica)
            found[phase] |= {f"{name} at last": answer(call, replica) for name, call in LOOKS.items()}
            found[phase]["global_parameters at last"] = answer(_outer, replica)
    return found


def main(out: str, *kinds: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        for kind in kinds or KINDS:
            for method in KINDS[kind]:
                mine = answers(kind, method, folder)
                ranks: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(ranks, mine)
                found[f"{kind} {method}"] = ranks
                dist.barrier()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
