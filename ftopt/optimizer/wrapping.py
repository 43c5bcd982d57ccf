"""`wrap`: checks its arguments, and makes the core for a replica of one process or of several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ftopt._connect import from_environment
from ftopt.common.paths import user_path
from ftopt.errors import UserError, check_whole, names_arguments
from ftopt.events import OnEvent
from ftopt.methods import Method
from ftopt.optimizer.arguments import (
    CALL,
    check_dense,
    check_for_island,
    check_inner,
    check_rest,
    check_whole_tensors,
)
from ftopt.optimizer.asked import Asked, by_environment
from ftopt.optimizer.beside import warn_of_steps_beside
from ftopt.optimizer.core import Core
from ftopt.optimizer.ending.at_exit import at_exit
from ftopt.optimizer.taken import check_free, take
from ftopt.optimizer.training import Training
from ftopt.optimizer.wrapper import ReplicaOptimizer, around
from ftopt.step.inner import Inner
from ftopt.step.tensors.flat import check_covered
from ftopt.step.tensors.mapped import Mapped
from ftopt.step.tensors.memory import Memory
from ftopt.sync.group import ReplicaGroup
from ftopt.sync.protocol.policy import FaultPolicy

_MOST_STEPS = 1 << 40
"""Maximum inner steps of a job that the protocol can count."""


@names_arguments(CALL)
def wrap(
    inner: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    method: Method,
    *,
    group: ReplicaGroup | None = None,
    policy: FaultPolicy | None = None,
    on_event: OnEvent | Sequence[OnEvent] | None = None,
    state_dir: str | Path | None = None,
    undo: bool = False,
    leave_on_signals: bool = False,
    start_step: int = 0,
) -> ReplicaOptimizer:
    """Makes one replica's optimizer take part in a job.

        optimizer = ftopt.wrap(torch.optim.AdamW(model.parameters()), model, ftopt.DiLoCo(sync_every=50))
        with optimizer:  # joins the job
            for step in optimizer.steps(10_000):  # of the job: a replica that joins late begins at the job's step
                loss = ...
                loss.backward()
                optimizer.step(loss=loss)
                optimizer.zero_grad()
        optimizer.export("model.safetensors")

    `ftopt.Checkpoints` saves and resumes a job. ``ftopt launch -n 4 SCRIPT`` starts four replicas of a script.

    Nothing is sent and no parameter is touched until ``with optimizer:`` or the first ``step()``.

    Args:
        inner: the optimizer to wrap, or several that divide the model (Muon for matrices, AdamW for the rest). Any
            `torch.optim.Optimizer`; it keeps its rates, groups and state.
        model: the module with all parameters that ``inner`` trains. fp32, bf16 and fp16 parameters may be mixed.
        method: `ftopt.DiLoCo`, `ftopt.StreamingDiLoCo`, `ftopt.LocalSGD`, ... (``docs/methods.md``).
        group: the replica's place in a job, the result of `ftopt.connect`, `ftopt.solo` or `ftopt.local_groups`.
            Default None: ``ftopt.connect()`` where ``FTOPT_COORDINATOR`` is set, as by ``ftopt launch``; else
            ``ftopt.solo()``, and a line of the log says that this process trains alone.
        policy, on_event: as for `ftopt.connect`, without ``group``: time-outs and what a loss means; loggers, such as
            ``ftopt.Wandb()``, and functions of your own.
        state_dir: a folder on a local disk. The committed state, anchor and outer optimizer state, then lies in
            memory-mapped files there, and uses no memory between outer steps (``docs/operations.md``). A per-replica
            setting; for models on the CPU. Default None: in RAM.
        undo: record each step, so that `ftopt.undo.undo_step` can undo the last one (``docs/checkpoints.md``). Each
            step then takes about 1.5 microseconds longer per tensor; for optimizers other than SGD, Adam and AdamW it
            copies parameters and inner state, which takes as much memory again. Default False.
        leave_on_signals: during the membership, SIGTERM and the first Ctrl-C end this process in good order: the step
            under way, or the next one, raises SystemExit(0) when it is done, and the end of ``with optimizer:`` hands
            in the pending steps (``docs/operations.md``). Default False: they act as in any process, unless
            ``FTOPT_LEAVE_ON_SIGNALS=1``, which ``ftopt launch`` sets.
        start_step: the inner step of the weights in ``model``, for schedules, such as that of a checkpoint that you
            have loaded. A new job begins there, with one replica's weights and their step. A job that runs already, or
            is resumed, goes on from its own step. Default 0.

    Returns:
        The optimizer to use instead of ``inner``, for schedulers and GradScaler too.

    Raises:
        ftopt.errors.UserError: ``inner`` is not an optimizer or is wrapped already; parameters train but are in no
            inner optimizer; the inner optimizer trains parameters that are not in the model; the group is taken; a
            dtype that fp32 cannot hold; parameters that share memory; another optimizer trains the model, and has not
            left its job; sparse gradients with a method that exchanges gradients; ``undo`` with a method whose steps
            cannot be undone; an argument is missing or unknown; ``state_dir`` cannot be used. When training starts:
            ``state_dir`` has too little room, or the model is not on the CPU.
    """
    optimizers = check_inner(inner, model, ReplicaOptimizer)
    if group is None:
        group = from_environment(policy, on_event)
    elif policy is not None or on_event is not None:
        what = "policy" if policy is not None else "on_event"
        raise UserError(f"{what}= beside group=; the group has it already: give {what}= to what makes the group")
    check_rest(model, method, group, state_dir, undo, leave_on_signals)
    check_free(group, model)
    joined = Inner(optimizers)
    check_covered(model, joined.param_groups)
    check_dense(model, method)
    start_step = check_whole("start_step", start_step, 0, of="inner steps", hint="use 0 for a new model")
    if start_step > _MOST_STEPS:
        raise UserError(
            f"start_step={start_step}; must be at most {_MOST_STEPS}; give the step of the weights in model"
        )
    at_exit.check_alone(model)
    memory = Mapped(user_path(state_dir)) if state_dir is not None else None
    asked = Asked(on_signals=leave_on_signals or by_environment())
    if group.island is None:
        check_whole_tensors(model)
        training = Training(joined, model, method, group=group, undo=undo, asked=asked)
    else:
        from ftopt.optimizer.ranks.inner import RankInner  # they import torch.distributed.tensor, which is slow
        from ftopt.optimizer.ranks.several import Several

        check_for_island(group, optimizers, undo)
        if isinstance(model, nn.parallel.DistributedDataParallel):  # its names differ from other replicas'
            model = model.module
        ranks = Several(group, group.island, asked, memory or Memory())
        joined = RankInner(optimizers, ranks)
        training = Training(joined, model, method, group=ranks.group, asked=asked, ranks=ranks)
    core = Core(training, memory=memory)
    core.joining.first_step = start_step
    group.joins = _joining(core)
    warn_of_steps_beside(training)
    optimizer = around(core)
    take(group, optimizer, training)
    return optimizer


def _joining(core: Core) -> Callable[[], object]:
    """A function that makes ``core`` join its job, for a loader, without keeping it alive."""
    found = weakref.ref(core)

    def join() -> object:
        if (core := found()) is None:
            raise UserError(
                "a batch was asked for, and the optimizer that was wrapped with this loader's group is gone; keep what "
                "ftopt.wrap() returns as long as you train"
            )
        return core.start()

    return join
