"""Any inner optimizer, and models whose parameters are not all alike: rounds equal the plain loop bit for bit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftopt._connect import local_groups
from ftopt.methods import DiLoCo, LocalSGD, Method
from ftopt.optimizer import wrap
from tests.optimizer.running import PATIENT, anchor, patient_solo, together
from tests.problems import INNER, MODELS, Problem, alike, flat
from tests.reference.diloco import diloco
from tests.reference.local_sgd import local_sgd
from tests.versions import needs_muon

REPLICAS, SYNC_EVERY, STEPS = 2, 5, 20
Make = Callable[[Iterator[nn.Parameter]], list[Optimizer]]


class Odd(nn.Module):
    """Tied and frozen parameters, and some that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.tanh(self.frozen(self.tied(self.first(x))))))


@alike
def odd(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Odd()


@alike
def wide(seed: int) -> nn.Module:
    """Its matrices are large enough to be quantized."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 4))


def split(parameters: Iterator[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    trained = [p for p in parameters if p.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def groups(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    matrices, rest = split(parameters)
    slow = {"params": rest, "lr": 0.01, "momentum": 0.5, "weight_decay": 0.0}
    return [torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, slow], lr=0.05, momentum=0.9)]


def muon_beside_adamw(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
    matrices, rest = split(parameters)
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]


def of(name: str, **settings: Any) -> Make:
    """One optimizer of ``torch.optim`` or another module, for all parameters that train."""
    module, _, cls = f"torch.optim.{name}".rpartition(".") if "." not in name else name.rpartition(".")

    def make(parameters: Iterator[nn.Parameter]) -> list[Optimizer]:
        made: Callable[..., Optimizer] = getattr(importlib.import_module(module), cls)
        return [made([p for p in parameters if p.requires_grad], **settings)]

    return make


class Several:
    """What the plain loops step."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def ours(model: Callable[[int], nn.Module], make: Make, method: Method) -> list[list[Tensor]]:
    """The anchor of each replica, of the parameters that train."""
    problem = Problem(model, INNER["sgd"])
    models, members = [model(0) for _ in range(REPLICAS)], local_groups(REPLICAS, policy=PATIENT)

    def replica(m: int) -> list[Tensor]:
        with wrap(make(models[m].parameters()), models[m], method, group=members[m]) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                problem.backward(models[m], m, step)
                optimizer.step()
            return anchor(optimizer, models[m])

    return together([lambda m=m: replica(m) for m in range(REPLICAS)])


def theirs(model: Callable[[int], nn.Module], make: Make, method: Method) -> list[Tensor]:
    problem = Problem(model, lambda parameters: Several(make(parameters)))  # type: ignore[arg-type, return-value]
    reference: Any = diloco if isinstance(method, DiLoCo) else local_sgd
    found = reference(problem, replicas=REPLICAS, sync_every=SYNC_EVERY, steps=STEPS)
    return [t for t, p in zip(found, model(0).parameters(), strict=True) if p.requires_grad]


def assert_equal(model: Callable[[int], nn.Module], make: Make, method: Method) -> None:
    expected = theirs(model, make, method)
    for anchors in ours(model, make, method):
        assert all(map(torch.equal, anchors, expected))


OUTER, AVERAGES = DiLoCo(sync_every=SYNC_EVERY, outer="paper"), LocalSGD(sync_every=SYNC_EVERY)


@pytest.mark.parametrize(
    ("method", "make"),
    [
        (AVERAGES, groups),
        pytest.param(OUTER, muon_beside_adamw, marks=needs_muon),
        (OUTER, of("AdamW")),
        (AVERAGES, of("SGD", lr=0.05, momentum=0.9)),
    ],
    ids=["local_sgd, groups", "diloco, two optimizers", "diloco, AdamW", "local_sgd, SGD"],
)
def test_tied_frozen_and_unused_parameters_train_as_in_the_plain_loop(method: Method, make: Make) -> None:
    assert_equal(odd, make, method)


@pytest.mark.parametrize(
    "name",
    ["Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "ASGD", "Rprop"],
)
def test_any_class_of_torch_trains_as_in_the_plain_loop(name: str) -> None:
    assert_equal(MODELS["mlp"], of(name), OUTER)


def test_what_the_loss_does_not_use_and_what_is_frozen_stays_bit_for_bit() -> None:
    before, model = odd(0), odd(0)
    problem = Problem(odd, INNER["sgd"])
    with wrap(groups(model.parameters()), model, DiLoCo(sync_every=2), group=patient_solo()) as optimizer:
        for step in range(6):
            optimizer.zero_grad()
            problem.backward(model, 0, step)
            optimizer.step()
    for part in ("unused", "frozen"):
        assert torch.equal(flat(model.get_submodule(part)), flat(before.get_submodule(part)))
    assert model.tied.weight is model.first.weight  # type: ignore[union-attr]
    assert not torch.equal(flat(model.get_submodule("first")), flat(before.get_submodule("first")))


def test_eight_bit_states_of_torchao_train_as_in_the_plain_loop_and_recover_from_nan() -> None:
    pytest.importorskip("torchao.optim", exc_type=ImportError)  # its versions go with those of torch
    make = of("torchao.optim.AdamW8bit", lr=1e-2)
    with torch.compiler.set_stance("force_eager"):  # its step would be compiled with a C++ compiler
        assert_equal(wide, make, OUTER)
        model, problem = wide(0), Problem(wide, INNER["sgd"])
        with wrap(make(model.parameters()), model, LocalSGD(sync_every=2), group=patient_solo()) as optimizer:
            for step in range(8):
                optimizer.zero_grad()
                problem.backward(model, 0, step)
                if step == 2:
                    model[0].weight.grad.fill_(torch.nan)  # type: ignore[index, union-attr]
                optimizer.step()
            state = optimizer.state[model[0].weight]["exp_avg"]  # type: ignore[index]
            assert hasattr(state, "codes"), "it is a quantized one"
            assert bool(torch.isfinite(state.dequantize()).all())
        assert bool(torch.isfinite(flat(model)).all())


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_a_state_that_is_reset_begins_as_the_first_one_did(name: str) -> None:
    model, fresh = MODELS["linear"](0), MODELS["linear"](0)
    problem = Problem(MODELS["linear"], INNER["sgd"])
    optimizer = wrap(of(name)(model.parameters()), model, LocalSGD(sync_every=100), group=patient_solo())
    with optimizer:
        optimizer.zero_grad()
        problem.backward(model, 0, 0)
        optimizer.step()
        optimizer._core.inner.reset_state()
        fresh.load_state_dict(model.state_dict())
        (reference,) = of(name)(fresh.parameters())
        for each, net in ((optimizer, model), (reference, fresh)):
            each.zero_grad()
            problem.backward(net, 0, 1)
            each.step()
    assert torch.equal(flat(model), flat(fresh))
