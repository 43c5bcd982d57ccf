"""`eval()` and `train()`, as trainers call them: the global parameters in the model; inner optimizers with both."""

from __future__ import annotations

import copy
import time
import timeit
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.fragments import Balanced
from ftopt.methods import PAFT, DiLoCo, LocalSGD, Method, StreamingDiLoCo, SyncSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from tests.optimizer.running import PATIENT, patient_solo, together
from tests.problems import flat

METHODS = [
    LocalSGD(sync_every=3),
    DiLoCo(sync_every=3),
    StreamingDiLoCo(sync_every=4, delay=2, fragments=Balanced(n=2), wait_for_result_s=60.0),
    SyncSGD(),
    PAFT(sync_every=3),
]


class TwoModes(torch.optim.SGD):
    """In eval mode the parameters are others, as those of a schedule-free optimizer; back there is no exact way."""

    mode = "eval"

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, lr=0.05)  # type: ignore[arg-type]

    @torch.no_grad()
    def _turn(self, mode: str, factor: float) -> None:
        if self.mode != mode:
            self.mode = mode
            for p in self.param_groups[0]["params"]:
                if self.state:
                    p.mul_(factor)

    def eval(self) -> None:
        self._turn("eval", 0.3)

    def train(self) -> None:
        self._turn("train", 1 / 0.3)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert self.mode == "train", "not in train mode"
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = torch.ones(())
        super().step()


def made(method: Method, inner: Callable[..., torch.optim.Optimizer]) -> tuple[nn.Module, ReplicaOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, wrap(inner(model.parameters()), model, method, group=patient_solo())


def step(model: nn.Module, optimizer: ReplicaOptimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()


def outer_of(model: nn.Module, optimizer: ReplicaOptimizer) -> Tensor:
    with optimizer.global_parameters():
        return flat(model)


@pytest.mark.parametrize("inner", [lambda p: torch.optim.SGD(p, lr=0.05), TwoModes], ids=["sgd", "two modes"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_between_eval_and_train_the_model_has_the_outer_parameters(
    method: Method, inner: Callable[..., torch.optim.Optimizer]
) -> None:
    model, optimizer = made(method, inner)
    with optimizer:
        for number in range(5):
            step(model, optimizer, number)
        assert optimizer.sync(propose=False)  # a round that is decided meanwhile would make them others
        mine, outer = flat(model), outer_of(model, optimizer)
        for _ in range(2):
            with torch.inference_mode():
                optimizer.eval()
            assert torch.equal(flat(model), outer)
            assert torch.equal(outer_of(model, optimizer), outer)
        for call in optimizer.step, optimizer.sync, lambda: optimizer.sync(propose=False):
            with pytest.raises(RuntimeError, match=r"optimizer.train\(\) after"):
                call()
        for _ in range(2):
            with torch.inference_mode():
                optimizer.train()
            assert torch.equal(flat(model), mine)
        step(model, optimizer, 5)
    assert optimizer.pending_steps == 0


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_job_that_evaluates_ends_as_one_that_does_not(method: Method) -> None:
    def run(evaluates: bool) -> tuple[str, Tensor]:
        model, optimizer = made(method, TwoModes)
        with optimizer:
            for number in range(9):
                step(model, optimizer, number)
                if evaluates:
                    optimizer.eval()
                    optimizer.train()
        return optimizer.digest(), flat(model)

    (digest, params), (usual, usual_params) = run(True), run(False)
    assert digest == usual and torch.equal(params, usual_params)


def test_before_the_start_the_inner_optimizer_alone_is_turned_and_the_start_turns_it_to_training() -> None:
    model, optimizer = made(DiLoCo(sync_every=3), TwoModes)
    before, inner = flat(model), optimizer._core.inner.optimizers[0]
    assert isinstance(inner, TwoModes)
    optimizer.train()
    optimizer.eval()
    assert inner.mode == "eval" and torch.equal(flat(model), before)
    assert not optimizer._core.standing().started
    with optimizer:
        assert inner.mode == "train"
        step(model, optimizer, 0)
    assert inner.mode == "train"


def test_after_the_end_both_leave_the_users_model_alone() -> None:
    model, optimizer = made(DiLoCo(sync_every=3), TwoModes)
    with optimizer:
        for number in range(4):
            step(model, optimizer, number)
        optimizer.eval()
    inner = optimizer._core.inner.optimizers[0]
    assert isinstance(inner, TwoModes) and inner.mode == "train"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer.eval()
    optimizer.train()
    assert bool((flat(model) == 7.0).all())


def test_a_copy_turns_its_own_inner_optimizer() -> None:
    _, optimizer = made(DiLoCo(sync_every=3), TwoModes)
    other = copy.deepcopy(optimizer)
    other.train()
    assert [o._core.inner.optimizers[0].mode for o in (optimizer, other)] == ["eval", "train"]  # type: ignore[attr-defined]


def test_leaving_within_an_evaluation_hands_in_the_own_parameters() -> None:
    def run(evaluates: bool) -> str:
        model, optimizer = made(LocalSGD(sync_every=10), TwoModes)
        with optimizer:
            for number in range(4):
                step(model, optimizer, number)
            if evaluates:
                optimizer.eval()
        return optimizer.digest()

    assert run(True) == run(False)


def test_train_inside_outer_parameters_takes_nothing_out() -> None:
    model, optimizer = made(DiLoCo(sync_every=3), TwoModes)
    with optimizer:
        for number in range(4):
            step(model, optimizer, number)
        with optimizer.global_parameters():
            outer = flat(model)
            optimizer.eval()
            optimizer.train()
            assert torch.equal(flat(model), outer)
        step(model, optimizer, 4)


def test_replicas_evaluate_the_same_parameters_whoever_evaluates() -> None:
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    groups = local_groups(2, policy=PATIENT)

    def replica(m: int) -> tuple[Tensor, str]:
        optimizer = wrap(TwoModes(models[m].parameters()), models[m], DiLoCo(sync_every=3), group=groups[m])
        with optimizer:
            for number in range(6):
                optimizer.train()
                step(models[m], optimizer, 10 * m + number)
                if m:
                    optimizer.eval()
            optimizer.train()
            assert optimizer.sync()
            optimizer.eval()
            return flat(models[m]).clone(), optimizer.digest()

    one, other = together([lambda: replica(0), lambda: replica(1)])
    assert torch.equal(one[0], other[0]) and one[1] == other[1]


def test_train_where_nothing_is_to_be_taken_out_costs_next_to_nothing() -> None:
    model, optimizer = made(DiLoCo(sync_every=3), lambda p: torch.optim.SGD(p, lr=0.05))
    with optimizer:
        step(model, optimizer, 0)
        taken_s = timeit.repeat(optimizer.train, timer=time.thread_time, number=1000, repeat=3)  # of this thread alone
        assert min(taken_s) / 1000 < 1e-3
