"""One replica's process: connects telemetry, faults, the group and the trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ftopt
from ftopt.config.loader import as_dict
from ftopt.config.schema import Recipe
from ftopt.errors import JobFailed
from ftopt.events import Event, OnEvent, Subscribers, attend
from ftopt.net.tls import Tls
from ftopt.run.fault_injector import FaultInjector
from ftopt.run.harm import harm
from ftopt.run.own_folder import OwnFolder
from ftopt.run.ranks import Ranks, meet
from ftopt.run.subscribers import CurrentStep, DroppedRounds, OnStep, OwnEnd, step_log
from ftopt.run.train import Trainer, leaving_on_signals
from ftopt.watch.folder import RunFolder
from ftopt.watch.jsonl import EventLog, JsonLines
from ftopt.watch.narrator import Screen
from ftopt.watch.trackers.wandb import Wandb, of_recipe, run_id

_WANDB_S = 10.0
_OTHERS_S = 60.0
"""Seconds that a replica at its end waits for the runner to report that all others are at theirs."""


@dataclass
class Result:
    """How a replica has ended.

    Attributes:
        done: whether the job is at its end.
        files: this replica's own folder; None: the folder is the runner's, or another rank's.
        summary: its figures; None: it has not joined, or its folder was removed.
        saved: whether its part of the last checkpoint is on disk, or none was due.
        failed: why the job has failed (LOSS), for a replica with a folder of its own; None: it has not.
    """

    done: bool
    files: RunFolder | None = None
    summary: dict[str, Any] | None = None
    saved: bool = True
    failed: JobFailed | None = None


def run_replica(
    recipe: Recipe,
    *,
    url: str,
    replica: str,
    job: str,
    token: str | None,
    tls: Tls,
    host: str | None = None,
    interface: str | None = None,
    folder: Path,
    started: float,
    over: threading.Event | None,
    screen: Screen | None = None,
    standby: bool = False,
) -> Result:
    """Trains one replica, or one rank of it, in this process until the job ends or a signal arrives.

    With several ranks, only rank 0 writes to the folder and to wandb, and carries out faults.

    Args:
        recipe, url, replica, job, token, tls: the job, the coordinator's address, this replica's id, and the rest that
            `ftopt.connect` takes.
        host, interface: this machine's address as peers reach it, or the interface that has it; None finds it.
        folder: the run's folder.
        started: the run's start, as ``time.time()`` gives it.
        over: set when the run is over, by `ftopt.run.runner`, which has started this process and owns the folder. None:
            the folder is this replica's own (`ftopt.run.own_folder`), and is summarized at the end.
        screen: shows the replica.
        standby: it is a spare.

    Raises:
        ftopt.errors.JobFailed: a replica was lost, and ``policy.on_loss`` is ``fail``; if this replica has a folder of
            its own and has joined, the error is in the result instead.
        ftopt.errors.JobOver: this replica is a spare, and the job has ended.
        ftopt.errors.UserError: the coordinator refuses this replica or cannot be reached; data or model are not
        available.
    """
    supervised = over is not None
    torch.set_num_threads(recipe.train.threads)
    ranks = meet(recipe)
    if not ranks.leads:
        path = None if supervised else (lambda: RunFolder(folder).checkpoints)  # rank 0 writes there
        group = ftopt.connect(url, replica, job=job)
        done, _ = _train(recipe, group, record=CurrentStep(), ranks=ranks, over=over, own_checkpoints=path)
        return Result(done)
    record = CurrentStep()
    on_steps: list[OnStep] = [] if screen is None else [screen.stepped]
    mode, _ = of_recipe(recipe.log.wandb)
    mirror = _Mirror() if mode != "off" else None

    def opened(files: RunFolder, started: float) -> None:
        on_steps.append(JsonLines(files.steps(replica), started).write)
        if mirror is not None:
            run = files.path.name if supervised else job  # each `ftopt run` is a new one
            wandb = Wandb(mode=mode, dir=files.path, group=run, id=run_id(run, replica), config=as_dict(recipe))
            attend(wandb, job, replica)
            mirror.wandb = wandb

    own = None if supervised else OwnFolder(recipe, replica, f"{url} {job}", folder, opened, standby=standby)
    events: OnEvent = own if own is not None else _shared_log(RunFolder(folder), started, opened)

    ids = recipe.replica_ids()
    faults = [fault for fault in recipe.faults if fault.target([*ids, replica]) == replica]
    injector = FaultInjector(faults, events)
    more: list[OnEvent] = [each for each in (mirror, screen) if each is not None]
    dropped, own_end = DroppedRounds(), OwnEnd(recipe.train.inner_steps, standby=standby)
    on_event = Subscribers([events, step_log(record, on_steps), *more, dropped, own_end, injector])
    group = ftopt.connect(
        url,
        replica,
        job=job,
        token=token,
        ca=tls.ca,
        cert=tls.cert,
        key=tls.key,
        host=host,
        interface=interface,
        policy=recipe.job_policy,
        on_event=on_event,
        standby=standby,
    )
    if own is not None:
        own.check()
    result = Result(False, own.files if own is not None else None)
    path = (lambda: own.files.checkpoints) if own is not None else None
    try:
        result.done, result.saved = _train(
            recipe,
            group,
            record=record,
            ranks=ranks,
            over=over,
            dropped=dropped,
            injector=injector,
            own_checkpoints=path,
        )
    except JobFailed as error:
        if own is None or not own.is_open:
            raise
        result.failed = error
    finally:
        group.close()
        if own is not None and own.is_open:
            result.files = own.files
            if own.files.events.exists():
                result.summary = own.files.summarize()
        if mirror is not None and mirror.wandb is not None:
            mirror.wandb.close(_WANDB_S)
    return result


class _Mirror:
    """Passes events on to wandb, whose folder is known once the replica has joined."""

    every_step = outer_gradient = True
    wandb: Wandb | None = None

    def __call__(self, event: Event) -> None:
        if self.wandb is not None:
            self.wandb(event)


def _shared_log(files: RunFolder, started: float, opened: Callable[[RunFolder, float], None]) -> EventLog:
    """Opens the runner's folder, to which all its processes write."""
    files.create()
    opened(files, started)
    return EventLog(JsonLines(files.events, started))


def _train(
    recipe: Recipe,
    group: ftopt.ReplicaGroup,
    *,
    record: CurrentStep,
    ranks: Ranks,
    over: threading.Event | None,
    dropped: DroppedRounds | None = None,
    injector: FaultInjector | None = None,
    own_checkpoints: Callable[[], Path] | None = None,
) -> tuple[bool, bool]:
    """Returns whether the job is done, and whether this replica's part of its last checkpoint is saved."""
    trainer = Trainer(
        recipe,
        group,
        record=record,
        dropped=dropped,
        evaluates=group.replica == recipe.replica_ids()[0],
        wait_for_others=lambda: ranks.leads and over is not None and over.wait(_OTHERS_S),
        ranks=ranks,
        own_checkpoints=own_checkpoints,
    )
    if injector is not None:
        injector.learn(harm(trainer.optimizer, group))
    with leaving_on_signals(trainer, supervised=over is not None):
        return trainer.run(), trainer.saved
