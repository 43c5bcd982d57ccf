"""One replica's process: puts telemetry, faults, the group and the trainer together."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import ftopt
from ftopt.config.loader import as_dict
from ftopt.config.schema import Recipe
from ftopt.events import OnEvent, Subscribers, ignore
from ftopt.faults.injector import FaultInjector
from ftopt.job.harm import harm
from ftopt.job.ranks import Ranks, meet
from ftopt.job.subscribers import CurrentStep, step_log
from ftopt.job.supervised import finish_up, terminate_self
from ftopt.job.train import Trainer, leaving_on_signals
from ftopt.net.tls import Tls
from ftopt.telemetry.folder import RunFolder
from ftopt.telemetry.jsonl import EventLog, JsonLines
from ftopt.telemetry.wandb import Wandb, resolve, run_id

_WANDB_S = 10.0
_OTHERS_S = 60.0
"""Seconds that a replica at its end waits for the runner to say that all others are at theirs."""
_PATIENCE_S = 45.0


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
    supervised: bool,
) -> bool:
    """Trains one replica, or one rank of it, in this process until the job ends or a signal says so; True at the job's
    end.

    Of several ranks, rank 0 alone writes to the folder and to wandb, and carries out faults.

    Args:
        recipe, url, replica, job, token, tls: the job, the coordinator's address, this replica's id, and the rest that
            `ftopt.connect` takes.
        host, interface: this machine's address as peers reach it, or the interface that has it; None finds it.
        folder: the run's folder.
        started: the run's start, as ``time.time()`` gives it.
        supervised: started by `ftopt.job.runner`, which says when to end.

    Raises:
        ftopt.UserError: the coordinator refuses this replica or cannot be reached; data or model cannot be had.
    """
    asked = finish_up(_PATIENCE_S) if supervised else None
    torch.set_num_threads(recipe.train.threads)
    ranks = meet(recipe)
    if not ranks.leads:
        group = ftopt.connect(url, replica, job=job)
        return _train(recipe, group, ignore, record=CurrentStep(), ranks=ranks, asked=asked)
    files = RunFolder(folder)
    files.create()
    events = EventLog(JsonLines(files.events, started))
    record = CurrentStep()
    mode = resolve(recipe.log.wandb)
    run = folder.name if supervised else job  # `ftopt run` begins a new one each time
    wandb = None
    if mode != "off":
        wandb = Wandb(mode=mode, dir=folder, group=run, id=run_id(run, replica), config=as_dict(recipe))
    steps = step_log(JsonLines(files.steps(replica), started), record)
    ids = recipe.replica_ids()
    faults = [fault for fault in recipe.faults if fault.target([*ids, replica]) == replica]
    injector = FaultInjector(faults, events)
    on_event = Subscribers([events, steps, *([wandb] if wandb is not None else []), injector])
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
        sync=recipe.sync,
        on_event=on_event,
    )
    try:
        done = _train(recipe, group, on_event, record=record, ranks=ranks, asked=asked, injector=injector)
    finally:
        group.close()
        if wandb is not None:
            wandb.close(_WANDB_S)
    return done


def _train(
    recipe: Recipe,
    group: ftopt.ReplicaGroup,
    on_event: OnEvent,
    *,
    record: CurrentStep,
    ranks: Ranks,
    asked: threading.Event | None,
    injector: FaultInjector | None = None,
) -> bool:
    trainer = Trainer(
        recipe,
        group,
        on_event,
        record=record,
        evaluates=group.replica == recipe.replica_ids()[0],
        wait_for_others=lambda: ranks.leads and asked is not None and asked.wait(_OTHERS_S),
        ranks=ranks,
    )
    if injector is not None:
        injector.learn(harm(trainer.optimizer, group))
    if asked is not None:
        terminate_self(asked)
    with leaving_on_signals(trainer):
        return trainer.run()
