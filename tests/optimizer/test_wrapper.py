"""What breaks other optimizers around an optimizer: a test for each."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

from ftopt._connect import solo
from ftopt.events import Event
from ftopt.methods import DiLoCo, LocalSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from tests.problems import flat, problem
from tests.versions import needs_muon

TASK = problem("mlp", "adamw")


def _wrapped(
    method: DiLoCo | LocalSGD | None = None, on_event: Callable[[Event], None] = lambda event: None
) -> tuple[ReplicaOptimizer, nn.Module]:
    model = TASK.model(0)
    method = method or LocalSGD(sync_every=5)
    return wrap(TASK.inner(model.parameters()), model, method, group=solo(on_event=on_event)), model


def _train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        TASK.backward(model, 0, step)
        optimizer.step()


# Alone, local SGD is the bare inner optimizer.


@pytest.mark.parametrize(
    ("dtype", "inner"),
    [  # AdamW's eps underflows in fp16.
        (torch.float32, "sgd"),
        (torch.float32, "adamw"),
        (torch.bfloat16, "sgd"),
        (torch.bfloat16, "adamw"),
        (torch.float16, "sgd"),
    ],
)
def test_solo_local_sgd_is_bit_identical_to_the_bare_inner_optimizer(dtype: torch.dtype, inner: str) -> None:
    task = problem("mlp", inner)
    bare, wrapped = task.model(0).to(dtype), task.model(0).to(dtype)
    reference = task.inner(bare.parameters())
    with wrap(task.inner(wrapped.parameters()), wrapped, LocalSGD(sync_every=3), group=solo()) as optimizer:
        for step in range(32):
            for each, model in ((reference, bare), (optimizer, wrapped)):
                each.zero_grad()
                task.backward(model, 0, step)
                each.step()
            assert torch.equal(flat(bare), flat(wrapped)), step
        assert optimizer.version == 10
    assert torch.equal(flat(bare), flat(wrapped))
    assert optimizer.version == 11, "the last two steps were not handed in"


def test_negative_zeros_survive_a_solo_round() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, -0.0)
    with wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=1), group=solo()) as opt:
        model.weight.grad = torch.zeros(1, 2)
        opt.step()
        assert torch.signbit(model.weight).all()


# Schedulers, scalers, hooks.


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=20),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 5)),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
        ),
    ],
    ids=["cosine", "one_cycle", "lambda", "sequential"],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # SequentialLR of torch 2.8
def test_schedulers_drive_the_inner_optimizer(make: Callable[[Any], Any]) -> None:
    optimizer, model = _wrapped()
    bare_model = TASK.model(0)
    bare = TASK.inner(bare_model.parameters())
    schedules = make(optimizer), make(bare)
    with optimizer:
        for step in range(15):
            for each, net, schedule in zip((optimizer, bare), (model, bare_model), schedules, strict=True):
                _train(each, net, 1, start=step)
                schedule.step()
            inner = optimizer._core.inner.optimizers[0]
            assert inner.param_groups[0]["lr"] == bare.param_groups[0]["lr"]
            assert inner.param_groups[0]["betas"] == bare.param_groups[0]["betas"]
    assert torch.equal(flat(model), flat(bare_model))


def test_hooks_fire_once_a_step() -> None:
    optimizer, model = _wrapped()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer._core.inner.optimizers[0].register_step_post_hook(lambda *_: calls.append("inner"))
    with optimizer:
        _train(optimizer, model, 2)
    assert calls == ["pre", "inner", "post"] * 2


def test_a_step_that_grad_scaler_skips_is_no_tick() -> None:
    optimizer, model = _wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer:
        for step in range(4):
            optimizer.zero_grad()
            x, y = TASK.batch(0, step)
            scaler.scale((model(x) - y).square().mean()).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.local_steps == 3


def test_a_closure_runs_once_and_its_loss_comes_back() -> None:
    optimizer, model = _wrapped()
    runs = []

    def closure() -> torch.Tensor:
        runs.append(1)
        optimizer.zero_grad()
        return TASK.backward(model, 0, 0)

    with optimizer:
        loss = optimizer.step(closure)
    assert len(runs) == 1 and loss.item() > 0


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")  # LBFGS of torch 2.8
def test_lbfgs_with_its_many_closure_calls_works_inside() -> None:
    model = TASK.model(0)
    optimizer = wrap(torch.optim.LBFGS(model.parameters()), model, LocalSGD(sync_every=2), group=solo())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return TASK.backward(model, 0, 0)

    with optimizer:
        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert optimizer.local_steps == 3
    assert losses[-1] < losses[0]


def test_a_trainer_that_subclasses_the_wrapper_on_the_fly_sees_the_same_state() -> None:
    optimizer, model = _wrapped()

    class Proxy:
        def __init__(self, wrapped: ReplicaOptimizer) -> None:
            self.__dict__ = {k: v for k, v in wrapped.__dict__.items() if k != "step"}
            self.__class__ = type("LightningOuterOptimizer", (Proxy, type(wrapped)), {})

    proxy: Any = Proxy(optimizer)
    assert isinstance(proxy, torch.optim.Optimizer)
    with optimizer:
        _train(proxy, model, 7)
        assert optimizer.local_steps == proxy.local_steps == 7
        assert optimizer.status.versions == proxy.status.versions == (1,)


# State dicts, copies, checkpoints.


def test_a_state_dict_is_the_inner_ones_and_one_key_more() -> None:
    optimizer, model = _wrapped()
    with optimizer:
        _train(optimizer, model, 7)
        ours, inner = optimizer.state_dict(), optimizer._core.inner.optimizers[0].state_dict()
    assert ours.keys() == inner.keys() | {"ftopt"}
    assert ours["state"][0]["exp_avg"] is inner["state"][0]["exp_avg"], "tensors go by reference"
    assert ours["ftopt"] == {
        "format": 1,
        "method": "local_sgd",
        "versions": [1],
        "inner_step": 7,
        "local_steps": 7,
        "pending_steps": 2,
    }


def test_loading_ones_own_state_dict_changes_nothing() -> None:
    optimizer, model = _wrapped()
    with optimizer:
        _train(optimizer, model, 7)
        before = flat(model)
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(flat(model), before)
        assert (optimizer.local_steps, optimizer.pending_steps) == (7, 2)
        _train(optimizer, model, 3, start=7)
        assert optimizer.status.versions == (2,)


def test_a_state_dict_travels_through_a_file_that_loads_weights_only() -> None:
    optimizer, model = _wrapped()
    with optimizer:
        _train(optimizer, model, 7)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, _ = _wrapped()
    other.load_state_dict(state_dict=torch.load(file, weights_only=True))
    state = zip(other.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in state)


def test_groups_after_a_load_are_the_ones_that_schedulers_edit() -> None:
    optimizer, _ = _wrapped()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 123.0
    assert optimizer._core.inner.optimizers[0].param_groups[0]["lr"] == 123.0


def test_a_state_dict_without_our_key_loads_with_a_warning() -> None:
    optimizer, _ = _wrapped()
    with pytest.warns(UserWarning, match="no key 'ftopt'"):
        optimizer.load_state_dict(TASK.inner(TASK.model(0).parameters()).state_dict())


def test_a_state_dict_of_another_method_loads_with_a_warning() -> None:
    diloco, _ = _wrapped(DiLoCo(sync_every=5))
    local_sgd, _ = _wrapped()
    with pytest.warns(UserWarning, match="method 'diloco'"):
        local_sgd.load_state_dict(diloco.state_dict())


def test_state_dict_hooks_on_the_wrapper_run() -> None:
    optimizer, _ = _wrapped()
    calls: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "mine"})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    state_dict = optimizer.state_dict()
    assert state_dict["mine"] == 1
    optimizer.load_state_dict(state_dict)
    assert calls == ["save pre", "load post"]


@pytest.mark.parametrize("started", [False, True])
def test_distributed_checkpoints_set_state_up_without_a_tick(started: bool) -> None:
    optimizer, model = _wrapped()
    if started:
        optimizer.__enter__()
    before = flat(model)
    saved = get_optimizer_state_dict(model, optimizer)
    assert (optimizer.local_steps, optimizer.status.versions) == (0, (0,) if started else ())
    with pytest.warns(UserWarning, match="no key 'ftopt'"):
        set_optimizer_state_dict(model, optimizer, saved)
    assert torch.equal(flat(model), before)
    with optimizer:
        _train(optimizer, model, 5)
        assert (optimizer.local_steps, optimizer.status.versions) == (5, (1,))


def test_distributed_checkpoints_leave_a_stateless_optimizer_alone_in_mid_run() -> None:
    model = TASK.model(0)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, LocalSGD(sync_every=2), group=solo())
    with optimizer:
        _train(optimizer, model, 3)
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
        assert optimizer.local_steps == 3


def test_a_warm_up_from_rate_zero_ticks() -> None:
    optimizer, model = _wrapped()
    optimizer.param_groups[0]["lr"] = 0.0
    with optimizer:
        _train(optimizer, model, 1)
        assert optimizer.local_steps == 1


def test_suspended_steps_are_not_counted() -> None:
    optimizer, model = _wrapped(LocalSGD(sync_every=1))
    with optimizer:
        with optimizer.suspended():
            _train(optimizer, model, 3)
        assert (optimizer.local_steps, optimizer.status.versions) == (0, (0,))
        _train(optimizer, model, 1)
        assert (optimizer.local_steps, optimizer.status.versions) == (1, (1,))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_is_detached_works_and_says_so(copied: Callable[[ReplicaOptimizer], ReplicaOptimizer]) -> None:
    optimizer, model = _wrapped()
    with optimizer:
        _train(optimizer, model, 2)
        other = copied(optimizer)
        assert isinstance(other, ReplicaOptimizer) and "detached" in repr(other)
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        before = [p.clone() for p in other.param_groups[0]["params"]]
        mine = flat(model)
        with pytest.warns(UserWarning, match="takes no part in the job"):
            other.step()
        with warnings.catch_warnings():
            other.step()
        assert not torch.equal(before[0], other.param_groups[0]["params"][0])
        assert torch.equal(flat(model), mine)
        with pytest.raises(RuntimeError, match=r"call ftopt\.wrap\(\)"):
            other.sync()


# Several inner optimizers.


def _muon_and_adamw() -> tuple[ReplicaOptimizer, nn.Module]:
    model = TASK.model(0)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    inner = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.001)]
    return wrap(inner, model, LocalSGD(sync_every=5), group=solo()), model


@needs_muon
def test_muon_and_adamw_train_one_model() -> None:
    optimizer, model = _muon_and_adamw()
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)
    bare, bare_model = _muon_and_adamw()
    with optimizer:
        for step in range(6):
            _train(optimizer, model, 1, start=step)
            for each in bare._core.inner.optimizers:
                for group, ours in zip(bare.param_groups, optimizer.param_groups, strict=True):
                    group["lr"] = ours["lr"]
                each.zero_grad()
            TASK.backward(bare_model, 0, step)
            for each in bare._core.inner.optimizers:
                each.step()
            schedule.step()
    assert torch.equal(flat(model), flat(bare_model))
    assert [o.param_groups[0]["lr"] for o in optimizer._core.inner.optimizers] == pytest.approx([0.01 / 64, 0.001 / 64])


@needs_muon
def test_state_dicts_of_several_inner_optimizers_go_there_and_back() -> None:
    optimizer, model = _muon_and_adamw()
    with optimizer:
        _train(optimizer, model, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        distributed = get_optimizer_state_dict(model, optimizer)
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    assert set(distributed["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    other, _ = _muon_and_adamw()
    other.load_state_dict(saved)
    for key, values in other.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(saved["state"][key][name])), (
                key,
                name,
            )
