"""What loops do: each action is a function of a running replica, with the script that it stands for."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.methods import Method
from tests.programs.program import TRAINED, Action

if TYPE_CHECKING:
    from tests.programs.running import Running

EVENTS = ["inner", "stepped", "propose", "apply", "stall", "commit", "reduce", "prepare", "payload", "gather"]


class Mine(Exception):
    """The user's own."""


class Interrupt(BaseException):
    """As a Ctrl-C in a notebook: the user goes on afterwards."""


class Dies(BaseException):
    """The process is gone on this line."""


@dataclass(frozen=True)
class Kind:
    """``weight``: how often it is drawn. ``values``: of its argument. ``ends``: nothing of the loop comes after it."""

    do: Callable[..., None]
    script: str
    weight: float
    values: tuple[Any, ...]
    ends: bool


ACTIONS: dict[str, Kind] = {}
Do = Callable[..., None]


def action(
    script: str, weight: float = 1.0, values: tuple[Any, ...] = (0,), *, ends: bool = False
) -> Callable[[Do], Do]:
    def note(do: Do) -> Do:
        ACTIONS[do.__name__] = Kind(do, script, weight, values, ends)
        return do

    return note


UNLIKE = ("changes_rates", "scheduler_steps", "edits_parameters", "clears_inner_state", "suspended_step")
"""Replicas that exchange gradients alone must do these alike, and here each one does what it likes."""


def draw(chance: random.Random, method: Method, count: int, *, dies: bool) -> tuple[Action, ...]:
    """So many actions; ``dies``: the last one ends the replica."""
    left_out = UNLIKE if method.gradients is not None else ()
    usual = {name: kind for name, kind in ACTIONS.items() if not kind.ends and name not in left_out}
    weights = [kind.weight for kind in usual.values()]
    names = chance.choices(list(usual), weights, k=count)
    if dies:
        names.append(chance.choice([name for name, kind in ACTIONS.items() if kind.ends]))
    return tuple(Action(name, chance.choice(ACTIONS[name].values)) for name in names)


# Steps.


@action("for _ in range({}): loss().backward(); optimizer.step(); optimizer.zero_grad()", 8, (1, 2, 3, 5, 8))
def steps(run: Running, count: int) -> None:
    for _ in range(count):
        run.loss().backward()
        run.step()
        run.optimizer.zero_grad()


@action("for _ in range({}): (loss() / {}).backward()\noptimizer.step(); optimizer.zero_grad()", 1.5, (2, 3))
def accumulates(run: Running, count: int) -> None:
    for _ in range(count):
        (run.loss() / count).backward()
    run.step()
    run.optimizer.zero_grad()


@action(
    "loss().backward(); clip_grad_norm_(model.parameters(), {}); optimizer.step(); optimizer.zero_grad()", 1, (0.1,)
)
def clips(run: Running, norm: float) -> None:
    run.loss().backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), norm)
    run.step()
    run.optimizer.zero_grad()


@action("optimizer.step(closure)", 1.5)
def closure_step(run: Running, _: object) -> None:
    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    run.step(closure)


@action("loss().backward(); optimizer.zero_grad()  # and no step")
def skips_a_step(run: Running, _: object) -> None:
    run.loss().backward()
    run.optimizer.zero_grad()


@action("optimizer.zero_grad(set_to_none={}); optimizer.step()", 0.7, (True, False))
def steps_without_gradients(run: Running, to_none: bool) -> None:
    run.optimizer.zero_grad(set_to_none=to_none)
    run.step()


@action("optimizer.zero_grad(set_to_none=False); loss().backward(); optimizer.step()")
def keeps_gradients_as_zeros(run: Running, _: object) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.loss().backward()
    run.step()


@action("loss().backward(); model[0].weight.grad = None; optimizer.step(); optimizer.zero_grad()", 0.7)
def steps_some(run: Running, _: object) -> None:
    run.loss().backward()
    run.first.weight.grad = None
    run.step()
    run.optimizer.zero_grad()


@action(
    "loss().backward(); model[0].weight.grad[0, 0] = {}; optimizer.step(); optimizer.zero_grad()", 0.7, ("nan", "inf")
)
def steps_with_what_is_not_finite(run: Running, what: str) -> None:
    run.loss().backward()
    if run.first.weight.grad is not None:
        run.first.weight.grad[0, 0] = float(what)
    run.step()
    run.optimizer.zero_grad()


@action(
    "scaler.scale(loss() * {}).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()",
    1,
    (1.0, "inf"),
)
def grad_scaler(run: Running, factor: float | str) -> None:
    scaled = run.scaler.scale(run.loss())
    if not scaled.requires_grad or not any(p.requires_grad for p in run.model.parameters()):
        return
    scaled.backward()
    if factor == "inf":
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.fill_(float("inf"))
    with run.counted():
        run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad()


