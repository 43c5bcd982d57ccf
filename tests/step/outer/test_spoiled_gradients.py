"""A replica's own copy of the agreed gradient goes bad between the aggregation and the inner step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ftopt._connect import local_groups
from ftopt.events import Event
from ftopt.methods import PAFT, Method, SyncSGD
from ftopt.optimizer import wrap
from tests.optimizer.running import PATIENT, together
from tests.problems import flat, problem

LR, CLIP, STEPS, SPOILED_STEP = 0.1, 0.2, 12, 7
TASK = problem("mlp")
METHODS: list[Callable[[float | None], Method]] = [
    lambda clip: SyncSGD(clip_norm=clip),
    lambda clip: PAFT(sync_every=50, clip_norm=clip),
]


def train(
    method: Method, spoil: Callable[[list[Tensor]], None] | None, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Module], list[float], list[Event]]:
    """Two replicas, of which the second one's copy is spoiled once. Returns their models, how far the second one's
    parameters moved in each step, and the events of copies that were found spoiled."""
    models, found, moved = [TASK.model(0).to(dtype) for _ in range(2)], list[Event](), list[float]()

    def on_event(event: Event) -> None:
        if event.event == "aggregated" and event.replica == "r1" and event.inner_step == SPOILED_STEP and spoil:
            spoil([p.grad for p in models[1].parameters() if p.grad is not None])
        elif event.event == "spoiled":
            found.append(event)

    groups = local_groups(2, policy=PATIENT, on_event=on_event)

    def replica(m: int) -> None:
        model = models[m]
        with wrap(torch.optim.SGD(model.parameters(), lr=LR), model, method, group=groups[m]) as optimizer:
            for step in range(STEPS):
                optimizer.zero_grad()
                TASK.backward(model, m, step)
                before = flat(model)
                optimizer.step()
                if m:
                    moved.append(float((flat(model) - before).norm()))

    together([lambda m=m: replica(m) for m in range(2)])
    return models, moved, found


def noise(gradients: list[Tensor]) -> None:
    chance = torch.Generator().manual_seed(0)
    for gradient in gradients:
        gradient.add_(torch.randn(gradient.shape, generator=chance) * 30)


def flipped_exponent(gradients: list[Tensor]) -> None:
    gradients[0].view(-1)[0] = 1e12


def not_a_number(gradients: list[Tensor]) -> None:
    gradients[1].view(-1)[0] = torch.nan


def largest(gradients: list[Tensor]) -> None:
    """Finite, and its square is not."""
    gradients[1].view(-1)[0] = -3e38


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spoil", [noise, flipped_exponent])
def test_a_spoiled_copy_moves_parameters_no_further_than_a_clipped_gradient(
    method: Callable[[float | None], Method], spoil: Callable[[list[Tensor]], None]
) -> None:
    models, moved, found = train(method(CLIP), spoil)
    assert max(moved) <= LR * CLIP * 1.001
    assert float((flat(models[0]) - flat(models[1])).norm()) <= STEPS * LR * CLIP
    assert [(e.replica, e.inner_step) for e in found] == [("r1", SPOILED_STEP)] and found[0].data["norm"] > CLIP


@pytest.mark.parametrize(
    ("method", "clip", "spoil"),
    [
        (METHODS[0], None, largest),
        (METHODS[0], CLIP, not_a_number),
        (METHODS[1], None, not_a_number),
        (METHODS[1], CLIP, largest),
    ],
    ids=["sync_sgd, largest", "sync_sgd, clipped, nan", "paft, nan", "paft, clipped, largest"],
)
def test_a_copy_that_is_not_finite_is_made_anew(
    method: Callable[[float | None], Method], clip: float | None, spoil: Callable[[list[Tensor]], None]
) -> None:
    models, _, found = train(method(clip), spoil)
    clean, _, _ = train(method(clip), None)
    assert torch.equal(flat(models[1]), flat(clean[1])) and torch.equal(flat(models[0]), flat(models[1]))
    assert [(e.replica, e.inner_step, e.data["norm"]) for e in found] == [("r1", SPOILED_STEP, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [CLIP, 1e-4])
def test_sound_copies_are_left_alone(dtype: torch.dtype, clip: float) -> None:
    """Clipped to the limit in all steps, and rounded to the parameters' dtype."""
    models, _, found = train(SyncSGD(clip_norm=clip), None, dtype)
    assert not found and torch.equal(flat(models[0]), flat(models[1]))


def test_an_agreed_gradient_that_goes_bad_in_memory_moves_nothing() -> None:
    model = TASK.model(0)
    (group,) = local_groups(1, on_event=lambda event: damage() if event.event == "apply" else None)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=LR), model, SyncSGD(), group=group)

    def damage() -> None:
        optimizer._core.started().fragments[0].state.outer["gradient"][0] = torch.inf

    with optimizer:
        TASK.backward(model, 0, 0)
        optimizer.step()
    assert optimizer.status.versions == (1,) and torch.equal(flat(model), flat(TASK.model(0)))
