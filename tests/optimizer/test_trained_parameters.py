"""What trains is agreed on when training starts: what a user freezes, unfreezes, replaces or adds afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import ftopt
from ftopt._connect import local_groups, solo
from ftopt.errors import UserError
from ftopt.methods import PAFT, DecoupledDiLoCo, DiLoCo, LocalSGD, Method, SlowMo, StreamingDiLoCo, SyncSGD
from ftopt.optimizer import ReplicaOptimizer, wrap
from tests.optimizer.running import PATIENT, together
from tests.problems import seeded

METHODS: list[Method] = [
    LocalSGD(sync_every=3),
    DiLoCo(sync_every=3),
    StreamingDiLoCo(sync_every=6, fragments=ftopt.fragments.Strided(n=2), wait_for_result_s=60),
    DecoupledDiLoCo(sync_every=6, fragments=ftopt.fragments.Balanced(n=2), wait_for_result_s=60, adaptive_grace=0),
    SlowMo(sync_every=3),
    SyncSGD(),
    PAFT(sync_every=3),
]
IDS = [method.name for method in METHODS]


class Net(nn.Module):
    """Layer ``b`` is frozen."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.b.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))


def inner(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters, also of those that are frozen."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


_started: list[ReplicaOptimizer] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    while _started:
        _started.pop().close(flush=False)


def started(method: Method) -> tuple[ReplicaOptimizer, Net]:
    model = Net()
    optimizer = wrap(inner(model), model, method, group=solo())
    optimizer.__enter__()
    _started.append(optimizer)
    train(optimizer, model, 2)
    return optimizer, model


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def unfreeze(model: Net, optimizer: ReplicaOptimizer) -> None:
    model.b.requires_grad_(True)


def add_to_a_group(model: Net, optimizer: ReplicaOptimizer) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))


def add_a_group(model: Net, optimizer: ReplicaOptimizer) -> None:
    optimizer._core.inner.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def replace_in_both(model: Net, optimizer: ReplicaOptimizer) -> None:
    model.c = nn.Linear(4, 4)
    optimizer.param_groups[0]["params"] = list(model.parameters())


@pytest.mark.parametrize("method", METHODS, ids=IDS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (unfreeze, r"b\.weight, b\.bias \(unfrozen, or put into the model, since then\)"),
        (add_to_a_group, "1 in the inner optimizer that are not in the model"),
        (add_a_group, "1 in the inner optimizer that are not in the model"),
        (replace_in_both, r"c\.weight, c\.bias \(unfrozen.*; c\.weight, c\.bias \(not in the model any more\)"),
    ],
)
def test_what_the_inner_optimizer_would_train_and_the_job_does_not_is_refused_before_it_has_moved(
    method: Method, change: Callable[[Net, ReplicaOptimizer], None], said: str
) -> None:
    optimizer, model = started(method)
    change(model, optimizer)
    before, steps, pending = copies(model), optimizer.local_steps, optimizer.status.pending_steps
    with pytest.raises(UserError, match=f"{said}.*nothing is lost: freeze them with requires_grad_"):
        train(optimizer, model, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, copies(model), strict=True))
    assert (optimizer.local_steps, optimizer.status.pending_steps) == (steps, pending)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_frozen_again_training_goes_on_as_if_nothing_had_been(method: Method) -> None:
    optimizer, model = started(method)
    other, undisturbed = started(method)
    model.b.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(UserError, match="unfrozen"):
            train(optimizer, model, 1)
    model.b.requires_grad_(False)
    for each, net in ((optimizer, model), (other, undisturbed)):
        train(each, net, 5)
        assert each.sync(propose=False)
    assert (
        optimizer.status.versions == other.status.versions
        and optimizer.status.pending_steps == other.status.pending_steps
    )
    assert all(torch.equal(a, b) for a, b in zip(copies(model), copies(undisturbed), strict=True))
    optimizer.close()
    other.close()


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_a_layer_replaced_in_the_model_alone_is_refused_at_the_next_proposal(method: Method) -> None:
    """Nothing trains that should not: the old layer has no gradients, the new one is in no inner optimizer."""
    optimizer, model = started(method)
    old, model.c = model.c, nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"c\.weight, c\.bias \(not in the model any more\)"):
        train(optimizer, model, 6)
    steps = optimizer.local_steps
    with pytest.raises(UserError, match="not in the model any more"):
        optimizer.sync()
    model.c = old
    train(optimizer, model, 1)
    assert optimizer.local_steps == steps + 1 and optimizer.sync() and not any(optimizer.status.pending_steps)
    optimizer.close()