@action("with optimizer.suspended(): loss().backward(); optimizer.step()\noptimizer.zero_grad()", 0.4)
def suspended_step(run: Running, _: object) -> None:
    with run.optimizer.suspended():
        run.loss().backward()
        run.optimizer.step()
    run.optimizer.zero_grad()


@action("loss().backward(); optimizer.step(); ftopt.undo.undo_step(optimizer)  # may be refused", 0.6)
def undoes(run: Running, _: object) -> None:
    run.loss().backward()
    run.step()
    try:
        ftopt.undo.undo_step(run.optimizer)
    except UserError:
        pass
    else:
        run.undone += 1
    run.optimizer.zero_grad()


# What is changed between steps.


@action("model[0].requires_grad_(False)", 0.7)
def freezes(run: Running, _: object) -> None:
    run.first.requires_grad_(False)


@action("model[0].requires_grad_(True)", 0.7)
def unfreezes(run: Running, _: object) -> None:
    run.first.requires_grad_(True)


@action("for group in optimizer.param_groups: group['lr'] *= {}", 1, (0.5, 0.0, 2.0))
def changes_rates(run: Running, factor: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = min(group["lr"] * factor, 0.05)


@action("scheduler.step()  # ReduceLROnPlateau: scheduler.step(1.0)", 1)
def scheduler_steps(run: Running, _: object) -> None:
    if isinstance(run.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        run.scheduler.step(1.0)
    else:
        run.scheduler.step()


@action("scheduler.load_state_dict(torch.load(torch.save(scheduler.state_dict())))", 0.4)
def saves_and_loads_the_scheduler(run: Running, _: object) -> None:
    run.scheduler.load_state_dict(copy.deepcopy(run.scheduler.state_dict()))


@action("with torch.no_grad(): [p.mul_(0.99) for p in model.parameters()]", 1)
def edits_parameters(run: Running, _: object) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            if p.dtype in TRAINED:
                p.mul_(0.99)


@action(
    "weights = copy.deepcopy(model.state_dict()) if {} else weights  # save\nmodel.load_state_dict(weights)",
    0.7,
    (True, False),
)
def loads_weights(run: Running, fresh: bool) -> None:
    if fresh:
        run.weights = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(run.weights)


@action("optimizer.load_state_dict(torch.load(torch.save(optimizer.state_dict())))", 0.7)
def saves_and_loads_inner_state(run: Running, _: object) -> None:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    run.optimizer.load_state_dict(torch.load(file, weights_only=True))


@action("optimizer.state.clear()", 0.2)
def clears_inner_state(run: Running, _: object) -> None:
    for optimizer in run.inners:
        optimizer.state.clear()


# What looks on.


@action(
    "kept = [p.clone() for p in model.parameters()]  # an average is swapped in, {}\n"
    "[p.zero_() for p in model.parameters()]; loss()\n"
    "[p.copy_(k) for p, k in zip(model.parameters(), kept)]",
    1.5,
    ("copy_", "data.copy_", "data"),
)
def looks_at_other_weights(run: Running, how: str) -> None:
    with torch.no_grad():
        parameters = [p for p in run.model.parameters() if p.dtype in TRAINED]
        kept, own = [p.detach().clone() for p in parameters], [p.data for p in parameters]
        for p in parameters:
            if how == "data":
                p.data = torch.zeros_like(p)
            else:
                (p if how == "copy_" else p.data).copy_(torch.zeros_like(p))
        run.over.wait(0.002)  # evaluates them
        for p, values, memory in zip(parameters, kept, own, strict=True):
            if how == "data":
                p.data = memory
            else:
                (p if how == "copy_" else p.data).copy_(values)


@action("model.eval(); with torch.no_grad(): loss()\nmodel.train()", 1)
def evaluates(run: Running, _: object) -> None:
    run.model.eval()
    with torch.no_grad(), run.optimizer.busy("evaluating"):
        run.loss()
    run.model.train()


@action("with optimizer.global_parameters(): loss()", 1)
def evaluates_the_anchor(run: Running, _: object) -> None:
    with torch.no_grad(), run.optimizer.global_parameters():
        run.loss()


@action("with optimizer.global_parameters(): raise Mine  # caught outside", 0.5)
def raises_while_it_evaluates(run: Running, _: object) -> None:
    with pytest.raises(Mine), run.optimizer.global_parameters():
        raise Mine


@action("copy.deepcopy(model)(x).sum().backward()", 0.6)
def copies_the_model(run: Running, _: object) -> None:
    copy.deepcopy(run.model)(run.x()).sum().backward() if any(p.requires_grad for p in run.model.parameters()) else None


@action("pickle.loads(pickle.dumps(copy.deepcopy(optimizer))).step()  # takes no part", 0.4)
def copies_the_optimizer(run: Running, _: object) -> None:
    own = pickle.loads(pickle.dumps(copy.deepcopy(run.optimizer)))
    own.step()


@action("optimizer.log(tokens={}, samples=2)", 1.5, (1, 16, 1000))
def counts_tokens(run: Running, tokens: int) -> None:
    run.optimizer.log(tokens=tokens, samples=2)


@action("optimizer.log(loss={})", 0.5, (0.5, "nan"))
def counts_a_loss(run: Running, loss: float | str) -> None:
    run.optimizer.log(loss=float(loss))


# What waits.


@action("optimizer.sync()", 1.5)
def syncs(run: Running, _: object) -> None:
    run.optimizer.sync()


@action("optimizer.sync(propose=False)", 1)
def settles(run: Running, _: object) -> None:
    run.optimizer.sync(propose=False)


@action("other_work.wait({})  # no step meanwhile", 0.7, (0.02, 0.15))
def pauses(run: Running, seconds: float) -> None:
    run.over.wait(seconds)


@action("# this replica's link is cut for {} s", 0.7, (0.05, 0.3))
def is_cut_off(run: Running, seconds: float) -> None:
    run.group.cut(seconds)  # type: ignore[attr-defined]


# What goes wrong.


@action("try: loss().backward(); raise Mine\nexcept Mine: optimizer.zero_grad()", 0.7)
def raises_before_the_step(run: Running, _: object) -> None:
    try:
        run.loss().backward()
        raise Mine
    except Mine:
        run.optimizer.zero_grad()


@action("try: optimizer.step(closure_that_raises)\nexcept Mine: optimizer.zero_grad()", 0.7)
def closure_raises(run: Running, _: object) -> None:
    def closure() -> torch.Tensor:
        run.loss().backward()
        raise Mine

    with pytest.raises(Mine):
        run.step(closure)
    run.optimizer.zero_grad()


@action("# a hook of the inner optimizer raises, {}; the loop goes on", 0.6, ("pre", "post"))
def inner_hook_raises(run: Running, when: str) -> None:
    def raises(*_: object) -> None:
        handle.remove()
        raise Mine

    handle = getattr(run.inners[-1], f"register_step_{when}_hook")(raises)
    run.loss().backward()
    try:
        run.step()
    except Mine:
        run.broken_off = True
    finally:  # an event before it may have been interrupted
        handle.remove()
    run.optimizer.zero_grad()


@action(
    "# Ctrl-C at the event {!r}, if it comes on this thread; the loop goes on",
    1,
    ("inner", "stepped", "propose", "apply", "stall", "aggregated", "discarded"),
)
def is_interrupted(run: Running, event: str) -> None:
    run.interrupt_at = event


@action("# on_event raises from now on at {!r}", 0.7, tuple(EVENTS))
def on_event_raises(run: Running, event: str) -> None:
    run.on_event_raises_at = event


@action("with pytest.raises(UserError): {}", 1, ("count", "rate", "group", "close", "again", "new"))
def mistakes(run: Running, which: str) -> None:
    optimizer = run.optimizer
    with pytest.raises(UserError):
        if which == "count":
            optimizer.log(tokens=-1)
        elif which == "close":
            optimizer.close(timeout_s=-1.0)
        elif which == "again":
            again = copy.deepcopy(run.model)
            ftopt.wrap(torch.optim.SGD(again.parameters(), lr=0.1), again, run.method, group=run.group).sync()
        elif which == "group":
            optimizer.sync()  # it has started then
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        elif which == "rate":
            group = optimizer.param_groups[0]
            before, group["lr"] = group["lr"], float("nan")
            try:
                run.loss().backward()
                run.step()
            finally:
                group["lr"] = before
                optimizer.zero_grad()
        elif which == "new":
            optimizer.sync()
            run.model.add_module("more", nn.Linear(2, 2))
            try:
                optimizer.sync()
            finally:
                del run.model.more


@action("with optimizer.global_parameters(): optimizer.step()  # RuntimeError", 0.4)
def steps_with_the_anchor(run: Running, _: object) -> None:
    with run.optimizer.global_parameters(), pytest.raises(RuntimeError):
        run.loss().backward()
        run.optimizer.step()
    run.optimizer.zero_grad()


# What ends a replica.


@action("os._exit(1)", ends=True)
def dies(run: Running, _: object) -> None:
    raise Dies


@action("# dies at the next {!r}", 2, tuple(EVENTS), ends=True)
def dies_at(run: Running, event: str) -> None:
    run.die_at = event
    for _ in range(8):
        steps(run, 1)
    raise Dies


@action("optimizer.close()", ends=True)
def leaves(run: Running, _: object) -> None:
    run.leave(times=1)


@action("optimizer.close(); optimizer.close()", ends=True)
def leaves_twice(run: Running, _: object) -> None:
    run.leave(times=2)


@action("raise Mine  # out of `with optimizer:`", ends=True)
def leaves_by_an_exception(run: Running, _: object) -> None:
    run.leave_by_exception()


@action("sys.exit()  # without close()", ends=True)
def never_closes(run: Running, _: object) -> None:
    raise Dies