def test_what_no_inner_optimizer_trains_any_more_is_refused() -> None:
    optimizer, model = started(LocalSGD(sync_every=3))
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.a.weight]
    with pytest.raises(UserError, match=r"a\.weight \(in no inner optimizer any more\)"):
        train(optimizer, model, 1)


def test_leaving_hands_in_the_steps_although_something_was_unfrozen_since() -> None:
    groups = local_groups(1)
    model = Net()
    optimizer = wrap(inner(model), model, DiLoCo(sync_every=10), group=groups[0])
    with optimizer:
        train(optimizer, model, 4)
        model.b.requires_grad_(True)
    assert optimizer.pending_steps == 0 and optimizer.status.versions == (1,)


def test_a_state_dict_that_is_loaded_changes_nothing_of_this() -> None:
    optimizer, model = started(LocalSGD(sync_every=3))
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, model, 4)
    model.b.requires_grad_(True)
    with pytest.raises(UserError, match="unfrozen"):
        train(optimizer, model, 1)


@pytest.mark.parametrize("method", METHODS, ids=IDS)
def test_what_is_frozen_later_stays_in_the_job_and_may_train_again(method: Method) -> None:
    groups = local_groups(2, policy=PATIENT)
    models = [Net(), Net()]
    barrier = threading.Barrier(2, timeout=60)

    def replica(m: int) -> list[list[Tensor]]:
        model, found = models[m], []
        with wrap(inner(model), model, method, group=groups[m]) as optimizer:
            for trains in (True, False, True):
                model.a.requires_grad_(trains)
                before = copies(model.a)
                train(optimizer, model, 6)
                optimizer.sync()
                barrier.wait()
                optimizer.sync(propose=False)
                barrier.wait()
                found.append([b - a for a, b in zip(before, copies(model.a), strict=True)])
            found.append(copies(model))
        return found

    one, other = together([lambda m=m: replica(m) for m in range(2)])
    assert any(bool(t.any()) for t in one[0]) and any(bool(t.any()) for t in one[2])
    if method.name in ("sync_sgd", "paft"):
        assert not any(bool(t.any()) for t in one[1]), "no gradient, no step"
    assert all(torch.equal(a, b) for a, b in zip(one[-1], other[-1], strict=True))


def test_one_that_freezes_alone_takes_the_others_gradient() -> None:
    """Replicas that step alike stay alike."""
    groups = local_groups(2, policy=PATIENT)
    models = [Net(), Net()]

    def replica(m: int) -> None:
        with wrap(inner(models[m]), models[m], SyncSGD(), group=groups[m]) as optimizer:
            models[m].a.requires_grad_(m == 0)
            train(optimizer, models[m], 5)

    together([lambda m=m: replica(m) for m in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(copies(models[0]), copies(models[1]), strict=True))


def test_a_global_batch_is_stepped_when_what_was_unfrozen_is_frozen_again() -> None:
    class Rows:
        random = False

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return torch.full((4,), float(index))

    (group,) = local_groups(1)
    model = Net()
    optimizer = wrap(inner(model), model, SyncSGD(), group=group)
    loader = ftopt.DataLoader(Rows(), 2, group=group, global_batch=4)
    with optimizer:
        for micro_batches in loader.global_batches():
            for rows in micro_batches:
                model(rows).square().mean().backward()
            model.b.requires_grad_(True)
            with pytest.raises(UserError, match="unfrozen"):
                optimizer.step()
            model.b.requires_grad_(False)
            optimizer.step()
    assert optimizer.status.versions == (2,)
